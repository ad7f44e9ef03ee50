"""The rules about the health of a run. A rule is a short function whose docstring says why its finding matters.

A rule yields its finding, if any. Most examine the last `RECENT` steps, so one bad step raises no alarm. They read
only metrics, so their findings are the same during a run and afterwards; the few rules that end a run also read the
measurements of `update_metrics.Health`. To add a rule, write its function here, and a case in
`tests/watch/test_rules.py`.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import sqrt
from statistics import fmean, median
from typing import Literal, NamedTuple

from trainer.config.sections.reward import function_name
from trainer.stats import rise
from trainer.watch.history import EARLY, LATE, RECENT, History
from trainer.watch.verdict import RISE

Looks = Callable[[History], Iterator[str]]

LONG = 30  # steps before times are compared
LARGE_DIFFERENCE = 0.1  # mean difference of a token's log-prob between sampler and trainer
DEAD_STEPS = 50  # steps in a row
LEAK_STEPS = 50  # steps over which memory must rise
PENALTIES = ("overlong", "repetition")  # built-in rewards that are 0 at best
CREEP = 0.01  # share of all memory leaked in these steps: enough to fill the card or machine in one night


class Rule(NamedTuple):
    """A rule that warns or ends the run. With `of_each_rank`, every rank applies it to its own metrics."""

    name: str
    why: str
    remedy: str
    looks: Looks
    severity: Literal["warn", "end"]
    of_each_rank: bool


RULES: list[Rule] = []


def rule(
    name: str, remedy: str, severity: Literal["warn", "end"] = "warn", of_each_rank: bool = False
) -> Callable[[Looks], Looks]:
    """Add a function to the table, whose docstring says why its finding matters."""

    def enter(looks: Looks) -> Looks:
        RULES.append(Rule(name, looks.__doc__ or "", remedy, looks, severity, of_each_rank or severity == "end"))
        return looks

    return enter


# answers


@rule("cut off", "Raise rollout.max_new_tokens, or with several turns rollout.turns.most.")
def cut_off(history: History) -> Iterator[str]:
    """An answer that is cut off seldom contains a result, so it earns little."""
    share = history.now("truncated")
    if share > 0.3 and not any(thinking_too_long(history)):
        rollout, has_turns = history.config.rollout, bool(history.recent("turns"))
        others = f" or another limit, such as rollout.turns.most={rollout.turns.most}" if has_turns else ""
        yield f"{share:.0%} of the answers reach rollout.max_new_tokens={rollout.max_new_tokens}{others}"


@rule(
    "thinking fills the limit",
    "Raise rollout.max_new_tokens, or switch thinking off: prompt.template='{enable_thinking: false}'.",
)
def thinking_too_long(history: History) -> Iterator[str]:
    """Unfinished thinking has no answer, so it counts as wrong."""
    if (share := history.now("unfinished_thinking")) > 0.3:
        yield f"{share:.0%} of the answers are still thinking when they are cut off"


@rule("answers alike", "Raise rollout.temperature towards 1.")
def answers_alike(history: History) -> Iterator[str]:
    """Equal answers earn equal rewards, so they teach nothing."""
    share, heat = history.now("distinct", 1.0), history.config.rollout.temperature
    are_alike = share < 0.3 and heat < 0.9 and history.now("dead_groups") > 0.6 and history.solve_rate < 0.9
    if are_alike and not history.config.learns_from_dead_groups:
        yield f"only {share:.0%} of the answers to a problem differ at rollout.temperature={heat:g}"


@rule("repetition", "Read samples.jsonl first. Lower algorithm.lr, or add algorithm.kl.coef=0.01.")
def repeats_itself(history: History) -> Iterator[str]:
    """The model is stuck in a loop. Training makes this worse if such answers are rewarded."""
    if (share := history.now("repetitive")) > 0.2:
        yield f"{share:.0%} of the answers repeat the same few tokens"


@rule("empty answers", "Read samples.jsonl first. Check prompt.style and rollout.stop.")
def empty(history: History) -> Iterator[str]:
    """The model has learned, or was asked, to stop at once."""
    if (share := history.now("empty")) > 0.2:
        yield f"{share:.0%} of the answers are empty"


@rule("tools fail", "Correct the tool whose first error the run printed, or its docstring.")
def tools_fail(history: History) -> Iterator[str]:
    """The model does not get the results that it asks for."""
    if (share := history.now("tool_errors")) > 0.9:
        yield f"{share:.0%} of the replies of tools have an error"


@rule(
    "answers grow",
    "Read samples.jsonl first. Lower rollout.max_new_tokens, or end answers where they are done: rollout.stop.",
)
def longer(history: History) -> Iterator[str]:
    """Longer answers that are not better cost time, and are eventually cut off."""
    first, now = history.first("length"), history.now("length")
    if first and now > 2 * first and history.improved < 0.1 and not history.chooses_problems:
        yield f"answers have {now:.0f} tokens, {first:.0f} in the first steps, and {history.measure.no_better}"


@rule("answers shrink", "Check reward.weights for parts that reward short answers; add algorithm.kl.coef=0.01.")
def shorter(history: History) -> Iterator[str]:
    """The model stops showing its work, which leaves less to learn from."""
    first, now = history.first("length"), history.now("length")
    if first and now < 0.4 * first and history.improved < 0.05:
        yield f"answers have {now:.0f} tokens, {first:.0f} in the first steps, and {history.measure.no_better}"


# groups to learn from


@rule(
    "all wrong",
    "Check in samples.jsonl that answers are read as you expect. Take easier problems, or a larger rollout.group_size. "
    "With rollout.dead_by=correct, rollout.dead_by=reward also learns from other rewards.",
)
def all_wrong(history: History) -> Iterator[str]:
    """A problem that is never solved gives no gradient."""
    share = history.now("dead_groups/wrong")
    if share > 0.8 and not any(wrong_form(history)) and not history.config.teacher.is_there:
        yield f"in {share:.0%} of the groups every answer is wrong"


@rule("dead by correct", "Write rollout.dead_by=reward.")
def dead_by_correct(history: History) -> Iterator[str]:
    """Right answers earn nothing, and the rewards that differ in these groups teach nothing."""
    share = history.now("dead_groups/unequal")
    if history.measure.is_reward and share > 0.5:
        yield f"rollout.dead_by=correct leaves out {share:.0%} of the groups, although their rewards differ"


@rule("all right", "Take harder problems, or task.curriculum.")
def all_right(history: History) -> Iterator[str]:
    """A problem that is always solved gives no gradient."""
    share = history.now("dead_groups/right")
    if share > 0.95 and not history.config.learns_from_dead_groups:
        yield f"in {share:.0%} of the groups every answer is right"


@rule("small groups", "Raise rollout.group_size, and lower rollout.problems for the same time.")
def small_groups(history: History) -> Iterator[str]:
    """A group whose answers are all right or all wrong gives no gradient."""
    rate, size, dead = history.solve_rate, history.config.rollout.group_size, history.now("dead_groups")
    mixed, of_larger = mixed_share(rate, size), mixed_share(rate, 4 * size)
    has_grades = all("reward/mean" in step for step in history.steps[-RECENT:])  # without any, every group is dead
    is_small = has_grades and dead > 0.5 and mixed < 0.5 and of_larger > 2 * mixed and 0.02 < rate < 0.8
    if is_small and not history.config.learns_from_dead_groups:
        yield (
            f"{dead:.0%} of the groups are dead: with a solve rate of {rate:.0%}, at most {mixed:.0%} of the groups of "
            f"{size} have right and wrong answers, and {of_larger:.0%} of the groups of {4 * size}"
        )


def mixed_share(rate: float, size: int) -> float:
    """Return the probability that a group has a right and a wrong answer, if all problems are equally hard."""
    return 1 - rate**size - (1 - rate) ** size


@rule("few problems", "Lower run.steps, run.epochs or warmup.steps, or add problems.")
def few_problems(history: History) -> Iterator[str]:
    """Problems repeated this often are memorized."""
    config, problems = history.config, history.problems
    parts = config.task.mix or [config.task.name]
    is_generated = all(name.startswith("reasoning_gym:") for name in parts)
    if is_generated and not (config.task.limit or config.is_warmup):
        return  # each pass has new ones
    each = config.warmup.problems if config.is_warmup else config.rollout.problems
    passes = history.steps[-1]["step"] * each / problems if problems else 0.0
    if passes > 10:
        yield f"the {problems} training problems have been used {passes:.0f} times each"


# the reward


@rule("form never seen", "Write reward.answer=lenient, prompt.answer=FORM, or another prompt.style, such as few_shot.")
def wrong_form(history: History) -> Iterator[str]:
    """Right answers earn nothing unless they have the form that is asked for."""
    strict, lenient = history.now("accuracy/strict"), history.now("accuracy/lenient")
    is_paid = history.config.reward.answer == "strict" and not history.measure.is_reward
    if is_paid and lenient > 0.1 and strict < 0.2 * lenient:
        yield f"{lenient:.0%} of the answers are right and only {strict:.0%} are also in the form asked for"


@rule("form alone", "Lower reward.weights.format.")
def only_the_form(history: History) -> Iterator[str]:
    """The model learns the form of an answer and nothing else."""
    form, right = history.grown("reward/format"), history.grown("accuracy/lenient")
    has_right = not history.measure.is_reward
    if has_right and form > 0.3 and right < 0.02 and history.grown("accuracy/strict") < 0.1:
        yield f"reward/format has risen by {form:.2f}, and the share of right answers by {right:.2f}"


@rule("paid by length", "Check reward.weights and reward.custom, with `octet reward test` if answers are known.")
def paid_by_length(history: History) -> Iterator[str]:
    """The model learns to write answers of a certain length, because that is rewarded."""
    among_equals, share = history.now("reward_length/correlation"), history.now("reward_length/share")
    if abs(among_equals) > 0.6 and share > 0.4:
        if history.measure.is_reward:
            yield f"among answers to one problem, reward and length have a correlation of {among_equals:+.2f}"
        else:
            yield (
                f"among answers to one problem that are equally right, reward and length have a correlation of "
                f"{among_equals:+.2f}, and {share:.0%} of the differences in reward are between such answers"
            )


@rule(
    "shaping decides",
    "Lower the weights beside `correct` in reward.weights, or write reward.weights.correct=0 if the others are what "
    "you want. If the run has reward.gate=false, leave that out.",
)
def shaping_decides(history: History) -> Iterator[str]:
    """Rewards for other things than right answers weigh a lot, and the model may learn them instead."""
    shares = history.recent("advantage/shaping")
    if shares and (share := median(shares)) > 0.2:  # the share of a step without right answers is 100 %
        yield f"{share:.0%} of the advantages come from other rewards than those for right answers"


@rule("no reward", "Look at the judge or the function in reward.custom: it fails, or returns None.")
def no_reward(history: History) -> Iterator[str]:
    """Nothing can be learned without rewards."""
    has_none = not any("reward/mean" in record for record in history.steps[-RECENT:])
    if has_none and len(history.steps) >= RECENT and not history.config.is_warmup:
        yield f"no answer of the last {RECENT} steps has a reward"


@rule("constant reward", "Remove or repair it.")
def constant_part(history: History) -> Iterator[str]:
    """A part that never differs teaches nothing."""
    reward = history.config.reward
    paid = [name for name, weight in reward.all_weights.items() if weight]
    # an only reward that differs between answers, and whose mean stays the same, is normalised within each group
    is_normalised = len(paid) == 1 and max(history.recent("reward/std"), default=0.0) > 1e-9
    for name in paid:
        every = history.of(f"reward/{name}")
        values = every[-2 * RECENT :]
        if name in ("correct", "code", "environment") or len(values) < 2 * RECENT or max(values) - min(values) >= 1e-9:
            continue
        if name in PENALTIES and not values[-1]:  # no answer of this time deserves it
            continue
        earned = [reward.all_weights[name] * value for value in every]
        if min(earned) < earned[-1] - 1e-9:  # it has risen to this value: it has been learned
            continue
        if name not in map(function_name, reward.custom):
            yield f"reward.weights.{name} gives every answer {values[-1]:g}"
            return
        if not is_normalised:
            pays = f"reward.weights.{name} pays {values[-1]:g} on average in every step"
            yield f"{pays}, which is right only if it is normalised within each group"
            return


@rule("a part dominates", "Lower its weight in reward.weights.")
def dominant_part(history: History) -> Iterator[str]:
    """The model learns first what earns most."""
    weights, pay = history.config.shaping, history.config.pay_of_right
    earned = {name: abs(weight * history.now(f"reward/{name}")) for name, weight in weights.items()}
    name = max(earned, key=lambda name: earned[name], default="")
    if name and earned[name] > 2 * pay and 0.02 < history.solve_rate < 0.98:
        yield f"reward.weights.{name} pays {earned[name]:.2f} on average, and a right answer {pay:g}"


@rule(
    "reward against accuracy",
    "Read samples.jsonl first. Check the sign of reward.weights and reward.custom: `octet reward test`.",
)
def reward_against_accuracy(history: History) -> Iterator[str]:
    """Something other than right answers is rewarded."""
    reward, right = history.grown("reward/mean"), history.grown("accuracy/lenient")
    if reward > 0.05 and right < -0.1:
        yield f"the reward has risen by {reward:.2f}, and the share of right answers has fallen by {-right:.0%}"


@rule("accuracy falls", "Lower algorithm.lr by 3 to 10, or raise optim.warmup.")
def worse(history: History) -> Iterator[str]:
    """The model forgets what it could do."""
    right = history.grown("accuracy/lenient")
    first = history.first("accuracy/lenient") or 0.0
    is_known = history.chooses_problems or history.measure.is_reward or any(reward_against_accuracy(history))
    if right < -max(0.1, 0.5 * first) and not is_known:
        yield f"the share of right answers has fallen from {first:.0%} to {first + right:.0%}"


@rule("held-out accuracy falls", "Use the adapter in best/, and stop earlier: eval.patience.")
def overfitted(history: History) -> Iterator[str]:
    """The model memorizes the training problems, or exploits a loophole in the reward."""
    values, measure = history.evaluated, history.measure
    if len(values) < 3 or history.grown("reward/mean") <= 0:
        return
    best, last = max(values), values[-1]
    at_best = [record for record in history.evaluations if record[measure.logged] == best]
    if measure.is_reward:
        noise = sqrt(2) * max(record["eval/high"] - best for record in at_best)
    else:
        asked = at_best[0].get("eval/problems", history.config.eval.problems)
        variance = max(value * (1 - value) for value in (best, last))  # at 100 % there would be none
        noise = max(2 * sqrt(2 * variance / asked), 0.02)
    if last < best - noise:
        fallen = f"from {measure.text(best)} to {measure.text(last)} while the reward rose"
        yield f"the held-out {measure.name} has fallen {fallen}{' in training' * measure.is_reward}"


@rule(
    "plateau",
    "End the run here, raise algorithm.lr or rollout.group_size, or take harder problems. eval.patience=3 with "
    "eval.every=50 ends such a run by itself.",
)
def plateau(history: History) -> Iterator[str]:
    """More such steps bring little."""
    steps = [step for step in history.steps[-LATE:] if step.keys() >= {"reward/mean", "reward/std"}]
    run, done = history.config.run, history.records[-1]["step"]
    total = history.config.total_steps(history.problems) if run.steps or history.problems else 0
    if len(steps) < LATE or done <= EARLY + LATE or total - done < LATE or history.chooses_problems:
        return
    risen = rise([step["reward/mean"] for step in steps], LATE // 2)
    deviation = fmean(step["reward/std"] for step in steps)
    if not (-RISE * deviation < risen.low and 0 <= risen.high < RISE * deviation):
        return
    late = [one[history.measure.logged] for one in history.evaluations if one["step"] >= steps[0]["step"]]
    earlier = history.evaluated[: len(history.evaluated) - len(late)]
    if late and earlier and max(late) > max(earlier):
        return
    held_out = f", nor has the held-out {history.measure.name} risen" if late and earlier else ""
    yield (
        f"the reward has neither risen nor fallen in the last {LATE} steps{held_out}: {risen.value:+.3f} from one half "
        f"of them to the other (95 % interval {risen.low:+.3f} to {risen.high:+.3f})"
    )


# the update


@rule(
    "entropy collapse",
    "Raise rollout.temperature, or with several updates a step algorithm.clip_high, or lower algorithm.lr.",
)
def entropy_gone(history: History) -> Iterator[str]:
    """The model always writes the same text, so it explores nothing."""
    first, now = history.first("entropy"), history.now("entropy", 1.0)
    # a warm-up should make the model certain of the solutions
    if first and now < 0.02 and now < 0.05 * first and not history.config.is_warmup:
        yield f"the entropy has fallen from {first:.2f} to {now:.3f}"


@rule("entropy explosion", "Lower algorithm.lr by 3 to 10, or raise optim.warmup.")
def entropy_rises(history: History) -> Iterator[str]:
    """The model drifts into noise."""
    first, now = history.first("entropy"), history.now("entropy")
    if first and now > 1.5 * first + 0.2:
        yield f"the entropy has risen from {first:.2f} to {now:.2f}"


@rule("far from the reference", "Raise algorithm.kl.coef, or lower algorithm.lr.")
def far_from_reference(history: History) -> Iterator[str]:
    """The model has moved far from what it knew before."""
    if (now := history.now("kl")) > 0.5:
        yield f"the KL to the reference is {now:.2f} a token"


@rule("clipping", "Lower algorithm.lr, algorithm.epochs or algorithm.minibatches.")
def clipped(history: History) -> Iterator[str]:
    """Clipped tokens give no gradient: together, the updates of a step are too large."""
    share = history.now("clipped/low") + history.now("clipped/high")
    # the narrow bounds of gspo clip many tokens on purpose, and the other losses give every token a gradient
    if share > 0.2 and history.config.algorithm.loss == "grpo_clip":
        yield f"{share:.0%} of the tokens are clipped"


@rule("gradient at its limit", "Lower algorithm.lr, or raise optim.max_grad_norm.")
def gradient_at_its_limit(history: History) -> Iterator[str]:
    """The gradient is cut to the same length in every update, however much there is to learn."""
    limit, norms = history.config.optim.max_grad_norm, history.of("grad_norm")[-2 * RECENT :]
    if limit and len(norms) == 2 * RECENT and min(norms) > 5 * limit:
        yield f"the norm of the gradient is {median(norms):.1f}, far above optim.max_grad_norm={limit:g}"


@rule("no gradient", "Check algorithm.truncated and rollout.dead_groups.")
def no_gradient(history: History) -> Iterator[str]:
    """All advantages are zero, or all tokens are masked or clipped."""
    norms = history.recent("grad_norm")
    if norms and max(norms) < 1e-9:
        yield f"the gradient is zero in the last {RECENT} updates"


@rule("learning rate too large", "Lower algorithm.lr by 3 to 10, or raise optim.warmup.")
def rate_too_large(history: History) -> Iterator[str]:
    """A few updates replace what the adapter has learned."""
    if (size := history.update_size) > 0.2:
        yield f"an update at the full rate changes the adapter by {size:.0%} of its size"


@rule("learning rate too small", "Raise algorithm.lr: adapters need 1e-5 to 1e-3.")
def rate_too_small(history: History) -> Iterator[str]:
    """The adapter hardly moves."""
    if 0 < (size := history.update_size) < 2e-4:
        yield f"an update at the full rate changes the adapter by {size:.1e} of its size"


@rule(
    "sampler and trainer apart",
    "With vLLM, check --logprobs-mode and which adapter and precision it serves; otherwise write rollout.engine=hf.",
)
def sampler_apart(history: History) -> Iterator[str]:
    """The answers do not come from the policy that is being trained."""
    values, is_same = history.of("sampler_difference")[-3:], history.config.rollout.weights == "same"
    # rounded weights differ by more, which algorithm.correction is for
    if is_same and len(values) == 3 and min(values) > LARGE_DIFFERENCE:
        yield f"the log-probs of sampler and trainer differ by {fmean(values):.2f} a token"


# the machine


@rule("slower", "Look at nvidia-smi and top; memory/* and time/* are in metrics.jsonl.")
def slower(history: History) -> Iterator[str]:
    """Something slows the machine down: other programs, heat, or swapped memory."""
    if history.config.rollout.ahead:  # time/rollout is then what a step still waits for its answers
        return
    timed = [step for step in history.steps if step.get("time/rollout") and step.keys() >= {"length", "groups"}]
    if len(timed) < LONG:
        return
    seconds = [step["time/rollout"] for step in timed]
    speeds = [step["length"] * step["groups"] / step["time/rollout"] for step in timed]
    early, late = slice(RECENT, 3 * RECENT), slice(-2 * RECENT, None)
    is_slower = median(speeds[late]) < median(speeds[early]) / 3
    if is_slower and median(seconds[late]) > median(seconds[early]):  # answers that are shorter may take as long
        yield "sampling is three times slower than at the start"


@rule(
    "memory leak",
    "Check the functions in reward.custom for what they keep. Save often (run.save_every): the run can be resumed.",
    of_each_rank=True,
)
def leak(history: History) -> Iterator[str]:
    """The run would run out of memory hours later."""
    held = history.of("memory/held")[-LEAK_STEPS:]
    if len(held) < LEAK_STEPS or not history.memory:
        return
    fifths = [held[start : start + LEAK_STEPS // 5] for start in range(0, LEAK_STEPS, LEAK_STEPS // 5)]
    risen = min(fifths[-1]) - max(fifths[0])
    if risen < CREEP * history.memory or any(min(later) <= max(before) for before, later in pairwise(fifths)):
        return
    yield (
        f"the memory held between steps rose by {risen:.2f} GB in {LEAK_STEPS} steps and is still rising "
        f"({held[-1]:.2f} of {history.memory:.1f} GB)"
    )


# rules that end a run


@rule(
    "nothing to learn from",
    "Read samples.jsonl. If all answers are wrong: easier problems, prompt.style, reward.answer=lenient; all "
    "alike: higher rollout.temperature, larger rollout.group_size; all cut off and masked "
    "(algorithm.truncated=mask): larger rollout.max_new_tokens; without a reward: repair the judge.",
    severity="end",
)
def dead_steps(history: History) -> Iterator[str]:
    """Groups whose answers all earn the same give no gradient."""
    steps = history.steps[-DEAD_STEPS:]
    if len(steps) == DEAD_STEPS and not any("lr" in step for step in steps):
        yield f"no problem of the last {DEAD_STEPS} steps had answers to learn from"


@rule("gradients not finite", "Lower algorithm.lr, or use model.dtype=bf16 or fp32.", severity="end")
def not_finite(history: History) -> Iterator[str]:
    """Such updates are skipped, so the run learns nothing."""
    last = history.records[-1]
    if (bad := last.get("bad_updates", 0)) and bad >= last["bad_updates_allowed"]:
        yield f"the gradient was not finite {bad:.0f} times in a row; see bad_update_*.json in the run folder"


@rule(
    "nothing trained",
    "Check that lora.targets names layers of this model and that algorithm.lr is not too small.",
    severity="end",
)
def unchanged(history: History) -> Iterator[str]:
    """The run would end without learning."""
    if history.records[-1].get("unchanged"):
        yield "the first update changed no trainable parameter"


@rule(
    "another policy samples",
    "Likely reasons with vLLM: its log-probs ignore the temperature (--logprobs-mode raw_logprobs), it has an adapter "
    "of an earlier step, or another base, precision or quantisation; with rollout.ahead=1 one update is part of the "
    "difference, so lower algorithm.lr. Without vLLM only rounding should differ: try model.dtype=fp32, "
    "rollout.weights=same and rollout.engine=hf.",
    severity="end",
)
def sampler_elsewhere(history: History) -> Iterator[str]:
    """Answers of another policy are no basis for training this one."""
    difference, limit = history.records[-1].get("sampler_difference", 0.0), history.config.rollout.vllm.max_difference
    if difference <= limit:  # False for NaN
        return
    yield (
        f"the log-probs of sampler and trainer differ by {difference:.2f} on average over the tokens, more than "
        f"rollout.vllm.max_difference={limit:g}"
    )
