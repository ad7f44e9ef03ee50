"""An environment of one's own: the model guesses a number from 1 to 99, and is told whether it is higher or lower.

octet task play examples/guessing.py:build reward.weights.environment=1
./run_deepspeed.sh task.name=examples/guessing.py:build reward.weights='{correct: 0, environment: 1.0}'
"""

import re


class Game:
    """Each answer has one of its own: `reset` begins it, and `step` replies to every turn of the model."""

    def reset(self, problem):
        self.secret = int(problem.gold)
        # it may return a text that is asked in place of the question

    def step(self, text):
        """Return what the model is told, whether the answer is done, and a reward."""
        guesses = re.findall(r"\d{1,9}", text)
        if not guesses:
            return "Write a number.", False, -0.1
        guess = int(guesses[-1])
        if guess == self.secret:
            return "", True, 1.0
        return ("higher" if guess < self.secret else "lower"), False, -0.1


class Guessing:
    prompt_style = "chat"

    def train(self):
        return [{"question": f"Guess number {n}.", "answer": 1 + n * 37 % 99} for n in range(99)]

    def read(self, problem, text):
        """Return the answer in the last turn of the model."""
        guesses = re.findall(r"\d{1,9}", text)
        return guesses[-1] if guesses else None

    def environment(self, problem):
        return Game()


def build(settings):
    return Guessing()
