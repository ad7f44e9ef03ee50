"""Count what a decode step and an update of the embedded model, and a step of two layers of other families, ask of a
card: `tests/cuda/python.sh -m tests.cuda.counting > tests/cuda/counts.json` writes the table that
tests/cuda/test_counts.py holds the code to."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.cuda.stub.library import counted
from trainer.config.command_line import Request, resolve
from trainer.config.settings import Model
from trainer.machine import quiet
from trainer.model.load import load_tokenizer
from trainer.records import MiniBatch
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.decoder.schedule import NewAnswers
from trainer.run import assemble
from trainer.run.assemble import Run
from trainer.run.rehearsal import _row, rehearse
from trainer.watch.tally import Tally

COUNTED = ("launches", "graph_launches", "copies", "bytes_to_host", "synchronisations")
Table = dict[str, dict[str, int]]
ROWS, WIDTH = 16, 256


@contextmanager
def counting(table: Table, name: str) -> Iterator[None]:
    before = counted()
    yield
    after = counted()
    table[name] = {what: after[what] - before[what] for what in COUNTED}


def decode_steps(run: Run, table: Table) -> None:
    """Count a step as it is, and the replay of a captured one. The second of each is counted: libraries are warm."""
    rollouts = run.rollouts
    with torch.inference_mode():
        batch = rollouts.sampler._prepare(ROWS, len(rollouts.longest.tokens), rollouts.sampling_of(0))
        batch.add([NewAnswers(0, rollouts.longest, range(ROWS))])
        for _ in range(2):
            with counting(table, f"decode step of {ROWS} rows"):
                batch._step(ROWS, WIDTH)
        for _ in range(3):  # seen, captured, replayed
            with counting(table, f"captured decode step of {ROWS} rows"):
                batch.decode_step(batch._step, ROWS, ROWS, WIDTH, batch.size.places)


FAMILIES = ("smollm3", "lfm2", "qwen3.5", "gemma4")


def decode_steps_of(name: str, table: Table) -> None:
    """Count a step of a family of models as it is, and the replay of a captured one."""
    from tests.rollout.test_decoder import adapted, family, prompts, sampling, turns  # with it comes DS_ACCELERATOR=cpu

    model, asked = adapted(family(name)).to("cuda", torch.bfloat16), prompts(9)[0]
    sampler = DecodeSampler(model, turns(load_tokenizer(Model()), [2]), ROWS)
    with torch.inference_mode():
        batch = sampler._prepare(ROWS, len(asked.tokens), sampling(group=ROWS, max_new_tokens=24))
        batch.add([NewAnswers(0, asked, range(ROWS))])
        for _ in range(2):
            with counting(table, f"decode step of {name}"):
                batch._step(ROWS, batch.size.places)
        for _ in range(3):
            with counting(table, f"captured decode step of {name}"):
                batch.decode_step(batch._step, ROWS, ROWS, batch.size.places, batch.size.places)


def update(run: Run, table: Table) -> None:
    updater, config = run.updater, run.rollouts.config
    prompt, length = run.rollouts.longest.tokens, config.rollout.max_new_tokens
    rows = [_row(prompt, length, index) for index in range(ROWS)]
    for step in range(2):
        tokens = float(ROWS * length)
        prepared = updater.prepare([MiniBatch(updater.packer.pack(rows), tokens, tokens)])
        with counting(table, f"update of {ROWS} rows"):
            updater.update(prepared, step, Tally())


def main() -> None:
    quiet.quiet()
    table: Table = {}
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["rollout.problems=2", "rollout.group_size=8", "rollout.max_new_tokens=24", "eval.problems=0"]
        config = resolve("nano", None, ["model.dtype=bf16", f"run.dir={folder}/run", "run.merge=false", *sizes])
        with assemble.process_group(config):
            run = assemble.build(Request(config, "nano", ""))
            rehearse(run.rollouts, run.updater)
            decode_steps(run, table)
            update(run, table)
    for name in FAMILIES:
        decode_steps_of(name, table)
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
