"""A whole training step against the strongest: the same model, adapter, prompts, groups, lengths and machine.

python bench/versus.py [--steps 40] [--repeats 3] [--sides trl octet]     the embedded model, with its accuracy
python bench/versus.py --cells                                           on a card: 1.5 B in bf16 and 7 B in 4 bits,
    256 and 1,024 tokens, 8 GiB and the whole card; time and memory of random weights, no accuracy
python bench/versus.py --cells --only "tiny bf16"                        a cell that needs no card; see --out

What is not installed is said, and left out. `octet` trains on every group, as TRL does; `octet, dropping` leaves out
those that teach nothing, which is Octet's default. Each side is a process of its own, and they take turns. A step is
the median over all steps but the first two of each process. Accuracy is greedy, on the same held-out problems, by the
same code; with --every 5 it is measured after every five steps, which shows when each side reaches --target, and saving
the adapters for that is not timed.

The cells go on where they stopped: a side of a cell that has run is not run again. Cells in which Octet is not the
fastest come first. A limit holds for torch's allocator, and is what each program sees of the card. Nobody has
run the sides with vLLM and Unsloth yet.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from machine import describe, python_path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
WARM_UP = 2
HELD_OUT = 256
GIB = 2**30


class Clock:
    """CPU and wall seconds since this process was started, after each step. Saving adapters does not count.

    `lengths` are the mean tokens of an answer in each step, and `layers` the layers with an adapter.
    """

    def __init__(self, began: float | None = None, every: int = 0) -> None:
        self.began, self.every = time.perf_counter() if began is None else began, every
        self.ticks: list[tuple[float, float]] = []
        self.lengths: list[float] = []
        self.layers = 0
        self.saving = (0.0, 0.0)

    def now(self) -> tuple[float, float]:
        return time.process_time() - self.saving[0], time.perf_counter() - self.began - self.saving[1]

    def tick(self, save: Callable[[Path], None], folder: Path, length: float) -> None:
        """Note the end of a step. Save the adapter as `folder/STEP` after the first, and if it is to be evaluated."""
        self.ticks.append(self.now())
        self.lengths.append(length)
        step = len(self.ticks)
        if step == 1 or (self.every and step % self.every == 0):
            save(folder / str(step))
            self.layers = adapted_layers(folder / str(step))
            self.saving = tuple(now - then + spent for now, then, spent in zip(self.now(), self.ticks[-1], self.saving))

    def seconds(self, of_kind: int) -> list[float]:
        """Return the seconds of each step except the first two."""
        times = [tick[of_kind] for tick in self.ticks]
        return [after - before for before, after in zip(times[WARM_UP - 1 : -1], times[WARM_UP:])]


def adapted_layers(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return sum(".lora_A." in name for name in file.keys())  # noqa: SIM118 (it is no dictionary)


def settings(steps: int, seed: int, folder: Path, *more: str) -> Any:
    from trainer.config.resolve import resolve

    fixed = ["model.dtype=fp32", "run.merge=false", "run.threads=1"]
    fixed += [f"run.steps={steps}", f"run.seed={seed}", f"run.dir={folder}"]
    return resolve("nano", None, [*fixed, "eval.problems=0", "run.save_every=100000", *more])


def octet(steps: int, seed: int, folder: Path, clock: Clock, *more: str) -> None:
    from trainer.config.request import Request
    from trainer.loop import train
    from trainer.machine import hardware, quiet
    from trainer.machine.console import Console
    from trainer.plan import preflight
    from trainer.run import assemble
    from trainer.watch.screen import Screen

    run: Any

    class Ticking(Screen):
        def step(self, step: int, metrics: Any) -> None:
            clock.tick(run.updater.policy.write_model, folder, metrics["length"])

    quiet.quiet()
    config = settings(steps, seed, folder, *more)
    preflight.import_libraries(config)
    hardware.prepare_cuda(config.rollout.engine)
    with assemble.process_group(config):
        run = assemble.build(Request(config, "nano", ""))
        run.log.screen = Ticking(console=Console(quiet=True))
        train(config, *run)


def trl(steps: int, seed: int, folder: Path, clock: Clock, *more: str, **arguments: Any) -> None:
    """TRL's GRPOTrainer. `arguments` are more of its own; `model`, a function, replaces how it loads the model."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trainer.answers import compare, find
    from trainer.model.load import load_tokenizer, location
    from trainer.problem.prompts import Prompter, answer_style
    from trainer.problem.task import draw, make_task, training_problems
    from trainer.ranks import distributed

    class Ticking(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if trainer.state.global_step % updates == 0:
                lengths = trainer._metrics["train"]["completions/mean_length"]
                clock.tick(lambda place: trainer.model.save_pretrained(str(place)), folder, lengths[-1])

    def correct(completions: list[str], gold: list[str], **_: Any) -> list[float]:
        found = [find.strict(text, style) for text in completions]
        return [float(one is not None and compare.equal(one, right)) for one, right in zip(found, gold)]

    config = settings(steps, seed, folder, *more)
    minibatches, epochs = config.algorithm.minibatches, config.algorithm.epochs
    updates = minibatches * epochs  # of a step
    rollout, task, tokenizer = config.rollout, make_task(config.task), load_tokenizer(config.model)
    style = answer_style(config.prompt, task)
    prompter, problems = Prompter(tokenizer, config.prompt, task), training_problems(task, config.task, seed)
    drawn = [problem for step in range(steps) for problem in draw(problems, step, rollout.problems, seed)]
    asked = [prompter.prompt(problem) for problem in drawn]
    rows = [{"prompt": prompt.text, "gold": prompt.problem.gold} for prompt in asked]
    answers_of_a_step = rollout.problems * rollout.group_size
    longest = max(len(prompt.tokens) for prompt in asked) + rollout.max_new_tokens
    at_once = side_by_side(answers_of_a_step // minibatches, config.optim.tokens_per_micro_batch // longest)
    load = arguments.pop("model", None)
    chosen = GRPOConfig(
        output_dir=str(folder), use_cpu=not distributed.on_gpu(), bf16=config.model.dtype == "bf16", seed=seed,
        report_to="none", disable_tqdm=True, logging_steps=10**6, save_strategy="no", max_steps=steps * updates,
        shuffle_dataset=False, gradient_checkpointing=config.model.gradient_checkpointing,
        model_init_kwargs=None if load else loaded_as(config.model), num_generations=rollout.group_size,
        per_device_train_batch_size=at_once, steps_per_generation=answers_of_a_step // at_once,
        gradient_accumulation_steps=answers_of_a_step // minibatches // at_once,
        max_completion_length=rollout.max_new_tokens, temperature=rollout.temperature, top_p=1.0, top_k=0,
        learning_rate=config.algorithm.lr, lr_scheduler_type="cosine", warmup_steps=round(0.1 * steps * updates),
        max_grad_norm=config.optim.max_grad_norm, beta=0.0, loss_type="dapo", num_iterations=epochs,
        vllm_max_model_length=longest, **arguments,
    )  # fmt: skip
    adapter = LoraConfig(r=config.lora.r, lora_alpha=config.lora.alpha, target_modules="all-linear")
    trainer = GRPOTrainer(
        load(config, longest) if load else location(config.model), correct, args=chosen,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=None if load else adapter,
        callbacks=[Ticking()],
    )  # fmt: skip
    trainer.train()


def side_by_side(rows: int, fitting: int) -> int:
    """Return how many answers fit into Octet's token budget with padding, and divide the batch evenly."""
    return max(count for count in range(1, max(1, min(rows, fitting)) + 1) if rows % count == 0)


def loaded_as(settings: Any) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    from trainer.model.load import DTYPES

    dtype = DTYPES[settings.dtype]
    if settings.quantize == "none":
        return {"dtype": dtype}
    four_bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return {"dtype": dtype, "quantization_config": BitsAndBytesConfig(load_in_4bit=True, **four_bits)}


def unsloth(*given: Any) -> None:
    """TRL's trainer as Unsloth patches it, over a model that Unsloth has loaded."""
    from unsloth import FastLanguageModel  # before trl and transformers

    from trainer.model.load import DTYPES, location

    def load(config: Any, longest: int) -> Any:
        model, _ = FastLanguageModel.from_pretrained(
            str(location(config.model)), max_seq_length=longest, dtype=DTYPES[config.model.dtype],
            load_in_4bit=config.model.quantize == "nf4",
        )  # fmt: skip
        checkpointing = "unsloth" if config.model.gradient_checkpointing else False
        layers = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        return FastLanguageModel.get_peft_model(
            model, r=config.lora.r, lora_alpha=config.lora.alpha, target_modules=layers,
            use_gradient_checkpointing=checkpointing, random_state=config.run.seed,
        )  # fmt: skip

    trl(*given, model=load)


@dataclass(frozen=True)
class Side:
    train: Callable[..., None]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Return what this side needs and the machine lacks: packages, or a card."""
        import torch

        has_card = torch.cuda.is_available()
        return [name for name in self.needs if not (has_card if name == "a card" else find_spec(name))]


BATCHING = "trl, continuous batching"  # takes 12 GB on a CPU, and five times as long as without it
KEEP, OWN = "rollout.dead_groups=keep", "rollout.engine=decode"
SIDES = {
    "trl": Side(trl, ("trl",)),
    "octet": Side(lambda *given: octet(*given, KEEP, OWN)),
    "octet, dropping": Side(lambda *given: octet(*given, OWN)),
    "octet, vllm colocated": Side(
        lambda *given: octet(*given, KEEP, "rollout.engine=vllm_colocate"), ("vllm", "a card")
    ),
    BATCHING: Side(partial(trl, use_transformers_continuous_batching=True), ("trl",)),
    "trl, vllm colocated": Side(partial(trl, use_vllm=True, vllm_mode="colocate"), ("trl", "vllm", "a card")),
    "unsloth": Side(unsloth, ("unsloth", "a card")),
}


@dataclass(frozen=True)
class Cell:
    """Random weights of a shape, trained on answers of exactly so many tokens, under a limit of memory (0: none)."""

    size: str
    quantize: str
    tokens: int
    gib: int

    @property
    def name(self) -> str:
        kind = "bf16" if self.quantize == "none" else self.quantize
        return f"{self.size} {kind}, {self.tokens} tokens, {f'{self.gib} GiB' if self.gib else 'no limit'}"


SHAPES = (("1.5b", "none"), ("7b", "nf4"))
CELLS = [Cell(*shape, tokens, gib) for gib in (8, 0) for tokens in (256, 1024) for shape in SHAPES]
TRIAL = Cell("tiny", "none", 16, 0)  # needs no card


class Meter(threading.Thread):
    """The most bytes of the card that were in use, whoever has taken them; looked at 20 times a second."""

    def __init__(self) -> None:
        import torch

        super().__init__(daemon=True)
        self.used, self.most = torch.cuda.mem_get_info, 0  # before be_small changes what is seen

    def run(self) -> None:
        while True:
            free, total = self.used()
            self.most = max(self.most, total - free)
            time.sleep(0.05)


def curve(folder: Path, clock: Clock, *more: str) -> Iterator[dict[str, float]]:
    """Greedy accuracy of the adapters in a folder, and what each had cost."""
    from trainer.model.load import load_model, load_tokenizer
    from trainer.model.lora import load_adapter
    from trainer.plan.read_data import read_held_out
    from trainer.ranks import distributed
    from trainer.run import assemble

    config = settings(1, 0, folder, f"eval.problems={HELD_OUT}", *more)
    data = read_held_out(config)
    for step in range(clock.every, len(clock.ticks) + 1, clock.every):
        model = load_adapter(load_model(config.model, "fp32", distributed.device()), folder / str(step))
        found = assemble.evaluate_model("trained", model, load_tokenizer(config.model), config, data)
        cpu, wall = clock.ticks[step - 1]
        samples = step * config.rollout.problems * config.rollout.group_size
        yield {"samples": samples, "cpu_s": cpu, "wall_s": wall, "accuracy": found.accuracy}


def one_side(options: argparse.Namespace) -> None:
    """Run one program in this child process, and print the result as its last line."""
    import torch

    torch.set_num_threads(1)
    clock, meter = Clock(options.began, options.every), None
    if torch.cuda.is_available():
        from gpu_memory import be_small

        meter = Meter()
        meter.start()
        be_small(int(options.gib * GIB) or torch.cuda.mem_get_info()[1])
    with tempfile.TemporaryDirectory() as name:
        SIDES[options.side].train(options.steps, options.seed, Path(name), clock, *options.more)
        peak = meter.most / 2**20 if meter else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        cpu, wall = (median(clock.seconds(kind)) for kind in range(2))
        reached = list(curve(Path(name), clock, *options.more)) if clock.every else []
    found = {"cpu_s": cpu, "wall_s": wall, "peak_mib": round(peak), "first_step_s": clock.ticks[0][0], "curve": reached}
    print(json.dumps({**found, "length": fmean(clock.lengths[WARM_UP:]), "layers": clock.layers}))


def run(side: str, seed: int, options: argparse.Namespace, more: list[str], gib: float = 0.0) -> dict[str, Any]:
    fixed = ["--side", side, "--steps", str(options.steps), "--every", str(options.every), "--seed", str(seed)]
    fixed += ["--gib", str(gib), "--began", str(time.perf_counter())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    if options.device == "cuda":
        environment |= {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}  # for all: see trainer/machine/hardware.py
        environment |= {} if "vllm" in side else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, __file__, *fixed, *more], env=environment, capture_output=True, text=True, check=False,
        timeout=options.seconds,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{done.stderr.strip()[-2000:]}\nit ended with status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def summary(runs: dict[str, list[dict[str, Any]]], target: float) -> dict[str, Any]:
    """Medians over the repetitions; accuracy is the mean, because each has its own seed."""
    sides: dict[str, Any] = {}
    for side, results in runs.items():
        sides[side] = {
            name: median(one[name] for one in results)
            for name in ("cpu_s", "wall_s", "peak_mib", "first_step_s", "length")
        }
        if results[0]["curve"]:
            sides[side]["accuracies"] = [one["curve"][-1]["accuracy"] for one in results]
            sides[side]["accuracy"] = fmean(sides[side]["accuracies"])
            sides[side]["curves"] = [one["curve"] for one in results]
            sides[side]["reached"] = [cost_of(target, one["curve"]) for one in results]
    speedups = {
        f"speedup_{clock}{kind}": sides["trl"][f"{clock}_s"] / sides[ours][f"{clock}_s"]
        for ours, kind in (("octet", ""), ("octet, dropping", "_dropping"))
        for clock in ("cpu", "wall")
        if {"trl", ours} <= sides.keys()
    }
    return {"target": target, **speedups, "sides": sides}


def cost_of(target: float, curve: list[dict[str, float]]) -> dict[str, float] | None:
    """Samples and seconds at which a curve first reaches the target, on a line between two evaluations."""
    for before, after in pairwise([{**curve[0], "accuracy": 0.0}, *curve]):
        if before["accuracy"] < target <= after["accuracy"]:
            share = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return {
                name: before[name] + share * (after[name] - before[name]) for name in ("samples", "cpu_s", "wall_s")
            }
    return None


def in_cells(options: argparse.Namespace, sides: Sequence[str]) -> dict[str, Any]:
    """Run each side of each cell, and write the file after each, so that a card that is taken back loses one."""
    from gpu_memory import SIZES, Case

    out = options.out or RESULTS / "versus.json"
    stored = json.loads(out.read_text()) if out.exists() else {"cells": {}}
    cells = stored["cells"]
    chosen = [one for one in (*CELLS, TRIAL) if one.name.startswith(options.only)] if options.only else CELLS
    for cell in chosen:
        found = cells.setdefault(cell.name, {})
        with tempfile.TemporaryDirectory() as folder:
            model, case = Path(folder), Case(cell.size, cell.quantize, cell.tokens)
            more = [*case.settings(model), *options.more]
            left = [side for side in sides if "wall_s" not in found.get(side, {}) and tries(found, side) < MOST_TRIES]
            if left:
                SIZES[cell.size].save(model)
            for side in left:
                found[side] = attempted(side, options, more, cell, tries(found, side))
                stored |= {"machine": describe(), "missing": {one: SIDES[one].missing for one in SIDES}}
                out.write_text(json.dumps(stored, indent=1) + "\n")
    return stored


MOST_TRIES = 2  # of what fails on a card that somebody lends


def tries(found: dict[str, Any], side: str) -> int:
    return int(found.get(side, {}).get("tries", 0))


def attempted(side: str, options: argparse.Namespace, more: list[str], cell: Cell, tried: int) -> dict[str, Any]:
    try:
        one = run(side, 0, options, more, cell.gib)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)[-600:], "tries": tried + 1}
    config = settings(options.steps, 0, Path("none"), *more)
    answers = config.rollout.problems * config.rollout.group_size
    work = {
        "problems": config.rollout.problems,
        "answers": answers,
        "tokens_per_s": answers * one["length"] / one["wall_s"],
    }
    return {**one, **work}


def lost_first(cells: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return the names of the cells, and whether another program was faster there than `octet`, or the only one."""

    def lost(found: dict[str, Any]) -> bool:
        seconds = {side: one["wall_s"] for side, one in found.items() if "wall_s" in one}
        others = [one for side, one in seconds.items() if not side.startswith("octet")]
        return bool(others) and min(others) < seconds.get("octet", float("inf"))

    return sorted(((name, lost(found)) for name, found in cells.items()), key=lambda one: not one[1])


def lines(cells: dict[str, Any]) -> Iterator[str]:
    for name, is_lost in lost_first(cells):
        yield f"{name}{': lost' if is_lost else ''}"
        work = {(round(one["length"]), one["layers"]) for one in cells[name].values() if "wall_s" in one}
        if len(work) > 1:
            yield f"  not the same work: tokens of an answer and layers with an adapter are {sorted(work)}"
        for side, one in cells[name].items():
            if "failed" in one:
                yield f"  {side:24} failed: {one['failed'].splitlines()[-1][:80]}"
                continue
            cost = f"{one['wall_s']:8.2f} s a step  {one['peak_mib']:7.0f} MiB"
            yield f"  {side:24} {cost}  {one['tokens_per_s']:7.0f} tokens/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default 40, and 5 in cells")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every", type=int, help="steps between evaluations (default: only after the last step)")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy to reach (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default cpu, and in cells the card if there is one")
    parser.add_argument("--sides", choices=SIDES, nargs="+", help=f"default on a card all, else all but {BATCHING}")
    parser.add_argument("--cells", action="store_true", help="random weights of larger shapes")
    parser.add_argument("--only", default="", help="with --cells: those whose name begins so")
    parser.add_argument("--seconds", type=float, help="most seconds of one side")
    parser.add_argument("--out", type=Path, help="in place of the file in bench/results/")
    parser.add_argument("more", nargs="*", metavar="key=value", help="settings, for all sides")
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.side:
        one_side(options)
        return
    result = compared(options)
    print(json.dumps(result) if options.json else "\n".join(lines(result["cells"]) if options.cells else table(result)))


