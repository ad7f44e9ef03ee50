"""`octet study`: train the arms and controls of an experiment with several seeds, and judge their differences.

Runs that have ended are not repeated and interrupted ones are resumed, so the same command continues a study.
"""

import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from subprocess import STDOUT, Popen
from typing import Any

from trainer.commands.shared_options import add_overrides, positive, words_of
from trainer.commands.slurm import JobRequest, check, of_job, slurm
from trainer.config.resolve import flat, overrides_of, resolve
from trainer.config.study import SUPERVISED, Study, StudyRun, read_study
from trainer.errors import ConfigError, DataError, OctetError, counted
from trainer.machine import disk
from trainer.machine.console import Console, folded
from trainer.machine.exits import listen
from trainer.machine.installed_files import in_a_process
from trainer.machine.safe_text import print
from trainer.problem.prompts import answer_style, must_have_solutions, taught
from trainer.problem.task import evaluation_problems, make_task, training_problems
from trainer.reports import study_page
from trainer.reports.csv_and_latex import as_csv, as_latex
from trainer.reports.markup import page
from trainer.reports.report import OF_TRAINING
from trainer.reports.study import RENUMBERED, collect, ended, summary, totals
from trainer.run_folder.changed_settings import NO_EFFECT
from trainer.run_folder.reader import facts_of, read_run
from trainer.sandbox.confine import ended_with_parent
from trainer.watch.footer import clock
from trainer.watch.measure import measure_of

WIDTH = 160  # characters of a line if the output is not a terminal
STOPPED = (129, 130, 143)  # exit statuses after the end of a terminal, Ctrl-C and SIGTERM
SOLUTIONS = 512  # the mean length of this many solutions is measured


class StudyError(OctetError):
    status = 1  # the remaining runs are complete


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet study bench/studies/controls.yaml"
    parser.add_argument("file", type=Path, metavar="FILE", help="arms, seeds and controls; see docs/studies.md")
    parser.add_argument("--collect", action="store_true", help="train nothing, and judge the runs that have ended")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--csv", action="store_true", help="as --collect, and print the comparisons as CSV")
    instead.add_argument("--tex", action="store_true", help="as --collect, and print the tables as LaTeX")
    instead.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at once; times count only with 1")
    instead.add_argument("--slurm", action="store_true", help="submit the runs as an array of jobs")
    parser.add_argument("--dry-run", action="store_true", help="only print the command of each run, or the job")
    parser.add_argument("--gpus", type=positive, default=1, help="with --slurm: GPUs of each job (default 1)")
    parser.add_argument("--time", help="with --slurm: time limit of a job, for sbatch")
    add_overrides(parser, "model.name=FOLDER")


def run(options: Namespace) -> None:
    if options.time == "auto":
        raise ConfigError("--time auto", "the runs of a study take different times", "Write --time HH:MM:SS")
    if not options.slurm and (options.time or options.gpus != 1):
        raise ConfigError("--time and --gpus", "they are for jobs", "Write --slurm as well, or leave them out")
    if options.collect and (options.slurm or options.jobs != 1):
        raise ConfigError("--collect", "it trains nothing", "Leave it out, or leave out --slurm and --jobs")
    study = read_study(options.file, options.overrides)
    _must_be_paid_alike(study)
    judges_only = options.collect or options.csv or options.tex
    if not (judges_only or options.dry_run):
        _must_have_solutions(study)
        _must_ask_the_same(study)
    if options.slurm:
        _submit(study, options)
        return
    if options.dry_run:
        for one in study.runs():
            later = f"# {one.name}: after {study.first}-{one.seed}, for as many steps as match its tokens"
            words = words_of(study.file.preset, study.file.recipe, one.overrides)
            print(later if one.arm == SUPERVISED else shlex.join(["octet", "train", *words]))
        return
    failed = [] if judges_only else _train(study, options.jobs)
    results = _judge(study)
    if options.csv:
        print(as_csv(results["comparisons"]))
    elif options.tex:
        print("\n\n".join(as_latex(*table) for table in study_page.tables(results)))
    else:
        _show(study, results)
    if failed:
        raise StudyError(", ".join(failed), f"{counted(len(failed), 'run')} failed", "The same command tries again")


