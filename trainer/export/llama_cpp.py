"""llama.cpp reads a GGUF file and answers problems, through the package llama-cpp-python; and compares what it computes
with what transformers computes with the numbers in the file."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.activations import GELUTanh

from trainer.errors import MergeError
from trainer.export.gguf_file import Kind, stored
from trainer.model.merge import Weights
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.collect import Sampler
from trainer.rollout.turns import Stops

# The largest error of a number that is stored, as a share of the largest number of its block: half a step. Q4_0 and
# Q5_0 have their steps from -8 to 7 and from -16 to 15, so a largest number of the other sign is a whole step off;
# those with a 1 count from the smallest number of the block, in steps of up to twice the length. Scales have 16 bits.
STEP = {Kind.F32: 2**-24, Kind.F16: 2**-11, Kind.BF16: 2**-8, Kind.Q8_0: 0.5 / 127}
STEP |= {Kind.Q5_0: 1 / 16, Kind.Q5_1: 1 / 31, Kind.Q4_0: 1 / 8, Kind.Q4_1: 1 / 15}
OF_SCALES = 2**-9
SMALLEST = 2.0**-24  # that 16 bits hold
# llama.cpp rounds what it multiplies quantised weights by: this is the number of values with one scale, of 8 bits each.
BLOCK_OF_8_BITS = 32
BLOCK_OF_K = 256
# Two roundings of one size that have nothing in common differ by 1.4 times that size.
LARGEST = 2.0  # times what this rounding changes in transformers
FLOOR = 1e-3  # less is the order of sums


def quantise(source: Path, file: Path, fmt: str) -> None:
    """Write a file in a format of llama.cpp's own from one in f32."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = int(gguf.LlamaFileType[f"MOSTLY_{fmt.upper()}"])
    if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), options):
        raise MergeError(file, f"llama.cpp cannot write --format {fmt}", "Take q8_0 or q4_0, which need no llama.cpp")


class LlamaCppSampler(Sampler):
    """Answers greedily, on the CPU. Keys and values are in fp32, because how they are rounded is no matter of the file,
    and weights stay as they are stored: llama.cpp's other layouts differ from one processor to the next."""

    def __init__(self, file: Path, stops: Stops, context: int) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        self.library, self.stops = llama_cpp, stops
        of_model, of_context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
        of_model.n_gpu_layers, of_model.use_extra_bufts = 0, False
        of_context.n_ctx = of_context.n_batch = context
        of_context.n_threads = of_context.n_threads_batch = torch.get_num_threads()
        of_context.type_k = of_context.type_v = llama_cpp.GGML_TYPE_F32
        of_context.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), of_model)
        if not self.model:
            raise MergeError(file, "llama.cpp cannot load it", "Export it again, and report it if it stays")
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.context = llama_cpp.llama_init_from_model(self.model, of_context)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        for index, prompt in enumerate(prompts):
            self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
            tokens: list[int] = []
            logprobs: list[float] = []
            read = prompt.tokens
            while len(tokens) < sampling.max_new_tokens:
                found = self._logits(read).double().log_softmax(-1)
                token = int(found.argmax())
                tokens.append(token)
                logprobs.append(float(found[token]))
                read = (token,)
                if token in self.stops.tokens or (self.stops.strings and self.stops.is_in(tokens)):
                    break
            yield index, [self.stops.completion(tokens, logprobs)]

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """Read more tokens, and return the logits of the next one."""
        read = (self.library.llama_token * len(tokens))(*tokens)
        if self.library.llama_decode(self.context, self.library.llama_batch_get_one(read, len(tokens))):
            raise MergeError("llama.cpp cannot compute with this file. Export it again, and report it if it stays.")
        pointer = self.library.llama_get_logits_ith(self.context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, (self.size,)).copy())

    def tokens(self, text: str, add_special: bool) -> list[int]:
        data = text.encode()
        found = (self.library.llama_token * (len(data) + 8))()
        count = self.library.llama_tokenize(self.vocabulary, data, len(data), found, len(found), add_special, True)
        return list(found[:count])

    @property
    def template(self) -> str | None:
        found = self.library.llama_model_chat_template(self.model, None)
        return found.decode() if found else None

    @property
    def end(self) -> int | None:
        """The token that the file names as the end of a text."""
        token = int(self.library.llama_vocab_eos(self.vocabulary))
        return None if token < 0 else token

    def ends(self) -> set[int]:
        """Return the tokens at which llama.cpp's programs stop: those the file names, and some known by text."""
        return {token for token in range(self.size) if self.library.llama_vocab_is_eog(self.vocabulary, token)}

    def close(self) -> None:
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)


