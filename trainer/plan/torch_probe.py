"""Try torch and bitsandbytes, and print findings as JSON. `octet doctor` runs this while it makes its own checks."""

import json
from collections.abc import Callable

import torch

from trainer.model.fast_imports import Compiler

WORST_NF4_ERROR = 0.2  # for weights between -1 and 1; a kernel built for another card returns noise or zeros
SIZE = 4096


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trouble = error_of(torch.cuda.init if device.type == "cpu" else _multiply) if torch.version.cuda else ""
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": device.type == "cuda", "trouble": trouble}
    print(json.dumps(facts), flush=True)  # at once, because the next step may crash the process
    # last, because the import of bitsandbytes takes longest
    print(json.dumps({"bitsandbytes": True, "trouble": error_of(lambda: _quantise(device))}))


def error_of(attempt: Callable[[], None]) -> str:
    """Return the first line of the error that the attempt raises, whatever its class; "" if it raises none."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]
    return ""


def _multiply() -> None:
    """Run a kernel on every card, which fails on a card that this build of torch does not support."""
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(8, 8, device=f"cuda:{index}")
        if float((ones @ ones).sum()) != 512:
            raise RuntimeError(f"card {index} multiplies wrongly")


def _quantise(device: torch.device) -> None:
    """Convert weights to 4 bits and back, and make one step of the 8-bit optimizer."""
    Compiler().stand_in()
    # bitsandbytes would import the compiler, and nothing is compiled here
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    import bitsandbytes

    weights = torch.linspace(-1, 1, SIZE, device=device).reshape(64, 64)
    packed, state = bitsandbytes.functional.quantize_4bit(weights, quant_type="nf4")
    error = (bitsandbytes.functional.dequantize_4bit(packed, state) - weights).abs().max()
    if not error < WORST_NF4_ERROR:
        raise RuntimeError(f"4-bit weights come back with an error of {float(error):g}")
    moved = torch.nn.Parameter(torch.zeros(SIZE, device=device))
    moved.grad = torch.ones_like(moved)
    bitsandbytes.optim.AdamW8bit([moved], lr=0.1).step()
    if not (moved < 0).all():
        raise RuntimeError("a step of the 8-bit optimizer moved nothing")
