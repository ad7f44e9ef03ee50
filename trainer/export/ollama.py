"""Writes the Modelfile with which Ollama runs a GGUF file as the run did: template, stop tokens, sampling."""

from __future__ import annotations

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
    form, default = _form_of(tokenizer, config.prompt.template)
    system = config.prompt.system or default
    settings = {
        "temperature": f"{config.rollout.temperature:g}",
        "num_predict": config.rollout.max_new_tokens,
        "num_ctx": config.prompt.max_tokens + config.rollout.max_new_tokens,  # Ollama's own may be smaller
        "top_k": 0,  # the run draws from all tokens, with their own probabilities; Ollama's defaults do not
        "top_p": 1,
        "min_p": 0,
        "repeat_penalty": 1,
    }
    lines = [f"FROM ./{file}", f"TEMPLATE {_quoted(form.template)}"]
    lines += [f"SYSTEM {_quoted(system)}"] if system else []
    lines += [f"PARAMETER {name} {value}" for name, value in settings.items()]
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return the text in the quotes of a Modelfile, which has no escapes: it ends at the first line that ends with
    three quotation marks."""
    if re.search(r'"""\s*[\r\n]', text):
        raise ModelError(
            "--to ollama",
            f"a Modelfile cannot hold {visible(text)[:LONGEST_SHOWN]!r}, because a line in it ends with three "
            'quotation marks (""") and is not the last',
            "Write another prompt.system or rollout.stop, or export --to gguf",
        )
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'


def _form_of(tokenizer: Any, variables: Mapping[str, Any]) -> tuple[Form, str]:
    """Return the form that writes the same as the chat template, and the system message that the template adds."""
    if tokenizer.chat_template:
        for form in FORMS.values():
            default = _default_system(form, tokenizer, variables)
            if default is not None:
                return form, default
    raise ModelError(
        "--to ollama",
        f"the chat template of this model is not one of {', '.join(FORMS)}, and a template for Ollama would have to "
        "be guessed",
        "Export --to gguf, and write a Modelfile by hand",
    )


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
