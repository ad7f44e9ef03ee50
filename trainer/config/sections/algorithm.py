"""The section `algorithm`: the objective. docs/objectives.md has a table of all of them."""

from typing import Literal

from pydantic import Field

from trainer.config.sections.base import Section


class Kl(Section):
    coef: float = Field(0.0, ge=0.0)
    """Weight of the KL penalty. With 0 there is no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL from one sample; see docs/objectives.md."""
    where: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract its sum over an answer from the reward, before the advantage."""
    target: float | None = Field(None, gt=0.0)
    """Adapt the coefficient to keep the mean KL of a token near this value."""
    refresh: int | None = Field(None, ge=1)
    """Replace the reference by the current policy every so many steps; by default it stays the initial model."""

    @property
    def is_reverse(self) -> bool:
        """Return True if the gradient in the loss is that of the reverse KL to a reference that stays."""
        return self.coef > 0 and self.where == "loss" and self.refresh is None and self.estimator == "k2"


class Correction(Section):
    level: Literal["none", "token", "sequence"] = "token"
    """Weight each token by the ratio of policy to sampler: its own, or the geometric mean of its answer."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Set weights above the cap to the cap, or to 0."""
    cap: float = Field(2.0, ge=1.0)
    """Largest weight."""


class GradReg(Section):
    strength: float = Field(0.0, ge=0.0)
    """Weight of the penalty on the gradient norm; published values are 1e-3 to 1e-2. Above 0, a step computes two
    gradients."""
    eps: float = Field(1e-3, gt=0.0)
    """Distance along the first gradient at which the second one is computed."""
    warmup: int = Field(0, ge=0)
    """Steps over which the strength rises."""


class Algorithm(Section):
    """docs/objectives.md lists every objective in one table."""

    loss: Literal["reinforce", "reinforce_baseline", "grpo_clip", "gspo", "cispo"] = "grpo_clip"
    """The policy loss; see docs/objectives.md."""
    aggregation: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = "dapo"
    """Average the losses of tokens over all tokens, over answers, by a constant, or over groups; see
    docs/objectives.md."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "batch_std"] = "grpo"
    """`grpo` divides by the standard deviation of the group, `dr_grpo` does not, `rloo` uses the mean of the other
    answers as the baseline, `batch_std` divides by the standard deviation of the whole step."""
    advantage_eps: float = Field(1e-6, gt=0.0)
    """Added to the standard deviation before the division."""
    advantage_ddof: Literal[0, 1] = 0
    """Divide the variance by G (0) or by G - 1 (1)."""
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0.0)
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1.0)
    """A second bound of the ratio, for answers with a negative advantage; usually 3."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch of answers (mu)."""
    minibatches: int = Field(1, ge=1)
    """Updates in one pass; the answers are divided among them."""
    truncated: Literal["keep", "mask"] = "keep"
    """`mask` removes truncated answers from the loss, but not from the mean of their group."""
    entropy_bonus: float = 0.0
    """Coefficient of the entropy bonus."""
    top_entropy: float = Field(1.0, gt=0.0, le=1.0)
    """Train only on this share of the tokens of an update, those with the highest entropy."""
    kl: Kl = Kl()
    """A penalty on the distance to a reference model."""
    correction: Correction = Correction()
    """Importance weights for the difference between the probabilities of the sampler and of the policy."""
    gradreg: GradReg = GradReg()
    """Gradient regularisation: prefer flat minima."""
    lr: float = Field(1e-5, gt=0.0)
    """Peak learning rate."""
