"""A task of one's own: sums of two or three numbers. A number alone on a line after #### is the answer.

octet task show examples/task.py:build -n 1
octet reward test task.name=examples/task.py:build
./run_deepspeed.sh task.name=examples/task.py:build run.steps=50
"""

import random
import re


class Sums:
    """`train` is all that a task needs. Records are dicts; every column but the question is handed to rewards, too."""

    prompt_style = "chat"  # the question alone, as the embedded model knows it

    def train(self):
        rng = random.Random(0)
        drawn = {tuple(rng.choices(range(10, 100), k=rng.randrange(2, 4))) for _ in range(2000)}
        return [
            {"question": f"What is {' + '.join(map(str, numbers))}?", "answer": sum(numbers), "terms": len(numbers)}
            for numbers in sorted(drawn)
        ]

    def read(self, problem, text):
        """Return the answer in what the model wrote, or None."""
        found = set(re.findall(r"^#### *(-?\d{1,9})\W*$", text, re.MULTILINE))
        return found.pop() if len(found) == 1 else None

    def score(self, problem, answer):
        """Return what an answer is worth: 1 if it is right, and something if it is close."""
        distance = abs(int(answer) - int(problem.gold))
        return 1.0 if distance == 0 else max(0.0, 0.5 - distance / 100)


def build(settings):
    return Sums()
