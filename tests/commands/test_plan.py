"""octet plan, as a person calls it."""

import json
import re
import shlex
import subprocess
import sys
from time import process_time

import pytest

from tests.hub_server import use_hub
from tests.run.test_job import run
from trainer.commands import main as cli
from trainer.config.command_line import resolve
from trainer.machine import hardware
from trainer.machine.hardware import Gpu, Hardware


@pytest.fixture(autouse=True)
def ram(monkeypatch):
    monkeypatch.setattr(hardware, "free_ram", lambda: 64 * 10**9)


def octet_plan(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def planned(capsys, *arguments: str) -> dict:
    status, out, err = octet_plan(capsys, *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_the_table_says_what_where_and_whether(capsys):
    status, out, _ = octet_plan(capsys, "--preset", "8gb")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 120
    words = " ".join(out.split())
    assert "1.54 B parameters in bf16, 18.46 M trained (LoRA r=16)" in words
    for term in ("weights 3.09 3.09", "KV cache", "merged copies", "allocator slack", "CUDA context", "peak"):
        assert term in words
    assert "it fits: " in words
    assert "most of it is weights, 3.09 GB" in words
    assert "optimizer offload saves 0.22 GB, because LoRA trains little" in words
    assert "the most that fits" in words


def test_on_all_layers_offload_is_what_the_readme_says(capsys):
    assert planned(capsys, "--preset", "8gb", "lora.targets=all")["optimizer_offload_saves"] == 12 * 18_464_768


def test_the_options_are_settings(capsys):
    asked = ("--model", "Qwen/Qwen2.5-3B", "--vram", "12", "--group", "4", "--completion", "1024", "--prompt", "256")
    named = planned(capsys, *asked)
    written = ("model.name=Qwen/Qwen2.5-3B", "rollout.group_size=4", "rollout.max_new_tokens=1024")
    plain = planned(capsys, "--preset", "12gb", "--vram", "12", *written, "prompt.max_tokens=256")
    assert named["phases"] == plain["phases"]
    assert named["vram_bytes"] == 12 * 10**9


def test_terms_add_up_to_the_peak(capsys):
    found = planned(capsys, "--preset", "24gb", "--gpus", "2")
    assert found["gpus"] == 2
    assert {name: sum(terms.values()) for name, terms in found["phases"].items()} == found["peaks"]
    assert found["peak_bytes"] == max(found["peaks"].values()) == found["peaks"][found["peak_phase"]]
    assert found["vram_bytes"] == 24 * 10**9


def test_the_search_prints_a_command_that_fits(capsys):
    found = planned(capsys, "--model", "Qwen/Qwen2.5-7B-Instruct", "--vram", "8", "--completion", "1024", "--search")
    assert found["verdict"] == "fits"
    assert "model.quantize=nf4" in found["proposal"]
    _, _, _, *settings = found["command"].split()
    again = planned(capsys, "--preset", "8gb", "--vram", "8", *settings)
    assert again["phases"] == found["phases"]
    status, out, _ = octet_plan(capsys, "--model", "Qwen/Qwen2.5-7B-Instruct", "--vram", "8", "--search")
    assert status == 0
    assert "./run_deepspeed.sh --preset 8gb model.name=Qwen/Qwen2.5-7B-Instruct" in out


def test_the_search_fills_the_card_with_a_small_model(capsys):
    without = planned(capsys, "--model", "Qwen/Qwen2.5-0.5B", "--vram", "24", "--preset", "8gb")
    found = planned(capsys, "--model", "Qwen/Qwen2.5-0.5B", "--vram", "24", "--preset", "8gb", "--search")
    assert found["peak_bytes"] > without["peak_bytes"]
    assert "optim.tokens_per_micro_batch=16384" in found["proposal"]


def test_a_whole_model_and_what_is_too_large_are_said(capsys):
    status, out, _ = octet_plan(capsys, "--preset", "24gb", "lora.enabled=false")
    assert status == 1
    assert "it does not fit" in out
    assert "What fits: " in out
    assert re.search(r"optimizer offload saves [\d.]+ GB of the card", out)


def test_the_card_of_this_machine_is_taken(capsys, monkeypatch):
    cards = tuple(Gpu(index, f"GPU-{index}", "RTX 3090", 25.8) for index in range(2))
    monkeypatch.setattr(hardware, "detect", lambda: Hardware(cards, cores=8))
    found = planned(capsys)
    assert (found["model"], found["gpus"], found["vram_bytes"]) == ("Qwen/Qwen2.5-7B-Instruct", 2, 25_800_000_000)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--vram", "0"], "--vram 0: that is not the size of a card"),
        (["--vram", "nan"], "--vram nan: that is not the size of a card"),
        (["--vram", "inf"], "--vram inf: that is not the size of a card"),
        (["--card", "Voodoo 2"], "--card Voodoo 2: its speed is not known. Known are RTX 2060"),
        (["--card", ""], "--card '': its speed is not known"),
        (["--length", "0"], "--length 0: it must be a number above 0"),
        (["--price", "nan"], "--price nan: it must be a number above 0"),
        (["--like", "nowhere"], "nowhere"),
        (["--gpus", "9"], "rollout.problems=8: each of the 9 ranks needs one"),
        (["--completion", "32767"], "prompts of up to 512 tokens have to be in it as well. Write --completion 32256"),
        (["engine.ds_config=zero3", "lora.dora=true"], "Write engine.ds_config=zero2_offload, or lora.dora=false"),
        (["lora.targets=[nothing]"], "lora.targets=nothing: this model has no layer nothing"),
        (["--recipe", "nothing"], "nothing"),
        (["--gpus", "0"], "--gpus 0: at least one card is needed"),
        (["--model", "nobody/nothing"], "model.name=nobody/nothing: its config.json cannot be had"),
        (["--completion", "40000"], "rollout.max_new_tokens=40000: the context of this model is 32768"),
        (
            ["--model", "Qwen/Qwen2.5-14B", "--vram", "4", "--search"],
            "nothing makes Qwen/Qwen2.5-14B fit 4 GB: with prompts of 512",
        ),
        (["rollout.grup=1"], "Did you mean"),
        (["model.quantize=int4"], "Write one of 'none', 'nf4' or 'int8'"),
    ],
)
def test_mistakes_are_answered(capsys, arguments, told):
    status, _, err = octet_plan(capsys, *arguments)
    assert status == 2
    assert told in err


