"""Runs in which every two values of two features meet: each is refused in one message, or survives `kill -9`.

bash tests/pairs.sh RESULTS [SEED [RUNS]]

A run makes three steps, undisturbed and once more killed at a random moment and resumed, and both have to be equal.
RESULTS is a JSON file with a row for each run; a later call goes on behind them. RUNS ends after so many runs, drawn
from all by the seed.
"""

import ctypes
import json
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from tests.conftest import write_lines
from tests.e2e import chaos
from trainer.config.resolve import resolve
from trainer.errors import ConfigError

FILES = Path(tempfile.gettempdir()) / "octet-pairs"  # the same for all calls: the settings name it
TEACHER = f"{FILES}/teacher/adapter"
TASKS = {name: name for name in ("nano", "addition", "records")}
TASKS |= {"own file": f"{FILES}/own.py:build", "gym": "reasoning_gym:chain_sum"}
OWN = """
class Own:
    prompt_style = "gsm8k"

    def __init__(self, sign):
        self.sign = sign

    def train(self):
        pairs = [(a, b, a + b if self.sign == "+" else a - b) for a in range(2, 9) for b in range(2, 9)]
        return [{"question": f"What is {a} {self.sign} {b}?", "answer": c, "steps": a,
                 "solution": f"{a} {self.sign} {b} = {c}"} for a, b, c in pairs]

    def read(self, problem, text):  # so that some answers of any model are right
        return str(len(text) % 2)

    def score(self, problem, answer):
        return float(answer)

def build(settings):
    return Own("+")

def other(settings):
    return Own("-")

def double(n: int) -> int:
    \"\"\"Return twice a number.

    Args:
        n: It.
    \"\"\"
    return 2 * n

def brief(completions, **columns):
    return [1.0 / (1 + len(text)) for text in completions]
"""
AGENT = (Path(__file__).parents[1] / "rollout/agents.py").read_text()
LOSSES = ("grpo_clip", "reinforce", "reinforce_baseline", "gspo", "cispo")
KL = "algorithm.kl.coef=0.1"
SAMPLES = "warmup.steps=2 warmup.from=samples warmup.asked=32"
# feature -> the name of a value -> its settings
FEATURES: dict[str, dict[str, str]] = {
    "objective": {name: f"algorithm.loss={name}" for name in LOSSES},
    "advantage": {name: f"algorithm.advantage={name}" for name in ("grpo", "dr_grpo", "rloo", "batch_std")},
    "KL": {"none": "", "k3 in the loss": KL}
    | {"k2 with a target": f"{KL} algorithm.kl.estimator=k2 algorithm.kl.target=0.01"}
    | {"k1 in the reward": f"{KL} algorithm.kl.estimator=k1 algorithm.kl.where=reward"}
    | {"refreshed": f"{KL} algorithm.kl.refresh=2"},
    "updates": {"one": "", "two epochs": "algorithm.epochs=2", "two minibatches": "algorithm.minibatches=2"}
    | {"four": "algorithm.epochs=2 algorithm.minibatches=2"},
    "dead groups": {name: f"rollout.dead_groups={name}" for name in ("drop", "keep", "refill")}
    | {"by correct": "rollout.dead_groups=refill rollout.dead_by=correct"},
    "curriculum": {name: f"task.curriculum={name}" for name in ("none", "difficulty", "solve_rate")},
    "tools": {"none": "", **{name: f"task.tools=[calculator] task.calls={name}" for name in ("fenced", "inline")}}
    | {"own": f"task.tools={FILES}/own.py:double"}
    | {"agent": f"task.agent={FILES}/agents.py:twice rollout.rows=1"},
    "task": {name: f"task.name={value}" for name, value in TASKS.items()}
    | {"records": f"task.name=records task.path={FILES}/rows.jsonl"},
    "mixture": {"none": "", "with sums": "addition", "with a function": f"{FILES}/own.py:other"},
    "warm-up": {"none": "", "solutions": "warmup.steps=2"}
    | {"early stop, merged": "warmup.steps=2 warmup.every=1 warmup.patience=1 warmup.then=merged"}
    | {"samples": f"{SAMPLES} reward.answer=lenient", "rounds": f"{SAMPLES} warmup.rounds=2"},
    "teacher": {"none": "", "adapter": f"teacher.adapter={TEACHER}", "model": "teacher.name=nano teacher.reward=1"}
    | {"loss": f"teacher.adapter={TEACHER} teacher.form=loss {KL} algorithm.kl.estimator=k2"},
    "trained": {"LoRA": "lora.targets=attention", "DoRA": "lora.dora=true", "PiSSA": "lora.init=pissa"}
    | {"rsLoRA": "lora.rslora=true lora.plus_ratio=4", "all weights": "lora.enabled=false"}
    | {"further": f"lora.start={TEACHER}"},
    "weights": {"fp32": "", "bf16": "model.dtype=bf16", "4 bits": "model.quantize=nf4"},
    "layout": {"flat": "", "padded": "optim.layout=padded"}
    | {"recomputed": "model.gradient_checkpointing=true optim.tokens_per_micro_batch=200"},
    "sampler": {"decoder": "", "generate": "rollout.engine=hf", "8 bits": "rollout.weights=int8"},
    "engine": {name: f"engine.ds_config={name}" for name in ("zero2_offload", "zero1", "zero2")},
    "evaluation": {"at the ends": "", "none": "eval.problems=0", "sampled": "eval.samples=2"}
    | {"each step": "eval.every=1 eval.metric=lenient", "early stop": "eval.every=1 eval.patience=1"},
    "reward": {"correct": "", "shaped": "reward.weights.format=0.1 reward.weights.overlong=0.3"}
    | {"custom": f"reward.custom={FILES}/own.py:brief", "random": "reward.control=random"}
    | {"shuffled": "reward.control=shuffled_gold reward.answer=lenient"},
    "prompt": {name: f"prompt.style={name}" for name in ("auto", "gsm8k", "boxed", "tags")},
    "end": {"adapter": "run.merge=false", "merged": ""},
    "ranks": {"1": "", "2": ""},
}
ALWAYS = ["run.steps=3", "run.save_every=1", "warmup.problems=4", "warmup.lr=1e-3"]
ALWAYS += ["rollout.dead_groups=drop", "eval.every=null", "rollout.refills=1", "eval.problems=4", "task.limit=64"]
ALWAYS += ["prompt.max_tokens=232"]