def _must_be_paid_alike(study: Study) -> None:
    """Raise ConfigError if mean rewards are compared, and an arm or a control has other rewards than the first arm."""
    paid = {arm: flat(config.model_dump(mode="json")) for arm, config in study.configs.items()}
    of_first, by_reward = paid[study.first], measure_of(study.configs[study.first]).is_reward
    keys = [key for key in of_first if key.startswith("reward.") and key not in OF_TRAINING | NO_EFFECT]
    for arm, config in study.configs.items():
        is_other = config.task.answer == "none" and measure_of(config).is_reward != by_reward
        if differs := next((key for key in keys if (by_reward or is_other) and paid[arm][key] != of_first[key]), ""):
            reason = f"{differs}: it has another reward than {study.first}, with which its own cannot be compared"
            of_file = "Write the reward under `settings:` in the file"
            remedy = "Remove it from controls" if arm in study.file.controls else of_file
            raise ConfigError(f"{study.path}, arm {arm}", reason, remedy)
    if by_reward and study.file.renumbered:
        reason = "renumbered: it compares right answers, and the study compares rewards"
        raise ConfigError(study.path, reason, "Write renumbered: false")


def _must_have_solutions(study: Study) -> None:
    """Raise ConfigError if the control `supervised` is asked for, and the problems have no worked solutions."""
    if (config := study.configs.get(SUPERVISED)) is None:
        return
    task = make_task(config.task)
    try:
        must_have_solutions(task, training_problems(task, config.task, config.run.seed)[:SOLUTIONS])
    except DataError as error:
        reason = f"controls: supervised: {error.reason or error}"
        raise ConfigError(study.path, reason, "Remove it from controls") from None


def _must_ask_the_same(study: Study) -> None:
    """Raise ConfigError if arms have other held-out problems, instead of when all their runs have ended."""
    configs = study.configs
    tasks = {f"{config.task} {config.eval.problems}": arm for arm, config in reversed(configs.items())}
    asked: dict[str, set[tuple[str, str]]] = {}
    for arm in tasks.values() if len(tasks) > 1 else ():
        with suppress(OctetError):  # the run reports it
            problems = evaluation_problems(make_task(configs[arm].task), configs[arm].eval.problems)
            asked[arm] = {(problem.question, problem.gold) for problem in problems}
    if others := [arm for arm in asked if asked[arm] != asked.get(study.first, asked[arm])]:
        reason = f"its held-out problems are not those of {study.first}, so they cannot be compared"
        raise ConfigError(f"{study.path}, arm {others[0]}", reason, "Write one task and eval.problems for all arms")


def _train(study: Study, jobs: int) -> list[str]:
    """Train the runs that have not ended, `supervised` last, and return the names of those that fail."""
    runs = [*study.runs()]
    ready = sum(ended(study, one) is not None for one in runs)
    print(f"octet: {study.name}: {counted(len(runs) - ready, 'run')} to make, {ready} ready", flush=True)
    runner = Runner(study)
    with disk.claimed(study.folder / "study.json", "Wait for it"), ThreadPoolExecutor(jobs) as pool:
        listen()
        try:
            failed = [*pool.map(runner.train, _pending(study, supervised=False))]
            failed += [*pool.map(runner.train, _pending(study, supervised=True))]
            failed += [*pool.map(runner.evaluate_renumbered, study.runs())] if study.file.renumbered else []
        except KeyboardInterrupt:
            for child in [*runner.children]:  # each finishes a checkpoint that it is writing, and ends
                child.terminate()
            raise KeyboardInterrupt("The same command continues the study.") from None
    return [name for name in failed if name]


@dataclass
class Runner:
    """Trains runs of a study in separate processes. Their output goes to log files beside the folders of the runs."""

    study: Study
    children: set[Popen[bytes]] = field(default_factory=set)

    def train(self, one: StudyRun) -> str:
        """Train a run, and return its name if it fails."""
        has_ended = (0, 3, 4)  # with 3 and 4, its own verdict is not "learned"
        words = words_of(self.study.file.preset, self.study.file.recipe, one.overrides)
        if failed := self._run(one, ["train", *words], has_ended):
            return failed
        made = read_run(self.study.folder / one.name)
        facts = facts_of(made)
        took = f"{counted(facts['steps'], 'step')}, {clock(facts['training_s'])}"
        print(f"{one.name:<24} {made.measure.text(facts[made.measure.name])} after {took}", flush=True)
        return ""

    def evaluate_renumbered(self, one: StudyRun) -> str:
        """Evaluate a run's model on the held-out problems with new numbers; return the run's name if that fails."""
        folder, config = self.study.folder / one.name, self.study.config(one)
        out = folder / RENUMBERED
        if ended(self.study, one) is None or (out / "eval.json").is_file():
            return ""
        arguments = ["task.name=gsm8k-renumbered", f"--problems={config.eval.problems}", f"--out={out}"]
        arguments += [f"model.{key}={getattr(config.model, key)}" for key in ("quantize", "quantize_head")]
        return self._run(one, ["eval", str(folder), *arguments], succeeds=(0,))

    def _run(self, one: StudyRun, words: Sequence[str], succeeds: Collection[int]) -> str:
        log = self.study.folder / f"{one.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with disk.naming(log), open(log, "ab", opener=disk.not_a_link) as output:
            child = Popen(in_a_process(words), stdout=output, stderr=STDOUT, preexec_fn=ended_with_parent)  # noqa: PLW1509
            self.children.add(child)
            status = child.wait()
            self.children.remove(child)
        if status in succeeds:
            return ""
        outcome = "was stopped" if status in STOPPED else f"failed with status {status}"
        print(f"{one.name:<24} {outcome}; see {log}", flush=True)
        return one.name


