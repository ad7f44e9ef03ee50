"""Imported at the start of every Python of the CUDA environment: switches the emulation on once torch is imported."""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class AfterTorch(MetaPathFinder):
    is_looking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Transformers looks torch up before anybody imports it, so this may be called more than once."""
        if name != "torch" or self.is_looking:
            return None
        self.is_looking = True
        spec = importlib.util.find_spec("torch")
        self.is_looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            from tests.cuda import emulation

            emulation.install()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("CUDA_STUB"):  # set by tests/cuda/environment.sh
    sys.meta_path.insert(0, AfterTorch())
