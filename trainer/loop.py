"""train() runs problem -> rollout -> reward -> advantage -> batch -> loss -> step, and warm_up() trains on solutions.

Where this GRPO departs from the paper (Shao et al. 2024), and why:

1. The loss is a sum over tokens divided by the tokens of the step, over all micro-batches and ranks. The paper takes a
   mean for each answer first, which favours short right answers and long wrong ones (`algorithm.aggregation=grpo`).
2. Groups whose rewards are all the same are dropped. Their advantages are zero, but the loss is then a mean over the
   remaining tokens. `rollout.dead_groups=keep` takes the mean over all tokens, as the paper does.
3. One update for each batch of answers, so the ratio is exactly 1 in value and only its gradient counts
   (`algorithm.epochs`, `algorithm.minibatches` make more).
4. No KL term and no reference model: the adapter is small and the run is short (`algorithm.kl.coef` adds both).
5. The temperature divides the logits in training as it does in sampling: otherwise the ratio is not 1.

A warm-up is supervised training on solutions. A solution is a row like any other, with an advantage of 1, so the loss
is the cross-entropy of its tokens, divided once by their number over all micro-batches and ranks.

The timer (`phases`) has fewer phases than the algorithm: rewards are computed in `rollout`, group by group while others
are sampled, and the loss in `step`, micro-batch by micro-batch. `score` computes log-probs that the loss needs before
the first update: those of the policy that sampled, of the reference, and of a teacher.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainer import advantage
from trainer.batch import pack
from trainer.config.settings import Config
from trainer.evaluation.best import Evaluator, describe, metrics_of
from trainer.problem.task import draw
from trainer.ranks import distributed
from trainer.records import TrainingRow
from trainer.rollout import self_training
from trainer.rollout.collect import Rollouts
from trainer.run_folder import run_log
from trainer.run_folder.run_log import RunLog
from trainer.step.update import Updater
from trainer.watch.measure import measure_of
from trainer.watch.phases import Phases
from trainer.watch.tally import Tally
from trainer.watch.update_metrics import Health, metrics_of_updates


def train(config: Config, rollouts: Rollouts, updater: Updater, evaluator: Evaluator, log: RunLog) -> None:
    """Train the policy with GRPO."""
    algorithm, policy = config.algorithm, updater.policy
    health = Health(log.folder, policy, log.first_step == 0)
    for step, tally, phases in steps(updater, evaluator, log):
        done = step + 1
        with phases("problem"):
            prompts = rollouts.prompts_of(step)
        with phases("rollout"), policy.gathered():  # a group is scored while the next ones are sampled
            # A resumed run starts from the saved policy, so no run samples ahead at a save.
            is_saved = log.is_checkpoint(done) or evaluator.history.is_due(done)
            samples_ahead = bool(config.rollout.ahead) and not is_saved
            groups = rollouts.scored_groups(prompts, step, tally, samples_ahead)
        with phases("advantage"):
            policy.refresh_reference(step)
            live = advantage.live_groups(groups, config.drops_dead_groups)
            dead = [group for group in groups if config.drops_dead_groups and group.is_dead]
            live = updater.penalise(live, tally)
            # the rewards include the KL, because without it all rewards of a step may be equal
            spread = advantage.step_deviation([*live, *dead], config, distributed.gather)
            advantages = [advantage.of_group(group, config, spread) for group in live]
            if config.shaping and config.algorithm.loss != "reinforce":  # which compares no answers
                tally.add("advantage/shaping", *advantage.decided_by_shaping(live, advantages, config, spread))
        with phases("batch"):
            rows = pack.rows(live, advantages, algorithm)
            minibatches = pack.minibatches(rows, pack.idle_row(groups[0]), config, updater.packer)
        with phases("score"):
            scored = updater.prepare(minibatches)
        with phases("step"):
            updates = updater.update(scored, step, tally)
        measured = health.of(done, updates, rows)
        metrics = run_log.metrics_of(groups, updates, tally, phases, measure_of(config))
        metrics |= updater.adapt_kl(metrics)
        log.step(done, groups, metrics, measured)


def warm_up(
    config: Config, rollouts: Rollouts, updater: Updater, evaluator: Evaluator, log: RunLog, lessons: "Lessons"
) -> None:
    """Train the policy on worked solutions, or on right answers that it has sampled itself."""
    health = Health(log.folder, updater.policy, log.first_step == 0)
    for step, tally, phases in steps(updater, evaluator, log):
        with phases("samples"):
            sampled = lessons.begin(step, rollouts, updater, log)
        with phases("batch"):
            idle = replace(lessons.rows[0], weight=0.0)  # the row of a rank without solutions
            rows = lessons.of(step)
            minibatches = pack.minibatches(rows, idle, config, updater.packer)
        with phases("score"):
            scored = updater.prepare(minibatches)
        with phases("step"):
            updates = updater.update(scored, step, tally)
        measured = health.of(step + 1, updates, rows)
        means = tally.means(distributed.gather)
        tokens = sum(minibatch.tokens for minibatch in minibatches)
        # the other means compare the rows with a sampler, and nobody has sampled these
        metrics = {"tokens": tokens, "loss": means["loss"], "entropy": means["entropy"]}
        log.step(step + 1, [], sampled | metrics | metrics_of_updates(updates) | run_log.costs_of(phases), measured)


def steps(updater: Updater, evaluator: Evaluator, log: RunLog) -> Iterator[tuple[int, Tally, Phases]]:
    """Yield the remaining steps, to the last one or an early stop. After each step, save, stop or evaluate if that is
    due. A signal may end an evaluation at once, so it comes last."""
    history = evaluator.history
    log.screen.start()
    if history.was_interrupted_at(log.first_step):
        evaluate(evaluator, log, log.first_step)
    for step in range(log.first_step, log.total_steps):
        if history.has_stopped_rising:
            return
        yield step, Tally(), Phases()
        done = step + 1
        is_last, evaluates = done == log.total_steps, history.is_due(done)
        stops = log.stopping.is_due(is_last, evaluates)
        if evaluates or stops or log.stopping.saves or log.is_checkpoint(done):
            log.save(updater.policy, done)
        if stops and (evaluates or not is_last):
            log.stopping.stop(done)
        if evaluates:
            evaluate(evaluator, log, done)


def evaluate(evaluator: Evaluator, log: RunLog, step: int) -> None:
    """Evaluate the policy after a step. The log line comes last, because it marks the evaluation as done."""
    phases = Phases()
    with log.stopping.evaluating(step):
        with phases("evaluation"):
            evaluation = evaluator.evaluate(f"step {step}")
        is_best = evaluator.keep_if_best(step, evaluation)
        log.evaluation(step, metrics_of(evaluation) | phases.metrics())
    is_praised = is_best and any(one.value for one in evaluator.history.milestones)  # not for a first result of 0 %
    log.screen.say(f"after step {step}: {describe(evaluation)}{', the best so far' if is_praised else ''}")


@dataclass(slots=True)
class Lessons:
    """The solutions that a warm-up currently trains on, as rows."""

    config: Config
    rows: Sequence[TrainingRow]

    def begin(self, step: int, rollouts: Rollouts, updater: Updater, log: RunLog) -> dict[str, float]:
        """Sample answers at the start of a round, or read those of a round that a run resumes; `warmup.from=solutions`
        needs neither. Return their metrics. Every rank calls this."""
        if self.config.warmup.source == "solutions":
            return {}
        number, place = self_training.round_of(self.config.warmup, step)
        if place:
            self.rows = self.rows or self_training.read(log.folder, number)
            return {}
        with updater.policy.gathered():
            self.rows, measured = self_training.sample(rollouts, step, number)
        self_training.write(log.folder, number, self.rows)
        log.screen.say(
            f"round {number + 1} of {self.config.warmup.rounds}: {measured['samples/right']:.1%} of the answers are "
            f"right, {measured['samples/solved']:.1%} of the problems are solved, {len(self.rows)} answers of "
            f"{measured['samples/length']:.0f} tokens are kept"
        )
        return measured

    def of(self, step: int) -> list[TrainingRow]:
        """Return this rank's share of the solutions of a step, each with its index among those of all ranks."""
        drawn = draw(self.rows, step, self.config.warmup.problems, self.config.run.seed)
        return distributed.mine([replace(row, place=place) for place, row in enumerate(drawn)])