def test_it_takes_less_than_a_second_of_the_processor(capsys):
    octet_plan(capsys, "--preset", "8gb")
    began = process_time()
    octet_plan(capsys, "--preset", "80gb", "--search")
    assert process_time() - began < 1


def test_the_command_works_without_torch(tmp_path):
    code = "import sys; sys.modules['torch'] = None\n"
    code += "from trainer.commands.main import main; main(['plan', '--model', 'nano'])"
    answer = run(sys.executable, "-c", code, folder=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "nano" in answer.stdout


def test_the_memory_of_the_machine_is_held_against_the_plan(capsys, monkeypatch):
    monkeypatch.setattr(hardware, "free_ram", lambda: 24 * 10**9)
    _, _, err = octet_plan(capsys, "--preset", "8gb", "--search", "lora.enabled=false")
    assert "fit 8 GB and the 24.0 GB of RAM that are free: " in err
    assert "What fits: lora.enabled=true" in err
    elsewhere = ("--preset", "8gb", "--vram", "8", "--search", "lora.enabled=false")
    found = planned(capsys, *elsewhere)
    assert (found["verdict"], found["ram_fits"], found["ram_free_bytes"]) == ("fits", False, 24 * 10**9)
    assert found["ram_bytes"] > found["ram_free_bytes"]
    _, out, _ = octet_plan(capsys, *elsewhere)
    assert "of 24.0 that are free here, more than this machine has" in out
    assert "it fits the card, and not the RAM of this machine: " in out


def test_the_exit_status_says_whether_it_fits(capsys, monkeypatch):
    too_large = ("--preset", "8gb", "model.name=Qwen/Qwen2.5-7B")
    status, out, _ = octet_plan(capsys, *too_large, "--json")
    assert (status, json.loads(out)["verdict"]) == (1, "too large")
    assert octet_plan(capsys, *too_large, "--search")[0] == 0
    assert octet_plan(capsys, "--preset", "8gb", "--vram", "6")[0] == 0  # it may fit, and a run tries
    monkeypatch.setattr(hardware, "free_ram", lambda: 10**9)
    assert octet_plan(capsys, "--preset", "8gb")[0] == 1
    assert octet_plan(capsys, "--preset", "8gb", "--vram", "8")[0] == 0  # the card may be in another machine


def test_a_recipe_counts(capsys):
    found = planned(capsys, "--preset", "8gb", "--recipe", "gspo")
    assert "--recipe gspo" in found["command"]
    regularised = planned(capsys, "--preset", "8gb", "--recipe", "gradreg")
    assert "regularisation" in regularised["phases"]["backward"]


def test_what_nothing_can_help_is_said_in_words(capsys):
    _, out, _ = octet_plan(capsys, "--model", "Qwen/Qwen2.5-7B", "--preset", "8gb", "--vram", "8")
    assert "the most that fits" not in out
    assert "proposed: model.quantize=nf4" in out
    _, out, _ = octet_plan(capsys, "--model", "Qwen/Qwen2.5-0.5B", "--preset", "8gb", "--vram", "80")
    assert "1,024 answers in a group" in " ".join(out.split())


def test_the_command_can_be_pasted(capsys):
    found = planned(capsys, "--preset", "8gb", "prompt.system=think, then answer")
    assert "'prompt.system=think, then answer'" in found["command"]
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
    found = planned(capsys, "--preset", "8gb", "--vram", "6", "rollout.rows=25", "optim.tokens_per_micro_batch=4414")
    assert (found["verdict"], found["largest"]["max_new_tokens"]) == ("fits", 512)


def test_a_reader_that_has_read_enough_is_no_error():
    code = "from trainer.commands.main import main; main(['plan', '--preset', '8gb', '--json'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_hub_that_is_not_there_is_asked_once(capsys, monkeypatch, tmp_path):
    """Port 9 of this machine: nobody listens."""
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    status, _, err = octet_plan(capsys, "--model", "nobody/nothing")
    assert status == 2
    assert "cannot be had (the hub cannot be reached (Connection refused)). Write a local folder" in err
    assert len(err) < 300


def test_the_time_energy_and_price_on_a_card_are_bounds(capsys):
    found = planned(capsys, "--preset", "8gb", "--card", "RTX 4060", "--price", "0.5")["time"]
    least, most = found["hours"]
    assert found["steps"] == round(3 * 7473 / 8)
    parts = {name: seconds[0] for name, seconds in found["seconds"].items()}
    every = 2 + (found["steps"] - 1) // 100
    worked_out = found["steps"] * (parts["rollout"] + parts["update"]) + every * parts["evaluation"]
    assert least == pytest.approx(worked_out / 3600)
    assert 1 < most / least < 13
    assert found["kwh"] == pytest.approx(most * 0.115)
    assert found["price"] == pytest.approx([least / 2, most / 2])
    _, out, _ = octet_plan(capsys, "--preset", "8gb", "--card", "RTX 4060", "--price", "0.5")
    for line in (f"time: {least:.1f} h to {most:.1f} h for 2802 steps", "energy: at most 15 kWh", "price: "):
        assert line in out


def test_without_a_card_or_a_number_of_problems_no_hours_are_said(capsys):
    assert planned(capsys, "--preset", "8gb")["time"] is None
    assert "--card" in octet_plan(capsys, "--preset", "8gb")[1]
    limited = ("--preset", "8gb", "--card", "H100", "task.limit=100")
    assert planned(capsys, *limited)["time"]["hours"] is None
    assert "write run.steps" in octet_plan(capsys, *limited)[1]


def earlier_run(folder, device: str) -> str:
    """Two steps of nano: three seconds to sample, one to train."""
    (folder / "config.yaml").write_text(resolve("nano", None, []).to_yaml())
    (folder / "machine.json").write_text(json.dumps({"device": device, "ranks": 1}))
    timed = {"length": 20.0, "dead_groups": 0.5, "time/rollout": 3.0, "time/step": 1.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **timed}) + "\n" for step in (1, 2)))
    return str(folder)


