"""What a server that a run started can do more: take the weights of a whole model. vLLM's worker imports this file, in
its own environment, so nothing of the trainer is imported here."""

from __future__ import annotations

from typing import Any

from vllm import _custom_ops
from vllm.platforms import current_platform

if current_platform.is_cpu():
    # it would keep packed copies of the weights, and go on with the old ones of tied embeddings
    _custom_ops._supports_onednn = False


class WholeModel:
    """Becomes a base of vLLM's worker."""

    def octet_load(self: Any, folder: str, version: int | None) -> str:
        self.reload_weights(weights_path=folder)
        return str(version)
