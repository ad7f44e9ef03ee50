"""The evaluations of a run: of its base model, after some of its steps, and of what it has trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainer.evaluation.best import EvaluationHistory
from trainer.evaluation.evaluate import Evaluation, ShowProgress, evaluate
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.records import Prompt
from trainer.reward.scorer import Scorer
from trainer.rollout.collect import Sampler


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates the policy on the held-out problems, and keeps the best adapter or model in the run folder."""

    policy: Policy
    sampler: Sampler  # without merged copies, so that a merged model is compared with the adapter as it is
    scorer: Scorer
    held_out: Sequence[Prompt]
    max_new_tokens: int
    history: EvaluationHistory
    progress: ShowProgress
    left_out: int = 0  # held-out problems that exceed the context
    loss: Callable[[], float | None] | None = None  # of a token of held-out solutions, in a warm-up

    def evaluate(self, name: str) -> Evaluation:
        """Return the evaluation of the policy as it is. Every rank calls it."""
        with self.policy.gathered():
            scorer, left_out = self.scorer.verifier(), self.left_out
            new_tokens, progress = self.max_new_tokens, self.progress
            found = evaluate(name, self.sampler, scorer, self.held_out, new_tokens, None, progress, left_out)
            return replace(found, loss=self.loss()) if self.loss else found

    def keep_if_best(self, step: int, evaluation: Evaluation) -> bool:
        """Add the evaluation after a step to the history; write the policy into `best/` if it is the best."""
        is_best = self.history.add(step, evaluation)
        if is_best:
            with self.policy.gathered():
                if distributed.is_main():
                    self.history.keep(self.policy.write_model)
        return is_best
