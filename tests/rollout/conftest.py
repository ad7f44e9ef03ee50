"""What the tests of samplers share."""

import pytest

from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler


@pytest.fixture(params=[HfSampler, DecodeSampler], ids=["hf", "decode"])
def kind(request):
    """Each of Octet's own samplers."""
    return request.param