def compared(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    options.steps = options.steps or (5 if options.cells else 40)
    options.device = options.device or ("cuda" if options.cells and torch.cuda.is_available() else "cpu")
    if options.every is None:
        options.every = 0 if options.cells else options.steps  # random weights learn nothing
    options.sides = options.sides or [one for one in SIDES if one != BATCHING or options.device == "cuda"]
    for side in options.sides:
        if missing := SIDES[side].missing:
            print(f"{side}: not run, for lack of {', '.join(missing)}", file=sys.stderr)
    sides = [side for side in options.sides if not SIDES[side].missing]
    if options.cells:  # every group of random weights is dead
        return in_cells(options, [side for side in sides if side != "octet, dropping"])
    result = measured(options, sides)
    (options.out or RESULTS / "vs_trl.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def measured(options: argparse.Namespace, sides: Sequence[str]) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for seed in range(options.repeats):
        for side in sides:
            runs[side].append(run(side, seed, options, options.more))
    return {"machine": describe(), "steps": options.steps, **summary(runs, options.target)}


def table(result: dict[str, Any]) -> Iterator[str]:
    for side, one in result["sides"].items():
        yield f"{side:24} {one['cpu_s']:.2f} CPU s, {one['wall_s']:.2f} s a step, {one['peak_mib']:.0f} MiB"
        if "accuracy" in one:
            reached = ", ".join(f"{cost['cpu_s']:.0f} CPU s" if cost else "not seen" for cost in one["reached"])
            yield f"{one['accuracy']:.1%} after {result['steps']} steps; {result['target']:.0%} after {reached}"


if __name__ == "__main__":
    main()
