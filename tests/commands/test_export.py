"""`octet export` without llama.cpp: what it writes and refuses. tests/llama compares answers."""

import json
import shutil
import subprocess
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoConfig

from tests.conftest import NANO, octet
from tests.forks import forked
from trainer.config.command_line import resolve
from trainer.config.settings import Lora, Model
from trainer.model.load import load_model
from trainer.model.lora import add_adapter, merged, save_adapter

CPU = torch.device("cpu")
ENDINGS = (".gguf", ".safetensors", ".unchecked")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The embedded model in bf16, as models on the hub are stored."""
    folder = tmp_path_factory.mktemp("base")
    load_model(Model(), "bf16", CPU).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((NANO / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def run(base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    model = add_adapter(load_model(Model(name=str(base)), "fp32", CPU), Lora(r=4))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(model, folder / "adapter")
    config = resolve("nano", None, [f"model.name={base}", "eval.problems=4", "rollout.max_new_tokens=8"])
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder


def test_safetensors_in_the_precision_of_the_base(run, base, tmp_path, capfd):
    out = tmp_path / "out"
    assert octet("export", run, "--to", "safetensors", "--problems", 4, "--out", out, "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["problems"] == 4
    assert AutoConfig.from_pretrained(out).dtype == torch.bfloat16
    whole = merged(load_model(Model(name=str(base)), "fp32", CPU), run / "adapter").state_dict()
    for name, value in load_model(Model(name=str(out)), "fp32", CPU).state_dict().items():
        assert torch.equal(value, whole[name].to(torch.bfloat16).float()), f"{name} is rounded once"


@pytest.mark.parametrize("more", [[], ["--no-check"], ["--no-check", "--problems", "0"]])
def test_a_file_that_nothing_has_read_is_said_to_be(more, run, tmp_path, capfd):
    assert octet("export", run, "--to", "gguf", "--format", "f16", "--out", tmp_path, *more) == 0
    said = capfd.readouterr().out
    assert "not checked: " + ("--no-check was given" if more else "llama-cpp-python is not installed") in said
    assert (tmp_path / "one-F16.gguf").is_file()


@pytest.mark.parametrize("to", ["gguf", "safetensors"])
def test_a_process_that_is_killed_leaves_no_name_of_a_checked_model(to, run, tmp_path):
    """Killed while the held-out problems are asked: the folder of GGUF has its name, its file has not."""
    (tmp_path / "llama_cpp.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    script = ["import os, sys", f"sys.path.insert(0, {str(tmp_path)!r})", "from trainer.commands.main import main"]
    script += ["import trainer.run.evaluate_models as models", "models.agreement = lambda *_: os.kill(os.getpid(), 9)"]
    asked = ["export", str(run), "--to", to, "--problems", "2", "--out", str(tmp_path / "out")]
    (tmp_path / "killed.py").write_text("\n".join([*script, f"main({asked})"]))
    assert subprocess.run([*forked(), str(tmp_path / "killed.py")], check=False).returncode == -9
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("out*/*") if path.suffix in ENDINGS}
    assert left == {"out/one-Q8_0.gguf.unchecked" if to == "gguf" else "out.unchecked/model.safetensors"}


def test_a_whole_model_and_an_adapter_in_place_of_a_run(run, base, tmp_path, capfd, monkeypatch):
    assert octet("export", run / "adapter", "--to", "gguf", "--no-check", "--out", tmp_path / "one") == 0
    named = shutil.copytree(base, tmp_path / "a model")
    assert octet("export", named, "--to", "gguf", "--no-check", "--out", tmp_path / "two") == 0
    assert octet("export", base, "--to", "safetensors", "--out", tmp_path / "three") == 0
    assert "nothing was merged" in capfd.readouterr().out
    whole = shutil.copytree(base, tmp_path / "whole")  # an export lies beside a model that was named itself
    monkeypatch.chdir(whole)
    assert octet("export", ".", "--to", "safetensors", "--no-check") == 0
    assert (tmp_path / "whole-safetensors/model.safetensors").is_file()
    files = (tmp_path / "one/one-Q8_0.gguf", tmp_path / "two/a-model-Q8_0.gguf")
    one, two = (gguf.GGUFReader(file).tensors for file in files)
    assert [(part.name, part.n_bytes) for part in one] == [(part.name, part.n_bytes) for part in two]
    assert any((mine.data != other.data).any() for mine, other in zip(one, two, strict=True))


def test_what_was_exported_is_recorded_and_another_format_has_its_own_folder(run, base, tmp_path):
    folder = shutil.copytree(run, tmp_path / "one")
    shutil.copytree(run / "adapter", folder / "checkpoints/step_000051/adapter")
    (folder / "metrics.jsonl").write_text('{"step": 60}\n')
    (folder / "verdict.json").write_text("{}")  # the run has ended
    for fmt in ("q8_0", "f16"):
        assert octet("export", folder, "--to", "gguf", "--format", fmt, "--no-check") == 0
        made = json.loads((folder / f"export-gguf-{fmt}/export.json").read_text())
        named = {"name": "one", "source": "../adapter", "step": 60, "file": f"one-{fmt.upper()}.gguf", "format": fmt}
        assert made == named | {"not_checked": "--no-check was given"}
        fields = gguf.GGUFReader(folder / f"export-gguf-{fmt}/one-{fmt.upper()}.gguf").fields
        assert fields["general.name"].contents() == "one"
        assert fields["general.base_model.0.name"].contents() == base.name
    saved = folder / "checkpoints/step_000051/adapter"
    assert octet("export", saved, "--to", "safetensors", "--problems", 4, "--out", tmp_path / "out") == 0
    made = json.loads((tmp_path / "out/export.json").read_text())
    assert (made["source"], made["step"]) == ("../one/checkpoints/step_000051/adapter", 51)
    assert (made["identical"], made["problems"]) == (4, 4)
    assert made["accuracy"].keys() == {"adapter", "merged"}


WRONG = {
    "another model": (["BASE", "--to", "gguf", "--model", "nano"], "is a whole model, and --model and model.name name"),
    "another name": (["BASE", "--to", "gguf", "model.name=nano"], "is a whole model, and --model and model.name name"),
    "no problems": (["RUN", "--to", "gguf", "--problems", "0"], "Write --problems 1 or more, or --no-check."),
    "no run": (["EMPTY", "--to", "gguf"], "there is neither an adapter nor a model in it"),
    "a full folder": (["RUN", "--to", "gguf", "--out", "RUN"], "it exists and is not empty"),
    "a place that cannot be written": (["RUN", "--to", "gguf", "--out", "/proc/foo"], "--out /proc/foo: it cannot be"),
    "a format of llama.cpp": (["RUN", "--to", "gguf", "--format", "q4_k_m"], "llama-cpp-python is not installed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case, run, base, tmp_path, capfd):
    arguments, message = WRONG[case]
    (tmp_path / "empty").mkdir()
    places = {"RUN": run, "BASE": base, "EMPTY": tmp_path / "empty"}
    out = [] if "--out" in arguments else ["--out", tmp_path / "out"]
    assert octet("export", *(places.get(one, one) for one in arguments), *out) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