def _pending(study: Study, supervised: bool) -> list[StudyRun]:
    """Return the runs that have not ended; of `supervised`, only those whose seed has ended in the first arm."""
    runs = [one for one in study.runs() if (one.arm == SUPERVISED) == supervised and ended(study, one) is None]
    done = {one.seed for one in study.runs() if one.arm == study.first and ended(study, one)}
    return [_with_steps(study, one) for one in runs if one.seed in done] if supervised else runs


def _with_steps(study: Study, one: StudyRun) -> StudyRun:
    """Return a `supervised` run with enough steps to train on as many tokens as the first arm has sampled."""
    config = study.config(one)
    task = make_task(config.task)
    problems = training_problems(task, config.task, config.run.seed)[:SOLUTIONS]
    from trainer.model.load import load_tokenizer

    tokenizer, style = load_tokenizer(config.model), answer_style(config.prompt, task)
    lengths = [len(tokenizer(taught(problem, style))["input_ids"]) + 1 for problem in problems if problem.solution]
    # longer ones are not trained on
    trained = [length for length in lengths if length <= config.rollout.max_new_tokens] or lengths
    tokens = totals(read_run(study.folder / f"{study.first}-{one.seed}"))["tokens"]
    steps = max(1, round(tokens / fmean(trained) / config.warmup.problems))
    return StudyRun(one.arm, one.seed, (*one.overrides, f"warmup.steps={steps}"))


def _submit(study: Study, options: Namespace) -> None:
    """Submit the runs that have not ended. `supervised` can be submitted once the first arm has ended."""
    ready = _pending(study, supervised=False) + _pending(study, supervised=True)
    if not ready:
        print("octet: nothing to submit; `octet study FILE --collect` judges the runs")
        return
    if len(starts := {study.config(one).rollout.vllm.start for one in ready}) > 1:
        reason = "only some runs have it, and the jobs of an array are alike"
        raise ConfigError("rollout.vllm.start=true", reason, "Write it for all runs, under `settings`")
    grid = study.folder / f"grid-{1 + len([*study.folder.glob('grid-*')])}"  # earlier arrays still read their own
    request = JobRequest(1, options.gpus, options.time, grid, tasks=len(ready), vllm=int(starts.pop()))
    for one in ready:
        try:
            check(of_job(study.file.preset, study.file.recipe, one.overrides), request)
        except ConfigError as error:
            raise ConfigError(f"{study.path}, arm {one.arm}", str(error)) from None
    lines = [f"{shlex.join(one.overrides)}\n" for one in ready]
    if options.dry_run:
        print(f"# {grid}:\n{''.join(f'#   {line}' for line in lines)}")
    else:
        study.folder.mkdir(parents=True, exist_ok=True)
        disk.replace(grid, "".join(lines).encode())
    config = resolve(study.file.preset, study.file.recipe, overrides_of({"run.dir": str(study.folder)}))
    slurm(config, study.file.preset, request, options.dry_run)
    if not options.dry_run:
        print(f"judge   {shlex.join(['octet', 'study', str(options.file), *options.overrides, '--collect'])}")
    if len(ready) < sum(ended(study, one) is None for one in study.runs()):
        print("supervised  depends on the first arm: repeat this command after its runs have ended")


def _judge(study: Study) -> dict[str, Any]:
    """Write `study.json` and the page, and return their results."""
    collected = collect(study)
    if study.first not in collected.runs:
        raise StudyError(study.folder, f"no run of {study.first}, the first arm, has ended yet")
    results = summary(collected)
    disk.replace(study.folder / "study.json", (json.dumps(results, indent=1) + "\n").encode())
    html = page(f"{study.name}: Octet", *study_page.sections(results, collected))
    disk.replace(study.folder / "study.html", html.encode())
    return results


def _show(study: Study, results: dict[str, Any]) -> None:
    console = Console(wide=WIDTH)
    for title, head, rows in study_page.tables(results):
        for part in folded(head, rows, console.width, title=title):
            console.print(part)
    for sentence in study_page.sentences(results):
        console.print(sentence, soft_wrap=not console.is_terminal)
    print(study.folder / "study.html")
