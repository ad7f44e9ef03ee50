"""What `octet eval` and `octet merge` do, behind the imports that take seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer import assemble, distributed, export
from trainer.config import Config
from trainer.evaluate import Evaluation, agreement, verdict
from trainer.policy.base import load_model, load_tokenizer, resolve_dtype
from trainer.policy.lora import load_adapter
from trainer.quiet import no_progress_bars
from trainer.watch.live import Screen


def evaluate(config: Config, adapter: Path | None, as_json: bool) -> None:
    """The model of the configuration; with an adapter, the base and the adapted model side by side."""
    model, tokenizer = _load(config)
    evaluations = [assemble.evaluate_model("base" if adapter else "model", model, tokenizer, config)]
    if adapter:
        evaluations.append(assemble.evaluate_model("adapter", load_adapter(model, adapter), tokenizer, config))
    said = [verdict(*evaluations)] if adapter else []
    _answer({"evaluations": [evaluation.summary() for evaluation in evaluations], "said": said}, evaluations, as_json)


def merge(config: Config, adapter: Path, out: Path, as_json: bool) -> None:
    """Write the merged model, load it again, and see whether it answers as the adapted one does."""
    dtype = resolve_dtype(config.model.dtype, distributed.device())
    model, tokenizer = _load(config)
    adapted = assemble.evaluate_model("adapter", load_adapter(model, adapter), tokenizer, config)
    del model
    export.merge(config.model, adapter, out, dtype)
    model, tokenizer = _load(config, str(out))
    merged = assemble.evaluate_model("merged", model, tokenizer, config)
    alike = agreement(adapted, merged)
    said = [f"merged against adapter: {alike}", f"written to {out}"]
    facts = {"out": str(out), "identical": alike.identical, "problems": alike.problems}
    _answer({**facts, "largest_difference": alike.largest_difference, "said": said}, [adapted, merged], as_json)


def _load(config: Config, name: str | None = None) -> tuple[Any, Any]:
    no_progress_bars()
    settings = config.model.model_copy(update={"name": name, "revision": None}) if name else config.model
    device = distributed.device()
    model = load_model(settings, resolve_dtype(settings.dtype, device), device)
    return model, load_tokenizer(settings)


def _answer(facts: dict[str, Any], evaluations: list[Evaluation], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    screen = Screen()
    screen.evaluations(evaluations)
    for line in facts["said"]:
        screen.say(line)