TRIES = 20  # to find a run for a pair
WAVES = 3
Run = dict[str, str]  # the name of a value by that of its feature
Pair = frozenset[tuple[str, str]]


class Outcome(NamedTuple):
    settings: str
    what: str  # "equal", "refused", or "fault"
    said: str


def covering(seed: int, known: Container[Pair] = ()) -> tuple[list[Run], list[str]]:
    """Return runs in which every two values of two features meet, and a message for each pair that is refused. They are
    found greedily: each begins with a pair that is missing, and then takes the values with most such pairs."""
    rng = random.Random(seed)
    values = [(feature, name) for feature, names in FEATURES.items() for name in names]
    usual = {feature: next(iter(names)) for feature, names in FEATURES.items()}
    pairs = {frozenset(pair): dict(pair) for pair in combinations(values, 2) if pair[0][0] != pair[1][0]}
    refused = {pair: said for pair, own in pairs.items() if (said := refusal(usual | own))}
    runs, missing = [], [pair for pair in pairs if pair not in refused and pair not in known]
    rng.shuffle(missing)
    while missing:
        covered = {missing[0]}  # a pair that is in no run that is taken is left out
        for _ in range(TRIES):
            if (run := _filled(pairs[missing[0]], frozenset(missing), refused, rng)) and not refusal(run):
                runs.append(run)
                covered |= pairs_of(run)
                break
        missing = [pair for pair in missing if pair not in covered]
    return runs, [*refused.values()]


def pairs_of(run: Run) -> set[Pair]:
    return set(map(frozenset, combinations(run.items(), 2)))


def _filled(first: Run, missing: Container[Pair], refused: Container[Pair], rng: random.Random) -> Run | None:
    """Return a run with a value of each feature, or None if no value goes with those that it has."""
    run = dict(first)
    for feature in rng.sample(sorted(FEATURES.keys() - run.keys()), len(FEATURES) - len(run)):
        new = {name: [frozenset([(feature, name), own]) for own in run.items()] for name in FEATURES[feature]}
        taken = [name for name, pairs in new.items() if not any(pair in refused for pair in pairs)]
        if not taken:
            return None
        rng.shuffle(taken)
        run[feature] = max(taken, key=lambda name: sum(pair in missing for pair in new[name]))
    return {feature: run[feature] for feature in FEATURES}


def refusal(run: Run) -> str:
    return _refusal(tuple(settings_of(run)))


