"""Answer problems with llama.cpp, through the package llama-cpp-python."""

import logging
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from trainer.errors import MergeError
from trainer.records import Prompt, Sampling
from trainer.rollout.interface import Groups, Sampler
from trainer.rollout.turns import Stops

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
