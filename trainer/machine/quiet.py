"""Filter messages of libraries that a user cannot act on. Call quiet() before the libraries are imported."""

import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.machine import hardware

BITSANDBYTES = "bitsandbytes.backends.cpu.ops"
KERNELS = "transformers.integrations.hub_kernels"
MXFP4 = "transformers.quantizers.quantizer_mxfp4"
MODELS, DEEPSPEED = "transformers.modeling_utils", "DeepSpeed"


def quiet() -> None:
    if not hardware.detect().gpus:  # DeepSpeed warns that it found no card; Octet reports that itself
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # transformers reports that kernels of LFM2 and Qwen3.5 are not installed, which only a card can run
        logging.getLogger(KERNELS).setLevel(logging.ERROR)
        # transformers reports that it converts MXFP4 to 16 bits, as Octet has requested
        logging.getLogger(MXFP4).setLevel(logging.ERROR)
    # bitsandbytes reports that an optional CPU kernel for 4-bit weights is not installed
    logging.getLogger(BITSANDBYTES).setLevel(logging.ERROR)
    # transformers prints a table of unused weights; model/load.py reports those that matter
    logging.getLogger(MODELS).addFilter(lambda record: "LOAD REPORT" not in record.getMessage())
    # DeepSpeed has not tested the optimizers of bitsandbytes; tests/step/test_engine.py does
    logging.getLogger(DEEPSPEED).addFilter(lambda record: "ZeRO with an untested optimizer" not in record.getMessage())
    # DeepSpeed's ZeRO-3 uses deprecated names of torch
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", message=f"`torch.distributed.{name}` is deprecated", category=FutureWarning)
    # torch prints twenty C++ frames when a rank has died; ranks/watchdog.py names the rank
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # The writer thread of TensorBoard prints its error, which run_folder/journal.py reports as well
    threading.excepthook = _report_unless_of_tensorboard
    # Python compiles a library at its first import, and warns of problems in its source
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*[/\\\\]site-packages[/\\\\]")
    # PEFT uses a deprecated name of transformers
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


def _report_unless_of_tensorboard(raised: threading.ExceptHookArgs) -> None:
    if type(raised.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(raised)


def no_progress_bars() -> None:
    """Switch off the progress bars for loading and writing weights. Downloads keep theirs."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@contextmanager
def put_back() -> Iterator[None]:
    """Restore loggers and progress bars afterwards. Callers restore the filters of warnings, and hooks."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging as transformers_logging

    loggers = map(logging.getLogger, (BITSANDBYTES, KERNELS, MXFP4, MODELS, DEEPSPEED))
    before = [(logger, logger.level, logger.filters[:]) for logger in loggers]
    had_bars, of_the_hub = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    try:
        yield
    finally:
        for logger, level, filters in before:
            logger.setLevel(level)
            logger.filters[:] = filters
        if had_bars:
            # this enables those of the hub as well, unless a variable forbids it
            warnings.filterwarnings("ignore", message="Cannot enable progress bars")
            transformers_logging.enable_progress_bar()
        if not of_the_hub:
            disable_progress_bars()
