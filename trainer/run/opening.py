"""What a run prints at its start."""

import shlex
from dataclasses import replace

from trainer.config.request import Request
from trainer.errors import counted
from trainer.plan import hours
from trainer.ranks import distributed, slurm
from trainer.reward import gold_check
from trainer.reward.judge import Judge
from trainer.reward.scorer import Scorer
from trainer.run.assemble import Run
from trainer.run_folder import changed_settings

SHOWN = 90  # characters of the first prompt that are shown


def introduce(run: Run, request: Request) -> None:
    """Print what is trained on what, after which step it continues, and what is paid."""
    config, log, rollout = request.config, run.log, request.config.rollout
    resumed = f", continuing after step {log.first_step}" if log.first_step else ""
    if log.first_step >= log.total_steps:
        section = "warmup" if config.is_warmup else "run"
        longer = f"--resume {shlex.quote(str(log.folder))} {section}.steps={2 * log.first_step}"
        can_continue = not config.is_warmup or changed_settings.is_warmup_alone(log.folder, config)
        resumed = f", all {counted(log.first_step, 'step')} done{f'. {longer} would continue' * can_continue}"
    base = f", base in {config.model.quantize}" if config.model.quantize != "none" else ""
    if job := slurm.describe():
        log.screen.say(f"octet: {job}{log.stopping.limit}")
    if request.reason and not request.resumes:
        log.screen.say(f"octet: {request.reason}")
    batch = f"{rollout.problems} x {rollout.group_size} answers"
    if config.is_warmup:
        lessons = "worked solutions" if config.warmup.source == "solutions" else "own right answers"
        batch = f"{config.warmup.problems} {lessons}"
    log.screen.say(
        f"model {config.model.name}, task {config.task.name}, {len(run.rollouts.curriculum.problems):,} problems: "
        f"{counted(log.total_steps, 'step')} of {batch} on "
        f"{distributed.world_size()} x {run.updater.device.type}, engine {config.engine.ds_config}{base}{resumed}\n"
        f"run folder: {log.folder}{f', a link to {log.folder.resolve()}' * log.folder.is_symlink()}"
    )
    if time := hours.at_start(config, log.first_step, log.total_steps, distributed.world_size()):
        log.screen.say(f"octet: {time}")
    if not config.is_warmup:
        log.screen.say(config.paid)
    if not log.first_step:
        log.screen.say(_example(run))


def _example(run: Run) -> str:
    """Return the end of the first prompt, and what a right and an empty answer to it earn if no judge or environment
    has to say so."""
    rollouts = run.rollouts
    prompt = rollouts.prompter.prompt(rollouts.curriculum.problems[0])
    end = prompt.text[-SHOWN:]
    shown = end if end == prompt.text else f"... {end.split(maxsplit=1)[-1]}"  # from the first whole word
    ending = f"a prompt ends with {shown!r}"
    if rollouts.config.task.agent:
        ending = "the agent writes its own prompts"
    if not prompt.problem.gold:
        return ending
    scorer = Scorer(rollouts.scorer.rules, rollouts.scorer.graders, rollouts.scorer.symbolic)  # counts for no step
    if scorer.weights.get("environment") or any(isinstance(grader, Judge) for grader in scorer.graders):
        return ending
    gold = gold_check.written(prompt.problem, scorer.rules)
    tokens = rollouts.prompter.answer_tokens(prompt, gold.text)  # `overlong` counts them
    answers = [replace(gold, tokens=tokens), replace(gold, tokens=tokens[-1:], text="")]
    right, empty = scorer.scores([(prompt, answer) for answer in answers])
    earned = ["no reward" if score.reward is None else f"{score.reward:.2f}" for score in (right, empty)]
    return f"{ending}\n{gold.text!r} earns {earned[0]}, an empty answer {earned[1]}"
