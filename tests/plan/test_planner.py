"""The plan: shapes to the last parameter, terms to the last byte, presets held to their cards."""

import json
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from accelerate import init_empty_weights
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.commands.conftest import write
from tests.conftest import ROOT, ran, refuses
from tests.forks import forked
from tests.hub_server import serving, use_hub
from trainer.commands import train
from trainer.config.resolve import resolve
from trainer.config.settings import Config, Lora
from trainer.errors import ModelError
from trainer.machine import hardware
from trainer.machine.hardware import Gpu, Hardware
from trainer.model import families, lora, shapes
from trainer.plan import memory_check, planner, preflight, search
from trainer.plan.hours import on_card
from trainer.plan.planner import GB
from trainer.plan.search import Placement
from trainer.rollout.limits import row_bytes

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 160, "vocab_size": 320, "head_dim": 16, "max_position_embeddings": 512}
SMALL |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}


def dense(family: str, layers: int) -> dict:
    """What leaves experts and Mamba layers out of Granite 4."""
    own = {"num_local_experts": 0, "layer_types": ["full_attention"] * layers, "shared_intermediate_size": 13824}
    own |= {"mamba_n_heads": 8}
    return own if family == "granitemoehybrid" else {}


def without_weights(settings: dict, dtype: torch.dtype = torch.bfloat16):
    with init_empty_weights(include_buffers=True):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=dtype)


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", shapes.KNOWN)
def test_a_shipped_configuration_has_the_parameters_that_transformers_makes(name):
    model = without_weights(shapes.KNOWN[name])
    assert shapes.known_shape(name).parameters == sum(parameter.numel() for parameter in model.parameters())


