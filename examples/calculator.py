"""Word problems whose numbers are too large for the embedded model's head, so that it has to call a calculator.

octet task show examples/calculator.py:build task.tools=calculator task.calls=inline -n 1
octet train --preset nano task.name=examples/calculator.py:build task.tools=calculator task.calls=inline
"""

import random

STORIES = {
    "There are {a} boxes with {k} pens in each box. How many pens are there?": lambda a, k, **_: a * k,
    "Amy has {m} coins and finds {n} more. How many coins does Amy have now?": lambda m, n, **_: m + n,
}
RANGES = {"a": (2, 9), "k": (12, 98), "m": (20, 90), "n": (20, 90)}


class LargeNumbers:
    prompt_style = "chat"  # the question alone, as the embedded model knows it

    def train(self):
        rng, found = random.Random(0), {}
        for _ in range(4000):
            numbers = {letter: rng.randint(*bounds) for letter, bounds in RANGES.items()}
            story = rng.choice(list(STORIES))
            if (answer := STORIES[story](**numbers)) > 99:
                found[story.format(**numbers)] = answer
        return [{"question": question, "answer": answer} for question, answer in found.items()]


def build(settings):
    return LargeNumbers()
