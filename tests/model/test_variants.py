"""Each kind of adapter, and the whole model: trained by the engine, saved, read by others, resumed, and its base."""

import contextlib
import json
import shutil
from functools import partial

import pytest
import torch

from tests.conftest import WITH_ENGINE, octet, refuses
from tests.e2e.short_job import train
from tests.e2e.updates import IDLE, ROWS, Case, in_one, in_pairs, make_model, settings, updater_of
from trainer.batch.pack import minibatches
from trainer.config.settings import Lora, Model
from trainer.errors import ModelError
from trainer.model import lora, merge
from trainer.model.load import load_model
from trainer.step.engine import DeepSpeedPolicy
from trainer.step.update import backward
from trainer.watch.tally import Tally

TOKENS = torch.tensor([[5, 6, 7, 30, 31, 32]])
UPDATES = 3
ADAPTERS = {
    "lora": "",
    "rslora": "lora.rslora=true",
    "dora": "lora.dora=true lora.targets=attention",
    "pissa": "lora.init=pissa",
    "pissa_niter": "lora.init=pissa_niter_16",
    "pissa_rslora": "lora.init=pissa lora.rslora=true",
    "pissa_dora": "lora.init=pissa lora.dora=true",
    "output layer": "lora.targets=[lm_head]",
    "both embeddings": "lora.targets=[embed_tokens,lm_head,q_proj]",
    "dora over the embedding": "lora.dora=true lora.targets=[embed_tokens]",
}
QUANTISED = [f"model.quantize={kind}" for kind in ("nf4", "int8", "bf16")]
OVER_4_BITS = [f"model.quantize=nf4 {more}" for more in ("", "lora.dora=true", "lora.rslora=true lora.plus_ratio=4")]
EIGHT_BIT = "optim.name=adamw_8bit engine.ds_config=zero2"
FULL = "lora.enabled=false algorithm.lr=0.001"

pytestmark = WITH_ENGINE


def make_policy(model, more: str = "", dtype: str = "fp32"):
    config = settings(str(model), Case("one", [4], settings=more.split()))
    return DeepSpeedPolicy(make_model(config, dtype), config, dtype, total_steps=UPDATES)


def one_update(policy, step: int = 0):
    algorithm = policy.config.algorithm
    batch = in_one(policy, algorithm.aggregation)
    return policy.update(partial(backward, policy, batch, algorithm, 0.0, Tally()), step)


def advance(policy, *steps: int):
    for step in steps:
        one_update(policy, step)
    return policy


def read(folder, dtype: str = "fp32", **options):
    return load_model(Model(name=str(folder), **options), dtype, torch.device("cpu"))


def base_of(policy):
    return load_model(policy.config.model, "fp32", torch.device("cpu"))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(TOKENS).logits.float()