PUBLISHED = {"Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624, "openai/gpt-oss-20b": 20_914_757_184}
PUBLISHED |= {"LiquidAI/LFM2.5-1.2B-Instruct": 1_170_340_608, "qwen/qwen2.5-3b-instruct": 3_085_938_688}
PUBLISHED |= {"Qwen/Qwen2.5-Coder-7B-Instruct": 7_615_616_512, "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648}
PUBLISHED |= {"Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096, "meta-llama/Meta-Llama-3-8B-Instruct": 8_030_261_248}
PUBLISHED |= {"google/gemma-2-2b-it": 2_614_341_888, "google/gemma-3-1b-it": 999_885_952}
PUBLISHED |= {"HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008}


@pytest.mark.parametrize("name", PUBLISHED)
def test_variants_have_the_published_size_without_the_network(name):
    assert shapes.known_shape(name).parameters == PUBLISHED[name]


def test_the_sizes_that_gemma_3_leaves_out_are_those_of_its_class():
    """The config.json of Gemma 3 on the hub, of which its class knows the heads and the vocabulary."""
    written = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    found = shapes.from_config("it", {"model_type": "gemma3", "text_config": written | {"sliding_window": 1024}})
    assert found.parameters == shapes.shape_of("google/gemma-3-4b-it").parameters


def test_a_name_of_somebody_else_is_not_taken_for_a_shipped_one():
    assert shapes.known_shape("somebody/Qwen2.5-1.5B") is None


def linears_of(model) -> Counter:
    """Count the linear layers between embedding and output layer."""
    named = [(name, part) for name, part in model.model.named_modules() if isinstance(part, torch.nn.Linear)]
    shaped = [(name.rpartition(".")[2], part.in_features, part.out_features, part.bias) for name, part in named]
    return Counter(shapes.Linear(*shape, bias is not None) for *shape, bias in shaped)


def planned_linears(shape: shapes.Shape) -> Counter:
    return sum((Counter(dict.fromkeys(block.linears, block.count)) for block in shape.blocks), Counter())


BIASES = {name: {"attention_bias": True, "mlp_bias": True} for name in ("llama", "smollm3", "granite", "seed_oss")}
OF_ATTENTION = ("qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "hunyuan_v1_dense", "lfm3")
BIASES |= {name: {"attention_bias": True} for name in OF_ATTENTION}
WINDOWED = ("mistral", "ministral", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "olmo3", "exaone4", "lfm3")


@pytest.mark.parametrize("biases", [{}, BIASES], ids=["usual", "all biases"])
@pytest.mark.parametrize("family", families.BY_TYPE)
def test_a_folder_is_read_with_all_that_its_family_has(tmp_path, family, biases):
    model = without_weights({"model_type": family, **SMALL, **dense(family, 3), **biases.get(family, {})})
    model.config.save_pretrained(tmp_path)
    shape = shapes.shape_of(str(tmp_path))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert planned_linears(shape) == linears_of(model)
    assert type(model).__name__ == f"{shape.family.kind}ForCausalLM"
    assert shape.windowed == (family in WINDOWED)


KINDS = {
    "attention alone": {"model_type": "llama", "tie_word_embeddings": True},
    "convolutions": {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    "a gate for each head": {"model_type": "lfm3", "layer_types": ["conv", "sliding_attention", "full_attention"]}
    | {"conv_L_cache": 7},
    "a gated delta rule": {"model_type": "qwen3_5_text", "full_attention_interval": 3, "linear_num_value_heads": 4}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
    "heads of two sizes": {"model_type": "gemma4_text", "global_head_dim": 32, "hidden_size_per_layer_input": 8},
    "borrowed keys": {"model_type": "gemma4_text", "num_hidden_layers": 6, "num_kv_shared_layers": 3}
    | {"use_double_wide_mlp": True, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "keys as values": {"model_type": "gemma4_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"hidden_size_per_layer_input": 0},
    "experts": {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    "experts in some layers": {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [0]},
    "experts with biases": {"model_type": "gpt_oss", "num_local_experts": 8, "attention_bias": True},
}


ADAPTERS = {"attention": Lora(targets="attention"), "all": Lora(r=8), "dora": Lora(dora=True)}
ADAPTERS |= {"two": Lora(targets=("q_proj", "k_proj"), r=3)}
ADAPTERS |= {"ends": Lora(targets=("q_proj", "lm_head", "embed_tokens"), dora=True)}


@pytest.mark.parametrize("written", ["by its makers", "by transformers"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_every_kind_are_counted_to_the_last_number(tmp_path, kind, written):
    settings = SMALL | KINDS[kind]
    model = without_weights(settings)
    if written == "by its makers":
        (tmp_path / "config.json").write_text(json.dumps(settings))
    else:
        model.config.save_pretrained(tmp_path)
    shape = shapes.shape_of(str(tmp_path))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert planned_linears(shape) == linears_of(model)
    assert planner_of(str(tmp_path)).weights == bytes_of(model.parameters())
    for name, adapter in ADAPTERS.items():
        overrides = [f"lora.{key}={json.dumps(value)}" for key, value in adapter.model_dump(mode="json").items()]
        with init_empty_weights():
            adapted = lora.add_adapter(without_weights(settings), adapter)
        trained = sum(value.numel() for value in adapted.parameters() if value.requires_grad)
        assert planner_of(str(tmp_path), *overrides).trained == trained, name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "experts" not in kind])
def test_what_the_decoder_keeps_of_a_row_is_planned_to_the_byte(tmp_path, kind):
    from trainer.rollout.decoder.forward import Forward

    (tmp_path / "config.json").write_text(json.dumps(SMALL | KINDS[kind]))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL | KINDS[kind]), dtype=torch.bfloat16)
    planned = planner_of(str(tmp_path), "prompt.max_tokens=20", "rollout.max_new_tokens=12")
    assert planned.places == 32
    assert planned._cache(3) == Forward(model, copies=False).allocate_cache(3, 32).bytes
    if kind == "attention alone":
        assert planned._cache(1) == row_bytes(model.config, 32, 2) - 12 * planned.shape.vocabulary


def test_a_mixture_computes_with_few_experts_and_keeps_all():
    shape = shapes.known_shape("Qwen/Qwen3-30B-A3B")
    assert shape.active == 3_353_032_704  # its makers say 3.3 B
    whole, packed = (planner_of("Qwen/Qwen3-30B-A3B", f"model.quantize={how}") for how in ("none", "nf4"))
    experts = 2 * (shape.parameters - shape.active) * 128 // 120
    assert whole.weights == 2 * shape.parameters
    assert experts < packed.weights < whole.weights  # bitsandbytes leaves experts as they are
    assert {one.name for one in whole.adapted} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    few, many = (planner_of("Qwen/Qwen3-30B-A3B", f"rollout.rows={rows}").decoded for rows in (1, 16))
    assert few == 2 * (shape.active - shape.embedding)
    assert many == 2 * (shape.parameters - shape.embedding)


LARGE = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40}
LARGE |= {"intermediate_size": 13824, "vocab_size": 32000, "head_dim": 128, "max_position_embeddings": 4096}


@pytest.mark.parametrize("family", families.BY_TYPE)
def test_a_model_of_10_b_or_more_is_refused_on_8_gb_whatever_its_family(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | LARGE | dense(family, 40)))
    config = resolve("8gb", None, [f"model.name={tmp_path}"])
    assert shapes.shape_of(str(tmp_path)).parameters > 10 * GB
    with refuses("model.name", names="card"):
        must_fit(config, machine(8.6))


WHOLE = shapes.KNOWN["Qwen/Qwen2.5-0.5B"]


def test_a_snapshot_of_another_revision_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for revision, layers in (("main", 2), ("later", 3)):
        snapshot, config = f"snapshots/commit-of-{revision}", WHOLE | {"num_hidden_layers": layers}
        files = {f"{snapshot}/config.json": config, f"{snapshot}/model.safetensors": ""}
        write(tmp_path / "models--some--body", files | {f"refs/{revision}": f"commit-of-{revision}"})
    found = [shapes.known_shape("some/body", revision) for revision in (None, "later", "other")]
    assert [shape and shape.layers for shape in found] == [2, 3, None]


def planner_of(name: str, *overrides: str, vram: int = 100 * GB, world: int = 1) -> planner.Planner:
    return planner.Planner(shapes.shape_of(name), resolve("8gb", None, [f"model.name={name}", *overrides]), world, vram)


def plan_of(
    preset: str, *overrides: str, shape: shapes.Shape | None = None, world_size: int = 1, vram: int = 8 * GB
) -> planner.Plan:
    config = resolve(preset, None, overrides)
    return planner.Planner(shape or shapes.shape_of(config.model.name), config, world_size, vram).plan


def test_four_bits_are_what_bitsandbytes_makes_of_a_weight():
    from bitsandbytes.functional import quantize_4bit

    weight = torch.randn(512, 1024, dtype=torch.bfloat16)
    packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    found = bytes_of([packed, state.absmax, state.state2.absmax])
    linear = shapes.Linear("x", 1024, 512, bias=False)
    assert planner_of("Qwen/Qwen2.5-0.5B", "model.quantize=nf4")._linear_bytes(linear) == found


SOME = ["normed, checkpointed", "small, in 8 bits"]
REST = ["small, whole model", "small, all layers", "convolutions", "borrowed keys", "experts", "sinks"]
MEASURED = [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]


@pytest.fixture(scope="module")
def measured(tiers) -> dict:
    """Live tensors of the real decoder and engine, from a process of its own."""
    chosen = (SOME if "quick" in tiers else []) + (REST if "slow" in tiers else [])
    answer = ran(*forked(), "bench/plan.py", "--json", "--only", *chosen, check=True)
    return {case["case"]: case["bytes"] for case in json.loads(answer.stdout)["cases"]}


@pytest.mark.parametrize("phase", ["load", "rollout", "score", "backward", "step"])
@pytest.mark.parametrize("name", MEASURED)
def test_every_phase_of_the_real_code_is_as_planned(measured, name, phase):
    found = measured[name][phase]
    assert found["live"] == pytest.approx(found["plan"], rel=0.05)


def test_offload_takes_the_state_off_the_card_and_no_more_than_that():
    name = "Qwen/Qwen2.5-1.5B"
    on_card = planner_of(name, "lora.enabled=false", "engine.ds_config=zero2").plan
    offloaded = planner_of(name, "lora.enabled=false", "engine.ds_config=zero2_offload").plan
    state = on_card.phases["rollout"]["optimizer state"]
    assert state == 12 * 1_543_714_304
    assert planner_of(name, "lora.enabled=false").state == state
    assert offloaded.phases["rollout"]["optimizer state"] == 2 * 151_936 * 1_536  # a buffer for the largest gradient
    assert offloaded.ram["run"]["optimizer state"] > state
    assert "optimizer state" not in on_card.ram["run"]


def test_more_cards_share_the_state_and_only_that():
    one, four = (planner_of("Qwen/Qwen2.5-1.5B", "engine.ds_config=zero2", world=world) for world in (1, 4))
    assert four.state == one.state / 4
    assert four.weights == one.weights


@pytest.mark.parametrize("trained", [(), ("lora.enabled=false",)], ids=["adapter", "whole"])
def test_split_weights_are_shared_while_training_and_whole_while_sampling(trained):
    name, whole = "Qwen/Qwen2.5-7B", 2 * 7_615_616_512
    split = planner_of(name, "engine.ds_config=zero3", "algorithm.kl.coef=0.1", *trained, world=4).plan.phases
    plain = planner_of(name, "engine.ds_config=zero2", "algorithm.kl.coef=0.1", *trained, world=4).plan.phases
    assert split["load"]["weights"] == plain["load"]["weights"] == whole
    assert split["rollout"]["weights"] == split["score"]["weights"] == whole * 5 / 4
    assert split["backward"]["weights"] == whole / 4 + 2 * GB
    assert split["step"]["weights"] == whole / 4
    assert split["backward"]["gradients"] == plain["backward"]["gradients"]  # reduced once, at the end
    for outside in ("optim.name=muon", "algorithm.gradreg.strength=0.1"):  # the engine, for which all are gathered
        phases = planner_of(name, "engine.ds_config=zero3", outside, *trained, world=4).plan.phases
        assert phases["backward"]["weights"] == split["rollout"]["weights"]
    assert "merged copies" not in split["rollout"]


def test_weights_in_cpu_memory_leave_the_card():
    planned = planner_of("Qwen/Qwen2.5-7B", "engine.ds_config=zero3_offload", "lora.enabled=false").plan
    assert planned.phases["rollout"]["weights"] == 2 * 7_615_616_512
    assert planned.phases["backward"]["weights"] == 2 * 152_064 * 3_584  # the embedding is more than what may be live
    assert "weights" not in planned.phases["step"]
    assert planned.ram["run"]["weights"] >= 2 * 7_615_616_512


def test_a_lone_card_splits_nothing():
    alone, plain = (planner_of("Qwen/Qwen2.5-7B", f"engine.ds_config={name}").plan for name in ("zero3", "zero2"))
    assert alone.phases["rollout"]["weights"] == plain.phases["rollout"]["weights"]
    assert alone.phases["backward"]["weights"] == plain.phases["backward"]["weights"]


def peak(*overrides: str) -> int:
    return planner_of("Qwen/Qwen2.5-1.5B", *overrides).plan.peak


TOKENS = "optim.tokens_per_micro_batch"
LARGE_BATCH, WHOLE_2 = [f"{TOKENS}=32768", "rollout.rows=8"], ["lora.enabled=false", "engine.ds_config=zero2"]


LESS = [(["model.gradient_checkpointing=false", f"{TOKENS}=16384"], [f"{TOKENS}=16384"])]
LESS += [([f"{TOKENS}=16384"], [f"{TOKENS}=8192"]), (["rollout.rows=64"], ["rollout.rows=16"])]
LESS += [(["rollout.max_new_tokens=1024"], ["rollout.max_new_tokens=256"]), ([], ["model.quantize=int8"])]
LESS += [(["model.quantize=int8"], ["model.quantize=nf4"]), (WHOLE_2, [*WHOLE_2, "optim.name=adamw_8bit"])]
LESS += [(LARGE_BATCH, [*LARGE_BATCH, "model.activation_offload=true"])]
LESS += [(WHOLE_2, ["lora.enabled=false", "engine.ds_config=zero2_offload"])]
LESS += [(["model.attention=flash", "optim.layout=padded", f"{TOKENS}=16384"], [])]


@pytest.mark.parametrize(("more", "less"), LESS)
def test_every_lever_takes_bytes_away(more, less):
    assert peak(*less) < peak(*more)


def test_a_warm_up_trains_on_solutions_each_with_a_prompt_of_its_own():
    """As many tokens as in GRPO make fewer rows, and a few solutions take less memory than many answers."""
    warmup = ("warmup.only=true", "warmup.steps=9")
    few, many = (plan_of("8gb", *warmup, f"warmup.problems={count}") for count in (1, 64))
    assert few.allocated_of("backward") < many.allocated_of("backward")
    assert many.allocated_of("backward") == pytest.approx(plan_of("8gb").allocated_of("backward"), rel=0.1)


def test_an_adapter_that_is_trained_further_is_kept_as_it_was():
    grpo = resolve("8gb")
    trained = Placement(shapes.shape_of(grpo.model.name), grpo, 1, 8 * GB).trained
    assert plan_of("8gb", "lora.start=x").phases["step"]["reference"] == trained * 2
    assert "reference" not in plan_of("8gb").phases["step"]


def test_a_teacher_lies_beside_the_policy_in_its_own_precision():
    shape, large = (shapes.shape_of(f"Qwen/Qwen2.5-{size}B-Instruct") for size in ("1.5", "3"))
    teacher = ["teacher.name=Qwen/Qwen2.5-3B-Instruct", "algorithm.loss=reinforce_baseline"]
    alone = plan_of("8gb", shape=shape)
    whole, packed = (plan_of("8gb", *teacher, f"teacher.quantize={kind}", shape=shape) for kind in ("none", "nf4"))
    assert whole.phases["rollout"]["teacher"] == pytest.approx(2 * large.parameters, rel=1e-3)
    assert packed.phases["rollout"]["teacher"] < whole.phases["rollout"]["teacher"] / 2.5
    assert "teacher" not in alone.phases["rollout"]
    assert whole.phases["teacher"]["activations"] > 0
    assert "teacher" not in alone.phases


def test_an_adapter_as_teacher_takes_no_second_base(tmp_path):
    """The embedded model has a base of 2 bytes a number here, and the teacher an adapter of all its layers."""
    shape = shapes.shape_of("nano", None)
    linears = [(f"layers.{index}.{one.name}", one) for index in range(shape.layers) for one in shape.linears]
    sides = {f"{name}.lora_A.weight": torch.zeros(4, one.inputs) for name, one in linears}
    save_file(sides, tmp_path / "adapter_model.safetensors")
    distill = [f"teacher.adapter={tmp_path}", "algorithm.loss=reinforce_baseline", "model.dtype=bf16"]
    kinds = ([], ["teacher.name=nano"], ["teacher.name=nano", "model.quantize=nf4"])
    plans = [plan_of("nano", *distill, *more) for more in kinds]
    numbers = sum(map(torch.numel, sides.values()))
    of_teacher = [2 * numbers, 2 * numbers, 2 * shape.parameters + 4 * numbers]
    assert [one.phases["rollout"]["teacher"] for one in plans] == of_teacher
    assert all(one.phases["teacher"]["activations"] > 0 for one in plans)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    with refuses("teacher.adapter", ModelError, names="adapter_model.safetensors"):
        plan_of("nano", *distill)
    served = plan_of("nano", "teacher.url=http://127.0.0.1:1", "algorithm.loss=reinforce_baseline")
    assert "teacher" not in served.phases["rollout"].keys() | served.phases.keys()


@pytest.mark.parametrize(("size", "gigabytes", "preset", "card"), [
    ("0.5B", 8, "8gb", "RTX 4060"), ("1.5B", 8, "8gb", "RTX 4060"), ("3B", 16, "16gb", "RTX 4080"),
])  # fmt: skip
def test_the_baseline_of_verl_fits_the_card_that_the_page_names(size, gigabytes, preset, card):
    config = resolve(preset, "verl_gsm8k", [f"model.name=Qwen/Qwen2.5-{size}-Instruct"])
    placement = Placement(shapes.shape_of(config.model.name), config, 1, gigabytes * GB)
    planned = placement.plan
    assert planned.fits
    hours = str(on_card(card, placement)).removeprefix("about ").replace(f" for 117 steps on {card}", f", {card}")
    page = (ROOT / "docs/objectives.md").read_text()
    assert f"| Qwen2.5-{size}-Instruct | `{preset}` | {planned.peak / GB:.1f} of {gigabytes} GB | {hours} |" in page


def test_the_rehearsals_of_the_baseline_of_verl_are_near_the_plan():
    cases = json.loads((ROOT / "bench/results/memory_cuda_host.json").read_text())["cases"]
    found = {one["case"]: one["difference"] for one in cases if one["case"].startswith("verl_gsm8k")}
    assert "verl_gsm8k, 0.5b" in found
    assert all(abs(apart) <= 0.05 for phases in found.values() for apart in phases.values()), found


def machine(gigabytes: float | None, count: int = 1) -> Hardware:
    gpus = () if gigabytes is None else tuple(Gpu(i, f"GPU-{i}", "a card", gigabytes) for i in range(count))
    return Hardware(gpus=gpus, cores=4)


def must_fit(config: Config, machine: Hardware) -> None:
    preflight.complain([*memory_check.findings(config, machine)])


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "google/gemma-2-2b"])
@pytest.mark.parametrize("gigabytes", [8, 12, 24])
def test_what_the_search_proposes_fits_and_can_be_written(name, gigabytes):
    asked = [f"model.name={name}", "rollout.max_new_tokens=1024"]
    config = resolve("8gb", None, asked)
    found = Placement(shapes.shape_of(name), config, 1, gigabytes * GB).search()
    written = resolve("8gb", None, [*asked, *search.difference(config, found)])
    assert written == found
    assert planner.Planner(shapes.shape_of(name), written, 1, gigabytes * GB).plan.fits
    assert (found.model.quantize == "none") is (gigabytes >= {"3B": 12, "7B": 24}.get(name[-2:], 8))


def test_a_whole_model_is_offloaded_and_never_quantised():
    config = resolve("8gb", None, ["lora.enabled=false", "engine.ds_config=zero2", "model.name=Qwen/Qwen2.5-3B"])
    found = Placement(shapes.shape_of("Qwen/Qwen2.5-3B"), config, 1, 24 * GB).search()
    assert (found.model.quantize, found.engine.ds_config) == ("none", "zero2_offload")


def test_the_largest_values_fit_and_one_more_does_not():
    config = resolve("8gb", None, ["rollout.max_new_tokens=512", "model.name=Qwen/Qwen2.5-1.5B"])
    placement = Placement(shapes.shape_of(config.model.name), config, 1, 7 * GB)
    for key in ("optim.tokens_per_micro_batch", "rollout.max_new_tokens"):
        value = placement.limits()[key.partition(".")[2]]
        assert placement.fits(config.changed({key: value}))
        assert not placement.fits(config.changed({key: value + 1}))


SEVEN, FOURTEEN = (f"model.name=Qwen/Qwen2.5-{size}B-Instruct" for size in (7, 14))
WHOLE_15B, WHOLE_3B = (["lora.enabled=false", f"model.name=Qwen/Qwen2.5-{size}B"] for size in ("1.5", "3"))


@pytest.mark.parametrize(("settings", "gigabytes", "ram", "key", "fits"), [
    (["8gb", SEVEN], 8.6, 64, "model.name", ": model.quantize=nf4"),
    (["8gb", FOURTEEN], 8.6, 64, "model.name", "=Qwen/Qwen3-8B model.quantize=nf4"),
    (["8gb", FOURTEEN, "warmup.steps=5"], 8.6, 64, "model.name", "=Qwen/Qwen3-8B model.quantize=nf4"),
    (["8gb", *WHOLE_15B, "engine.ds_config=zero2"], 8.6, 64, "model.name", ": engine.ds_config=zero3_offload"),
    # ZeRO-3 would need 77.7 GB of RAM
    (["8gb", *WHOLE_3B], 8.6, 64, "model.name", ": lora.enabled=true model.quantize=nf4"),
    (["8gb"], 1.0, 64, "model.name", "--preset nano"),
    (["8gb", "lora.targets=[q, kv]"], 8.6, 64, "lora.targets", "layer q, kv"),
    (["8gb", "lora.enabled=false"], 24, 16, "engine.ds_config", ": lora.enabled=true"),
    (["8gb", "lora.enabled=false"], 80, 16, "engine.ds_config", ": =zero2"),
    (["24gb", SEVEN], 24, 10, "model.name", ": model.quantize=nf4"),
    (["24gb", SEVEN], 24, 1, "model.name", "smaller"),
    (["8gb", "teacher.name=Qwen/Qwen3-4B", "algorithm.loss=cispo"], 8.6, 64, "model.name", "teacher.quantize=nf4"),
    (["8gb"], None, 16, "model.name", "1.7 B"),  # on a CPU, unless it is meant
    (["8gb", "model.dtype=bf16"], None, 16, "model.name", None),
    (["8gb", "model.name=somebody/else"], None, 16, "model.name", None),
    (["24gb", "model.dtype=bf16", "model.quantize=nf4"], None, 16, "model.name", None),
    (["24gb", "model.dtype=fp32"], None, 16, "model.name", None),  # plan/preflight.py compares it with the RAM
])  # fmt: skip
def test_a_run_that_cannot_fit_is_refused_with_what_does(monkeypatch, settings, gigabytes, ram, key, fits):
    monkeypatch.setattr(hardware, "free_ram", lambda: ram * GB)
    with refuses(key, names=fits) if fits else nullcontext() as refused:
        must_fit(resolve(settings[0], None, settings[1:]), machine(gigabytes))
    assert "\n" not in str(refused and refused.value)  # nor is the same said of its warm-up


def test_a_model_that_may_fit_is_tried_with_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(hardware, "free_ram", lambda: 64 * GB)
    must_fit(resolve("8gb", None, ["rollout.max_new_tokens=1024", "rollout.rows=64"]), machine(8.6))
    assert "memory will be short: " in (told := capsys.readouterr().err)
    assert "What fits: rollout.rows=" in told
    must_fit(resolve("8gb"), machine(8.6))
    monkeypatch.setenv("LOCAL_RANK", "1")  # the first rank has warned
    must_fit(resolve("8gb", None, ["rollout.max_new_tokens=1024", "rollout.rows=64"]), machine(8.6))
    assert capsys.readouterr().err == ""


def test_ranks_are_counted_as_the_launcher_has_said(monkeypatch):
    config = resolve("8gb", None, ["lora.enabled=false"])
    shape = shapes.shape_of(config.model.name)
    assert hardware.ranks(machine(24, count=2)) == (2, 2)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert hardware.ranks(machine(24, count=8)) == (16, 4)
    of_node = planner.Planner(shape, config, 16, 24 * GB, local_size=4).plan
    alone = planner.Planner(shape, config, 4, 24 * GB).plan
    assert of_node.ram["load"] == alone.ram["load"]  # four processes read the weights
    assert of_node.ram["run"]["optimizer state"] == pytest.approx(alone.ram["run"]["optimizer state"] / 4, rel=0.01)


def test_a_model_that_only_the_hub_describes_is_refused_before_its_download(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(shapes.KNOWN["Qwen/Qwen2.5-14B"]))
    with serving({"models/some/body": tmp_path}) as hub:
        use_hub(monkeypatch, hub.url, tmp_path)
        with refuses("model.name", names="32.5 GB"):
            must_fit(resolve("8gb", None, ["model.name=some/body"]), machine(8.6))
        must_fit(resolve("8gb", None, ["model.name=no/body"]), machine(8.6))


def test_what_a_setting_takes_is_planned():
    name = "Qwen/Qwen2.5-0.5B"
    base = ["optim.layout=padded", "model.gradient_checkpointing=false"]
    plain, eager = (planner_of(name, f"model.attention={kind}", *base).plan for kind in ("sdpa", "eager"))
    scores = 24 * 14 * 2 * (512 + 256 - 1) ** 2 * (4 + 2 * 2)  # of each layer, for two rows to a micro-batch
    assert eager.peak_of("backward") - plain.peak_of("backward") > scores
    whole = planner_of(name, "lora.enabled=false").plan.phases["backward"]
    regularised = planner_of(name, "lora.enabled=false", "algorithm.gradreg.strength=0.1").plan.phases["backward"]
    assert regularised["gradients"] == 2 * whole["gradients"] == 4 * 494_032_768
    assert regularised["regularisation"] == 16 * 494_032_768
    adam, muon = planner_of(name), planner_of(name, "optim.name=muon")
    gradients = [one.plan.phases["backward"]["gradients"] for one in (adam, muon)]
    assert gradients == [2 * adam.trained, 6 * adam.trained]
    assert [one.state for one in (adam, muon)] == [12 * adam.trained, 4 * adam.trained]
    muon = planner_of(name, "lora.enabled=false", "optim.name=muon")
    copied = 2 * 4 * 151_936 * 896  # the embedding is the largest matrix
    assert muon.plan.phases["backward"]["gradients"] == 3 * whole["gradients"] + copied


@pytest.mark.parametrize(("targets", "same"), [("[self_attn.q_proj]", "[q_proj]"), ("all-linear", "all")])
def test_a_target_is_known_by_the_end_of_its_name_and_by_the_name_of_peft(targets, same):
    one, other = (planner_of("Qwen/Qwen2.5-0.5B", f"lora.targets={named}") for named in (targets, same))
    assert one.trained == other.trained > 0


def test_the_launcher_refuses_before_it_asks_the_hub(monkeypatch):
    monkeypatch.setattr(hardware, "detect", lambda: machine(8.6))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with refuses("model.name", names="card"):
        train.main(["--preset", "8gb", "model.name=Qwen/Qwen2.5-14B"])
