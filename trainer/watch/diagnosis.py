"""What the log of a run says about its health: one rule, one short function, in one table.

    >>> diagnose(History(config, metrics_of_each_step))
    [Finding(severity='warn', name='cut off', seen='62% of the answers of steps 4 to 8 were cut off at ...', ...)]

A rule looks at the metrics alone, so it says the same while a run goes on, and afterwards from its metrics.jsonl. It
returns what it has seen, or None. Most look at the last `RECENT` steps, so one bad step raises no alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from statistics import fmean, median
from typing import NamedTuple

from trainer.config.settings import Config
from trainer.errors import EndedByAlarm, Finding
from trainer.watch.verdict import RISE, rise

Looks = Callable[["History"], "str | None"]
Value = Callable[[Mapping[str, float]], "float | None"]  # of a record

RECENT = 5  # steps that most rules look at
MOST = 3 * RECENT  # steps at the beginning or at the end that a rule looks at, and half of those that it asks for
QUIET = 10  # steps without a finding, after which it is said again
LONG = 30  # steps before times are compared
EARLY, LATE = 20, 60  # steps that are kept for the rules, and every evaluation
ANOTHER = 0.5  # of the size of an adapter: an update that large makes it another one
EVALUATED = "eval/accuracy"
LARGE_DIFFERENCE = 0.1  # of a token's log-prob between sampler and trainer, in the mean


@dataclass(frozen=True)
class History:
    """The settings of a run, and the metrics of its steps in their order. Step 0 holds the first evaluation."""

    config: Config
    records: Sequence[Mapping[str, float]]
    problems: int = 0  # in the training set, if known

    @cached_property
    def steps(self) -> list[Mapping[str, float]]:
        return [record for record in self.records if record["step"]]

    @cached_property
    def _columns(self) -> dict[str, list[float]]:
        return {}

    def column(self, name: str, value: Value, ends: bool = True) -> list[float]:
        """Return the values of the records that have one, and remember them under a name for the next rule. With
        `ends` the first and the last `MOST` are enough."""
        if name not in self._columns:
            self._columns[name] = self._read(name, value, ends)
        return self._columns[name]

    def _read(self, name: str, value: Value, ends: bool) -> list[float]:
        return [found for record in self.records if (found := value(record)) is not None]

    def of(self, name: str) -> list[float]:
        """Return a metric of all steps that have it."""
        return self.column(name, lambda record: record.get(name) if record["step"] else None)

    def recent(self, name: str) -> list[float]:
        """Return a metric of the last steps, or nothing if there are fewer than `RECENT` that have it."""
        values = self.of(name)[-RECENT:]
        return values if len(values) == RECENT else []

    def now(self, name: str, otherwise: float = 0.0) -> float:
        """Return the mean of a metric over the last steps."""
        values = self.recent(name)
        return fmean(values) if values else otherwise

    def first(self, name: str) -> float | None:
        """Return the mean of a metric over the first steps, or None unless as many steps came after them."""
        values = self.of(name)
        return fmean(values[:RECENT]) if len(values) >= 2 * RECENT else None

    def grown(self, name: str) -> float:
        """Return by how much the mean of a metric has risen since the first steps."""
        first = self.first(name)
        return 0.0 if first is None else self.now(name) - first

    @property
    def solve_rate(self) -> float:
        return self.now(f"accuracy/{self.config.reward.answer}")

    @cached_property
    def moved(self) -> float:
        """The median relative change of an update, as if the learning rate were at its peak; 0 if not measured. A
        single update counts if it alone, at the rate that it had, changes the adapter by `ANOTHER` of its size."""
        peak, sizes = self.config.algorithm.lr, self.column("sizes", _update_size, ends=False)
        if len(sizes) < 2 and not any(size > ANOTHER for size in sizes):
            return 0.0
        return median(
            self.column(
                "moved",
                lambda one: one["update_size"] * peak / one["lr"] if _update_size(one) is not None else None,
                ends=False,
            )
        )


class Rule(NamedTuple):
    name: str
    why: str
    remedy: str
    looks: Callable[[History], str | None]


RULES: list[Rule] = []


def rule(name: str, why: str, remedy: str) -> Callable[[Looks], Looks]:
    """Enter a function into the table: why it matters what it sees, and what to change."""

    def enter(looks: Looks) -> Looks:
        RULES.append(Rule(name, why, remedy, looks))
        return looks

    return enter


def diagnose(history: History) -> list[Finding]:
    """Return what every rule has seen after the last step."""
    if not history.steps:
        return []
    found = ((rule, rule.looks(history)) for rule in RULES)
    return [Finding("warn", rule.name, seen, rule.remedy, rule.why) for rule, seen in found if seen]


class Alarms:
    """Says what the rules see as a run goes on: once while it lasts, and again if it comes back after `QUIET` steps."""

    def __init__(self, history: History, say: Callable[[str], None]) -> None:
        self.history = history
        self.records = [dict(record) for record in history.records]
        self.say = say
        self.last_seen: dict[str, int] = {}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at the run after a step. Raise EndedByAlarm for an alarm with run.strict_health=true."""
        self.records.append({"step": step, **metrics})
        self._forget_the_middle()
        findings = diagnose(replace(self.history, records=self.records))
        for finding in findings:
            if step - self.last_seen.get(finding.name, -QUIET) >= QUIET:
                self.say(f"step {step}: {finding}")
            self.last_seen[finding.name] = step
        if findings and self.history.config.run.strict_health:
            raise EndedByAlarm(f"step {step}: run.strict_health=true ends the run at this alarm.")

    def _forget_the_middle(self) -> None:
        """Keep what the rules look at, so that a step of a long run costs no more than an early one."""
        late = len(self.records) - LATE
        kept = (one for index, one in enumerate(self.records) if index < EARLY or index >= late or EVALUATED in one)
        self.records = list(kept)

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Add an evaluation after the last step."""
        if self.records:
            self.records[-1] |= metrics


# what the model writes


@rule("cut off", "A cut-off answer has no mark, so it counts as wrong.", "Raise rollout.max_new_tokens.")
def cut_off(history: History) -> str | None:
    share = history.now("truncated")
    if share > 0.3 and not thinking_too_long(history):
        return f"{share:.0%} of the answers reach rollout.max_new_tokens={history.config.rollout.max_new_tokens}"
    return None


@rule(
    "thinking fills the limit",
    "Unfinished thinking has no answer, so it counts as wrong.",
    "Raise rollout.max_new_tokens, or switch thinking off: prompt.template='{enable_thinking: false}'.",
)
def thinking_too_long(history: History) -> str | None:
    share = history.now("unfinished_thinking")
    return f"{share:.0%} of the answers are still thinking when they are cut off" if share > 0.3 else None


@rule("answers alike", "Equal answers earn equal rewards, and teach nothing.", "Raise rollout.temperature towards 1.")
def answers_alike(history: History) -> str | None:
    share, heat = history.now("distinct", 1.0), history.config.rollout.temperature
    if share < 0.3 and heat < 0.9 and history.now("dead_groups") > 0.6 and history.solve_rate < 0.9:
        return f"only {share:.0%} of the answers to a problem differ at rollout.temperature={heat:g}"
    return None


@rule(
    "repetition",
    "The model is in a loop, which a run makes worse if it is paid for.",
    "Read samples.jsonl first. Lower algorithm.lr, or add algorithm.kl.coef=0.01.",
)
def repeats_itself(history: History) -> str | None:
    share = history.now("repetitive")
    return f"{share:.0%} of the answers repeat the same few tokens" if share > 0.2 else None


@rule(
    "empty answers",
    "The model has learned, or was told, to stop at once.",
    "Read samples.jsonl first. Check prompt.style and rollout.stop.",
)
def empty(history: History) -> str | None:
    share = history.now("empty")
    return f"{share:.0%} of the answers are empty" if share > 0.2 else None


@rule(
    "answers grow",
    "Length that does not help costs time, and is cut off in the end.",
    "Pay for short answers: reward.weights.length=0.05 with reward.length_band, in characters. Or lower "
    "rollout.max_new_tokens.",
)
def longer(history: History) -> str | None:
    first, now = history.first("length"), history.now("length")
    if first and now > 2 * first and history.grown("accuracy/lenient") < 0.1:
        return f"answers have {now:.0f} tokens, {first:.0f} in the first steps, and are right no more often"
    return None


@rule(
    "answers shrink",
    "The model gives its working up, and with it what it could learn.",
    "Check reward.weights for parts that pay for short answers; add algorithm.kl.coef=0.01.",
)
def shorter(history: History) -> str | None:
    first, now = history.first("length"), history.now("length")
    if first and now < 0.4 * first and history.grown("accuracy/lenient") < 0.05:
        return f"answers have {now:.0f} tokens, {first:.0f} in the first steps, and are right no more often"
    return None


# groups to learn from


@rule(
    "all wrong",
    "A problem that is never solved gives no gradient.",
    "See in samples.jsonl that answers are read as you expect. Take easier problems, or a larger rollout.group_size.",
)
def all_wrong(history: History) -> str | None:
    share = history.now("dead_groups/wrong")
    if share > 0.8 and not wrong_form(history):
        return f"in {share:.0%} of the groups every answer is wrong"
    return None


@rule("all right", "A problem that is always solved gives no gradient.", "Take harder problems, or task.curriculum.")
def all_right(history: History) -> str | None:
    share = history.now("dead_groups/right")
    return f"in {share:.0%} of the groups every answer is right" if share > 0.95 else None


@rule(
    "small groups",
    "A group whose answers are all right or all wrong gives no gradient.",
    "Raise rollout.group_size, and lower rollout.problems for the same time.",
)
def small_groups(history: History) -> str | None:
    rate, size, dead = history.solve_rate, history.config.rollout.group_size, history.now("dead_groups")
    mixed = mixed_share(rate, size)
    if dead > 0.5 and mixed < 0.5 and mixed_share(rate, 4 * size) > 2 * mixed and 0.02 < rate < 0.8:
        return (
            f"{dead:.0%} of the groups are alike: with a solve rate of {rate:.0%}, {size} answers are both right and "
            f"wrong in at most {mixed:.0%} of the groups, and {4 * size} answers in {mixed_share(rate, 4 * size):.0%}"
        )
    return None


def mixed_share(rate: float, size: int) -> float:
    """Return the probability that a group has a right and a wrong answer, if all problems are equally hard."""
    return 1 - rate**size - (1 - rate) ** size


@rule(
    "few problems",
    "A set that is seen so often is learned by heart.",
    "Write fewer run.steps or run.epochs, or add problems.",
)
def few_problems(history: History) -> str | None:
    steps, each = history.steps[-1]["step"], history.config.rollout.problems
    passes = steps * each / history.problems if history.problems else 0.0
    if passes > 10:
        return f"the {history.problems} training problems have been asked {passes:.0f} times each"
    return None


# the reward


@rule(
    "form never seen",
    "Right answers that are not where they are looked for earn nothing.",
    "Write reward.answer=lenient, another prompt.style, or prompt.shots=2.",
)
def wrong_form(history: History) -> str | None:
    strict, lenient = history.now("accuracy/strict"), history.now("accuracy/lenient")
    if history.config.reward.answer == "strict" and lenient > 0.1 and strict < 0.2 * lenient:
        return f"{lenient:.0%} of the answers are right and only {strict:.0%} are also in the form asked for"
    return None


@rule("form alone", "The reward rises because of the form; nothing else is learned.", "Lower reward.weights.format.")
def only_the_form(history: History) -> str | None:
    form, right = history.grown("reward/format"), history.grown("accuracy/lenient")
    if form > 0.3 and right < 0.02 and history.grown("accuracy/strict") < 0.1:
        return f"reward.weights.format has risen by {form:.2f}, and the share of right answers by {right:.2f}"
    return None


@rule(
    "paid by length",
    "The model learns the length, because it is paid for it.",
    "Check reward.weights and reward.custom: `octet reward test`.",
)
def paid_by_length(history: History) -> str | None:
    among_equals, share = history.now("reward_length/correlation"), history.now("reward_length/share")
    if abs(among_equals) > 0.6 and share > 0.4:
        return (
            f"among answers to one problem that are equally right, reward and length have a correlation of "
            f"{among_equals:+.2f}, and {share:.0%} of the differences in reward are between such answers"
        )
    return None


@rule(
    "no reward",
    "Nothing can be learned without.",
    "Look at the judge or the function of reward.custom: it fails, or returns None.",
)
def no_reward(history: History) -> str | None:
    if history.config.is_warmup:
        return None
    if len(history.steps) >= RECENT and not any("reward/mean" in record for record in history.steps[-RECENT:]):
        return f"no answer of the last {RECENT} steps has a reward"
    return None


@rule("constant reward", "A part that never differs teaches nothing.", "Leave it out, or mend it: `octet reward test`.")
def constant_part(history: History) -> str | None:
    for name, weight in history.config.reward.weights.items():
        values = history.of(f"reward/{name}")[-2 * RECENT :]
        if weight and name != "correct" and len(values) == 2 * RECENT and max(values) - min(values) < 1e-9:
            return f"reward.weights.{name} gives every answer {values[-1]:g}"
    return None


@rule("a part dominates", "What pays most is learned first.", "Lower its weight in reward.weights.")
def dominant_part(history: History) -> str | None:
    weights = history.config.reward.weights
    earned = {name: abs(weight * history.now(f"reward/{name}")) for name, weight in weights.items()}
    name = max(earned, key=lambda name: earned[name], default="correct")
    can_differ = 0.02 < history.solve_rate < 0.98
    if weights.get("correct") and name != "correct" and earned[name] > 2 * weights["correct"] and can_differ:
        return f"reward.weights.{name} pays {earned[name]:.2f} in the mean, and a right answer {weights['correct']:g}"
    return None


@rule(
    "reward against accuracy",
    "What is paid is not what is right.",
    "Read samples.jsonl first. Check the sign of reward.weights and reward.custom: `octet reward test`.",
)
def reward_against_accuracy(history: History) -> str | None:
    reward, right = history.grown("reward/mean"), history.grown("accuracy/lenient")
    if reward > 0.05 and right < -0.1:
        return f"the reward has risen by {reward:.2f}, and the share of right answers has fallen by {-right:.0%}"
    return None


@rule("accuracy falls", "The model forgets what it could do.", "Lower algorithm.lr by 3 to 10, or raise optim.warmup.")
def worse(history: History) -> str | None:
    right = history.grown("accuracy/lenient")
    first = history.first("accuracy/lenient") or 0.0
    if right < -max(0.1, 0.5 * first) and not reward_against_accuracy(history):
        return f"the share of right answers has fallen from {first:.0%} to {first + right:.0%}"
    return None


@rule(
    "held-out accuracy falls",
    "The model learns the training problems, or a hole of the reward.",
    "Take the adapter in best/, and stop earlier: eval.patience.",
)
def overfitted(history: History) -> str | None:
    evaluated = history.column("evaluated", lambda record: record.get(EVALUATED), ends=False)
    if len(evaluated) < 3 or history.grown("reward/mean") <= 0:
        return None
    best, last = max(evaluated), evaluated[-1]
    noise = 2 * sqrt(2 * best * (1 - best) / max(1, history.config.eval.problems))
    if last < best - max(noise, 0.02):
        return f"the held-out accuracy has fallen from {best:.1%} to {last:.1%} while the reward rose"
    return None


@rule(
    "plateau",
    "More of the same steps bring little.",
    "End it here, or raise algorithm.lr or rollout.group_size, or take harder problems. eval.patience=3 with "
    "eval.every=50 ends such a run by itself.",
)
def plateau(history: History) -> str | None:
    steps = [one for one in history.steps[-LATE:] if one.keys() >= {"reward/mean", "reward/std"}]
    run, done = history.config.run, history.records[-1]["step"]
    total = history.config.total_steps(history.problems) if run.steps or history.problems else 0
    if len(steps) < LATE or done <= EARLY + LATE or total - done < LATE:
        return None
    risen = rise([one["reward/mean"] for one in steps], LATE // 2)
    of_a_reward = fmean(one["reward/std"] for one in steps)
    if not (-RISE * of_a_reward < risen.low and 0 <= risen.high < RISE * of_a_reward):
        return None
    evaluated = [one[EVALUATED] for one in steps if EVALUATED in one]
    all_evaluated = history.column("evaluated", lambda record: record.get(EVALUATED), ends=False)
    earlier = all_evaluated[: len(all_evaluated) - len(evaluated)]
    if evaluated and earlier and max(evaluated) > max(earlier):
        return None
    held_out = ", nor has the held-out accuracy risen" if evaluated and earlier else ""
    return (
        f"the reward has neither risen nor fallen in the last {LATE} steps{held_out}: {risen.value:+.3f} from one half "
        f"of them to the other (95 % interval {risen.low:+.3f} to {risen.high:+.3f})"
    )


# the update


@rule(
    "entropy collapse",
    "The model always writes the same, so it explores nothing.",
    "Raise algorithm.clip_high or rollout.temperature, or lower algorithm.lr.",
)
def entropy_gone(history: History) -> str | None:
    if history.config.is_warmup:  # a solution is to become certain
        return None
    first, now = history.first("entropy"), history.now("entropy", 1.0)
    if first and now < 0.02 and now < 0.05 * first:
        return f"the entropy has fallen from {first:.2f} to {now:.3f}"
    return None


@rule("entropy explosion", "The model drifts into noise.", "Lower algorithm.lr by 3 to 10, or raise optim.warmup.")
def entropy_rises(history: History) -> str | None:
    first, now = history.first("entropy"), history.now("entropy")
    return f"the entropy has risen from {first:.2f} to {now:.2f}" if first and now > 1.5 * first + 0.2 else None


@rule(
    "far from the reference",
    "The model is no longer held by what it knew.",
    "Raise algorithm.kl.coef, or lower algorithm.lr.",
)
def far_from_reference(history: History) -> str | None:
    now = history.now("kl")
    return f"the KL to the reference is {now:.2f} a token" if now > 0.5 else None


@rule(
    "clipping",
    "Clipped tokens give no gradient: the updates of a step are too large together.",
    "Lower algorithm.lr or algorithm.epochs.",
)
def clipped(history: History) -> str | None:
    share = history.now("clipped/low") + history.now("clipped/high")
    if share > 0.2 and history.config.algorithm.loss != "gspo":  # whose bounds are made to clip many
        return f"{share:.0%} of the tokens are clipped"
    return None


@rule(
    "gradient at its limit",
    "Every update has the length of the limit, whatever was learned.",
    "Lower algorithm.lr, or raise optim.max_grad_norm.",
)
def gradient_at_its_limit(history: History) -> str | None:
    limit, norms = history.config.optim.max_grad_norm, history.of("grad_norm")[-2 * RECENT :]
    if limit and len(norms) == 2 * RECENT and min(norms) > 5 * limit:
        return f"the norm of the gradient is {median(norms):.1f}, far above optim.max_grad_norm={limit:g}"
    return None


@rule(
    "no gradient",
    "Advantages are zero, or all tokens are masked or clipped.",
    "Check algorithm.truncated and rollout.dead_groups.",
)
def no_gradient(history: History) -> str | None:
    norms = history.recent("grad_norm")
    return f"the gradient is zero in the last {RECENT} updates" if norms and max(norms) < 1e-9 else None


@rule(
    "learning rate too large",
    "The adapter is another one after a few updates.",
    "Lower algorithm.lr by 3 to 10, or raise optim.warmup.",
)
def rate_too_large(history: History) -> str | None:
    moved = history.moved
    return f"an update at the full rate changes the adapter by {moved:.0%} of its size" if moved > 0.2 else None


@rule("learning rate too small", "The adapter hardly moves.", "Raise algorithm.lr: adapters want 1e-5 to 1e-3.")
def rate_too_small(history: History) -> str | None:
    moved = history.moved
    if 0 < moved < 2e-4:
        return f"an update at the full rate changes the adapter by {moved:.1e} of its size"
    return None


@rule(
    "sampler and trainer apart",
    "Answers are not those of the policy that is trained.",
    "With vLLM look at --logprobs-mode, the adapter and the precision that it serves; else write rollout.engine=hf.",
)
def sampler_apart(history: History) -> str | None:
    values = history.of("sampler_difference")[-3:]
    if len(values) == 3 and min(values) > LARGE_DIFFERENCE:
        return f"the log-probs of sampler and trainer differ by {fmean(values):.2f} a token"
    return None


# the machine


@rule(
    "slower",
    "Something takes the time: other programs, heat, or memory that is swapped.",
    "Look at nvidia-smi and top; memory/* and time/* are in metrics.jsonl.",
)
def slower(history: History) -> str | None:
    speeds = history.column("speed", _speed)
    if len(speeds) >= LONG and median(speeds[-2 * RECENT :]) < median(speeds[RECENT : 3 * RECENT]) / 3:
        return "sampling is three times slower than at the start"
    return None


def _update_size(record: Mapping[str, float]) -> float | None:
    return record.get("update_size") if record["step"] and record.get("lr") else None


def _speed(record: Mapping[str, float]) -> float | None:
    is_timed = record["step"] and record.get("time/rollout") and record.keys() >= {"length", "groups"}
    return record["length"] * record["groups"] / record["time/rollout"] if is_timed else None