@dataclass(frozen=True, slots=True)
class Difference:
    """Compares the log-probs that llama.cpp and transformers give to the same tokens, with the same weights. `rounding`
    is what rounding as llama.cpp does makes of them in transformers: the bound follows from it."""

    mean: float
    largest: float
    rounding: float

    @property
    def bound(self) -> float:
        return LARGEST * self.rounding + FLOOR

    def __str__(self) -> str:
        return (
            f"llama.cpp against transformers with the weights of the file: log-probs within {self.largest:.1e}, "
            f"{self.mean:.1e} on average (bound {self.bound:.1e})"
        )


class FileModel:
    """The model in transformers, in fp32, with the weights of a GGUF file."""

    def __init__(self, file: Path, weights: Weights, names: Mapping[str, str]) -> None:
        """Read the file. Raise MergeError if a number in it is further off than its format explains."""
        reader = gguf.GGUFReader(str(file))
        self.kinds: dict[str, Kind] = {}
        values = {}
        for part in reader.tensors:
            if own := names.get(part.name):
                shape = tuple(int(size) for size in reversed(part.shape))
                value = torch.from_numpy(dequantize(part.data, part.tensor_type).astype(np.float32).reshape(shape))
                _must_be_within_a_step(file, own, value, stored(weights[own], own, weights.config), part.tensor_type)
                values[own] = stored(value, own, weights.config, back=True).contiguous()
                self.kinds[own] = part.tensor_type
        if missing := sorted(set(names.values()) - values.keys()):
            raise MergeError(file, f"{missing[0]} is missing in it, one of {len(missing)} weights", "Export it again")
        self.model = AutoModelForCausalLM.from_config(weights.config, dtype=torch.float32).eval()
        self.model.load_state_dict(values, strict=False, assign=True)
        self.model.tie_weights()
        self.tied = self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight
        self.embedding = weights.embedding

    def difference(self, asked: Sequence[tuple[Sequence[int], Completion]]) -> Difference:
        """Compare the log-probs of answers of llama.cpp, given with their prompts."""
        exact = [self._logprobs(prompt, answer.tokens) for prompt, answer in asked]
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if isinstance(module, (nn.Linear, GELUTanh)):  # GELU comes from a table of 16 bits
                    kind = self.kinds.get(f"{name}.weight", self.kinds[self.embedding])
                    kind = kind if isinstance(module, nn.Linear) else Kind.F16
                    hook = module.register_forward_pre_hook(partial(_round_input, kind))
                    hooks.callback(hook.remove)
            rounded = [self._logprobs(prompt, answer.tokens) for prompt, answer in asked]
        apart = [abs(x - y) for one, (_, answer) in zip(exact, asked) for x, y in zip(one, answer.logprobs)]
        own = [abs(x - y) for one, other in zip(exact, rounded) for x, y in zip(one, other)]
        return Difference(fmean(apart), max(apart), fmean(own))

    @torch.no_grad()
    def _logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        logits_TV = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        found: list[float] = logits_TV.double().log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
        return found


def _must_be_within_a_step(file: Path, name: str, found: Tensor, wanted: Tensor, kind: Kind) -> None:
    if kind not in STEP:  # llama.cpp's own formats, whose steps it chooses
        return
    block = gguf.GGML_QUANT_SIZES[kind][0]
    found, wanted = (value.float().reshape(-1, block) for value in (found, wanted))
    size = wanted.abs().amax(-1, keepdim=True)
    allowed = size * (STEP[kind] + (OF_SCALES if block > 1 else 0)) + SMALLEST
    if not bool(((found - wanted).abs() <= allowed).all()):
        reason = (
            f"{name} is further from the merged weight than {kind.name} explains: up to "
            f"{float((found - wanted).abs().max()):.1e}"
        )
        raise MergeError(file, reason, "Export it again, and report it if it stays")


def _round_input(kind: Kind, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round the input of a layer as llama.cpp does before it multiplies it by weights of this kind."""
    value = arguments[0]
    if kind == Kind.F32:
        return arguments
    if kind in (Kind.F16, Kind.BF16):
        return (value.to(torch.float16 if kind == Kind.F16 else torch.bfloat16).float(),)
    block = BLOCK_OF_K if gguf.GGML_QUANT_SIZES[kind][0] == gguf.QK_K else BLOCK_OF_8_BITS
    blocks = value.reshape(-1, block)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (((blocks / scale).round() * scale).reshape(value.shape),)
