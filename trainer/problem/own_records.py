"""The user's own data: `task.question` and `task.answer` name the columns; a `prompt` may be text or a conversation.

All columns but the question's go into `Problem.extra` under their own names, where a custom reward finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.answers import find
from trainer.errors import DataError
from trainer.problem.dataset import DataTask
from trainer.problem.sources import Record, is_unicode
from trainer.records import Problem

NO_ANSWER = "none"
EXPECTED_MESSAGES = 'expected text, or a conversation: [{"role": "user", "content": "..."}]'


class RecordsTask(DataTask):
    name = "records"

    def problem(self, name: str, record: Record) -> Problem:
        column = self.settings.question or _usual_column(record)
        answer = self.settings.answer or "answer"
        record.must_have({column: "task.question"} | ({answer: "task.answer"} if answer != NO_ANSWER else {}))
        messages = conversation(record, column)
        spoken = "\n\n".join(message["content"].strip() for message in messages if message["role"] != "system")
        question = spoken or record.text(column, "task.question")
        gold, solution = self._gold(record)
        return Problem(name, question, gold, solution, record.others(column), messages)

    def _gold(self, record: Record) -> tuple[str, str]:
        """Return answer and worked solution. The answer column may hold both, as in GSM8K and MATH."""
        if self.settings.answer == NO_ANSWER:
            return "", ""
        text = record.answer(self.settings.answer or "answer", "task.answer")
        solution = record.text(self.settings.solution, "task.solution") if self.settings.solution else ""
        style = "boxed" if "\\boxed" in text else "gsm8k" if "####" in text else None
        if style is None:
            return text, solution
        gold = find.marked(text, style)
        if gold is None:
            raise DataError(f"{record.where}: there is no answer behind the mark in {text[-40:]!r}.")
        return gold, solution or text


def _usual_column(record: Record) -> str:
    """Return `prompt` if it is a conversation or there is no `question`: data sets for TRL often have both columns."""
    is_chat = isinstance(record.values.get("prompt"), list)
    return "prompt" if is_chat or ("prompt" in record.values and "question" not in record.values) else "question"


def conversation(record: Record, column: str) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a chat-format column unchanged, or none if the column holds text."""
    value = record.values.get(column)
    if value is None or isinstance(value, str):
        return ()
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise DataError(f"{record.where}: `{column}` is {str(value)[:60]}; {EXPECTED_MESSAGES}.")
    if not all(is_unicode(message["content"]) for message in value):
        raise DataError(f"{record.where}: `{column}` holds half a character; expected UTF-8 text.")
    if not any(message["role"] == "user" for message in value):
        raise DataError(f"{record.where}: nobody asks in `{column}`; expected a message of the role `user`.")
    # a parquet file gives every message the keys of all messages, and fills them with None
    return tuple({key: part for key, part in message.items() if part is not None} for message in value)


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not all(isinstance(value.get(key), str) for key in ("role", "content")):
        return False
    return bool(value["content"].strip()) or value["role"] != "user"
