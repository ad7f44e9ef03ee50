"""Turn a problem into the tokens that the model sees, in a style of styles.yaml or with a text of the user's around it.

`few_shot` puts solved examples before the question. The model's chat template is applied to every style except
`r1_zero`; a model without a template sees `Question: ... Answer:`. A conversation from the data set is passed on
unchanged.
"""

import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.answers import compare, find
from trainer.answers.strip_thinking import THOUGHTS
from trainer.config.nearest_name import did_you_mean
from trainer.config.read_yaml import read_yaml
from trainer.config.sections.task import SET_BY_OCTET
from trainer.config.settings import PromptSettings
from trainer.errors import ConfigError, DataError, ModelError
from trainer.machine.user_code import OF_A_TEMPLATE, TEMPLATE_S, deadline
from trainer.problem.environment import Environments
from trainer.problem.task import Task
from trainer.records import Problem, Prompt

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Style:
    """The text around the question. `answer` says where a strict answer has to stand; None leaves that to the task."""

    name: str
    request: str
    answer: str | None = None
    raw: bool = False  # do not apply the chat template
    stops: Sequence[str] = ()  # strings at which an answer ends


_FILE = read_yaml(Path(__file__).with_name("styles.yaml").read_bytes())
STYLES: dict[str, Style] = {name: Style(name, **fields) for name, fields in _FILE.items()}
TODAY = date(2026, 1, 1)  # the date for all chat templates, so that prompts do not depend on the day
TURN = "OCTET-TURN"  # a placeholder for the model's turn, to find out what a template writes after it
# The ending of an example whose solution does not end with a marked answer.
MARKS = {
    "gsm8k": "#### {}",
    "boxed": "\\boxed{{{}}}",
    "tags": "<answer>{}</answer>",
    "letter": "Answer: {}",
    "alone": "{}",
}
PLAIN_STOPS = ("\nQuestion:",)  # without a chat template, a model may go on with a question of its own
# Messages for a model without a chat template. Data sets have more roles, such as `tool`.
ROLES = defaultdict(lambda: "{}\n\n", user="Question: {}\n", assistant="Answer: {}\n\n")


