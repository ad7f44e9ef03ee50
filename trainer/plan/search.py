"""Search for settings with which a run fits a card and the RAM of its machine, and for the largest ones that fit."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

from trainer.config import conflicts, ds_config
from trainer.config.resolve import overrides_of
from trainer.config.settings import Config
from trainer.errors import ConfigError
from trainer.model.shapes import shape_of
from trainer.plan.planner import Planner

# Settings that the search may change, in the order in which it reverts needless changes: activation offload
# needs checkpointing, and optimizer offload needs 32-bit states.
LEVERS = (
    *("lora.enabled", "model.quantize_head", "model.quantize", "rollout.weights", "model.embeddings"),
    *("model.activation_offload", "model.gradient_checkpointing", "engine.ds_config", "optim.name", "rollout.rows"),
    "optim.tokens_per_micro_batch",
)
WITHOUT_A_CARD = 8  # GB of the card that is assumed on a machine without one
# Recent models that Octet's decoder samples, from large to small, which usually means from best to worst; see
# docs/training.md.
CHOICES = (
    *("Qwen/Qwen3-14B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3-8B", "google/gemma-4-E2B-it", "Qwen/Qwen3.5-4B"),
    *("Qwen/Qwen3-4B-Instruct-2507", "google/gemma-3-4b-it", "meta-llama/Llama-3.2-3B-Instruct"),
    *("HuggingFaceTB/SmolLM3-3B", "LiquidAI/LFM2-2.6B", "Qwen/Qwen3.5-2B", "LiquidAI/LFM3-1.7B"),
    *("Qwen/Qwen3-1.7B", "meta-llama/Llama-3.2-1B-Instruct", "LiquidAI/LFM2-1.2B"),
    *("google/gemma-3-1b-it", "Qwen/Qwen3.5-0.8B", "Qwen/Qwen3-0.6B", "LiquidAI/LFM2-350M", "google/gemma-3-270m-it"),
)


class Placement(Planner):
    """A model and its settings, on a card and a machine that they have to fit."""

    def fits(self, config: Config) -> bool:
        plan = replace(self, config=config).plan
        return plan.fits and plan.ram_peak <= self.ram

    # the largest values that fit

    def limits(self) -> dict[str, int]:
        """Return the largest value of each setting that fits with the others as they are; 0 if none does."""
        return {
            "rows": self._largest(self.all_rows, "rollout.rows"),
            "max_new_tokens": self._largest(self.longest_answer, "rollout.max_new_tokens"),
            "tokens_per_micro_batch": self._largest(self.most_tokens, "optim.tokens_per_micro_batch"),
        }

    @property
    def most_tokens(self) -> int:
        return (self.prompt + self.completion) * self.all_rows

    @property
    def longest_answer(self) -> int:
        """The context minus the longest prompt, which is at most half of it because longer ones are cut."""
        context = self.shape.context
        return context - min(self.config.prompt.max_tokens, context // 2)

    def _largest(self, limit: int, key: str) -> int:
        def fits(less: int) -> bool:
            return self.fits(self.config.changed({key: high - less}))

        high = max(limit, 0)
        spare = max(high - attrgetter(key)(self.config), 0)
        # a slightly smaller value than that of the settings may not fit, because rows fill a micro-batch
        return high - bisect_left(range(spare if fits(spare) else high), True, key=fits)

    # what to change

    def search(self) -> Config | None:
        """Return the first settings of the ladder that fit, without needless changes; None if none fit."""
        config = next(filter(self._runs, self._ladder()), None)
        if config is None:
            return None
        for key in LEVERS:
            reverted = config.changed({key: attrgetter(key)(self.config)})
            config = reverted if self._runs(reverted) else config
        return config

    def _runs(self, config: Config) -> bool:
        try:
            conflicts.check(config)
            ds_config.check(config, has_gpu=True)
        except ConfigError:
            return False
        return self.fits(config)

    def _ladder(self) -> Iterator[Config]:
        """Yield settings that need less and less memory. The cheapest changes come first, those of precision last."""
        yield self.config
        lora, rollout, whole = self.config.lora, self.config.rollout, not self.config.lora.enabled
        few, longest_row = min(rollout.rows, rollout.group_size), self.prompt + self.completion
        steps: list[tuple[str, list[Any]]] = [
            ("model.gradient_checkpointing", [True]),
            ("model.embeddings", ["cpu"] if self._has_frozen_ends else []),
            ("model.activation_offload", [False]),
            ("engine.ds_config", ["zero2"] if whole else []),
            ("optim.name", ["adamw"] if whole else []),
            ("engine.ds_config", ["zero2_offload"] if whole else []),
            ("rollout.rows", _halves(rollout.rows, few)),
            ("optim.tokens_per_micro_batch", _halves(self.config.optim.tokens_per_micro_batch, longest_row)),
            ("model.activation_offload", [True]),
            ("engine.ds_config", ["zero3_offload"] if whole else []),
            ("rollout.rows", _halves(few, 1)),
        ]
        precisions: list[tuple[str, str]] = [(self.config.model.quantize, self.config.model.quantize_head)]
        if lora.enabled and lora.init == "zero":
            precisions += [("nf4", precisions[0][1]), *([("nf4", "int8")] if self._has_frozen_ends else [])]
        for quantize, head in dict.fromkeys(precisions):
            rung = self.config.changed({"model.quantize": quantize, "model.quantize_head": head})
            if quantize != "none":  # of which the decoder makes no copy in 8 bits
                rung = rung.changed({"rollout.weights": "same"})
            yield rung
            for key, value in ((key, value) for key, values in steps for value in values):
                rung = rung.changed({key: value})
                yield rung

    @property
    def _has_frozen_ends(self) -> bool:
        """True if embedding and output layer are two weights that are not trained."""
        return self.config.lora.enabled and not self.shape.tied and isinstance(self.config.lora.targets, str)

    def nearest(self) -> str:
        """Return a sentence that names settings that fit: for this model, for an adapter of it, or a smaller model."""
        adapter: dict[str, Any] = {"lora.enabled": True}
        if ds_config.splits_weights(self.zero):
            adapter |= {"engine.ds_config": "zero2_offload", "optim.name": "adamw"}
        for placement in (self, replace(self, config=self.config.changed(adapter))):
            if found := placement.search():
                return f"What fits: {' '.join(difference(self.config, found))}"
        for name in () if self.teacher else CHOICES:  # of another family, which could not learn from the teacher
            shape = shape_of(name)
            if shape.parameters < self.shape.parameters and (found := replace(self, shape=shape).search()):
                return f"What fits: {' '.join([f'model.name={name}', *difference(self.config, found)])}"
        others = ("teacher.quantize=nf4", "teacher") if self.teacher else ("--preset nano", "model")
        return "Write {}, or a smaller {}.name.".format(*others)

    def grown(self, config: Config) -> Config:
        """Return `config` with settings that use the rest of the card. If the settings of this placement do not fit,
        they are the upper limit."""
        fits = self.fits(self.config)
        for key, whole in (("rollout.rows", self.all_rows), ("optim.tokens_per_micro_batch", 16384)):
            limit = whole if fits else min(whole, attrgetter(key)(self.config))
            most = replace(self, config=config)._largest(limit, key)
            config = config.changed({key: max(most, attrgetter(key)(config))})
        return config


def _halves(value: int, least: int) -> list[int]:
    half = max(least, value // 2)
    return [half, *_halves(half, least)] if value > least else []


def difference(before: Config, after: Config) -> list[str]:
    """Return what the search has changed, as arguments of the command line."""
    values = {key: attrgetter(key) for key in LEVERS}
    return overrides_of({key: value(after) for key, value in values.items() if value(before) != value(after)})