@cache
def _refusal(settings: tuple[str, ...]) -> str:
    try:
        resolve("nano", None, settings)
    except ConfigError as error:
        return str(error)
    return ""


def settings_of(run: Run) -> list[str]:
    found = [text for feature, name in run.items() if feature != "mixture" for text in FEATURES[feature][name].split()]
    if other := FEATURES["mixture"][run["mixture"]]:
        parts = {TASKS[run["task"]]: 2, other: 1} if TASKS[run["task"]] != other else {other: 2, "nano": 1}
        found = [text for text in found if not text.startswith("task.name=")] + [f"task.mix={json.dumps(parts)}"]
    return [*ALWAYS, *found]


def make_files() -> None:
    """Write what the settings name, and train the adapter that teaches."""
    FILES.mkdir(exist_ok=True)
    (FILES / "own.py").write_text(OWN)
    (FILES / "agents.py").write_text(AGENT)
    answers = {a: f"{a} + 1 = {a + 1}\n#### {a + 1}" for a in range(10, 90)}
    rows = [{"question": f"What is {a} plus 1?", "answer": said, "steps": a} for a, said in answers.items()]
    write_lines(FILES / "rows.jsonl", rows)
    if not Path(TEACHER).is_dir():
        ended = chaos.start(FILES / "teacher", 1, ["run.steps=1", "run.merge=false", "eval.problems=0"])
        assert ended.statuses == [0], ended.said


def outcome(run: Run, place: Path, rng: random.Random) -> Outcome:
    """Start a run, start it again to kill it, and compare."""
    settings, ranks = settings_of(run), int(run["ranks"])
    command = " ".join(settings)
    folder = place / "run"
    usual = chaos.start(folder, ranks, settings)
    if "Traceback" in usual.said or "frame #" in usual.said or set(usual.statuses) not in ({0}, {2}):
        return Outcome(command, "fault", f"{usual.statuses}: {usual.said[-2000:]}")
    if usual.statuses[0] == 2:
        return Outcome(command, "refused", usual.said[-400:])
    undisturbed = chaos.result(folder)
    shutil.rmtree(folder)  # the other has its name, which the run after a warm-up has among its settings
    chaos.VARIANTS["pair"] = (ranks, settings)
    said = []
    for moment, wrong in chaos.killed_run(folder, "pair", usual, rng, 1):
        said.append(moment or "resumed")
        if wrong:
            return Outcome(command, "fault", f"{said}: {wrong[-2000:]}")
    different = chaos.differences(folder, undisturbed)
    return Outcome(command, "fault" if different else "equal", "; ".join([*said, *different]))


def outcomes(runs: list[Run], results: Path, seed: int) -> Iterator[Outcome]:
    """Yield the outcome of each run, and keep them in a file, where a later call finds them."""
    known = {row["settings"]: Outcome(**row) for row in json.loads(results.read_text())} if results.exists() else {}
    for number, run in enumerate(runs, start=1):
        settings = " ".join(settings_of(run))
        if settings not in known or known[settings].what == "fault":
            place = Path(tempfile.mkdtemp(prefix="octet-pairs-"))
            known[settings] = outcome(run, place, random.Random(f"{seed}/{settings}"))
            shutil.rmtree(place)
            results.write_text(json.dumps([one._asdict() for one in known.values()], indent=1) + "\n")
        print(f"{number}/{len(runs)} {known[settings].what}: {known[settings].said[-300:]}", flush=True)
        yield known[settings]


def main(results: str, seed: int = 0, count: int | None = None) -> int:
    """Return the number of faults. A pair that was only in runs that are refused late is tried in others, twice."""
    chaos.prepare()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(chaos.SUBREAPER, 1, 0, 0, 0)
    make_files()
    met, counted = set[Pair](), Counter[str]()
    for wave in range(1 if count else WAVES):
        runs, refused = covering(seed + wave, met)
        drawn = set().union(*map(pairs_of, runs))
        print(f"{len(runs)} runs have {len(drawn)} pairs, {len(refused)} are refused", flush=True)
        runs = random.Random(seed).sample(runs, count) if count else runs
        for run, one in zip(runs, outcomes(runs, Path(results), seed), strict=True):
            counted[one.what] += 1
            met |= pairs_of(run) if one.what != "refused" else set()
    pairs = f"{len(met)} pairs met, {len(refused)} refused at once"
    print(f"{counted.total()} runs: {dict(counted)}; {pairs} (seed {seed})")
    return counted["fault"]


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1], *map(int, sys.argv[2:]))))
