"""An agent with a calculator, as one writes it for any server that speaks OpenAI's interface.

    octet train --preset nano task.name=examples/calculator.py:build task.agent=examples/agent.py:run

It needs the package `openai`. OPENAI_BASE_URL and OPENAI_API_KEY are in its environment.
"""

import operator
import re

from openai import OpenAI

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def run(problem):
    client, text = OpenAI(), ""
    for _ in range(8):
        messages = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": text}]
        reply = client.chat.completions.create(model="octet", messages=messages[: 1 + bool(text)], stop="=")
        text += reply.choices[0].message.content
        found = re.search(r"(\d+) *([-+*]) *(\d+) *$", text)
        if not found:
            break
        text += f"= {OPERATORS[found[2]](int(found[1]), int(found[3]))}"
    return text
