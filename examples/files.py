"""A folder with logs and bills: the model looks through it with Python programs, and then answers the question.

octet task show examples/files.py:build -n 1
octet train task.name=examples/files.py:build

A turn with a block of Python is run in the sandbox, in a folder with these files, and its output comes back. Each
program gets the folder as it was at first, and what it writes there is gone with it. Any other turn ends the answer.
"""

import random
import re

from trainer.problem.tools import PYTHON

SHOWN = 2000  # characters of an output
LEVELS = ("INFO", "WARNING", "ERROR")
TEAMS = ("alpha", "beta", "gamma", "delta")
# The files are written in the sandbox, and then the program runs.
PROGRAM = """
import os
for path, text in {files!r}.items():
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
exec(compile({program!r}, "program.py", "exec"), {{"__name__": "__main__"}})
"""


def lines(files, ending, folder=""):
    return [
        line for path, text in files.items() if path.endswith(ending) and folder in path for line in text.splitlines()
    ]


def amounts(files, folder):
    return sum(int(line.split(",")[1]) for line in lines(files, ".csv", folder) if not line.startswith("item"))


def longest(files):
    """Return the name of the log with the most lines, if that is one."""
    sizes = {path: len(text.splitlines()) for path, text in files.items() if path.endswith(".log")}
    names = [path for path, size in sizes.items() if size == max(sizes.values())]
    return names[0].rpartition("/")[2].removesuffix(".log") if len(names) == 1 else None


# What is asked, how the answer is known, and a program that finds it.
WALK = "import glob\nlines = [line for path in glob.glob('{where}', recursive=True) for line in open(path)]\n"
QUESTIONS = {
    "How many lines in all .log files together have the level {level}?": (
        lambda files, team, level: sum(f" {level} " in line for line in lines(files, ".log")),
        WALK.format(where="**/*.log") + "print(sum(' {level} ' in line for line in lines))",
    ),
    "How many .csv files are there in the folder {team}, its subfolders included?": (
        lambda files, team, level: sum(path.startswith(f"{team}/") and path.endswith(".csv") for path in files),
        "import glob\nprint(len(glob.glob('{team}/**/*.csv', recursive=True)))",
    ),
    "What is the sum of the column `amount` of all .csv files in the folder {team}, its subfolders included?": (
        lambda files, team, level: amounts(files, f"{team}/"),
        WALK.format(where="{team}/**/*.csv") + "print(sum(int(one.split(',')[1]) for one in lines if one[0] != 'i'))",
    ),
    "Which .log file has the most lines? Answer with its name without `.log`.": (
        lambda files, team, level: longest(files),
        "import glob\nprint(max(glob.glob('**/*.log', recursive=True), key=lambda path: len(open(path).readlines()))"
        ".split('/')[-1][:-4])",
    ),
}


class Session:
    """The programs of one answer."""

    def reset(self, problem):
        self.files = problem.extra["files"]

    def step(self, text):
        found = re.findall(r"```python\n(.*?)(?:```|\Z)", text, re.DOTALL)
        if not found:
            return "", True, 0.0
        return PYTHON.use(PROGRAM.format(files=self.files, program=found[-1]))[:SHOWN], False, 0.0


def tree(rng):
    """Return the texts of files by their paths."""
    files = {}
    for number in range(rng.randint(8, 14)):
        folder = "/".join([rng.choice(TEAMS), *rng.sample(["old", "new", "2025"], rng.randrange(3))])
        if rng.random() < 0.5:
            text = "".join(f"{10 + at}:00 {rng.choice(LEVELS)} step {at}\n" for at in range(rng.randint(2, 12)))
            files[f"{folder}/run{number}.log"] = text
        else:
            rows = "".join(f"part{at},{rng.randint(1, 99)}\n" for at in range(rng.randint(1, 6)))
            files[f"{folder}/bill{number}.csv"] = f"item,amount\n{rows}"
    return files


class Folders:
    prompt_style = "gsm8k"

    def train(self):
        return [record for number in range(2000) if (record := folder_of(number))["answer"] is not None]

    def environment(self, problem):
        return Session()


def folder_of(number):
    rng = random.Random(number)
    files, (asked, (answer, program)) = tree(rng), rng.choice([*QUESTIONS.items()])
    team, level = rng.choice(TEAMS), rng.choice(LEVELS)
    told = "To run a Python program there, end your message with a block ```python, and its output comes back."
    question = f"Folder {number} has logs (`10:00 ERROR step 0`) and tables. {told}\n"
    question += asked.format(team=team, level=level)
    found = {"question": question, "answer": answer(files, team, level), "files": files}
    return found | {"program": program.format(team=team, level=level)}


def build(settings):
    return Folders()
