"""A vLLM worker extension with which a server that the run has started can load the weights of a whole model.

vLLM imports this file in its own environment, so the file imports nothing of Octet.
"""

from inspect import signature
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm import _custom_ops
from vllm.platforms import current_platform

if current_platform.is_cpu():
    # oneDNN would keep packed copies of the weights, and continue to use old copies of tied embeddings
    _custom_ops._supports_onednn = False


class WholeModel:
    """A mixin that vLLM adds to its worker class."""

    def octet_load(self: Any, folder: str, version: int | None) -> str:
        if "weights_path" in signature(self.model_runner.reload_weights).parameters:
            self.reload_weights(weights_path=folder)
        else:  # vLLM 0.12 and before
            files = sorted(Path(folder).glob("*.safetensors"))
            self.model_runner.model.load_weights(tensor for file in files for tensor in load_file(file).items())
        return str(version)
