"""A whole training step against TRL's GRPOTrainer: the same model, adapter, prompts, groups, lengths and machine.

python bench/vs_trl.py [--steps 40] [--repeats 3] [--json]        writes bench/results/vs_trl.json
python bench/vs_trl.py --device cuda                               writes bench/results/vs_trl_cuda.json
python bench/vs_trl.py --device cuda --shape qwen2.5-1.5b-shape --steps 6 model.dtype=bf16 rollout.problems=4
    rollout.max_new_tokens=512 prompt.style=few_shot               random weights: time and memory, no accuracy

`octet` trains on every group, as TRL does; `octet, dropping` leaves out those that teach nothing, which is Octet's
default. Each side is a process of its own, and they take turns. A step is the median over all steps but the first two
of each process; accuracy is greedy, on the same held-out problems, by the same code. With --every 5 it is measured
after every five steps, which shows when each side reaches --target; saving the adapters for that is not timed.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from machine import describe, python_path

ROOT = Path(__file__).parent.parent
SIDES = ("trl", "octet", "octet, dropping")
WARM_UP = 2
HELD_OUT = 256


class Clock:
    """CPU and wall seconds since this process was started, after each step. Saving adapters does not count."""

    def __init__(self, began: float | None = None, every: int = 0) -> None:
        self.began, self.every = time.perf_counter() if began is None else began, every
        self.ticks: list[tuple[float, float]] = []
        self.saving = (0.0, 0.0)

    def now(self) -> tuple[float, float]:
        return time.process_time() - self.saving[0], time.perf_counter() - self.began - self.saving[1]

    def tick(self, save: Callable[[Path], None], folder: Path) -> None:
        """Note the end of a step, and save the adapter as `folder/STEP` if it is one of those to be evaluated."""
        self.ticks.append(self.now())
        if self.every and len(self.ticks) % self.every == 0:
            save(folder / str(len(self.ticks)))
            self.saving = tuple(now - then + spent for now, then, spent in zip(self.now(), self.ticks[-1], self.saving))

    def seconds(self, of_kind: int) -> list[float]:
        """Return the seconds of each step except the first two."""
        times = [tick[of_kind] for tick in self.ticks]
        return [after - before for before, after in zip(times[WARM_UP:-1], times[WARM_UP + 1 :])]


def with_random_weights(shape: str, folder: Path) -> str:
    """A model of that shape, with the tokenizer of the embedded one."""
    from decode import SHAPES
    from transformers import AutoModelForCausalLM

    from trainer.config.settings import Model
    from trainer.model.load import load_tokenizer

    AutoModelForCausalLM.from_config(SHAPES[shape].config).save_pretrained(str(folder))
    load_tokenizer(Model()).save_pretrained(str(folder))
    return f"model.name={folder}"


def settings(steps: int, seed: int, folder: Path, *more: str) -> Any:
    from trainer.config.command_line import resolve

    fixed = [
        "model.dtype=fp32",
        f"run.steps={steps}",
        f"run.seed={seed}",
        f"run.dir={folder}",
        "run.merge=false",
        "run.threads=1",
    ]
    return resolve("nano", None, [*fixed, "eval.problems=0", "run.save_every=100000", *more])


def octet(steps: int, seed: int, folder: Path, clock: Clock, *more: str) -> None:
    from trainer.config.command_line import Request
    from trainer.loop import train
    from trainer.machine import hardware, quiet
    from trainer.plan import preflight
    from trainer.run import assemble
    from trainer.watch.screen import Screen

    class Ticking(Screen):
        def step(self, step: int, metrics: Any) -> None:
            clock.tick(run.updater.policy.write_model, folder)

    quiet.quiet()
    config = settings(steps, seed, folder, *more)
    preflight.import_libraries(config)
    hardware.prepare_cuda("decode")
    with assemble.process_group(config):
        run = assemble.build(Request(config, "nano", ""))
        run.log.screen = Ticking(quiet=True)
        train(config, *run)


def trl(steps: int, seed: int, folder: Path, clock: Clock, *more: str) -> None:
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
                clock.tick(lambda place: trainer.model.save_pretrained(str(place)), folder)

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
    arguments = GRPOConfig(
        output_dir=str(folder), use_cpu=not distributed.on_gpu(), bf16=config.model.dtype == "bf16", seed=seed,
        report_to="none", disable_tqdm=True, logging_steps=10**6, save_strategy="no", max_steps=steps * updates,
        shuffle_dataset=False, gradient_checkpointing=config.model.gradient_checkpointing,
        model_init_kwargs=loaded_as(config.model), num_generations=rollout.group_size,
        per_device_train_batch_size=at_once, steps_per_generation=answers_of_a_step // at_once,
        gradient_accumulation_steps=answers_of_a_step // minibatches // at_once,
        max_completion_length=rollout.max_new_tokens, temperature=rollout.temperature, top_p=1.0, top_k=0,
        learning_rate=config.algorithm.lr, lr_scheduler_type="cosine", warmup_steps=round(0.1 * steps * updates),
        max_grad_norm=config.optim.max_grad_norm, beta=0.0, loss_type="dapo", num_iterations=epochs,
    )  # fmt: skip
    adapter = LoraConfig(r=config.lora.r, lora_alpha=config.lora.alpha, target_modules="all-linear")
    trainer = GRPOTrainer(
        location(config.model), correct, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, peft_config=adapter, callbacks=[Ticking()],
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


RUNNERS: dict[str, Callable[..., None]] = {
    "trl": trl,
    "octet": lambda *given: octet(*given, "rollout.dead_groups=keep"),
    "octet, dropping": octet,
}


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
    clock = Clock(options.began, options.every)
    with tempfile.TemporaryDirectory() as name:
        RUNNERS[options.side](options.steps, options.seed, Path(name), clock, *options.more)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if torch.cuda.is_available():  # what matters there
            peak = torch.cuda.max_memory_reserved() / 2**20
        cpu, wall = (median(clock.seconds(kind)) for kind in range(2))
        reached = list(curve(Path(name), clock, *options.more)) if clock.every else []
        first = clock.ticks[0][0]
        print(
            json.dumps({"cpu_s": cpu, "wall_s": wall, "peak_mib": round(peak), "first_step_s": first, "curve": reached})
        )


def run(side: str, seed: int, options: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    fixed = ["--side", side, "--steps", str(options.steps), "--every", str(options.every), "--seed", str(seed)]
    command = [sys.executable, __file__, *fixed, "--began", str(time.perf_counter()), *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def summary(runs: dict[str, list[dict[str, Any]]], target: float) -> dict[str, Any]:
    """Medians over the repetitions; accuracy is the mean, because each has its own seed."""
    sides: dict[str, Any] = {}
    for side, results in runs.items():
        sides[side] = {
            name: median(one[name] for one in results) for name in ("cpu_s", "wall_s", "peak_mib", "first_step_s")
        }
        if results[0]["curve"]:
            sides[side]["accuracies"] = [one["curve"][-1]["accuracy"] for one in results]
            sides[side]["accuracy"] = fmean(sides[side]["accuracies"])
            sides[side]["curves"] = [one["curve"] for one in results]
            sides[side]["reached"] = [cost_of(target, one["curve"]) for one in results]
    theirs, ours, dropping = (sides[side] for side in SIDES)
    return {
        "target": target,
        "speedup_cpu": theirs["cpu_s"] / ours["cpu_s"],
        "speedup_wall": theirs["wall_s"] / ours["wall_s"],
        "speedup_cpu_dropping": theirs["cpu_s"] / dropping["cpu_s"],
        "speedup_wall_dropping": theirs["wall_s"] / dropping["wall_s"],
        "sides": sides,
    }


def cost_of(target: float, curve: list[dict[str, float]]) -> dict[str, float] | None:
    """Samples and seconds at which a curve first reaches the target, on a line between two evaluations."""
    for before, after in pairwise([{**curve[0], "accuracy": 0.0}, *curve]):
        if before["accuracy"] < target <= after["accuracy"]:
            share = (target - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return {
                name: before[name] + share * (after[name] - before[name]) for name in ("samples", "cpu_s", "wall_s")
            }
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every", type=int, help="steps between evaluations (default: only after the last step)")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy to reach (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--shape", help="random weights of a shape that bench/decode.py knows, in place of the embedded"
    )
    parser.add_argument("--out", type=Path, help="in place of the file in bench/results/")
    parser.add_argument("more", nargs="*", metavar="key=value", help="settings, for both sides")
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.side:
        one_side(options)
        return
    if options.every is None:
        options.every = 0 if options.shape else options.steps  # random weights learn nothing
    with tempfile.TemporaryDirectory() as folder:
        more = [*options.more, *([with_random_weights(options.shape, Path(folder))] if options.shape else [])]
        result = measured(options, more)
    conclude(result, options)


def measured(options: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for seed in range(options.repeats):
        for side in SIDES:
            runs[side].append(run(side, seed, options, more))
    return {"machine": describe(), "steps": options.steps, **summary(runs, options.target)}


def conclude(result: dict[str, Any], options: argparse.Namespace) -> None:
    name = "_".join(["vs_trl", *([options.shape] if options.shape else []), *(["cuda"] * (options.device == "cuda"))])
    out = options.out or ROOT / f"bench/results/{name}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
        return
    for side in SIDES:
        one = result["sides"][side]
        print(f"{side:16} {one['cpu_s']:.2f} CPU s, {one['wall_s']:.2f} s a step, {one['peak_mib']:.0f} MiB")
        if "accuracy" in one:
            reached = ", ".join(f"{cost['cpu_s']:.0f} CPU s" if cost else "not seen" for cost in one["reached"])
            print(f"{one['accuracy']:.1%} after {options.steps} steps; {options.target:.0%} after {reached}")
    print(f"like for like {result['speedup_cpu']:.1f} x CPU, {result['speedup_wall']:.1f} x wall; written to {out}")


if __name__ == "__main__":
    main()