def test_an_earlier_run_corrects_the_time(capsys, tmp_path):
    """It took three seconds to sample where a second was computed for its length, and so would this one."""
    like = ("--preset", "nano", "--like", earlier_run(tmp_path, "CPU with AVX2"))
    same = planned(capsys, *like)["time"]
    assert same["seconds"]["rollout"] == pytest.approx([3.0, 3.0])
    assert same["seconds"]["update"] == pytest.approx([1.0, 1.0])
    assert same["kwh"] is None
    assert planned(capsys, *like, "--length", "40")["time"]["seconds"]["rollout"][0] > 4.5
    assert str(tmp_path) in same["basis"]


def test_an_earlier_run_of_another_model_or_task_gives_no_length_of_answers(capsys, tmp_path):
    like = ("--like", earlier_run(tmp_path, "NVIDIA H100 80GB HBM3"))
    for other, longest in ((("--preset", "8gb"), "512"), (("--preset", "nano", "task.name=gsm8k"), "40")):
        found, given = (planned(capsys, *other, *like, *more)["time"] for more in ((), ("--length", longest)))
        assert found["seconds"]["rollout"] == given["seconds"]["rollout"]


def test_an_earlier_run_says_nothing_of_a_card_if_it_had_none(capsys, tmp_path):
    asked = ("--preset", "nano", "--like", earlier_run(tmp_path, "CPU with AVX2"), "--card", "H100")
    status, _, err = octet_plan(capsys, *asked)
    assert (status, "--card H100" in err, "CPU with AVX2" in err) == (2, True, True)
    earlier_run(tmp_path, "NVIDIA H100 80GB HBM3")
    own, other = (planned(capsys, *asked[:-1], card)["time"]["seconds"] for card in ("H100", "rtx4060"))
    assert own["rollout"] == pytest.approx([3.0, 3.0])
    assert other["update"][0] > own["update"][0]


def test_the_hours_hold_refills_and_a_warm_up(capsys):
    card = ["--preset", "8gb", "--vram", "8", "--card", "RTX 4060", "run.steps=100"]
    plain, refilled, taught = (
        planned(capsys, *card, *more)["time"]
        for more in ([], ["rollout.dead_groups=refill"], ["warmup.steps=50", "warmup.from=samples"])
    )
    least, most = plain["seconds"]["rollout"]
    assert refilled["seconds"]["rollout"] == pytest.approx([least, 4 * most])
    assert taught["hours"][0] > plain["hours"][0]
