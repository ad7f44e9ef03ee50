"""The merge that reads weight by weight equals that of PEFT in a whole model, and a whole model is the way out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.conftest import NANO, refuses
from tests.model.test_bad_models import edit
from tests.model.test_variants import read
from tests.rollout.test_decoder import family, move_adapter
from trainer.config.settings import Lora, Model
from trainer.errors import CheckpointError
from trainer.machine import manifest
from trainer.model import hub, lora, merge
from trainer.watch.footer import Progress

ADAPTERS = {
    "lora": Lora(r=4, rslora=True),
    "dora": Lora(r=4, dora=True),
    "both embeddings": Lora(r=4, targets=("embed_tokens", "lm_head", "q_proj")),
    "output layer": Lora(r=4, targets=("lm_head",)),
}


@pytest.fixture(scope="module", params=ADAPTERS)
def adapter(request, tmp_path_factory):
    return save_adapter(NANO, ADAPTERS[request.param], tmp_path_factory.mktemp("adapter"))


def save_adapter(base, settings, folder):
    model = lora.add_adapter(AutoModelForCausalLM.from_pretrained(base), settings)
    move_adapter(model, seed=0)
    lora.save_adapter(model, folder)
    return folder


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_weight_is_that_of_the_whole_model(adapter, dtype):
    weights = merge.stored_weights(Model(), adapter, merge.DTYPES[dtype])
    whole = lora.merged(read("nano"), adapter)
    expected = dict(whole.named_parameters())
    assert {*weights} == {*expected}
    assert weights.config.tie_word_embeddings == whole.config.tie_word_embeddings
    for name, value in weights.items():
        assert torch.equal(value, expected[name].to(merge.DTYPES[dtype])), f"{name} is rounded once"


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("kind", ["gpt2", "phi3"])
def test_a_base_whose_files_name_its_layers_otherwise(kind, tmp_path):
    """GPT-2 on the hub leaves out the decoder's name, and the dtype. Phi-3 joins queries, keys and values."""
    base, out = tmp_path / "base", tmp_path / "merged"
    family(kind).save_pretrained(base)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(base)
    stored = load_file(base / "model.safetensors")
    renamed = {name.removeprefix("transformer."): value for name, value in stored.items()}
    save_file(renamed, base / "model.safetensors", {"format": "pt"})
    edit(base / "config.json", dtype=None)
    adapter = save_adapter(base, Lora(r=2, targets="all"), tmp_path / "adapter")
    assert merge.stored_weights(Model(name=str(base)), adapter, None) is not None
    merge.write_merged(Model(name=str(base)), adapter, out, None)
    assert AutoConfig.from_pretrained(out).dtype == torch.float32
    assert_merged(base, adapter, out)


def assert_merged(base, adapter, out):
    expected = lora.merged(read(base), adapter).state_dict()
    found = read(out).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_files_of_a_limited_size_with_an_index_and_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(merge, "SHARD_BYTES", 1_000_000)
    adapter, out, bars = save_adapter(NANO, ADAPTERS["lora"], tmp_path / "adapter"), tmp_path / "merged", []
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"of an earlier result, which transformers would prefer")
    merge.write_merged(Model(), adapter, out, "fp32", lambda *task: bars.append(Progress(*task)) or bars[0])
    assert (bars[0].task, bars[0].done) == ("merging", len(merge.stored_weights(Model(), adapter, None)))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    first, *_ = files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert {*files} == {*index["weight_map"].values()}
    assert_merged("nano", adapter, out)
    weights = bytearray((out / first).read_bytes())
    weights[-3] ^= 1  # a flipped bit is found
    (out / first).write_bytes(weights)
    with refuses(out, CheckpointError, names=first):
        manifest.must_be_whole(out)


@pytest.mark.parametrize("other", ["model-00009-of-00009", "consolidated", "model_ema"])
def test_weights_that_lie_beside_the_model_are_not_merged_nor_counted(tmp_path, other):
    base, adapter = tmp_path / "base", save_adapter(NANO, ADAPTERS["lora"], tmp_path / "adapter")
    AutoModelForCausalLM.from_pretrained(NANO).save_pretrained(base, max_shard_size="1MB")
    AutoTokenizer.from_pretrained(NANO).save_pretrained(base)
    alone = hub.find_model(Model(name=str(base))).weights
    changed = {name: value + 1 for name, value in load_file(NANO / "model.safetensors").items()}
    save_file(changed, base / f"{other}.safetensors")
    assert hub.find_model(Model(name=str(base))).weights == alone
    merge.write_merged(Model(name=str(base)), adapter, tmp_path / "merged", "fp32")
    assert_merged(base, adapter, tmp_path / "merged")


def test_weights_in_a_pickle_are_not_read_one_by_one(tmp_path):
    (tmp_path / "config.json").write_bytes((NANO / "config.json").read_bytes())
    torch.save(load_file(NANO / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert merge.stored_weights(Model(name=str(tmp_path)), None, None) is None


@pytest.mark.parametrize("adapter", ["both embeddings"], indirect=True)
def test_no_link_leads_what_is_written_elsewhere(adapter, tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / "merged").mkdir()
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        (tmp_path / "merged" / name).symlink_to(tmp_path / "other")
    merge.write_merged(Model(), adapter, tmp_path / "merged", "fp32")
    assert (tmp_path / "other").read_text() == "kept"
    assert all((tmp_path / "merged" / name).is_file() for name in names)
