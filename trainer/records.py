"""The records that travel through a step. They are frozen; a measurement makes a new one.

Axis letters at the end of a name replace a shape comment:

    P  problems of a step          B  rows of a micro-batch
    G  completions of a problem    T  token positions
    V  vocabulary                  H  hidden size

    Problem -> Prompt -> Completion -> ScoredGroup -> TrainingRow -> TrainingBatch -> MeasuredBatch
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its gold answer, before any prompt is built around it."""

    id: str  # such as gsm8k/train/0
    question: str
    gold: str
    solution: str = ""  # a worked solution, for few-shot examples, such as "3 * 4 = 12\n#### 12"
    extra: Mapping[str, Any] = field(default_factory=dict)  # other columns, passed to custom rewards
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation, if the data set has one
    stem: str = ""  # the question without its choices, if it has some
    part: str = ""  # the name of its task in a mixture
    where: str = field(default="", compare=False)  # its location in the data, for people


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem as the model sees it. The model reads `tokens`; `text` is only for people."""

    problem: Problem
    text: str
    tokens: tuple[int, ...]
    repeat: int = 0  # how often the problem occurs earlier in the step; each time it gets other answers
    place: int = 0  # index among the prompts of the step, on all ranks
    original: Problem | None = None  # the problem in the data, if an environment asks another question
    most: int | None = None  # the most tokens that may follow, if fewer than the sampling allows
    stop: tuple[str, ...] = ()  # more strings that end its answers; samplers may decode beyond them

    def most_tokens(self, new_tokens: int) -> int:
        """Return the most tokens of an answer if the sampling allows `new_tokens`."""
        return new_tokens if self.most is None else min(self.most, new_tokens)

    def longest(self, new_tokens: int) -> int:
        """Return the most tokens of the prompt and an answer together."""
        return len(self.tokens) + self.most_tokens(new_tokens)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: `group` completions per prompt, at a temperature (0 is greedy)."""

    group: int
    temperature: float
    max_new_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Draws:
    """How an evaluation samples in addition to its greedy answers: `samples` per problem, repeated `trials` times."""

    samples: int
    temperature: float
    trials: int
    seed: int


class Turn(NamedTuple):
    """A text in an answer of several turns, and its author."""

    role: Literal["model", "environment"]
    text: str


