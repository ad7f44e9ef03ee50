"""octet push: what is shown is what is sent, nothing is sent unasked, and the card says what the run measured."""

import json
import re
import shutil
import textwrap
import time

import pytest
import yaml
from huggingface_hub import constants

from tests.commands.conftest import write
from tests.conftest import NANO, said_by
from tests.http_double import Double
from tests.hub_server import serving, use_hub
from tests.reports.conftest import change, configure
from trainer.commands import push
from trainer.config.resolve import resolve


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that takes what is pushed, by the protocol for large files that every version of it speaks."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serving({}, token="hf_secret") as server:
        use_hub(monkeypatch, server.url, tmp_path / "home")
        yield server


def pushed(capsys, folder, *more: str) -> str:
    """Return what is said of a run that can be sent."""
    status, out, err = said_by(capsys, "push", folder, "--to", "me/demo", *more)
    assert status == 0, err
    return out


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub sends large files so
def test_what_was_shown_is_sent_in_one_commit(capsys, hub, finished, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    shown = pushed(capsys, finished)
    assert "nothing was sent: --yes sends these files to me/demo, private if" in shown
    assert "adapter_model.safetensors" in shown
    assert not hub.uploads
    assert "/me/demo/commit/" in pushed(capsys, finished, "--yes")
    sent = hub.uploads["me/demo"]
    assert sent["README.md"].decode() in shown
    assert hub.private == {"me/demo": True}
    adapter = {path.name: path.read_bytes() for path in (finished / "adapter").iterdir() if path.name != "README.md"}
    stored, given = (json.loads(files["adapter_config.json"]) for files in (adapter, sent))
    assert given == stored | {"base_model_name_or_path": "nano"}
    assert sent["adapter_model.safetensors"] == adapter["adapter_model.safetensors"]
    assert {*sent} == {*adapter, "README.md", "curves.svg"} - {"manifest.json"}
    assert b"hf_secret" not in b"".join(sent.values())


def test_the_card_says_what_the_run_measured(capsys, finished):
    _, head, text = pushed(capsys, finished).split("---\n", 2)
    facts = yaml.safe_load(head)
    assert (facts["library_name"], facts["license"], facts["tags"]) == ("peft", "apache-2.0", ["octet", "grpo", "lora"])
    base, trained = json.loads((finished / "eval.json").read_text())["evaluations"]
    row = next(line for line in text.splitlines() if line.startswith("| correct"))
    assert [one["name"] for one in (base, trained) if f"{one['accuracy']:.1%}" not in row] == []
    recipe = [line for line in text.partition("## Training\n")[2].splitlines() if "|" in line]
    assert dict(line.strip("| ").split(" | ") for line in recipe) == RECIPE
    facts = ("held-out problems after the last step, 6, with", "git revision", "\n    rollout.problems=4\n")
    assert [fact for fact in (*facts, "octet train --preset nano") if fact not in text] == []


RECIPE = {
    **{"steps": "6", "---": "---", "learning rate": "0.003", "loss": "grpo_clip", "advantage": "grpo"},
    **{"problems in a step": "4", "answers to each (group size)": "8", "sampling temperature": "1.0"},
    **{"tokens of an answer, at most": "40", "LoRA rank": "16", "LoRA alpha": "32", "LoRA targets": "all"},
}


def usage(said):
    """The lines of the card that load the model, as a program."""
    return textwrap.dedent(said.partition("with Octet.\n")[2].partition("## Licence")[0]).strip() + "\n"


@pytest.mark.parametrize("base", ["nano", "taught"])
def test_the_card_of_an_adapter_loads_it_over_its_base(base, capsys, copied, tmp_path, monkeypatch):
    folder, taught, found = copied("demo"), shutil.copytree(NANO, tmp_path / "taught"), {}
    if base == "taught":
        configure(folder, model__name=str(taught))
    else:
        change(folder / "adapter/adapter_config.json", base_model_name_or_path="nano")
        (folder / "adapter/manifest.json").unlink()
    said = pushed(capsys, folder)
    assert "base_model:" not in said
    code = usage(said).replace("me/demo", str(folder / "adapter"))
    exec(code.replace('"taught"', repr(str(taught))), found)  # noqa: S102
    assert found["model"].peft_config["default"].r == 16
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    write(tmp_path / "models--gpt2", {"refs/main": "abc", "snapshots/abc/config.json": "{}"})
    for name in ("some/model", "gpt2"):
        configure(folder, model__name=name)
        said = pushed(capsys, folder)
        assert f"base_model: {name}\n" in said
        assert usage(said).endswith('AutoPeftModelForCausalLM.from_pretrained("me/demo")\n')


@pytest.mark.parametrize("what", ["best", "best-safetensors"])
def test_the_card_of_the_best_has_its_own_evaluation(what, capsys, finished, copied):
    """In place of the verdict and the table of the final model."""
    folder = copied("demo")
    shutil.copytree(finished / "best", folder / "best")
    change(folder / "best/best.json", step=3, accuracy=0.75, lenient=0.875)
    (folder / "best/manifest.json").unlink()
    if what != "best":  # as octet export writes it
        shutil.copytree(folder / "best", folder / what)
        (folder / what / "export.json").write_text(json.dumps({"source": "../best", "step": 3, "not_checked": "why"}))
    out = pushed(capsys, folder, "--what", what)
    base, _ = json.loads((folder / "eval.json").read_text())["evaluations"]
    before = f"{base['accuracy']:.1%} ({100 * base['interval'][0]:.1f}-{100 * base['interval'][1]:.1f})"
    assert "This is the model after step 3 of 6, the first with the best\n`eval.metric=accuracy` of the run." in out
    assert f"| | base | step 3 |\n| --- | --- | --- |\n| correct | {before} | 75.0% (57.9-86.7) |\n" in out
    assert not re.search(r"Verdict|trained \|", out)
    change(folder / "best/best.json", step=6)
    assert "after the last step, 6" in pushed(capsys, folder, "--what", "best")


def test_no_path_of_this_machine_is_in_the_card(capsys, copied):
    folder = copied("demo")
    configure(folder, task__name="gsm8k", task__data_dir="/home/somebody/data", prompt__system="/no_think")
    configure(folder, prompt__template={"image": "/home/somebody/picture"})
    write(folder, {"given/path/train.jsonl": ""})
    for data in ({}, {"task__data_dir": None, "task__path": "given/path/train.jsonl"}):
        configure(folder, **data)
        out = pushed(capsys, folder)
        assert str(folder) not in out
        assert ("somebody" in out, "/no_think" in out, "The data: of the author" in out) == (False, True, True)
    configure(folder, task__path="some/v1.data")
    assert "The data: some/v1.data, with the licence on its page" in pushed(capsys, folder)


@pytest.mark.parametrize(("key", "said"), [("hf_other", "the upload failed"), ("", "there is no login")])
def test_a_hub_that_does_not_know_the_key_is_one_message(key, said, capsys, hub, finished, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", key)
    status, out, err = said_by(capsys, "push", finished, "--to", "me/demo", "--yes")
    assert (status, out, "Traceback" in err, f"octet: --to me/demo: {said}" in err) == (2, "", False, True), err
    assert not hub.uploads


CHECK = {"format": "q4_0", "identical": 30, "problems": 32, "largest_difference": 0.0371, "mean_difference": 0.002}
CHECK |= {"accuracy": {"Octet": 0.75, "llama.cpp": 0.71875}}
EXPORTS = {
    "checked": (CHECK, ["3.7e-02", "2.0e-03", "Octet 75.0%", "llama.cpp 71.9%", "`q4_0`"]),
    "unchecked": ({"not_checked": "--no-check was given"}, ["**Not checked:** --no-check was given."]),
    "of another file": ({**CHECK, "file": "model-q8_0.gguf"}, ["**Not checked:**"]),
    "unrecorded": (None, ["**Not checked:**"]),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_the_card_of_a_gguf_file_says_what_its_check_found(case, capsys, copied):
    made, said = EXPORTS[case]
    folder = write(copied("demo"), {"export-gguf/model-q4_0.gguf": "GGUF"})
    if made:
        made = {"source": "../adapter", "step": 6, "file": "model-q4_0.gguf", **made}
        write(folder, {"export-gguf/export.json": made})
    out = pushed(capsys, folder, "--what", "export-gguf")
    assert [text for text in said if text not in out] == []
    assert ("after the last step, 6" in out) == (made is not None)
    assert "  export.json" not in out


HEADS = ["license: [mit", "license: {a: b}", "license: '<script>'", "license: 'a\n\n\n# b'", "license: 5", "license:"]
HEADS += ["- a", "", "license: !!python/object/apply:os.system [x]", "license: \x1b[2J"]
HEADS += ["a: &a [x,x]\nb: &b [*a,*a]\nlicense: [*b,*b]"]
LICENCES = [("license: mit", "in its folder", "mit"), ("license: mit", "on the hub", "mit")]
LICENCES += [("license: mit", "nowhere", "see its page"), *((head, "in its folder", "see its page") for head in HEADS)]


@pytest.mark.parametrize(("head", "place", "said"), LICENCES)
def test_the_licence_of_the_base_is_that_of_its_card_if_it_is_a_name(head, place, said, capsys, copied, monkeypatch):
    folder = copied("demo")
    base = write(folder.parent / "base", {"config.json": "{}", "README.md": f"---\n{head}\n---\n"})
    configure(folder, model__name=str(base) if place == "in its folder" else "octet/tiny")
    with serving({} if place == "nowhere" else {"models/octet/tiny": base}) as server:
        use_hub(monkeypatch, server.url, base / "home")
        assert f"The base: {said}." in pushed(capsys, folder)


def test_a_model_whose_step_is_another_one_has_no_evaluation(capsys, copied):
    folder = copied("demo")
    shutil.copytree(folder / "adapter", folder / "kept")
    shutil.copytree(folder / "adapter", folder / "checkpoints/step_000004/adapter")
    for what, said in (("kept", "is not recorded"), ("checkpoints/step_000004/adapter", "the model after step 4 of 6")):
        out = pushed(capsys, folder, "--what", what)
        assert (said in out, "| correct" in out) == (True, False)
    (folder / "verdict.json").unlink()  # as it is when a run begins to go on
    assert "is not recorded, so no evaluation is shown" in pushed(capsys, folder)


NOT_SENT = {"../export": "it was exported from", "damaged": "adapter_model.safetensors"}
NOT_SENT |= {"linked": "x.gguf is a link, or lies in one, to ", "described": "adapter_config.json"}


@pytest.mark.parametrize(("what", "said"), NOT_SENT.items())
def test_what_is_not_the_whole_model_of_this_run_is_not_sent(what, said, capsys, copied):
    folder, other = copied("demo"), copied("other") / "adapter"
    for name in ("damaged", "linked", "described"):
        shutil.copytree(folder / "adapter", folder / name)
    (folder / "described/adapter_config.json").unlink()
    for link in ("linked/x.gguf", "described/adapter_config.json"):
        (folder / link).symlink_to(other / "adapter_config.json")
    weights = folder / "damaged/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    write(folder / "../export", {"x.gguf": "GGUF", "export.json": {"source": "../other/adapter"}})
    status, out, err = said_by(capsys, "push", folder, "--to", "me/demo", "--what", what, "--yes")
    assert (status, out, said in err) == (2, "", True), err


@pytest.mark.parametrize("said", ["Connection refused", "timed out", "NoneType"])
def test_a_hub_that_does_not_answer_or_answers_nonsense_is_one_message(said, capsys, finished, monkeypatch, tmp_path):
    monkeypatch.setattr(push, "ANSWER_S", 0.2)
    with Double().serving() as server:
        server.get, server.post = lambda path: (404, ""), lambda *_: (200, time.sleep(said == "timed out"))
        if said == "Connection refused":
            server.shutdown()
            server.server_close()
        use_hub(monkeypatch, server.url, tmp_path / "home")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        status, _, err = said_by(capsys, "push", finished, "--to", "me/demo", "--yes")
    assert (status, err.count(said), err.count("\n")) == (2, 1, 1), err


@pytest.mark.parametrize("stored", [[], {}])
def test_an_adapter_that_names_no_base_is_sent_with_that_of_the_run(stored, capsys, copied):
    folder = copied("demo")
    (folder / "adapter/adapter_config.json").write_text(json.dumps(stored))
    (folder / "adapter/manifest.json").unlink()
    status, _, err = said_by(capsys, "push", folder, "--to", "me/demo")
    assert (status, "holds a list" in err) == ((2, True) if stored == [] else (0, False)), err


LEFT_OUT = ["notes.txt", ".env", ".secret.gguf", "id_rsa", "wandb_key.json", "model.safetensors.bak", "run.py"]
LEFT_OUT += ["x.jinja", "additional_chat_templates/.x.jinja", "additional_chat_templates/notes.txt"]


def test_files_that_belong_to_no_model_are_left_out(capsys, copied):
    folder = copied("demo")
    exports = ("gguf/model-q8_0.gguf", "gguf/deep/model-q8_0.gguf")  # in the folder of the adapter: another model
    names = (*LEFT_OUT, *exports, "additional_chat_templates/tool_use.jinja")
    write(folder / "adapter", dict.fromkeys(names, "secret"))
    status, out, err = said_by(capsys, "push", folder, "--to", "me/demo")
    assert (status, [name for name in LEFT_OUT if f"  {name}\n" in out]) == (0, [])
    assert all(name in err for name in LEFT_OUT)
    assert ("  additional_chat_templates/tool_use.jinja\n" in out, "q8_0" in out) == (True, False)


def test_the_card_says_that_the_base_has_the_adapter_from_which_the_run_began(capsys, copied):
    folder = copied("demo")
    assert "`base` is" not in pushed(capsys, folder)
    configure(folder, lora__start="/home/somebody/adapter")
    said = pushed(capsys, folder)
    assert ("`base` is the model with the adapter of `lora.start`" in said, "somebody" in said) == (True, False)


@pytest.mark.parametrize("then", ["same", "merged"])
def test_the_card_after_a_warm_up_names_its_base_and_the_command_that_began_with_it(then, capsys, copied):
    folder = copied("demo")
    whole = resolve(str(folder / "config.yaml"), None, ["warmup.steps=3", f"warmup.then={then}"])
    warmup = folder / "warmup"
    (warmup / "merged").mkdir(parents=True)
    older = whole.warmed_up_in(warmup).to_yaml(warmup).replace("  rounds: 1\n", "")  # a version without this setting
    (warmup / "config.yaml").write_text(older)
    (folder / "config.yaml").write_text(whole.after_warmup(warmup).to_yaml(folder))
    said, base = pushed(capsys, folder), "nano" if then == "same" else "merged"
    facts = ("trained by GRPO after a warm-up", f"A LoRA adapter of {base},", "license: apache-2.0")
    assert [fact for fact in facts if fact not in said] == []
    assert "base_model:" not in said, "no name of the hub"
    (command,) = [line for line in said.splitlines() if "octet train" in line]
    assert (" warmup.steps=3" in command, "=null" in command) == (True, False)
    assert not {"lora.start", "model.name", "warmup/"} & {*command.replace("=", " ").split()}
    assert str(folder.parent) not in said
    assert said_by(capsys, "report", folder)[0] == 0
    assert " warmup.steps=3" in (folder / "report.html").read_text()
