"""Files of a run have the permissions of the umask, whichever library has written them."""

import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from trainer.machine import disk
from trainer.reward.judge_client import Cache


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def permissions(request):
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def test_weights_and_the_cache_of_a_judge_follow_the_umask(tmp_path, permissions):
    weights = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.ones(1)}, weights)
    disk.follow_umask(weights)
    cache = Cache(tmp_path / "cache")
    cache.put("abc", "a reply")
    files = [weights, tmp_path / "cache/ab/abc.json"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [permissions] * 2