class Segment(NamedTuple):
    """A conversation of an agent with the model: the prompt before the first answer, and everything that follows."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    written: tuple[bool, ...]  # for each token, whether the model wrote it


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer. Token ids travel together with the log-probs with which they were sampled.

    `tokens` ends with the stop token, unless the completion is `truncated`.
    `logprobs` belong to the distribution that was sampled, which includes the temperature.
    `version` is the number of updates of the policy that sampled, as an external program reports it.

    With an environment, an answer has several turns. Then `text` is the last one (all of them if the replies continue
    the model's own turn), and `tokens` includes the replies of the environment, with a log-prob of 0. The first and the
    last token are always the model's.

    An agent writes its own prompts, and may have several conversations in one answer. `segments` has them, and `tokens`
    is their concatenation. It is empty if the agent never called the model.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool
    version: int | None = None  # None for the current policy
    written: tuple[bool, ...] = ()  # for each token, whether the model wrote it; empty if it wrote all
    turns: tuple[Turn, ...] = ()  # all turns, if an environment replied
    reward: float | None = None  # the sum of the environment's rewards
    segments: tuple[Segment, ...] = ()

    @property
    def mask(self) -> Sequence[bool]:
        """Return for each token whether the model wrote it."""
        return self.written or [True] * len(self.tokens)

    @property
    def transcript(self) -> dict[str, list[dict[str, str]]]:
        """Return the turns for a file of samples; {} for an answer of one turn."""
        return {"turns": [turn._asdict() for turn in self.turns]} if len(self.turns) > 1 else {}

    @property
    def length(self) -> int:
        """Return the number of tokens that the model wrote."""
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class Score:
    """The rewards of one completion. `reward` is None if a grader gave no grade. `components` holds each named reward
    before weighting: {"correct": 1.0, "format": 1.0}."""

    reward: float | None
    components: Mapping[str, float | None]
    strict: str | None  # the answer in the requested format
    lenient: str | None  # the answer in any format
    correct_strict: bool
    correct_lenient: bool
    shaping: float = 0.0  # the part of the reward that is not for being right; see Config.shaping


DeadBy = Literal["reward", "correct_strict", "correct_lenient"]  # attributes of a Score


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The completions of one prompt with their scores. A group is never split. It is *dead* if all its rewards are
    equal, because then it does not show which answers are better. With another `dead_by`, it is also dead if all its
    answers are right, or all are wrong."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]
    dead_by: DeadBy = "reward"

    @property
    def rewards_G(self) -> tuple[float | None, ...]:
        return tuple(score.reward for score in self.scores)

    @property
    def is_dead(self) -> bool:
        known = [score for score in self.scores if score.reward is not None]
        return any(len({getattr(score, name) for score in known}) < 2 for name in ("reward", self.dead_by))


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One completion with its advantage, ready to be packed into a batch.

    `weight` is the weight of each of its tokens in the loss: 1 for a mean over tokens, 1 / length for one over answers.
    `written` says which tokens of the completion the model wrote, as in a `Completion`; the others are never targets.
    `place` is that of its prompt, so it is the same for all rows of a group.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float]
    advantage: float
    reward: float = 0.0
    weight: float = 1.0
    written: Sequence[bool] = ()
    place: int = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def mask(self) -> Sequence[bool]:
        """Return for each token of the completion whether it is trained on."""
        return self.written or [True] * len(self.completion)


@dataclass(frozen=True, slots=True)
class Tree:
    """The common beginnings of rows. Rows form a tree of tokens, in which each token is stored once, in one line.

    The answers 7 2 and 7 8 2 to the prompt 5 6, each shifted to inputs and targets:

        inputs_BT   5 6 7 .   5 6 7 8      place_BT   0 1 2 .   0 1 2 3      line_N   0 1 2 7
        targets_BT  6 7 2 .   6 7 8 2      edge_BT    . 0 1 .   . 0 2 3      edge_E   1 2 6 7
    """

    place_BT: Tensor  # for each input, its index in the line; 0 for padding
    line_N: Tensor  # for each index of the line, the first of the B x T inputs that it stands for
    edge_BT: Tensor  # for each target that is a completion token, its index among the different ones
    edge_E: Tensor  # for each of these, the first of the B x T targets that it stands for
    first_B: Tensor  # for each row, the first row with the same prompt

    def to(self, device: Any) -> Tree:
        return Tree(**_moved(self, device))


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A micro-batch, already shifted: position t of `inputs_BT` predicts position t of `targets_BT`.

    A prompt [5, 6] with the completion [7, 2] (2 stops) is one row:

        inputs_BT   5  6  7
        targets_BT  6  7  2
        mask_BT     0  1  1     only completion tokens that the model wrote are trained on

    Padding is on the right, where causal attention never looks, so there is no attention mask.
    """

    rows: Sequence[TrainingRow]  # the rows of the batch, with which it can be divided if memory runs out
    inputs_BT: Tensor
    targets_BT: Tensor
    mask_BT: Tensor  # bool: this target is a token that the model wrote
    sampled_logprobs_BT: Tensor  # those of the sampler, 0 outside the mask
    advantages_B: Tensor
    rewards_B: Tensor
    weights_B: Tensor  # 0 for a row that only gives this rank as many micro-batches as the others
    tree: Tree
    # computed before the first update (`loss/before_update.py`), if the objective needs them
    reference_logprobs_BT: Tensor | None = None
    token_advantages_BT: Tensor | None = None  # if a teacher gives more than one number for an answer

    def to(self, device: Any) -> TrainingBatch:
        return TrainingBatch(**_moved(self, device))

    def measured(self, old_logprobs_BT: Tensor, trained_BT: Tensor | None = None) -> MeasuredBatch:
        """Return the batch with the log-probs of the policy before the first update."""
        return MeasuredBatch(**_parts(self), old_logprobs_BT=old_logprobs_BT, trained_BT=trained_BT)

    @property
    def advantages_BT(self) -> Tensor:
        """The advantage of each token, or B x 1 if all tokens of an answer have the same one."""
        return self.advantages_B[:, None] if self.token_advantages_BT is None else self.token_advantages_BT

    @property
    def present_BT(self) -> Tensor:
        """Bool: this input is a token of the row, not padding."""
        return self.mask_BT.flip(-1).cumsum(-1).flip(-1) > 0

    @property
    def counted_BT(self) -> Tensor:
        """Bool: this token counts in the loss and in the metrics."""
        return self.mask_BT & (self.weights_B > 0)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch(TrainingBatch):
    """A micro-batch with everything that the objective compares, including the log-probs before the first update."""

    old_logprobs_BT: Tensor
    trained_BT: Tensor | None  # bool: this token is among those of the highest entropy; None if all are trained on


class Scores(NamedTuple):
    """Log-probs and entropies of a batch's targets, 0 outside its mask. The entropy has a gradient only if the
    objective needs it."""

    logprobs_BT: Tensor
    entropy_BT: Tensor


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The micro-batches of one update on this rank; all ranks have equally many. The loss is a weighted sum over tokens
    / `divisor`. `divisor` and `tokens` count all ranks."""

    batches: Sequence[TrainingBatch]
    divisor: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Update:
    """The metrics of one optimizer step."""

    grad_norm: float  # before clipping
    lr: float  # read back from the optimizer
    skipped: bool  # the gradient was not finite, so nothing changed
    measured: Mapping[str, float] = field(default_factory=dict)  # further metrics


def _parts(record: Any) -> dict[str, Any]:
    return {part.name: getattr(record, part.name) for part in fields(record)}


def _moved(record: Any, device: Any) -> dict[str, Any]:
    """Return the parts of a record with its tensors on a device. Copies to a card are combined and asynchronous."""
    parts = _parts(record)
    if str(device).startswith("cuda"):
        here = {name: value for name, value in parts.items() if hasattr(value, "is_cuda") and not value.is_cuda}
        parts |= zip(here, _packed(tuple(here.values()), device), strict=True) if here else {}
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in parts.items()}


def _packed(tensors: Sequence[Tensor], device: Any) -> Iterator[Tensor]:
    """Yield tensors on a card, in one block of its memory, each aligned to eight bytes."""
    import torch  # commands that only read records do not import it

    sizes = [tensor.nbytes + -tensor.nbytes % 8 for tensor in tensors]
    block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for tensor, part in zip(tensors, block.split(sizes), strict=True):
        part[: tensor.nbytes].view(tensor.dtype).copy_(tensor.flatten())
    for tensor, part in zip(tensors, block.to(device, non_blocking=True).split(sizes), strict=True):
        yield part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
