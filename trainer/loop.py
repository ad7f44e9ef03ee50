"""train(): problem -> rollout -> reward -> advantage -> batch -> loss -> step, in this order.

Where this GRPO departs from the paper (Shao et al. 2024), and why:

1. The loss is a sum over tokens divided by the tokens of the step, over all micro-batches and ranks. The paper takes a
   mean for each answer first, which favours short right answers and long wrong ones (`algorithm.aggregation=grpo`).
2. Groups whose rewards are all the same are dropped. Their advantages are zero; what changes is the mean, which is over
   the tokens that are left. `rollout.dead_groups=keep` takes the mean over all tokens, as the paper does.
3. One update for each batch of answers, so the ratio is exactly 1 in value and only its gradient counts
   (`algorithm.epochs`, `algorithm.minibatches` make more).
4. No KL term and no reference model: the adapter is small and the run is short (`algorithm.kl.coef` adds both).
5. The temperature divides the logits in training as it does in sampling: otherwise the ratio is not 1.
"""

from __future__ import annotations

from trainer import advantage
from trainer.batch import pack
from trainer.config.settings import Config
from trainer.evaluation.best import describe, metrics_of
from trainer.evaluation.evaluator import Evaluator
from trainer.ranks import distributed
from trainer.rollout.collect import Rollouts
from trainer.run_folder import record as run_record
from trainer.run_folder.record import Record
from trainer.step.update import Updater
from trainer.watch.health import Health
from trainer.watch.phases import Phases
from trainer.watch.tally import Tally


def train(config: Config, rollouts: Rollouts, updater: Updater, evaluator: Evaluator, record: Record) -> None:
    algorithm, policy, history = config.algorithm, updater.policy, evaluator.history
    limit, served = config.rollout.vllm.max_difference, rollouts.sampler.owns_copy
    health = Health(record.folder, policy, record.screen.warn, record.first_step == 0, limit, served)
    record.screen.start()
    if history.was_interrupted_at(record.first_step):
        evaluate(evaluator, record, record.first_step)
    for step in range(record.first_step, record.total_steps):
        if history.has_stopped_rising:
            break
        done, tally, phases = step + 1, Tally(), Phases()
        with phases("problem"):
            prompts = rollouts.prompts_of(step)
        with phases("rollout"), policy.gathered():  # a group is scored while the next ones are sampled
            # A resumed run starts from the saved policy, so no run samples ahead of a save.
            is_saved = record.is_checkpoint(done) or history.is_due(done)
            samples_ahead = bool(config.rollout.ahead) and not is_saved
            groups = rollouts.scored_groups(prompts, step, tally, samples_ahead)
        with phases("reward"):  # what has to be known of a whole group: is it live, and its KL to the reference
            policy.refresh_reference(step)
            live = updater.penalise(advantage.live_groups(groups, config.drops_dead_groups), tally)
        with phases("advantage"):
            spread = advantage.step_deviation(groups, algorithm, distributed.gather)
            advantages = [advantage.of(group.rewards_G, algorithm, spread) for group in live.values()]
        with phases("batch"):
            rows = pack.rows(live, advantages, algorithm)
            minibatches = updater.pack(rows, groups)
        with phases("loss"):
            prepared = updater.prepare(minibatches)
        with phases("step"):
            updates = updater.update(prepared, step, tally)
        health.check(done, updates, pack.all_rows(rows))
        metrics = run_record.metrics_of(groups, updates, tally, phases)
        metrics |= updater.adapt_kl(metrics)
        record.step(done, groups, metrics)
        health.compare(done, metrics)
        finish_step(done, rollouts, updater, evaluator, record)


def finish_step(done: int, rollouts: Rollouts, updater: Updater, evaluator: Evaluator, record: Record) -> None:
    """Do what is due after a step: save, stop, evaluate. A signal may end the evaluation at once, so it comes last."""
    is_last, evaluates = done == record.total_steps, evaluator.history.is_due(done)
    stops = record.stopping.is_due(is_last, evaluates)
    if evaluates or stops or record.is_checkpoint(done):
        record.save(updater.policy, done, {"curriculum": rollouts.curriculum, "kl": updater.kl})
    if stops and (evaluates or not is_last):
        record.stopping.stop(done)
    if evaluates:
        evaluate(evaluator, record, done)


def evaluate(evaluator: Evaluator, record: Record, step: int) -> None:
    """Evaluate the policy after a step. The log line comes last, because it marks the evaluation as done."""
    phases = Phases()
    with record.stopping.evaluating(step):
        with phases("evaluation"):
            evaluation = evaluator.evaluate(f"step {step}")
        is_best = evaluator.keep_if_best(step, evaluation)
        record.evaluation(step, metrics_of(evaluation) | phases.metrics())
    headline = describe(evaluation, record.config.reward.answer)
    record.screen.say(f"after step {step}: {headline}{', the best so far' if is_best else ''}")
