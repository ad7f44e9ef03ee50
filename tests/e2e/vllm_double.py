"""A server that speaks as much of vLLM's protocol as a run uses, and samples from the embedded model and its adapters.

python -m tests.e2e.vllm_double PORT

Equal requests get equal answers, whatever is asked beside them, so whole runs can be compared bit for bit. A real vLLM
(tests/vllm/) batches requests as they come, and its sums are rounded differently each time.
"""

import sys
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tests.http_double import OfVllm, Reply
from trainer.model.hub import NANO


class VllmDouble(OfVllm):
    def __init__(self, port: int = 0, context: int = 1024) -> None:
        super().__init__("nano", context, port)
        self.base = AutoModelForCausalLM.from_pretrained(NANO)
        self.tokenizer = AutoTokenizer.from_pretrained(NANO)

    def say(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/detokenize":
            return 200, {"prompt": self.tokenizer.decode(body["tokens"])}
        return self.look_back(**body) if "prompt_logprobs" in body else self.complete(**body)

    @torch.no_grad()
    def look_back(self, model: str, prompt: list[int], **_: Any) -> Reply:
        """Return the log-probs of the prompt itself."""
        logprobs_TV = self.adapters.get(model, self.base)(torch.tensor([prompt])).logits[0].float().log_softmax(dim=-1)
        found = [{str(token): {"logprob": float(row_V[token])}} for row_V, token in zip(logprobs_TV, prompt[1:])]
        return 200, {"model": model, "choices": [{"index": 0, "prompt_logprobs": [None, *found]}]}

    def load(self, name: str, path: str) -> Reply:
        base = AutoModelForCausalLM.from_pretrained(NANO)
        self.adapters[name] = PeftModel.from_pretrained(base, path).get_base_model()
        return 200, "added"

    @torch.no_grad()
    def complete(self, model: str, prompt: list[int], n: int, seed: int, temperature: float, **asked: Any) -> Reply:
        if model not in (self.name, *self.adapters):
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        randoms = [torch.Generator().manual_seed((seed + index) % (1 << 63)) for index in range(n)]
        choices = [{"index": index, "token_ids": [], "logprobs": {"token_logprobs": []}} for index in range(n)]
        going, tokens_GT, cache = list(range(n)), torch.tensor([prompt] * n), DynamicCache(config=self.base.config)
        while going:  # the cache by position: its name differs between versions
            passed = self.adapters.get(model, self.base)(tokens_GT, None, None, cache, use_cache=True)
            logprobs_GV = (passed.logits[:, -1].float() / (temperature or 1.0)).log_softmax(dim=-1)
            tokens_GT = logprobs_GV.argmax(dim=-1, keepdim=True)
            for index in list(going):
                if temperature:
                    tokens_GT[index] = logprobs_GV[index].exp().multinomial(1, generator=randoms[index])
                tokens, token = choices[index]["token_ids"], int(tokens_GT[index])
                tokens.append(token)
                choices[index]["logprobs"]["token_logprobs"].append(float(logprobs_GV[index, token]))
                if len(tokens) == asked["max_tokens"] or token in asked["stop_token_ids"]:
                    going.remove(index)
        return 200, {"model": model, "choices": choices}


if __name__ == "__main__":
    torch.set_num_threads(1)
    VllmDouble(int(sys.argv[1])).serve_forever()
