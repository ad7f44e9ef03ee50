"""Answer problems with llama.cpp (through the package llama-cpp-python), and compare it with transformers, which
computes with the same numbers from the GGUF file."""

import logging
from collections.abc import Mapping, Sequence
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
from trainer.rollout.interface import Groups, Sampler
from trainer.rollout.turns import Stops

# The largest error of a stored number, as a share of the largest number of its block: half a step. Q4_0 and Q5_0 have
# steps from -8 to 7 and from -16 to 15, so the largest number of the other sign may be off by a whole step; Q4_1 and
# Q5_1 count from the smallest number of the block, in steps of up to twice the length. Scales have 16 bits.
STEP = {Kind.F32: 2**-24, Kind.F16: 2**-11, Kind.BF16: 2**-8, Kind.Q8_0: 0.5 / 127}
STEP |= {Kind.Q5_0: 1 / 16, Kind.Q5_1: 1 / 31, Kind.Q4_0: 1 / 8, Kind.Q4_1: 1 / 15}
OF_SCALES = 2**-9
SMALLEST = 2.0**-24  # the smallest number in 16 bits
# llama.cpp rounds the inputs of quantised weights to 8 bits, with one scale for each block of this size.
BLOCK_OF_8_BITS = 32
BLOCK_OF_K = 256
# Two independent roundings differ by 1.4 times the error of one.
LARGEST = 2.0  # the bound, as a multiple of the change that this rounding causes in transformers
FLOOR = 1e-3  # smaller differences come from the order of sums
AGAIN = "Export it again, and report it if it fails again"


