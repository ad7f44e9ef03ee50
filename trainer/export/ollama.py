"""Writes the Modelfile with which Ollama runs a GGUF file as the run did: template, stop tokens, sampling."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.settings import Config
from trainer.errors import ModelError
from trainer.machine.visible import visible

QUESTION, ANSWER, SYSTEM = "octet-question", "octet-answer", "octet-system"
LONGEST_SHOWN = 200  # characters of a text that cannot be written
CONVERSATIONS = (
    [{"role": "user", "content": QUESTION}],
    [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}],
    [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": QUESTION},
    ],
)


@dataclass(frozen=True, slots=True)
class Form:
    """How a chat template writes a turn. `template` is the same in Go."""

    begin: str  # with {role}
    end: str
    assistant: str = "assistant"
    has_system: bool = True

    def text(self, messages: Sequence[Mapping[str, str]]) -> str:
        named = [{**turn, "role": self.assistant if turn["role"] == "assistant" else turn["role"]} for turn in messages]
        turns = [self.begin.format(role=turn["role"]) + turn["content"] + self.end for turn in named]
        return "".join(turns) + self.begin.format(role=self.assistant)

    @property
    def template(self) -> str:
        role = "{{ .Role }}"
        if self.assistant != "assistant":
            role = f'{{{{ if eq .Role "assistant" }}}}{self.assistant}{{{{ else }}}}{{{{ .Role }}}}{{{{ end }}}}'
        turn = self.begin.format(role=role) + "{{ .Content }}" + self.end
        return f"{{{{ range .Messages }}}}{turn}{{{{ end }}}}{self.begin.format(role=self.assistant)}"


FORMS = {
    "ChatML": Form("<|im_start|>{role}\n", "<|im_end|>\n"),
    "Llama 3": Form("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    "Gemma": Form("<start_of_turn>{role}\n", "<end_of_turn>\n", "model", has_system=False),
}


def modelfile(file: str, config: Config, tokenizer: Any, stops: Sequence[str]) -> str:
    """Return the text of a Modelfile. Raise ModelError for a chat template that would have to be guessed."""
    forms = FORMS.values() if tokenizer.chat_template else ()
    found = ((form, _default_system(form, tokenizer, config.prompt.template)) for form in forms)
    form, default = next((pair for pair in found if pair[1] is not None), (None, None))
    if form is None:
        reason = f"the chat template of this model is not one of {', '.join(FORMS)}, and a template for Ollama would "
        reason += "have to be guessed"
        raise ModelError("--to ollama", reason, "Export --to gguf, and write a Modelfile by hand")
    system = config.prompt.system or default
    new, temperature = config.rollout.max_new_tokens, f"{config.rollout.temperature:g}"
    # Ollama's own context may be smaller, and it does not draw from all tokens with their own probabilities.
    settings = {"temperature": temperature, "num_predict": new, "num_ctx": config.prompt.max_tokens + new}
    settings |= {"top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1}
    lines = [f"FROM ./{file}", f"TEMPLATE {_quoted(form.template)}"]
    lines += [f"SYSTEM {_quoted(system)}"] if system else []
    lines += [f"PARAMETER {name} {value}" for name, value in settings.items()]
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return the text in the quotes of a Modelfile, which has no escapes: it ends at the first line that ends with
    three quotation marks."""
    if re.search(r'"""\s*[\r\n]', text):
        reason = (
            f"a Modelfile cannot hold {visible(text)[:LONGEST_SHOWN]!r}, because a line in it ends with three "
            'quotation marks (""") and is not the last'
        )
        raise ModelError("--to ollama", reason, "Write another prompt.system or rollout.stop, or export --to gguf")
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'


def _default_system(form: Form, tokenizer: Any, variables: Mapping[str, Any]) -> str | None:
    """Return the system message of conversations without one ("" for none), or None if the form is another one."""
    bos = tokenizer.bos_token
    adds_bos = bos and tokenizer("1")["input_ids"][0] == tokenizer.bos_token_id  # as llama.cpp then does
    written = []
    for messages in CONVERSATIONS:
        if messages[0]["role"] == "system" and not form.has_system:
            continue
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        written.append((messages, text.removeprefix(bos) if adds_bos else text))
    begin = form.begin.format(role="system")
    first = written[0][1]
    default = first[len(begin) :].partition(form.end)[0] if first.startswith(begin) else ""
    added = [{"role": "system", "content": default}] if default else []
    for messages, text in written:
        if text != form.text([*([] if messages[0]["role"] == "system" else added), *messages]):
            return None
    return default
