"""Messages of libraries that a user cannot act on, silenced one by one and by name. Import before the libraries."""

from __future__ import annotations

import logging
import os
import warnings

from trainer.machine import hardware


def quiet() -> None:
    if not hardware.detect().gpus:  # DeepSpeed warns that it found no accelerator; the run says so itself
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # an optional CPU kernel for 4-bit weights is not installed
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # DeepSpeed has tested none of bitsandbytes's optimizers; tests/step/test_engine.py has
    logging.getLogger("DeepSpeed").addFilter(_is_no_untested_optimizer)
    # DeepSpeed's ZeRO-3 calls torch by old names
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", message=f"`torch.distributed.{name}` is deprecated", category=FutureWarning)
    # twenty lines of C++ frames when a rank is gone; ranks/rendezvous.py says which one
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # PEFT asks transformers by an old name
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


def _is_no_untested_optimizer(record: logging.LogRecord) -> bool:
    return "ZeRO with an untested optimizer" not in record.getMessage()


def no_progress_bars() -> None:
    """Bars for loading and writing weights; downloads keep theirs."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
