"""The tables in bench/results/ and the figures in docs/, from what was measured: python bench/report.py"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import counts_cuda_host
import figures
import page_memory
import page_results
import page_scaling
from page_results import DOCS, markdown, on

from trainer.reports.chart import svg

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
HEAD = """# Speed: all tables

Numbers are medians of what was measured unless a section says that it counts or computes. Programs that are compared
took turns on one machine. [The evidence](../../docs/evidence.md) says what follows. `python bench/report.py` makes this
page from the files beside it, which have the machine, the versions and the command of each measurement.

"""
AGAINST_TRL = {
    "vs_trl": "the embedded model, as it is trained by default, 16 x 8 answers of at most 40 tokens",
    "vs_trl_smollm2": "SmolLM2-135M on sums, 8 x 8 answers of at most 12 tokens, beside other programs",
    "vs_trl_tuned": "the embedded model, four updates of each batch, with which TRL is faster",
}
CARD_NAME = "NVIDIA H100 80GB HBM3"
CARD = f"cards/{CARD_NAME.replace(' ', '-')}"


def page() -> str:
    sides = [line for path in sorted(RESULTS.glob("vs_trl*.json")) for line in _vs_trl(path.stem)]
    measured = [*sides, *_decode(), *_vllm(), *_logprobs(), *_seeds(), *_answers(), *_sandbox()]
    return "\n".join([HEAD, *_card(), *counts_cuda_host.section(), *measured])


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _card() -> Iterator[str]:
    card = _read(CARD)
    (case,) = card["parts"]["speed"]["result"]
    (with_cudnn,) = card["parts"]["speed with cuDNN's attention"]["result"]
    (later,) = card["parts"]["speed, four days later"]["result"]
    octet, trl = case["octet"]["seconds"], case["trl"]["seconds"]["step"]
    yield "## A training step of 1.5 B parameters on an H100\n"
    yield "The shape of Qwen2.5-1.5B with random weights in bf16, LoRA r=16 on all layers, gradient checkpointing,"
    yield "4 problems x 8 answers of exactly 256 tokens, one optimizer step. TRL is GRPOTrainer without vLLM. Both hold"
    yield "at most 4,096 tokens in one pass, as on a small card; larger passes might help either on this one. Neither"
    yield "side uses cuDNN's attention.\n"
    yield "| | s a step | rollout | update |\n| --- | --- | --- | --- |"
    for name, one in {"Octet": octet, "Octet, four days later": later["octet"]["seconds"]}.items():
        yield f"| {name} | {sum(one.values()):.1f} | {one['time/rollout']:.1f} | {one['time/step']:.1f} |"
    yield f"| TRL | {trl:.1f} | | |\n"
    by_cudnn = with_cudnn["octet"]["seconds"]["time/step"]
    larger = card["parts"]["speed, larger passes"]["result"]["octet"]
    yield f"Octet was {trl / sum(octet.values()):.1f} times as fast as TRL. The second row is a later revision, on"
    yield "another card of this kind; TRL was not measured again. On that card a step with 20,480 tokens in a pass and"
    yield f"without gradient checkpointing took {larger['wall_s']:.1f} s and {larger['peak_mib'] / 1024:.0f} GiB"
    yield f"(`{card['parts']['speed, larger passes']['command']}`)."
    yield "With cuDNN's attention, which torch takes on this card by default, Octet's update took"
    yield f"{by_cudnn:.1f} s; TRL was not measured with it."
    machine = {**card["machine"], "card": CARD_NAME, "command": card["parts"]["speed"]["command"]}
    yield f"Medians of three steps of each run. {on(machine)}"
    yield from _decode_on_a_card(card)


def _decode_on_a_card(card: Any) -> Iterator[str]:
    in_8_bits, kernels = (card["parts"][name]["result"] for name in ("decode in 8 bits", "kernels of a decode step"))
    yield "## Where a decode step goes on an H100\n"
    floor = in_8_bits["over_memory_floor"]
    yield "32 rows of the same model with merged copies of its weights: prompts of 256 tokens, answers of 512."
    yield f"Reading weights and cache once at the speed of a copy ({floor['copy_gb_per_s']:,.0f} GB/s) takes"
    yield f"{floor['floor_ms']:.1f} ms.\n"
    yield "| weights | tokens a second | a step | kernels that take the most, with microseconds a step and calls |"
    yield "| --- | --- | --- | --- |"
    for kind, own in kernels.items():
        parts = ", ".join(f"{name} {one[0]} ({one[1]:.0f})" for name, one in own.items() if name != "total_ms")
        measured = in_8_bits[kind]
        step = measured["wall_s"] / measured["steps"] * 1e3
        yield f"| {kind} | {measured['per_wall_s']:,.0f} | {step:.1f} ms | {parts} |"
    command = card["parts"]["decode in 8 bits"]["command"]
    yield f"\nMedians of two runs. {on({**card['machine'], 'card': CARD_NAME, 'command': command})}"


def _vs_trl(name: str) -> Iterator[str]:
    result = _read(name)
    yield f"## Against TRL's GRPOTrainer: {AGAINST_TRL[name]}\n"
    clock, what = ("wall", "s") if name.endswith("_cuda") else ("cpu", "CPU s")
    yield "Both sides train LoRA r=16 on all layers, with the same settings, the same problems in the same order, and"
    yield "one thread on a CPU. The row `octet` trains on every group, as TRL does; by default Octet drops dead groups."
    yield "Times are medians."
    seeds = [len(one["accuracies"]) for one in result["sides"].values() if "accuracies" in one]
    yield (f"Accuracy is greedy, on 256 held-out problems, and the mean over {min(seeds)} seeds.\n" if seeds else "")
    yield f"| | {what} a step | peak MiB | accuracy after {result['steps']} steps |\n" + "| --- " * 4 + "|"
    for side, one in result["sides"].items():
        right = f"{one['accuracy']:.1%}" if "accuracy" in one else "random weights"
        yield f"| {side} | {one[f'{clock}_s']:.2f} | {one['peak_mib']:.0f} | {right} |"
    like, dropping = (f"{result[f'speedup_{clock}{kind}']:.1f} times as fast" for kind in ("", "_dropping"))
    yield f"\nOctet is **{like}** on the same groups, and {dropping} if it drops dead groups. {on(result['machine'])}"
    if all("curves" in one for one in result["sides"].values()):
        yield from _reached(result, name)


def _reached(result: dict[str, Any], name: str) -> Iterator[str]:
    """When each side reaches the target: the median over the seeds, and the range."""
    yield f"Cost until {result['target']:.0%} are right, interpolated between two evaluations: the median of"
    yield f"{len(result['sides']['trl']['reached'])} seeds, and the range. Seconds are CPU seconds since the program"
    yield "was started, and since the end of its first step, without the time to save adapters for the evaluations.\n"
    yield "| | samples | CPU s | since the first step | first step |\n" + "| --- " * 5 + "|"
    for side, one in result["sides"].items():
        reached, first = one["reached"], one["first_step_s"]
        if None in reached:
            yield f"| {side} | not in {reached.count(None)} of {len(reached)} seeds | | | {first:.1f} |"
            continue
        samples, seconds = ([cost[name] for cost in reached] for name in ("samples", "cpu_s"))
        after = [cost - first for cost in seconds]
        spread = " | ".join(
            f"{median(one):,.0f} ({min(one):,.0f} to {max(one):,.0f})" for one in (samples, seconds, after)
        )
        yield f"| {side} | {spread} | {first:.1f} |"
    yield f"\n![accuracy over samples]({DOCS}/{name}_samples.svg) ![accuracy over seconds]({DOCS}/{name}_seconds.svg)\n"


def _decode() -> Iterator[str]:
    yield "## Sampling against model.generate\n"
    yield "Useful tokens a second (of the CPU, or of the wall on a GPU), with LoRA r=16 on all layers. Tests compare"
    yield "the greedy tokens with those of `generate`. The floor is the time to read weights and cache once at the"
    yield "speed of a copy.\n"
    yield "| model | rows | generate | decode | speedup (least to most) | times the floor |\n" + "| --- " * 6 + "|"
    measured = _read("decode")
    for name, run in measured.items():
        clock = "per_cpu_s" if run["device"] == "cpu" else "per_wall_s"
        for rows, one in run["results"].items():
            spread, floor = one[f"speedup_{clock}"], one["over_memory_floor"]["ratio"]
            tokens = f"{one['generate'][clock]:,.0f} | {one['decode'][clock]:,.0f}"
            speedup = f"**{spread['median']:.1f}** ({spread['least']:.1f} to {spread['most']:.1f})"
            yield f"| {name} | {rows} | {tokens} | {speedup} | {floor:.1f} |"
    yield "\nThe shape of SmolLM2-135M stays below four times `generate` on a CPU: both wait for the same matmuls.\n"
    for name, run in measured.items():
        yield f"{name}, medians of {run['repetitions']} repetitions: {on(run['machine'])}"


def _vllm() -> Iterator[str]:
    yield "## vLLM in whole runs\n"
    yield "On a CPU these runs show whether vLLM samples correctly, and not how fast it is, because there it computes"
    yield "adapters in plain PyTorch, and both programs share the cores. `ahead` samples the next step while this one"
    yield "trains."
    for model, result in _read("vllm").items():
        yield f"\n{model}:\n\n| engine | tokens a second | rollout | training | a step |\n" + "| --- " * 5 + "|"
        for engine, one in result["runs"].items():
            seconds = " | ".join(f"{one[name]:.2f} s" for name in ("rollout_s", "training_s", "step_s"))
            tokens = "" if "ahead" in engine else f"{one['tokens_per_s']:,.0f}"  # most of its rollout is elsewhere
            yield f"| {engine} | {tokens} | {seconds} |"
        for engine, one in result["sync"].items():
            yield (
                f"\nFrom an update to a {engine} that has it: {one['median_ms']:.0f} ms ({one['most_ms']:.0f} at most) "
                f"for {one['bytes'] / 1e6:.1f} MB."
            )
        yield f"\n{on(result['machine'])}"


def _logprobs() -> Iterator[str]:
    result = _read("logprobs")
    yield "## Log-probs chunk by chunk\n"
    yield f"Forward and backward through an output layer of {result['vocabulary']:,} x {result['hidden']:,}, against"
    yield "logits that are there all at once. Memory is what the pass adds at its peak.\n"
    yield "| tokens | chunked | whole | memory | time |\n| --- | --- | --- | --- | --- |"
    for size in result["sizes"]:
        chunked, whole = (f"{size[way]['peak_mib']:,.0f} MiB" for way in ("chunked", "whole"))
        yield f"| {size['tokens']:,} | {chunked} | {whole} | {size['memory']:.0%} | {size['time']:.0%} |"
    yield f"\n{on(result['machine'])}"


def _seeds() -> Iterator[str]:
    result = _read("seeds")
    yield "## The shipped default, start to end\n"
    yield "| seed | greedy before | after | whole command | training |\n| --- | --- | --- | --- | --- |"
    for run in result["runs"]:
        accuracy = f"{run['base']:.1%} | {run['trained']:.1%}"
        yield f"| {run['seed']} | {accuracy} | {run['wall_s']:.0f} s | {run['training_s']:.0f} s |"
    phases = {name: fmean(run["phases_s"][name] for run in result["runs"]) for name in result["runs"][0]["phases_s"]}
    shares = ", ".join(f"{name} {seconds / sum(phases.values()):.0%}" for name, seconds in phases.items())
    yield f"\nWhere the time of training goes: {shares}. {on(result['machine'])}"


def _answers() -> Iterator[str]:
    result = _read("answers")
    yield "## Answers read and compared\n"
    yield f"{result['what']}.\n\n| text | a second |\n| --- | --- |"
    for shape, one in result["results"].items():
        yield f"| `{shape}` | {one['per_second']:,} |"
    yield f"\nMedians of {result['repetitions']} repetitions. `{result['command']}` on"
    yield f"{result['machine']['cores']} cores of {result['machine']['processor']}.\n"


def _sandbox() -> Iterator[str]:
    result = _read("sandbox")
    yield "## Programs in the sandbox\n"
    yield f"CPU time of each over all processes, and programs a second, {result['at_once']} at once: medians of"
    yield f"{result['repetitions']} times {result['programs']} programs, held in by {result['held_in_by']}.\n"
    rows = []
    for name, one in result["results"].items():
        taken = f"{one['cpu_ms']:.1f} ms" if "cpu_ms" in one else ""
        rows.append([name, taken, f"{one['per_second']:.0f}", f"{one['slowest']:.0f} to {one['fastest']:.0f}"])
    yield from markdown(["", "CPU time of each", "a second", "slowest to fastest"], rows)
    yield f"{on(result['machine'])}"


def claims() -> dict[str, list[str]]:
    """Return what README.md and the pages of evidence say in numbers, as it has to stand there."""
    return {
        "README.md": [*_of_the_default()],
        "docs/evidence_trl.md": [*_against_trl()],
        "docs/evidence_small_model.md": [*_of_a_small_model()],
        "docs/evidence_learning.md": [*_of_studies("controls", "addition_cpu")],
        "docs/small_model_learns.md": [*_of_generators()],
        "docs/evidence_settings.md": [*_of_studies("ablations", "losses")],
        "docs/evidence_intervals.md": [*_of_intervals()],
        "docs/evidence_scaling.md": [*_of_scaling()],
    }


def _of_the_default() -> Iterator[str]:
    yield f"at least +{100 * _read('seeds')['least_gain']:.1f} points"


def _against_trl() -> Iterator[str]:
    (case,) = _read(CARD)["parts"]["speed"]["result"]
    octet, trl = sum(case["octet"]["seconds"].values()), case["trl"]["seconds"]["step"]
    yield f"| {trl:.1f} s | {octet:.1f} s | {trl / octet:.1f} |"
    for name, digits in (("vs_trl", 2), ("vs_trl_tuned", 2), ("vs_trl_smollm2", 1)):
        result = _read(name)
        ours, theirs = (result["sides"][side]["cpu_s"] for side in ("octet", "trl"))
        yield f"| {theirs:.{digits}f} s | {ours:.{digits}f} s | {result['speedup_cpu']:.1f} |"
    smollm2 = _read("vs_trl_smollm2")["sides"]
    ours, theirs = (smollm2[side]["peak_mib"] * 2**20 / 1e9 for side in ("octet", "trl"))
    yield f"{ours:.1f} GB in place of {theirs:.1f}"
    for name in ("vs_trl", "vs_trl_tuned"):
        sides = _read(name)["sides"]
        trl, octet = ([cost["cpu_s"] for cost in sides[side]["reached"]] for side in ("trl", "octet, dropping"))
        yield " | ".join(f"{median(one):.0f} s ({min(one):.0f} to {max(one):.0f})" for one in (trl, octet))


def _of_a_small_model() -> Iterator[str]:
    runs = _read("addition")["runs"]
    for arm in ("right", "random"):
        curves = [run["curve"] for run in runs if run["arm"] == arm]
        after = ", ".join(f"{100 * curve[-1]['strict']:.1f}" for curve in curves)
        yield f"| {100 * fmean(curve[0]['strict'] for curve in curves):.1f} % | {after} % |"
    first, *_, last = _read("gsm8k")["runs"][0]["warmup"]["curve"]
    yield f"from {100 * first['strict']:.1f} to {100 * last['strict']:.1f} %"


def _of_studies(*names: str) -> Iterator[str]:
    for name in names:
        found = page_results.read(f"studies/{name}")
        for one in found["comparisons"]:
            if one["against"] == "base" and one["arm"] == found["first"]:
                low, gain, high = (100 * one[value] for value in ("low", "difference", "high"))
                yield f"{gain:+.1f} points ({low:+.1f} to {high:+.1f})"


def _of_generators() -> Iterator[str]:
    for name in ("gym_products", "gym_word_order", "gym_word_order_gemma", "gym_number_filter"):
        arms = _read(f"studies/{name}")["arms"]
        before, *after = ([100 * one for one in arms[arm]["strict"]] for arm in arms)
        cells = (f"{fmean(seeds):.0f} % ({min(seeds):.0f}-{max(seeds):.0f})" for seeds in after)
        yield " | ".join([f"{before[0]:.0f} %", *cells])
    yield from _of_studies("gym_products")


def _of_intervals() -> Iterator[str]:
    shares = [one["coverage"] for one in _read("coverage")["coverage"]]
    yield f"{100 * min(shares):.1f} to {100 * max(shares):.1f} % of simulated studies, over {len(shares)} designs"


def _of_scaling() -> Iterator[str]:
    result = _read("scaling")
    least, most = result["least_and_most"]
    yield f"{100 * result['efficiency']['whole']:.0f} % ({100 * least:.0f} to {100 * most:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, help="the folder to write to (default %(default)s)")
    root = parser.parse_args().out
    modules = {"learning": page_results, "scaling": page_scaling, "memory": page_memory}
    pages = {"speed": page(), **{name: module.page() for name, module in modules.items()}}
    for folder in ("docs", "bench/results"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (root / f"bench/results/{name}.md").write_text(text, encoding="utf-8")
    (root / "docs/results.md").write_text(page_results.results_page(), encoding="utf-8")
    for name, *drawn in figures.figures():
        (root / f"docs/{name}.svg").write_text(svg(*drawn, alone=True), encoding="utf-8")


if __name__ == "__main__":
    main()