def assert_close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(one, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("more", ADAPTERS.values(), ids=ADAPTERS)
def test_the_saved_and_the_merged_adapter_are_what_was_trained(tiny_model, tmp_path, more):
    policy = advance(make_policy(tiny_model, more), 0, 1)
    trained = logits(policy.model)
    assert (trained - logits(read(tiny_model))).abs().max() > 0.1
    policy.write_model(tmp_path / "adapter")
    assert_close(logits(lora.load_adapter(read(tiny_model), tmp_path / "adapter")), trained)
    merge.write_merged(policy.config.model, tmp_path / "adapter", tmp_path / "merged", "fp32")
    assert_close(logits(read(tmp_path / "merged")), trained)
    assert torch.equal(logits(policy.model), trained), "saving changes nothing"


@pytest.mark.parametrize("more", [*ADAPTERS.values(), FULL, *OVER_4_BITS])
def test_the_base_is_the_model_before_the_first_update(tiny_model, more):
    policy = make_policy(tiny_model, more)
    original = logits(base_of(policy))
    assert_close(logits(policy.model), original)
    trained = logits(advance(policy, 0).model)
    with contextlib.suppress(ZeroDivisionError), policy.as_base():
        assert_close(logits(policy.model), original)
        raise ZeroDivisionError("an evaluation of the base failed")
    assert torch.equal(logits(policy.model), trained)
    advance(policy, 1)
    assert (logits(policy.model) - trained).abs().max() > 0.01, "and it goes on learning"


@pytest.mark.parametrize("more", [
    *(ADAPTERS[kind] for kind in ("pissa", "pissa_dora", "dora")), "lora.plus_ratio=8", FULL, EIGHT_BIT,
    *QUANTISED,
])  # fmt: skip
def test_a_resumed_run_is_the_undisturbed_run(tiny_model, tmp_path, more):
    undisturbed = advance(make_policy(tiny_model, more), 0, 1, 2)
    advance(make_policy(tiny_model, more), 0, 1).save(tmp_path)
    (states,) = tmp_path.glob("engine/*model_states.pt")
    saved = torch.load(states, weights_only=False)["module"]
    assert {"lora_" in name for name in saved} == {more != FULL}, "a frozen base is not written"
    assert [path.parent.name for path in tmp_path.glob("**/*.safetensors")] == ["adapter"] * (more != FULL)
    resumed = make_policy(tiny_model, more)
    resumed.load(tmp_path)
    with resumed.as_base():
        assert_close(logits(resumed.model), logits(base_of(resumed)))
    advance(resumed, 2)
    for name, value in lora.trainable(undisturbed.model).items():
        assert torch.equal(lora.trainable(resumed.model)[name], value), name


def test_gradient_regularisation_over_a_4_bit_base(tiny_model):
    """Only the adapter is displaced and moves; the quantised base stays as it is."""
    policy = make_policy(tiny_model, "algorithm.gradreg.strength=0.01 model.quantize=nf4")
    quantised = policy.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    before, bytes_before = lora.fingerprint(policy.model), quantised.detach().clone()
    measured = one_update(policy).measured
    assert quantised.dtype == torch.uint8
    assert torch.equal(quantised, bytes_before)
    assert lora.fingerprint(policy.model) != before
    assert 0 < measured["gradreg/first_norm"] != measured["gradreg/second_norm"]


def test_what_is_scored_before_an_update_has_the_precision_of_the_update(tiny_model):
    """In bf16 the regularised gradient is taken in fp32: what it is compared with has to be, too."""
    policy = make_policy(tiny_model, "algorithm.gradreg.strength=0.01 algorithm.top_entropy=0.5", "bf16")
    updater, tally = updater_of(policy, policy.config), Tally()
    for step in range(2):  # at first B is zero, and so is what rounding could change
        dealt = minibatches(in_pairs(ROWS, "dapo"), IDLE, policy.config, updater.packer)
        updater.update(updater.prepare(dealt), step, tally)
    assert tally.means(lambda sums: [sums])["ratio/max"] == 1.0


def test_a_reference_that_has_moved_comes_back_with_the_checkpoint(tiny_model, tmp_path):
    moving = "algorithm.kl.coef=0.1 algorithm.kl.refresh=2"
    before = advance(make_policy(tiny_model, moving), 0, 1)
    before.refresh_reference(2)
    advance(before, 2).save(tmp_path)
    resumed = make_policy(tiny_model, moving)
    resumed.load(tmp_path)
    with before.as_reference(), resumed.as_reference():
        assert torch.equal(logits(resumed.model), logits(before.model))
        assert (logits(resumed.model) - logits(read(tiny_model))).abs().max() > 0.01
    resumed.refresh_reference(3)  # not yet
    with before.as_reference(), resumed.as_reference():
        assert torch.equal(logits(resumed.model), logits(before.model))


def test_a_machine_that_finds_another_principal_part_resumes_with_the_first(tiny_model, tmp_path):
    """Other versions of a library may find another one; here it differs a lot."""
    before = advance(make_policy(tiny_model, ADAPTERS["pissa"]), 0, 1)
    before.save(tmp_path)
    resumed = make_policy(tiny_model, ADAPTERS["pissa"])
    other = {name: value + 0.1 * torch.randn_like(value) for name, value in lora.trainable(resumed.model).items()}
    _, layer = next(lora.layers(resumed.model))
    rest = layer.get_base_layer().weight.clone()
    resumed.trained.restart(other)
    assert not torch.equal(layer.get_base_layer().weight, rest)
    original = logits(read(tiny_model))
    with resumed.as_base():
        assert_close(logits(resumed.model), original)
    resumed.load(tmp_path)
    assert_close(logits(resumed.model), logits(before.model))
    with resumed.as_base():
        assert_close(logits(resumed.model), original)


@pytest.mark.parametrize(("init", "tolerance"), [("pissa", 1e-5), ("pissa_niter_16", 1e-2)])
def test_pissa_leaves_what_comes_after_the_first_singular_values(tiny_model, init, tolerance):
    whole = torch.linalg.svdvals(read(tiny_model).model.layers[0].self_attn.q_proj.weight.detach())
    model = lora.add_adapter(read(tiny_model), Lora(r=4, init=init, targets="attention"))
    rest = torch.linalg.svdvals(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight.detach())
    assert float(rest[0]) == pytest.approx(float(whole[4]), rel=tolerance)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16"])
def test_in_bf16_the_principal_part_loses_nothing(tiny_model, init):
    """The engine rounds the adapter to bf16. The rest of the weight is what is left then, rounded once."""
    base = read(tiny_model, "bf16")
    weights = {name: part.weight.detach().clone() for name, part in base.named_modules() if "_proj" in name}
    model = lora.add_adapter(base, Lora(r=4, init=init, targets="all")).to(torch.bfloat16)
    for name, layer in model.named_modules():
        if isinstance(layer, lora.LoraLayer):
            rest = layer.get_base_layer().weight.float()
            whole = weights[name.removeprefix("base_model.model.")].float()
            error = (rest + layer.float().get_delta_weight("default") - whole).abs()
            assert (error <= rest.abs() * 2**-8 + 1e-6).all(), name


def without_its_base(tiny_model, tmp_path, more: str = ""):
    """A whole model whose folder has gone since it was loaded."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    policy = make_policy(folder, f"{FULL} {more}")
    folder.rename(tmp_path / "elsewhere")
    return policy


def test_a_fresh_whole_model_is_its_own_base_and_later_its_weights_are_read_again(tiny_model, tmp_path):
    policy = without_its_base(tiny_model, tmp_path)
    with policy.as_base():
        pass
    advance(policy, 0)
    with refuses("model.name", ModelError), policy.as_base():
        pass


def test_the_reference_of_a_whole_model_is_kept_and_not_read_at_every_step(tiny_model, tmp_path):
    policy = without_its_base(tiny_model, tmp_path, "algorithm.kl.coef=0.1")
    original = logits(policy.model)
    trained = logits(advance(policy, 0).model)
    with policy.as_reference():
        assert torch.equal(logits(policy.model), original)
    assert torch.equal(logits(policy.model), trained)
    assert not torch.equal(trained, original)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Two steps in which everything is trained, and a third that goes on from the second."""
    folder = tmp_path_factory.mktemp("full")
    few = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=24", "eval.problems=16"]
    few += [*FULL.split(), *EIGHT_BIT.split(), "eval.every=1"]
    first = train(folder, "--preset", "nano", *few, "run.dir=it", "run.steps=2")
    before = (folder / "it/eval_answers.jsonl").read_text().splitlines()
    return folder / "it", first, before, train(folder, "--resume", "it", "run.steps=3")


def test_a_job_that_trains_everything_leaves_a_model(job):
    folder, said = job[0], job[1]
    assert (folder / "model/model.safetensors").is_file()
    assert (folder / "best/model.safetensors").is_file()
    assert not (folder / "adapter").exists()
    assert not (folder / "merged").exists()
    assert not list(folder.glob("checkpoints/**/*.safetensors"))
    assert "\nrun folder it, with model/, best/\n" in said
    assert [word for word in ("adapter", "merged", "warning") if word in said.lower()] == []


def test_the_base_of_a_resumed_job_is_the_original_model(job):
    folder, _, before, said = job
    assert "continuing after step 2" in said
    now = (folder / "eval_answers.jsonl").read_text().splitlines()
    base = [line for line in before if json.loads(line)["model"] == "base"]
    assert (len(base), [line for line in now if json.loads(line)["model"] == "base"]) == (16, base)
    assert [one["name"] for one in json.loads((folder / "eval.json").read_text())["evaluations"]] == ["base", "trained"]


def test_the_model_of_a_job_is_evaluated_with_its_settings(job, monkeypatch, capsys):
    folder = job[0]
    monkeypatch.chdir(folder.parent)
    assert octet("eval", "--model", "it/model", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    trained = json.loads((folder / "eval.json").read_text())["evaluations"][1]
    assert printed["out"] == "it/eval"
    for number in ("accuracy", "mean_tokens"):
        assert printed["evaluations"][0][number] == trained[number]


@pytest.mark.parametrize(("settings", "key", "named"), [
    (Lora(r=17, init="pissa"), "lora.r", "k_proj is 16 x 32"),
    (Lora(init="pissa", targets=("q_proj", "lm_head")), "lora.init", "lm_head"),
    (Lora(init="pissa", targets=("q_proj", "embed_tokens")), "lora.init", "embed_tokens"),
])  # fmt: skip
def test_pissa_of_what_it_cannot_split_is_refused(tiny_model, settings, key, named):
    with refuses(key, names=named):
        lora.add_adapter(read(tiny_model), settings)


def test_gradient_regularisation_leaves_the_embedding_of_a_whole_model_out(tiny_model):
    """The first step of Adam depends on the sign of the gradient, which a strong penalty changes."""
    regularised = f"{FULL} optim.max_grad_norm=1e9 algorithm.gradreg.strength="
    weak, strong = (advance(make_policy(tiny_model, regularised + value), 0).model for value in ("1e-9", "10"))
    assert_close(weak.get_input_embeddings().weight, strong.get_input_embeddings().weight, 1e-5)
    queries = [model.model.layers[0].self_attn.q_proj.weight for model in (weak, strong)]
    assert (queries[0] - queries[1]).abs().max() > 1e-3
