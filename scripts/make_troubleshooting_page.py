"""Generate docs/troubleshooting.md and the page of runs with its evidence:

python -m scripts.make_troubleshooting_page > docs/troubleshooting.md
python -m scripts.make_troubleshooting_page --runs > bench/results/alarms.md
"""

import json
import sys

from scripts.count import ROOT
from tests.e2e.faulty_runs import FAULTS, HEALTHY, STEPS
from trainer.watch.history import RECENT
from trainer.watch.rules import RULES, Rule

OTHER_MESSAGES = ROOT / "scripts/troubleshooting.md"
RESULTS = ROOT / "bench/results/diagnosis.json"
HEAD = f"""# Troubleshooting

## Why does it not learn?

A run checks its metrics after each step. If something looks wrong, it prints an alarm, which says what is wrong, why it
matters, and what to change:

    step 5: cut off: 62% of the answers reach rollout.max_new_tokens=256. An answer that is cut off seldom contains a
    result, so it earns little. Raise rollout.max_new_tokens, or with several turns rollout.turns.most.

An alarm is printed once, and again if it comes back. Most alarms look at the means of the last {RECENT} steps; those
that compare with the beginning wait for {2 * RECENT} steps. With `--strict-health` (`run.strict_health=true`) the first
alarm ends the run. Alarms in bold always end it, because it could not learn.

Do not judge a run by its loss, which says little: with one update a step it is minus the mean advantage of a token.
Look at the reward and at `grad_norm` instead.

| alarm | why it matters | what to change |
| --- | --- | --- |
"""
TRIED = """
The alarms were tried on [runs that were broken on purpose](../bench/results/alarms.md). Each fault raised its
alarm, and no healthy run raised one. No alarm finds advantages that are shuffled between answers: such a run has
healthy metrics, but does not learn.

"""
RUNS = f"""# Alarms: runs that were broken on purpose

Each line is a run of the embedded model. The first runs were broken in one way each, and the last ones are healthy. The
runs have {STEPS} steps; the one with a machine that slows down has 40. The number after an alarm is the step at which
it was raised. The alarm that names the fault is in bold. Alarms without a run here are tested with made-up metrics in
`tests/watch/test_rules.py`. `python -m tests.e2e.faulty_runs FOLDER` makes the runs, and
`python -m scripts.make_troubleshooting_page --runs > bench/results/alarms.md` this page.
[Troubleshooting](../../docs/troubleshooting.md) has the rules.

| run | alarms |
| --- | --- |
"""


def page() -> str:
    rules = "".join(f"| {_name(rule)} | {rule.why} | {rule.remedy} |\n" for rule in RULES)
    return HEAD + rules + TRIED + OTHER_MESSAGES.read_text()


def _name(rule: Rule) -> str:
    return f"**{rule.name}**" if rule.severity == "end" else rule.name


def runs() -> str:
    found = json.loads(RESULTS.read_text())
    return RUNS + "".join(f"| {name} | {_alarms(name, found[name])} |\n" for name in [*FAULTS, *HEALTHY])


def _alarms(name: str, found: dict[str, int]) -> str:
    own = FAULTS[name][1][0] if name in FAULTS else ""
    return ", ".join(f"{f'**{rule}**' if rule == own else rule} {step}" for rule, step in found.items()) or "none"


if __name__ == "__main__":
    print(runs() if "--runs" in sys.argv else page(), end="")
