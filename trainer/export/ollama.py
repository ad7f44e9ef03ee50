"""Write the Modelfile with which Ollama serves a GGUF file, and asks questions with the prompt of the run."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.settings import Config
from trainer.errors import ModelError
from trainer.machine.safe_text import visible
from trainer.problem.prompts import Messages, Prompter
from trainer.records import Problem

QUESTION, ANSWER = "octet-question", "octet-answer"
CONTEXT = 4096  # tokens of a conversation, if the model supports as many
TEMPERATURE = 0.7  # the maximum; runs may use a higher temperature to explore


@dataclass(frozen=True, slots=True)
class Form:
    """The format of a turn in a chat template. `template` returns it as a template of Go."""

    begin: str  # contains {role}
    end: str
    assistant: str = "assistant"
    opening: str = ""  # text before an answer, such as an empty thought
    opens_all: bool = False  # the opening also precedes the answers of earlier turns

    def text(self, messages: Messages) -> str:
        return "".join(map(self._turn, messages)) + self.begin.format(role=self.assistant) + self.opening

    def _turn(self, message: Mapping[str, str]) -> str:
        is_answer = message["role"] == "assistant"
        begin = self.begin.format(role=self.assistant if is_answer else message["role"])
        return begin + self.opening * (is_answer and self.opens_all) + message["content"] + self.end

    def template(self, before: str, after: str) -> str:
        """Return the template, with the run's text before and after a question."""
        role = "{{ .Role }}"
        if self.assistant != "assistant":
            role = f'{{{{ if eq .Role "assistant" }}}}{self.assistant}{{{{ else }}}}{role}{{{{ end }}}}'
        opening = _for_role("assistant", self.opening * self.opens_all)
        content = f"{opening}{_for_role('user', before)}{{{{ .Content }}}}{_for_role('user', after)}"
        turn = self.begin.format(role=role) + content + self.end
        return f"{{{{ range .Messages }}}}{turn}{{{{ end }}}}{self.begin.format(role=self.assistant)}{self.opening}"


FORMS = {
    "ChatML": Form("<|im_start|>{role}\n", "<|im_end|>\n"),
    "Llama 3": Form("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    "Gemma": Form("<start_of_turn>{role}\n", "<end_of_turn>\n", "model"),
}


def modelfile(file: str, config: Config, prompter: Prompter, stops: Sequence[str], context: int) -> str:
    """Return the text of a Modelfile for a model with this context. Raise ModelError for a chat template that has no
    known form."""
    problem = Problem("", QUESTION, "")
    examples: Messages = ()
    if prompter.has_turns:
        *examples, question = prompter.messages(problem)
        form, system = _form(prompter, [*examples, question])
        before, _, after = question["content"].partition(QUESTION)
        template = form.template(before, after)
    else:  # each question is a conversation of its own
        template, system = _go(prompter.prompt(problem).text).replace(QUESTION, "{{ .Prompt }}"), ""
    longest = config.prompt.max_tokens + config.rollout.max_new_tokens
    temperature = f"{min(config.rollout.temperature, TEMPERATURE):g}"
    # Ollama's defaults have a smaller context, and change the probabilities of the tokens.
    settings = {"temperature": temperature, "num_ctx": min(context, max(CONTEXT, longest))}
    settings |= {"top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1}
    lines = [f"FROM ./{file}", f"TEMPLATE {_quoted(template)}"]
    lines += [f"SYSTEM {_quoted(system)}"] if system else []
    lines += [f"MESSAGE {turn['role']} {_quoted(turn['content'])}" for turn in examples if turn["role"] != "system"]
    lines += [f"PARAMETER {name} {value}" for name, value in settings.items()]
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    return "\n".join(lines) + "\n"


def _for_role(role: str, text: str) -> str:
    """Return template code that writes a text only in the turns of one role."""
    shown = _go(text).replace(QUESTION, "{{ .Content }}")  # again, if the run asks it twice
    return f'{{{{ if eq .Role "{role}" }}}}{shown}{{{{ end }}}}' if text else ""


def _go(text: str) -> str:
    """Escape a text for a template of Go, also a brace that would be followed by those of Go."""
    return re.sub(rf"{{{{+|{{(?={QUESTION}|\Z)", r'{{ "\g<0>" }}', text)


def _quoted(text: str) -> str:
    """Return the text in a Modelfile's quotes, which know no escapes: three quotes at the end of a line end it."""
    if re.search(r'"""\s*[\r\n]', text):
        reason = f'a Modelfile cannot hold {visible(text)[:200]!r}, in which a line before the last ends with """'
        raise ModelError("--to ollama", reason, "Write another prompt.system or rollout.stop, or export --to gguf")
    return f'"""{text}"""' if "\n" in text or '"' in text else f'"{text}"'


def _form(prompter: Prompter, messages: Messages) -> tuple[Form, str]:
    """Return the form that reproduces the chat template, and the system message ("" for none)."""
    tokenizer = prompter.tokenizer
    bos = tokenizer.bos_token
    adds_bos = bos and tokenizer("1")["input_ids"][0] == tokenizer.bos_token_id  # then llama.cpp adds it, too
    longer = [*messages, {"role": "assistant", "content": ANSWER}, messages[-1]]
    examples = []
    for turns in (messages, longer):
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **prompter.settings.template}
        text = tokenizer.apply_chat_template([*turns], **options)
        others = [turn for turn in turns if turn["role"] != "system"]
        examples.append((others, text.removeprefix(bos) if adds_bos else text))
    for form, system in _candidates(examples[0][1]):
        first = [{"role": "system", "content": system}] if system else []
        if all(form.text([*first, *others]) == text for others, text in examples):
            return form, system
    reason = f"the chat template of this model is not one of {', '.join(FORMS)}, so Ollama's template is unknown"
    raise ModelError("--to ollama", reason, "Export --to gguf, and write a Modelfile by hand")


def _candidates(prompt: str) -> Iterator[tuple[Form, str]]:
    """Yield the forms that may match a prompt, each with the system message that it finds there."""
    for form in FORMS.values():
        begin = form.begin.format(role="system")
        system = prompt[len(begin) :].partition(form.end)[0] if prompt.startswith(begin) else ""
        opening = prompt.rpartition(form.begin.format(role=form.assistant))[2]
        yield from ((replace(form, opening=opening, opens_all=all_), system) for all_ in (False, True))
