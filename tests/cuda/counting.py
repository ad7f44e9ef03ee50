"""Count what a decode step and an update of the embedded model, and a step of two layers of other families, ask of a
card: `tests/cuda/python.sh -m tests.cuda.counting > tests/cuda/counts.json` writes the table that
tests/cuda/test_training.py holds the code to."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.cuda.stub.library import counted
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.config.settings import Model
from trainer.machine import quiet
from trainer.model.load import load_tokenizer
from trainer.records import MiniBatch
from trainer.rollout.decoder.rows import Batch
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


def decode_steps(batch: Batch, name: str, width: int, table: Table) -> None:
    """Count a step as it is, and the replay of a captured one. The second of each is counted: libraries are warm."""
    for _ in range(2):
        with counting(table, f"decode step of {name}"):
            batch._step(ROWS, width)
    for _ in range(3):  # seen, captured, replayed
        with counting(table, f"captured decode step of {name}"):
            batch.decode_step(batch._step, ROWS, ROWS, width, batch.size.places)


def decode_steps_of_nano(run: Run, table: Table) -> None:
    rollouts = run.rollouts
    with torch.inference_mode():
        batch = rollouts.sampler._prepare(ROWS, len(rollouts.longest.tokens), rollouts.sampling_of(0))
        batch.add([NewAnswers(0, rollouts.longest, range(ROWS))])
        decode_steps(batch, f"{ROWS} rows", WIDTH, table)


def decode_steps_of_family(name: str, table: Table) -> None:
    from tests.rollout.test_decoder import adapted, family, prompts, sampling, turns  # with it comes DS_ACCELERATOR=cpu

    model, asked = adapted(family(name)).to("cuda", torch.bfloat16), prompts(9)[0]
    sampler = DecodeSampler(model, turns(load_tokenizer(Model()), [2]), ROWS)
    with torch.inference_mode():
        batch = sampler._prepare(ROWS, len(asked.tokens), sampling(group=ROWS, max_new_tokens=24))
        batch.add([NewAnswers(0, asked, range(ROWS))])
        decode_steps(batch, name, batch.size.places, table)


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
            decode_steps_of_nano(run, table)
            update(run, table)
    for name in ("smollm3", "lfm2", "qwen3.5", "gemma4"):
        decode_steps_of_family(name, table)
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