class Prompter:
    """Writes prompts in one style. `answer_style` is where a strict answer has to stand."""

    def __init__(
        self, tokenizer: Any, settings: PromptSettings, task: Task, environments: Environments | None = None
    ) -> None:
        self.tokenizer, self.environments, self.settings = tokenizer, environments, settings
        self.style = style = _style(settings, task)
        if style.name == "gsm8k" and task.in_words:
            self.style = replace(style, request=style.request.replace("#### 42", "#### Paris"))
        self.answer_style = answer_style(settings, task)
        self._examples = examples(task, settings.shots) if style.name == "few_shot" else []
        known = sorted(_variables(tokenizer.get_chat_template())) if tokenizer.chat_template else []
        for name, value in settings.template.items():
            if name not in known and (name, value) != ("enable_thinking", False):  # it would have no effect
                reads = f"the chat template of this model reads {', '.join(known) or 'no variables'}"
                remedy = f"{did_you_mean(name, known)} Correct the name, or leave it out".strip()
                raise ConfigError(f"prompt.template={{{name}: ...}}", reads, remedy)
        if environments and not environments.is_inline:
            self._must_keep_turns(environments)

    def prompt(self, problem: Problem) -> Prompt:
        asked = self.environments.reset(problem) if self.environments else None
        original = None if asked is None else problem
        if asked is not None:  # keep the system message of the data set
            system = tuple(message for message in problem.messages if message["role"] == "system")
            question = ({"role": "user", "content": asked},) if system else ()
            problem = replace(problem, question=asked, messages=system + question)
        text = self._text(problem)
        return Prompt(problem, text, self.tokens(text, self._has_special_tokens(problem)), original=original)

    @property
    def has_turns(self) -> bool:
        """Return True if the chat template is applied, so that a conversation can be written."""
        return bool(self.tokenizer.chat_template) and not self.style.raw

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the strings that end a turn. With a chat template its stop token ends a turn."""
        is_plain = not self.style.raw and not self.tokenizer.chat_template
        of_environment = self.environments.stops if self.environments else ()
        return (*self.style.stops, *(PLAIN_STOPS if is_plain else ()), *of_environment)

    def answer_tokens(self, prompt: Prompt, answer: str) -> tuple[int, ...]:
        """Return the tokens of an answer that follows the prompt. Without a chat template, a space separates them."""
        text, has_special_tokens = prompt.text, self._has_special_tokens(prompt.problem)
        answer = answer if has_special_tokens or text[-1:].isspace() else f" {answer}"
        whole = self.tokens(text + answer, has_special_tokens)
        if whole[: len(prompt.tokens)] == prompt.tokens:
            return whole[len(prompt.tokens) :]
        return tuple(self.tokenizer(answer, add_special_tokens=False)["input_ids"])

    def fitting(self, problems: Sequence[Problem], most: int | None = None) -> list[Problem]:
        """Return the problems whose prompts have at most `most` tokens, by default `prompt.max_tokens`. Raise DataError
        if there are none."""
        most = most or self.settings.max_tokens
        longer = {id(prompt.original or prompt.problem): len(prompt.tokens) for prompt in self.longer(problems, most)}
        kept = [problem for problem in problems if id(problem) not in longer]
        if not kept:
            shortest = min(longer.values(), default=most)
            reason = f"none of {len(problems)} prompts is that short; the shortest has {shortest} tokens"
            fewer = ", or a smaller prompt.shots" if self._examples else ""
            raise DataError(f"prompt.max_tokens={most}", reason, f"Write prompt.max_tokens={shortest} or more{fewer}")
        return kept

    def longer(self, problems: Sequence[Problem], most: int) -> Iterator[Prompt]:
        """Yield the prompts of more than `most` tokens. A token is at least one byte, so only long questions need to
        be tokenized."""
        around = len(self.prompt(Problem("", "", "")).tokens)  # the tokens around a question
        longest = (most - around) / self.style.request.count("{question}")
        is_known = not (self.environments and self.environments.may_ask)
        long = (one for one in problems if not is_known or one.messages or len(one.question.encode()) > longest)
        yield from (prompt for prompt in map(self.prompt, long) if len(prompt.tokens) > most)

    def messages(self, problem: Problem) -> Messages:
        turns = [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        if problem.messages:
            has_own = any(message["role"] in ("system", "developer") for message in problem.messages)
            return self._with_request([*([] if has_own else turns), *problem.messages])
        # by id as well, because an environment asks in other words than the data
        others = [one for one in self._examples if one.question != problem.question and one.id != problem.id]
        for example in others[: self.settings.shots]:
            turns += [{"role": "user", "content": self._request(example)}]
            turns += [{"role": "assistant", "content": solved(example, self.answer_style)}]
        return self._with_request([*turns, {"role": "user", "content": self._request(problem)}])

    def _with_request(self, messages: Messages) -> Messages:
        """Add how to call tools to the last question of a conversation, unless the chat template says it."""
        if not (self.environments and self.environments.request):
            return messages
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        asked = {**messages[last], "content": f"{messages[last]['content']}\n\n{self.environments.request}"}
        return [*messages[:last], asked, *messages[last + 1 :]]

    def reply(self, problem: Problem, text: str) -> str:
        """Return what stands between a turn of the model and its next one if an environment replies with `text`."""
        if self.environments and self.environments.is_inline:
            return text
        turn = TURN
        while turn in text:
            turn += "-"
        return self._rendered(self._after(self.messages(problem), turn, text), problem).rpartition(turn)[2]

    def conversation(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of a conversation that an agent leads, with the tools that it offers."""
        variables = {"tools": [*tools], "xml_tools": [*tools]} if tools else {}
        return self._rendered(messages, Problem("", "", ""), variables)

    def _after(self, messages: Messages, turn: str, reply: str) -> Messages:
        """Return the conversation after a turn of the model and a reply. The data set may have begun the turn."""
        assert self.environments is not None, "only an environment replies"
        if messages[-1]["role"] == "assistant":
            *messages, beginning = messages
            turn = beginning["content"] + turn
        replied = {"role": self.environments.role, "content": reply}
        return [*messages, {"role": "assistant", "content": turn}, replied]

    def _must_keep_turns(self, environments: Environments) -> None:
        """Raise ConfigError if later turns change an earlier one: the model would not see what it wrote."""
        if self.style.raw:
            reason = f"it has no place for the replies of {environments.setting} between turns"
            raise ConfigError(f"prompt.style={self.style.name}", reason, "Write another style")
        if not self.tokenizer.chat_template or self._keeps_turns():
            return
        remedies = []
        for name, value in product(sorted(_variables(self.tokenizer.get_chat_template()) - {"tools"}), (True, False)):
            with suppress(DataError):
                if self._keeps_turns({name: value}):
                    remedies.append(f"prompt.template='{{{name}: {str(value).lower()}}}'")
        models = "Take a model whose template keeps turns, such as Qwen2.5, Llama 3 or Gemma 3"
        remedy = f"Write {' or '.join(remedies)}" if remedies else models
        template = f"the chat template of {self.tokenizer.name_or_path}"
        reason = f"{template} rewrites earlier turns, so the model would not see what it wrote"
        raise ConfigError(environments.setting, reason, remedy)

    def _keeps_turns(self, changed: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Return True if the text of a conversation only grows: it begins with the text before the last turn, and goes
        on with that turn as the model wrote it. Many templates leave thoughts out, so the first turn of a model that
        thinks has one; every turn has one if the template itself begins the thought."""
        problem, template = Problem("", "What is 2 + 2?", ""), self.tokenizer.get_chat_template()
        begin, end = next((marks for marks in THOUGHTS.items() if marks[1] in template), ("<think>", "</think>"))
        messages: Messages = self.messages(problem)
        text = self._rendered(messages, problem, changed)
        begins = text.rstrip().endswith(begin)
        thinks = self._rendered(messages, problem, {**changed, "enable_thinking": True}) == text
        thought = f"{begin}\nI add.\n{end}\n\nIt is 4."
        first = thought if thinks else "It is 4."
        for turn in [thought.removeprefix(f"{begin}\n")] * 2 if begins else [first, "It is 4."]:
            messages = self._after(messages, turn, "Sure?")
            try:
                longer = self._rendered(messages, problem, changed)
            except DataError:  # the template refuses this form of a turn or of a reply
                return False
            if not longer.startswith(text + turn):
                return False
            text = longer
        return True

    def _request(self, problem: Problem) -> str:
        return self.style.request.replace("{question}", problem.question)

    def _text(self, problem: Problem) -> str:
        if self.style.raw and not problem.messages:
            before = f"{self.settings.system}\n\n" if self.settings.system else ""
            return before + self._request(problem)
        messages = self.messages(problem)
        text = self._rendered(messages, problem)
        self._must_have_system(messages, text, problem)
        return text

    def _has_special_tokens(self, problem: Problem) -> bool:
        """Return True if the text of a prompt already contains the special tokens at its beginning."""
        return bool(self.tokenizer.chat_template) and (not self.style.raw or bool(problem.messages))

    def _must_have_system(self, messages: Messages, text: str, problem: Problem) -> None:
        """Raise DataError if the chat template leaves out a system message, whatever it says."""
        for index, message in enumerate(messages):
            if message["role"] == "system" and str(message["content"]).strip() not in text:
                changed = {**message, "content": f"{message['content']}?"}
                if self._rendered([*messages[:index], changed, *messages[index + 1 :]], problem) == text:
                    reason = "the chat template of the model leaves the system message out"
                    remedy = "Leave it out (prompt.system, or in the data), or write it into the question"
                    raise DataError(problem.where or problem.id or "prompt", reason, remedy)

    def tokens(self, text: str, has_special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of a text that begins a prompt, with special tokens before it if it has none."""
        if has_special_tokens:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return begun(self.tokenizer, text)

    def _rendered(self, messages: Messages, problem: Problem, changed: Mapping[str, Any] = MappingProxyType({})) -> str:
        if not self.tokenizer.chat_template:
            text = "".join(ROLES[message["role"]].format(message["content"]) for message in messages)
            return text.rstrip() if messages[-1]["role"] == "assistant" else f"{text}Answer:"
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template  # cached by transformers

        continues = messages[-1]["role"] == "assistant"  # the data set has begun the answer
        options = {"tokenize": False, "add_generation_prompt": not continues, "continue_final_message": continues}
        if self.environments and self.environments.schemas:
            options["tools"] = options["xml_tools"] = list(self.environments.schemas)  # the second name is SmolLM3's
        try:
            with deadline(TEMPLATE_S):
                options |= {**self.settings.template, **changed}
                template = self.tokenizer.get_chat_template(tools=options.get("tools"))
                _compile_jinja_template(template).environment.globals["strftime_now"] = TODAY.strftime
                text = self.tokenizer.apply_chat_template([*map(dict, messages)], **options)
        except (TemplateError, *OF_A_TEMPLATE) as error:
            roles = ", ".join(message["role"] for message in messages)
            reason = f"the chat template of the model refuses the messages ({roles}): {error}"
            remedy = "It may have no role `system`, or need prompt.system=TEXT, or a variable of prompt.template"
            raise DataError(problem.where or problem.id or "prompt", reason, remedy) from None
        return str(text)


def _variables(chat_template: str) -> set[str]:
    """Return the variables of a chat template that prompt.template may set."""
    from jinja2 import TemplateSyntaxError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template  # knows transformers' own tags

    try:
        environment = _compile_jinja_template(chat_template).environment
    except TemplateSyntaxError as error:
        broken = f"its chat template is broken in line {error.lineno} ({error.message})"
        raise ModelError("model.name", broken, "Restore the template, or take another model") from None
    return meta.find_undeclared_variables(environment.parse(chat_template)) - environment.globals.keys() - SET_BY_OCTET


def begun(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the tokens of a text that another text follows: with the special tokens that the tokenizer adds before a
    text, and without those that some tokenizers, saved after a training, add at its end."""
    plain, whole = (tuple(tokenizer(text, add_special_tokens=special)["input_ids"]) for special in (False, True))
    ends = range(len(whole), len(plain) - 1, -1)  # from the last, because no token of an empty text says where it is
    return whole[: next((end for end in ends if whole[end - len(plain) : end] == plain), len(whole))]


def left_out_of_texts(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens that are left out of the text of an answer: all except the marks of thinking."""
    marks = " ".join([*THOUGHTS, *THOUGHTS.values()])
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset(token for token, text in special.items() if len(text) < 3 or text not in marks)


def answer_style(settings: PromptSettings, task: Task) -> str:
    """Return the style of answers, which says where a strict answer has to stand."""
    return settings.answer if settings.answer != "auto" else _style(settings, task).answer or task.answer_style


def opens_thought(settings: PromptSettings, task: Task) -> bool:
    """Return True if the style, such as `r1_zero`, ends prompts with an open thought. Chat templates may do so too."""
    return _style(settings, task).request.endswith("<think>")


def _style(settings: PromptSettings, task: Task) -> Style:
    name = task.prompt_style if settings.style == "auto" else settings.style
    if name in STYLES:
        return STYLES[name]
    try:
        request = Path(name).read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise ConfigError(f"prompt.style={name}", f"it cannot be read ({error})", remedy) from None
    if "{question}" not in request:
        raise ConfigError(f"prompt.style={name}", "there is no {question} in it", "Write it where the question goes")
    marks = {"####": None, "\\boxed": "boxed", "</answer>": "tags"}  # headings begin with #### as well
    asked = [style for mark, style in marks.items() if mark in request]
    return Style(name, request, asked[0] if len(asked) == 1 else None)


def examples(task: Task, shots: int) -> list[Problem]:
    """Return the training problems for few-shot prompts, the same in every run, and a spare in case one is asked."""
    problems = [problem for problem in task.train() if not problem.messages]
    if len(problems) <= shots:
        reason = f"the training set has only {len(problems)} problems, and one more than the examples is needed"
        raise ConfigError(f"prompt.shots={shots}", reason, "Write fewer, or add problems")
    return random.Random(0).sample(problems, shots + 1)


_MARKED = re.compile(r"\n?[ \t]*####[^\n]*|</?answer>")


def solved(problem: Problem, answer_style: str) -> str:
    """Return the worked solution, with the answer where a strict answer has to stand. The solution is left out if it
    leads to another answer, or if the style wants the answer alone."""
    if not problem.gold:
        return problem.solution
    if answer_style == "alone":
        return problem.gold
    found = find.strict(problem.solution, answer_style, problem.gold) if problem.solution else None
    if found is not None and compare.equal(found, problem.gold):
        return problem.solution
    work = _MARKED.sub("", problem.solution).strip() if found is None else ""
    return f"{work}\n{MARKS[answer_style].format(problem.gold)}".strip()


def taught(problem: Problem, style: str, closing: str = "") -> str:
    """Return the text that a warm-up teaches: the solution, with its result where a strict answer has to stand.

        3 * 4 = 12            gsm8k       boxed       tags                       r1_zero
        12 - 5 = 7            #### 7      \\boxed{7}   <answer>7</answer>         </think>, then <answer>7</answer>

    If the prompt has opened a thought, this text ends it with the mark `closing`. A solution without a gold answer is
    taught as it is. A style that wants the answer alone leaves no place for the work.
    """
    if not problem.gold:
        return problem.solution
    if not closing and find.strict(problem.solution, style, problem.gold) is not None:
        return problem.solution
    work, mark = _MARKED.sub("", problem.solution).strip(), MARKS[style].format(problem.gold)
    if style == "alone" and not closing:
        return mark
    return "\n".join([work, closing, mark] if closing else [work, mark])


def must_have_solutions(task: Task, problems: Sequence[Problem]) -> None:
    """Raise DataError if there is no worked solution to teach."""
    if not any(problem.solution for problem in problems):
        reason = f"none of its {len(problems)} training problems has a worked solution for the warm-up to teach"
        remedy = "Name the column of the solutions: task.solution=COLUMN. If there are none, write warmup.steps=0"
        raise DataError(f"task.name={task.name}", reason, remedy)


def end_token(prompter: Prompter, stop_tokens: Collection[int]) -> int:
    """Return the token that ends an answer: the one that the chat template writes after a turn of the assistant."""
    tokenizer: Any = prompter.tokenizer
    if tokenizer.chat_template:
        turns = [*prompter.messages(Problem("", "a", "")), {"role": "assistant", "content": "b"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, **prompter.settings.template)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if closing := [token for token in tokens if token in stop_tokens][-1:]:
            return int(closing[0])
    if tokenizer.eos_token_id is None and not stop_tokens:
        reason = f"the tokenizer of {tokenizer.name_or_path} has no token that ends a text, which a solution needs"
        raise ModelError("model.name", reason, "Write its eos_token into its tokenizer_config.json")
    return int(min(stop_tokens) if tokenizer.eos_token_id is None else tokenizer.eos_token_id)
