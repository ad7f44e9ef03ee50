"""octet plan, as a person calls it."""

import json
import re
import shlex
import sys

import pytest

from tests.commands.conftest import config_of, write
from tests.conftest import ROOT, launch, said_by, write_lines
from trainer.config.choose_preset import GPU_PRESETS
from trainer.config.request import parse_command_line
from trainer.config.resolve import resolve
from trainer.machine import hardware
from trainer.machine.hardware import Gpu, Hardware


@pytest.fixture(autouse=True)
def ram(monkeypatch):
    monkeypatch.setattr(hardware, "free_ram", lambda: 64 * 10**9)


def octet_plan(capsys, *arguments: str) -> tuple[int, str, str]:
    return said_by(capsys, "plan", *arguments)


def planned(capsys, *arguments: str) -> dict:
    status, out, err = octet_plan(capsys, *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_the_table_says_what_where_and_whether(capsys):
    status, out, _ = octet_plan(capsys, "--preset", "8gb")
    assert (status, max(map(len, out.splitlines())) <= 80) == (0, True)
    told = ["1.72 B parameters in bf16, 17.43 M trained (LoRA r=16)", "weights 3.44 3.44", "KV cache", "merged copies"]
    told += ["allocator slack", "CUDA context", "peak", "it fits: ", "most of it is weights, 3.44 GB"]
    told += ["optimizer offload saves 0.21 GB of the card", "the most that fits"]
    assert [text for text in told if text not in " ".join(out.split())] == []


def test_a_narrow_terminal_has_all_phases_one_below_the_other(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = octet_plan(capsys, "--preset", "8gb")
    heads = [line.split() for line in out.splitlines() if line.startswith("GB ")]
    assert [phase for head in heads for phase in head[1:]] == ["load", "rollout", "backward", "step"]
    assert len(heads) == 2


def test_the_options_are_settings(capsys):
    asked = ("--model", "Qwen/Qwen2.5-3B", "--vram", "12", "--group", "4", "--completion", "1024", "--prompt", "256")
    named = planned(capsys, *asked)
    written = ("model.name=Qwen/Qwen2.5-3B", "rollout.group_size=4", "rollout.max_new_tokens=1024")
    plain = planned(capsys, "--preset", "12gb", "--vram", "12", *written, "prompt.max_tokens=256")
    assert (named["phases"], named["vram_bytes"]) == (plain["phases"], 12 * 10**9)


def test_the_search_prints_a_command_that_fits(capsys):
    found = planned(capsys, "--model", "Qwen/Qwen2.5-7B-Instruct", "--vram", "8", "--completion", "1024", "--search")
    assert found["verdict"] == "fits"
    assert "model.quantize=nf4" in found["proposal"]
    again = planned(capsys, "--preset", "8gb", "--vram", "8", *found["command"].split()[3:])
    assert again["phases"] == found["phases"]
    status, out, _ = octet_plan(capsys, "--model", "Qwen/Qwen2.5-7B-Instruct", "--vram", "8", "--search")
    assert (status, "./run_deepspeed.sh --preset 8gb model.name=Qwen/Qwen2.5-7B-Instruct" in out) == (0, True)


def test_the_search_fills_the_card_with_a_small_model(capsys):
    without = planned(capsys, "--model", "Qwen/Qwen2.5-0.5B", "--vram", "24", "--preset", "8gb")
    found = planned(capsys, "--model", "Qwen/Qwen2.5-0.5B", "--vram", "24", "--preset", "8gb", "--search")
    assert found["peak_bytes"] > without["peak_bytes"]
    assert "optim.tokens_per_micro_batch=16384" in found["proposal"]


def test_the_card_of_this_machine_is_taken(capsys, monkeypatch):
    cards = tuple(Gpu(index, f"GPU-{index}", "RTX 3090", 25.8) for index in range(2))
    monkeypatch.setattr(hardware, "detect", lambda: Hardware(cards, cores=8))
    found = planned(capsys)
    assert (found["model"], found["gpus"], found["vram_bytes"]) == ("Qwen/Qwen3-4B-Instruct-2507", 2, 25_800_000_000)
    assert "RTX 3090" in found["time"]["basis"]


def test_the_command_works_without_torch(tmp_path):
    code = "import sys; sys.modules['torch'] = None\n"
    code += "from trainer.commands.main import main; main(['plan', '--model', 'nano'])"
    assert "nano" in launch(sys.executable, "-c", code, folder=tmp_path, check=True).stdout


def test_the_memory_of_the_machine_is_held_against_the_plan(capsys, monkeypatch):
    monkeypatch.setattr(hardware, "free_ram", lambda: 24 * 10**9)
    _, _, err = octet_plan(capsys, "--preset", "8gb", "--search", "lora.enabled=false")
    assert "fit 8 GB and the 24.0 GB of RAM that are free: " in err
    assert "What fits: lora.enabled=true" in err
    elsewhere = ("--preset", "8gb", "--vram", "8", "--search", "lora.enabled=false")
    found = planned(capsys, *elsewhere)
    assert (found["verdict"], found["ram_fits"], found["ram_free_bytes"]) == ("fits", True, 24 * 10**9)
    assert found["ram_bytes"] > found["ram_free_bytes"]
    _, out, _ = octet_plan(capsys, *elsewhere)
    assert "24.0 GB are free here" in out  # the card that is named may be in another machine
    assert "it fits: " in out
    assert "more than this machine has" not in out


def test_a_small_table_is_asked_no_more_than_it_holds_out(capsys, tmp_path):
    lines = [f'{{"question": "{n} + 1?", "answer": "{n + 1}"}}' for n in range(200)]
    (tmp_path / "table.json").write_text(f"[{', '.join(lines)}]")
    words = ("--preset", "8gb", "--card", "RTX 4060", "task.name=records", f"task.path={tmp_path}/table.json")
    small, asked = planned(capsys, *words)["time"], planned(capsys, *words, "eval.problems=60")["time"]
    assert small == asked


def test_the_exit_status_says_whether_it_fits(capsys, monkeypatch):
    too_large = ("--preset", "8gb", "model.name=Qwen/Qwen2.5-7B")
    status, out, _ = octet_plan(capsys, *too_large, "--json")
    assert (status, json.loads(out)["verdict"]) == (1, "too large")
    status, out, _ = octet_plan(capsys, "--preset", "24gb", "lora.enabled=false")
    assert (status, "it does not fit" in out, "What fits: " in out) == (1, True, True)
    assert octet_plan(capsys, *too_large, "--search")[0] == 0
    assert [octet_plan(capsys, "--vram", "0.1", *more)[0] for more in ((), ("--json",))] == [1, 1]
    assert " for 1 step on " in octet_plan(capsys, "--preset", "8gb", "run.steps=1", "--card", "RTX 4060")[1]
    assert octet_plan(capsys, "--preset", "8gb", "--vram", "6")[0] == 0  # it may fit, and a run tries
    monkeypatch.setattr(hardware, "free_ram", lambda: 10**9)
    assert octet_plan(capsys, "--preset", "8gb")[0] == 1
    assert octet_plan(capsys, "--preset", "8gb", "--vram", "8")[0] == 0  # the card may be in another machine


def test_terms_add_up_to_the_peak(capsys):
    found = planned(capsys, "--preset", "24gb", "--gpus", "2")
    assert found["gpus"] == 2
    assert {name: sum(terms.values()) for name, terms in found["phases"].items()} == found["peaks"]
    assert found["peak_bytes"] == max(found["peaks"].values()) == found["peaks"][found["peak_phase"]]
    assert found["vram_bytes"] == 24 * 10**9


def test_the_command_can_be_pasted_and_its_recipe_counts(capsys):
    found = planned(capsys, "--preset", "8gb", "--recipe", "gradreg", "prompt.system=think, then answer")
    assert "regularisation" in found["phases"]["backward"]
    assert "--recipe gradreg 'prompt.system=think, then answer'" in found["command"]
    assert shlex.split(found["command"])[-1] == "prompt.system=think, then answer"
    assert found["proposal"] is None


def test_the_search_and_the_most_that_fits_agree(capsys):
    """A card that is too small gets no larger micro-batches."""
    card = ("--preset", "8gb", "--vram", "6")
    found = planned(capsys, *card, "--search")
    assert found["proposal"] == [f"rollout.rows={found['largest']['rows']}"]
    assert planned(capsys, *card, *found["proposal"])["verdict"] == "fits"
    _, without, _ = octet_plan(capsys, *card)
    assert f"proposed: {found['proposal'][0]}\n" in without  # by itself, because it may not fit


def test_the_most_that_fits_is_no_less_than_what_fits(capsys):
    """Answers of 508 to 511 tokens do not fit, and those of 512 do, because fewer of them go into a micro-batch."""
    settings = ("model.name=Qwen/Qwen2.5-1.5B", "rollout.max_new_tokens=512", "optim.tokens_per_micro_batch=4414")
    found = planned(capsys, "--preset", "8gb", "--vram", "6", "rollout.rows=25", *settings)
    assert (found["verdict"], found["largest"]["max_new_tokens"]) == ("fits", 512)


def test_the_time_on_a_card_lies_between_bounds(capsys):
    found = planned(capsys, "--preset", "8gb", "--card", "RTX 4060")["time"]
    least, most = found["hours"]
    assert found["steps"] == 100
    parts = {name: seconds[0] for name, seconds in found["seconds"].items()}
    worked_out = found["steps"] * (parts["rollout"] + parts["update"]) + 4 * parts["evaluation"]
    assert least == pytest.approx(worked_out / 3600)
    assert 1 < most / least < 13
    assert found["about"] == pytest.approx((least * most) ** 0.5)
    _, out, _ = octet_plan(capsys, "--preset", "8gb", "--card", "RTX 4060")
    assert f"time: about {found['about']:.1f} h (between {least:.0f} and {most:.1f}) for 100 steps on RTX 4060\n" in out


GSM8K = ["--preset", "8gb", "--card", "H100", "run.epochs=2"]
LINES = ["task.name=records", "task.question=q", "task.answer=a", "task.holdout=0.2"]


@pytest.mark.parametrize(("more", "steps"), [([], 1868), (["task.limit=100"], 25), ([*LINES, "task.path={}"], 10)])
def test_the_steps_follow_from_the_number_of_problems(capsys, tmp_path, more, steps):
    path = tmp_path / "mine.jsonl"
    write_lines(path, ({"q": f"What is {one} + 1?", "a": one + 1} for one in range(50)))
    assert planned(capsys, *GSM8K, *[one.format(path) for one in more])["time"]["steps"] == steps


def test_problems_that_nobody_has_counted_are_said(capsys):
    asked = [*GSM8K, "task.name=math"]
    assert planned(capsys, *asked)["time"]["hours"] is None
    assert "write run.steps" in octet_plan(capsys, *asked)[1]


@pytest.mark.parametrize(("arguments", "gigabytes", "card"), [
    (["--preset", "8gb", "--card", "RTX 4090"], 24, "RTX 4090"),
    (["--card", "rtx 5060 ti 16gb", "--preset", "16gb"], 16, "rtx 5060 ti 16gb"),
    (["--card", "RTX 4060", "--vram", "6", "--preset", "8gb"], 6, "RTX 4060"),
    (["--card", "RTX 5060 Ti", "--preset", "16gb"], 16, "RTX 5060 Ti"),
    (["--card", "RTX 5060 Ti", "--preset", "8gb"], 8, "RTX 5060 Ti"),
    (["--preset", "cluster"], 80, "H100"),
    (["--preset", "12gb"], 12, "RTX 3060"),
    (["--preset", "8gb", "--vram", "48"], 48, "RTX 3090"),  # the common one of this size or below
    (["--preset", "8gb", "--vram", "11.9"], 11.9, "RTX 3060"),
    (["--preset", "8gb", "--vram", "6"], 6, "RTX 4060"),
])  # fmt: skip
def test_a_card_has_its_memory_and_a_preset_its_card(capsys, arguments, gigabytes, card):
    found = planned(capsys, *arguments)
    assert found["vram_bytes"] == gigabytes * 10**9
    assert found["time"]["basis"].endswith(card)


def test_the_models_that_fit_a_card_are_listed_the_best_first(capsys):
    status, out, _ = octet_plan(capsys, "--vram", "8")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    found = json.loads(octet_plan(capsys, "--card", "RTX 4060", "--json")[1])
    sizes = [one["parameters"] for one in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len(found) >= 8
    assert all(one["verdict"] == "fits" and one["time"]["about"] for one in found)
    own = next(one for one in found if one["model"] == resolve("8gb").model.name)
    assert own["proposal"] is None
    for one in found:
        assert f"\n{one['model']} " in out
        assert {*(one["proposal"] or [])} <= {*out.split()} | {one["command"]}
    assert len(json.loads(octet_plan(capsys, "--vram", "80", "--json")[1])) > len(found)
    assert re.search(
        r"^Nothing fits 0.3 GB\..* google/gemma-3-270m-it, needs 2 GB\.$", octet_plan(capsys, "--vram", "0.3")[1]
    )


def test_the_command_below_the_list_has_what_was_asked(capsys):
    asked = "--vram 16 --recipe dapo --completion 64 run.steps=5"
    assert f"octet plan --model NAME {asked} shows" in octet_plan(capsys, *asked.split())[1]
    assert octet_plan(capsys, "--card", "T4")[1].count("T4") == 2  # the card is named once, and in the command


SHIPPED = [name for name in GPU_PRESETS if name not in ("cluster", "smollm2-gsm8k")]


@pytest.mark.parametrize("preset", SHIPPED)
def test_the_search_proposes_nothing_worse_than_a_preset(capsys, preset):
    """It samples as many answers at a time, keeps as many bits, and proposes the preset where no less will do."""
    config, size = resolve(preset), GPU_PRESETS[preset]
    found = planned(capsys, "--model", config.model.name, "--vram", str(size), "--search")
    again = resolve(found["command"].split()[2], None, found["command"].split()[3:])
    assert found["verdict"] == "fits"
    assert again.rollout.rows >= config.rollout.rows
    assert again.model.quantize in ("none", config.model.quantize)
    assert not again.model.activation_offload
    commands = (found["command"].split()[1:], ["--preset", preset])
    least, own = (planned(capsys, *one, "--vram", str(size)) for one in commands)
    assert least["peak_bytes"] == own["peak_bytes"] or least["time"]["about"] < 0.95 * own["time"]["about"]
    if preset == "8gb-4b":
        assert (found["proposal"], found["command"].split()[1:]) == (["--preset", preset], ["--preset", preset])


@pytest.fixture
def like(tmp_path):
    """Return how a run on this device is named: two steps of nano, with three seconds to sample and one to train."""

    def run_on(device: str) -> tuple[str, ...]:
        write(tmp_path, {"config.yaml": config_of(), "machine.json": {"device": device, "ranks": 1}})
        timed = {"length": 20.0, "dead_groups": 0.5, "time/rollout": 3.0, "time/step": 1.0}
        write_lines(tmp_path / "metrics.jsonl", ({"step": step, **timed} for step in (1, 2)))
        return "--preset", "nano", "--like", str(tmp_path)

    return run_on


def test_an_earlier_run_corrects_the_time(capsys, like):
    *_, folder = named = like("CPU with AVX2")
    assert f"On 8 GB, times by those of {folder} (CPU with AVX2)." in octet_plan(capsys, "--vram", "8", *named[2:])[1]
    found = planned(capsys, *named)["time"]
    assert found["seconds"]["rollout"] == pytest.approx([3.0, 3.0])
    assert found["seconds"]["update"] == pytest.approx([1.0, 1.0])
    assert found["basis"] == f"by those of {folder} (CPU with AVX2)"


def test_an_earlier_run_says_less_of_another_task_or_card(capsys, like):
    """Only the same task has answers of the same length: 20 tokens, and not 40."""
    named = like("NVIDIA H100 80GB HBM3")
    changes = ("--card", "H100"), ("--card", "H100", "task.name=gsm8k"), ("--card", "rtx4060")
    own, of_task, of_card = (planned(capsys, *named, *change)["time"]["seconds"] for change in changes)
    assert own["rollout"] == pytest.approx([3.0, 3.0])
    assert of_task["update"][0] > 1.2 * own["update"][0]
    assert of_card["update"][0] > own["update"][0]


def test_the_hours_hold_refills_and_a_warm_up(capsys):
    card = ["--preset", "8gb", "--vram", "8", "--card", "RTX 4060", "run.steps=100"]
    settings = ([], ["rollout.dead_groups=refill"], ["warmup.steps=50", "warmup.from=samples"])
    plain, refilled, taught = (planned(capsys, *card, *more)["time"] for more in settings)
    least, most = plain["seconds"]["rollout"]
    assert refilled["seconds"]["rollout"] == pytest.approx([least, 4 * most])
    assert taught["hours"][0] > plain["hours"][0]


def test_a_plan_for_several_machines_counts_the_memory_of_one(capsys):
    cluster = ("--preset", "cluster", "--gpus", "4", "--card", "A100 80GB")
    one, four = planned(capsys, *cluster), planned(capsys, *cluster, "--nodes", "4")
    assert (one["gpus"], four["gpus"]) == (4, 16)
    assert four["ram_bytes"] < 1.1 * one["ram_bytes"]
    assert four["ram_fits"]
    assert four["command"].startswith("octet slurm --nodes=4 --gpus=4 --preset cluster")


def test_the_search_keeps_the_settings_of_a_file_of_ones_own(capsys, tmp_path):
    """The preset that is made for this model has another task."""
    file = tmp_path / "mine.yaml"
    file.write_text("model: {name: Qwen/Qwen3-4B-Instruct-2507}\ntask: {name: addition}\nrun: {steps: 500}\n")
    found = planned(capsys, "--preset", str(file), "--vram", "8", "--search")
    assert (found["verdict"], found["time"]["steps"]) == ("fits", 500)
    assert shlex.split(found["command"])[1:3] == ["--preset", str(file)]


EIGHT_BITS = "rollout.weights=int8"  # which no quantised model may have, and a preset is quantised


@pytest.mark.parametrize("settings", [[EIGHT_BITS], ["--recipe", "full_finetune"]])
def test_settings_that_a_preset_excludes_have_a_list_of_models_that_a_run_takes(capsys, settings):
    for one in planned(capsys, "--vram", "8", *settings):
        assert parse_command_line(shlex.split(one["command"])[1:]).config


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"])
def test_the_search_proposes_nothing_that_a_run_refuses(capsys, model):
    found = planned(capsys, "--model", model, "--vram", "8", EIGHT_BITS, "--search")
    config = resolve("8gb", None, shlex.split(found["command"])[3:])
    assert (config.model.quantize, config.rollout.weights) == ("nf4", "same")


@pytest.mark.parametrize("strange", [{"tie_word_embeddings": None}, {"linear_num_value_heads": 0}])
def test_strange_values_in_a_config_are_planned_as_they_are_loaded(capsys, tmp_path, strange):
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    known = json.loads((ROOT / "trainer/model/known_shapes.json").read_text())["Qwen/Qwen3.5-2B"]
    write(tmp_path, {"config.json": json.dumps(known | layers | strange)})
    assert planned(capsys, "--model", str(tmp_path), "--vram", "24")["verdict"] == "fits"


def test_the_cards_of_servers_train_nothing(capsys):
    cards = ("--preset", "8gb", "--card", "RTX 4060", "--gpus", "2")
    served = (*cards, "rollout.vllm.start=true")
    assert [planned(capsys, *one)["gpus"] for one in (cards, (*served, "rollout.vllm.devices=1"))] == [2, 1]
    alone = ("--preset", "8gb", "--card", "RTX 4060", "rollout.vllm.start=true", "rollout.vllm.devices=0")
    assert planned(capsys, *alone)["gpus"] == 1  # the one that trains, of a machine with more


def test_a_teacher_goes_through_the_ram_as_well(capsys):
    models = ("model.name=Qwen/Qwen3-1.7B", "teacher.name=Qwen/Qwen3-14B")
    found = planned(capsys, "--preset", "80gb", "--vram", "80", *models)
    assert found["ram_bytes"] > 2 * 14.7e9