def quantise(source: Path, file: Path, fmt: str) -> None:
    """Convert a file in f32 to a format that only llama.cpp writes."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = int(gguf.LlamaFileType[f"MOSTLY_{fmt.upper()}"])
    if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), options):
        raise MergeError(file, f"llama.cpp cannot write --format {fmt}", "Take q8_0 or q4_0, which need no llama.cpp")


class LlamaCppSampler(Sampler):
    """Samples greedily on the CPU. Keys and values are in fp32, so that their rounding does not count as an error of
    the file, and weights keep their layout, because llama.cpp's other layouts depend on the processor."""

    def __init__(self, file: Path, stops: Stops, context: int) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        self.library, self.stops = llama_cpp, stops
        settings, options = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
        settings.n_gpu_layers, settings.use_extra_bufts = 0, False
        options.n_ctx = options.n_batch = context
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        self.context = self.model and llama_cpp.llama_init_from_model(self.model, options)
        if not self.context:
            raise MergeError(file, "llama.cpp cannot load it, or lacks the memory for it", AGAIN)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Groups:
        for index, prompt in enumerate(prompts):
            self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
            tokens: list[int] = []
            logprobs: list[float] = []
            inputs = prompt.tokens
            while len(tokens) < sampling.max_new_tokens:
                logprobs_V = self._logits(inputs).double().log_softmax(-1)
                token = int(logprobs_V.argmax())
                tokens.append(token)
                logprobs.append(float(logprobs_V[token]))
                inputs = (token,)
                if token in self.stops.tokens or (self.stops.strings and self.stops.is_in(tokens)):
                    break
            yield index, [self.stops.completion(tokens, logprobs)]

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens to the context, and return the logits of the next one."""
        batch = (self.library.llama_token * len(tokens))(*tokens)
        if self.library.llama_decode(self.context, self.library.llama_batch_get_one(batch, len(tokens))):
            raise MergeError(f"llama.cpp cannot compute with this file. {AGAIN}.")
        pointer = self.library.llama_get_logits_ith(self.context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(pointer, (self.size,)).copy())

    def tokens(self, text: str, add_special: bool) -> list[int]:
        data = text.encode()
        tokens = (self.library.llama_token * (len(data) + 8))()
        count = self.library.llama_tokenize(self.vocabulary, data, len(data), tokens, len(tokens), add_special, True)
        return list(tokens[:count])

    @property
    def template(self) -> str | None:
        template = self.library.llama_model_chat_template(self.model, None)
        return template.decode() if template else None

    @property
    def end(self) -> int | None:
        """The end-of-text token in the file."""
        token = int(self.library.llama_vocab_eos(self.vocabulary))
        return None if token < 0 else token

    def ends(self) -> set[int]:
        """Return the tokens at which llama.cpp's programs stop: those in the file, and some known by their text."""
        return {token for token in range(self.size) if self.library.llama_vocab_is_eog(self.vocabulary, token)}

    def close(self) -> None:
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of the log-probs of llama.cpp and transformers for the same tokens and weights. `rounding` is the
    mean change in transformers if it rounds as llama.cpp does, which determines the bound."""

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
    """The model in transformers, in fp32, with the weights from a GGUF file."""

    def __init__(self, file: Path, weights: Weights, names: Mapping[str, str]) -> None:
        """Read the file. Raise MergeError if the error of a number is larger than its format explains."""
        reader = gguf.GGUFReader(str(file))
        self.kinds: dict[str, Kind] = {}
        values = {}
        for tensor in reader.tensors:
            if name := names.get(tensor.name):
                kind, shape = tensor.tensor_type, tuple(int(size) for size in reversed(tensor.shape))
                value = torch.from_numpy(dequantize(tensor.data, kind).astype(np.float32).reshape(shape))
                _must_be_within_a_step(file, name, value, stored(weights[name], name, weights.config), kind)
                values[name] = stored(value, name, weights.config, back=True).contiguous()
                self.kinds[name] = kind
        if missing := sorted(set(names.values()) - values.keys()):
            raise MergeError(file, f"{missing[0]} is missing in it, one of {len(missing)} weights", "Export it again")
        self.model = AutoModelForCausalLM.from_config(weights.config, dtype=torch.float32).eval()
        self.model.load_state_dict(values, strict=False, assign=True)
        self.model.tie_weights()
        self.embedding = weights.embedding

    def difference(self, asked: Sequence[tuple[Sequence[int], Completion]]) -> Difference:
        """Compare the log-probs of llama.cpp's answers, given as pairs of prompt and answer."""
        exact = [self._logprobs(prompt, answer.tokens) for prompt, answer in asked]
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if isinstance(module, (nn.Linear, GELUTanh)):  # llama.cpp's GELU is a table for inputs of 16 bits
                    kind = self.kinds.get(f"{name}.weight", self.kinds[self.embedding])
                    kind = kind if isinstance(module, nn.Linear) else Kind.F16
                    hook = module.register_forward_pre_hook(partial(_round_input, kind))
                    hooks.callback(hook.remove)
            rounded = [self._logprobs(prompt, answer.tokens) for prompt, answer in asked]
        apart = [abs(x - y) for logprobs, (_, answer) in zip(exact, asked) for x, y in zip(logprobs, answer.logprobs)]
        rounding = [abs(x - y) for before, after in zip(exact, rounded) for x, y in zip(before, after)]
        return Difference(fmean(apart), max(apart), fmean(rounding))

    @torch.no_grad()
    def _logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        logits_TV = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logprobs_T1 = logits_TV.double().log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])
        return [float(logprob) for logprob in logprobs_T1[:, 0]]


def _must_be_within_a_step(file: Path, name: str, read: Tensor, wanted: Tensor, kind: Kind) -> None:
    if kind not in STEP:  # only llama.cpp writes it, with steps that it chooses
        return
    block = gguf.GGML_QUANT_SIZES[kind][0]
    read, wanted = (value.float().reshape(-1, block) for value in (read, wanted))
    largest, error = wanted.abs().amax(-1, keepdim=True), (read - wanted).abs()
    # a scale, which is off by half of SMALLEST at most, is multiplied by up to 127
    allowed = largest * (STEP[kind] + (OF_SCALES if block > 1 else 0)) + SMALLEST * (64 if block > 1 else 1)
    if not bool((error <= allowed).all()):
        reason = f"{name} differs from the merged weight by {float(error.max()):.1e}, more than {kind.name} explains"
        raise MergeError(file, reason, AGAIN)


def _round_input(kind: Kind, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round the input of a layer as llama.cpp does for weights of this kind."""
    value = arguments[0]
    if kind == Kind.F32:
        return arguments
    if kind in (Kind.F16, Kind.BF16):
        return (value.to(torch.float16 if kind == Kind.F16 else torch.bfloat16).float(),)
    block = BLOCK_OF_K if gguf.GGML_QUANT_SIZES[kind][0] == gguf.QK_K else BLOCK_OF_8_BITS
    blocks = value.reshape(-1, block)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (((blocks / scale).round() * scale).reshape(value.shape),)
