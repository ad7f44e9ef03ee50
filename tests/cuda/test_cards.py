"""Cards of several kinds: capability and memory, the attention kernels that torch chooses, and what may be missing."""

import pytest

from tests.cuda.conftest import answer, on_card

CARDS = {"7.5": 6, "8.0": 80, "8.6": 8, "8.9": 12, "9.0": 80, "10.0": 180, "12.0": 24}  # GiB by capability

# Queries, keys and values as the decoder and the training pass have them, with the heads of Qwen2.5-1.5B.
KERNELS = """
import json
from trainer.machine import hardware
hardware.prepare_cuda()
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

class Names(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))

def kernel(q, k, v, **more):
    names.clear()
    with Names():
        F.scaled_dot_product_attention(q, k, v, **more)
    fused = [name.split("_")[4] for name in names if name.startswith("_scaled_dot_product")]
    return fused[0] if fused else "math"

def passes(dtype):
    x = lambda *shape: torch.empty(shape, device="cuda", dtype=dtype)
    t = lambda *shape: x(*shape).requires_grad_()
    mask = torch.ones(5, 1, 255, 767, dtype=torch.bool, device="cuda")
    grouped = dict(is_causal=True, enable_gqa=True)
    return {
        "prefill, grouped keys": kernel(x(8, 12, 512, 128), x(8, 2, 512, 128), x(8, 2, 512, 128), **grouped),
        "prefill, repeated keys": kernel(*[x(8, 12, 512, 128)] * 3, is_causal=True),
        "decode step": kernel(x(32, 2, 6, 128), *[x(32, 2, 768, 128)] * 2, attn_mask=x(32, 1, 1, 768)),
        "training, prompts": kernel(t(1, 12, 512, 128), t(1, 2, 512, 128), t(1, 2, 512, 128), **grouped),
        "training, answers": kernel(t(5, 12, 255, 128), *[t(5, 12, 767, 128)] * 2, attn_mask=mask),
    }

names = []
free, total = torch.cuda.mem_get_info()
found = {name: passes(getattr(torch, name)) for name in ("bfloat16", "float16", "float32")}
capability = ".".join(map(str, torch.cuda.get_device_capability()))
print(json.dumps({"total": total, "context": total - free, "capability": capability, "kernels": found}))
"""
FLASH = ["flash", "flash", "efficient", "flash", "efficient"]
MEMORY_EFFICIENT = ["math", "efficient", "efficient", "math", "efficient"]  # grouped keys have to be repeated for it
MATH = ["math"] * 5
CHOSEN = {
    "bfloat16": {"7.5": MATH, "otherwise": FLASH},
    "float16": {"7.5": MEMORY_EFFICIENT, "otherwise": FLASH},
    "float32": {"7.5": MEMORY_EFFICIENT, "otherwise": MEMORY_EFFICIENT},
}


@pytest.mark.parametrize("capability", CARDS)
def test_capability_memory_and_attention_kernels(capability):
    found = answer(KERNELS, capability=capability, memory_gib=CARDS[capability], compute_bytes=0)
    assert found["capability"] == capability
    assert found["total"] == CARDS[capability] * 2**30
    for dtype, chosen in CHOSEN.items():
        assert list(found["kernels"][dtype].values()) == chosen.get(capability, chosen["otherwise"]), dtype


TRAINING_PASS = """
from tests.loss.test_shared_prefix import ROWS, tiny
from trainer.batch.pack import to_tensors
from trainer.loss.shared_prefix import last_hidden, make_flat

model = tiny("qwen2", dtype=torch.{dtype}).cuda()
assert make_flat(model)
names, batch = [], to_tensors(ROWS, pad_token=0).to("cuda")
with Names():
    last_hidden(model.get_decoder(), batch)
print(json.dumps([name for name in names if "attention" in name]))
"""


@pytest.mark.parametrize(("capability", "dtype"), [("7.5", "float16"), ("8.6", "float32")])
def test_a_training_pass_takes_no_slow_kernel(capability, dtype):
    imports, _, _ = KERNELS.partition("def kernel")
    found = answer(imports + TRAINING_PASS.replace("{dtype}", dtype), capability=capability)
    assert found == 2 * 2 * ["_scaled_dot_product_efficient_attention"]  # prompts and answers in two layers


ALLOCATE = "import torch; print(torch.ones(3, device='cuda').sum().item())"
GROW = "import os; os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'; "
NO_IPC = "os.environ['TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC'] = '0'; "


def test_expandable_segments_need_the_management_library_or_no_ipc():
    assert answer(GROW + ALLOCATE) == 3.0
    assert answer(GROW + NO_IPC + ALLOCATE, nvml=False) == 3.0
    assert on_card(["-c", GROW + ALLOCATE], nvml=False).returncode != 0


def test_wsl_has_no_expandable_segments_and_lends_memory_of_the_host():
    assert on_card(["-c", GROW + NO_IPC + ALLOCATE], wsl=1).returncode != 0
    more = "import torch; print(torch.empty(9 * 2**30, dtype=torch.uint8, device='cuda').numel())"
    assert answer(more, wsl=1) == 9 * 2**30
    assert "OutOfMemoryError" in on_card(["-c", more]).stderr


def test_under_wsl_a_run_stays_off_the_memory_of_the_host():
    """The driver would lend it. Of 8 GiB the context takes 0.45, and 1 GB is left to Windows."""
    take_card = "import platform; platform.release = lambda: '5.15.153.1-microsoft-standard-WSL2'\n"
    take_card += "from trainer.ranks import distributed; distributed.take_card()\n"
    allocate = "import torch; print(torch.empty(%d, dtype=torch.uint8, device='cuda').numel())"
    assert answer(take_card + allocate % 6.9e9, wsl=1) == 6.9e9
    assert "OutOfMemoryError" in on_card(["-c", take_card + allocate % 7.4e9], wsl=1).stderr
    assert answer(allocate % 7.4e9, wsl=1) == 7.4e9


EIGHT_BITS = """
import json
from tests.rollout.test_decoder import adapted, family, prompts, sampling
from trainer.config.settings import Model, Rollout
from trainer.errors import ConfigError
from trainer.model.load import load_tokenizer
from trainer.rollout.make import make_sampler
from trainer.rollout.turns import Stops

try:
    sampler = make_sampler(Rollout(weights="fp8"), adapted(family()).cuda(), Stops(load_tokenizer(Model()), [2]))
    answers = dict(sampler.sample(prompts(9, 3), sampling(max_new_tokens=40)))
    print(json.dumps([len(answers), len(sampler.batch.decode_step._graphs) > 0]))
except ConfigError as error:
    print(json.dumps([str(error)]))
"""


def test_weights_in_fp8_need_a_card_that_multiplies_them():
    assert answer(EIGHT_BITS, capability=8.9) == [2, True]
    (said,) = answer(EIGHT_BITS, capability=8.6)
    assert said.startswith("rollout.weights=fp8: this card has compute capability 8.6, and fp8 needs 8.9")
