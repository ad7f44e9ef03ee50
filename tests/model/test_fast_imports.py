"""Parts of torch that Octet does not use are imported when somebody does."""

import os
import sys

import pytest

from tests.conftest import ran

LATE = ["torch._dynamo.utils", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "datasets"]
PROGRAM = f"""
import os
import sys
read = []
sys.addaudithook(lambda event, about: read.append(about[0]) if event == "open" else None)
sys.modules["bitsandbytes"] = None
from trainer.model.fast_imports import import_libraries
import_libraries()
of_models = [path for path in read if "/transformers/models/" in str(path) and str(path).endswith(".py")]
print(len(of_models) > 1000, len(of_models) - len(set(of_models)))
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight], lr=0.5)
def step():
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
step()
from trainer.step import engine
engine._import_muon()
print("deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules)
print([name for name in {LATE} if name in sys.modules], torch.distributed.is_available())

from transformers.integrations import deepgemm
from torch._dynamo.utils import counters
import torch._dynamo.utils as parts
print(parts is sys.modules["torch._dynamo.utils"] is torch._dynamo.utils, parts.counters is counters)
print(parts.__spec__.loader.__class__.__name__, torch._dynamo.__file__.endswith("_dynamo/__init__.py"))
print(type(sys.modules["torch._dynamo.trace_rules"]).__name__, torch._dynamo.trace_rules.check is not None)
asked = torch.optim.Optimizer.zero_grad.__wrapped__
print(hasattr(asked, "__dynamo_disable"), deepgemm.is_sm100._dynamo_marked_constant)
step()
print(asked.__dynamo_disable is asked, torch.compile(lambda number: number + 1, backend="eager")(torch.ones(1)).item())
"""


def test_parts_of_torch_are_imported_when_somebody_uses_them():
    """`zero_grad` is called before there is a compiler. Torch keeps in an attribute what it is given then."""
    files, *said = ran(sys.executable, "-c", PROGRAM, check=True).stdout.splitlines()
    are_many, read_again = files.split()
    assert are_many == "True"
    assert int(read_again) < 100, "those of some packages are read by Python as well, which imports them"
    assert said == [
        *("True", "[] True"),  # neither a step nor what DeepSpeed imports with the first gradient needs a compiler
        *("True True", "SourceFileLoader True", "module True"),  # the compiler is imported once
        *("False True", "False 2.0"),  # and learns what it was asked to leave alone
    ]


@pytest.mark.parametrize(("given", "used"), [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7")], ids=["default", "own"])
def test_threads_of_torch_give_their_core_to_others_soon(given, used):
    shown = ran(sys.executable, "-c", "import trainer, torch", env=os.environ | {"OMP_DISPLAY_ENV": "verbose"} | given)
    assert f"GOMP_SPINCOUNT = '{used}'" in shown.stderr
