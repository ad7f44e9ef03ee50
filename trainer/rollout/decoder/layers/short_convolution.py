"""Gated short convolutions, as in LFM2: each token reads the few tokens before it, and a row keeps only those."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.model.families import Family
from trainer.rollout.decoder.layers.passes import Pass, Prompts, State
from trainer.rollout.decoder.weights import Norm, Projection


class Convolution:
    """A causal convolution of each channel. A row keeps the last inputs, as state `number` of layer `index`."""

    def __init__(self, conv: Any, index: int, number: int = 0) -> None:
        self.conv, self.index, self.number = conv, index, number
        self.before = conv.kernel_size[0] - 1  # number of inputs that are kept

    @property
    def state(self) -> State:
        return State((self.conv.in_channels, self.before), self.conv.weight.dtype)

    def __call__(self, inputs_NC: Tensor, at: Pass) -> Tensor:
        weight_C1k, bias_C = self.conv.weight, self.conv.bias
        if isinstance(at, Prompts):
            inputs_PCT = inputs_NC.view(len(at.lengths_P), at.width, -1).transpose(1, 2)
            padded_PCT = F.pad(inputs_PCT, (self.before, 0))
            if at.before:
                padded_PCT[:, :, : self.before] = at.beginning(self.index, self.number)
            last_Pk = at.lengths_P[:, None] + torch.arange(self.before, device=inputs_NC.device)
            last_PCk = last_Pk[:, None].expand(-1, inputs_NC.shape[1], -1)
            at.keep(self.index, self.number, padded_PCT.gather(2, last_PCk))
            output_PCT = F.conv1d(padded_PCT, weight_C1k, bias_C, groups=inputs_NC.shape[1])
            return output_PCT.transpose(1, 2).reshape(inputs_NC.shape)
        state_BCk = at.state(self.index, self.number)
        seen_BCk = torch.cat((state_BCk, inputs_NC[:, :, None]), dim=2)
        state_BCk.copy_(seen_BCk[:, :, 1:].where(at.running_B[:, None, None], state_BCk))
        output_BC = torch.linalg.vecdot(seen_BCk, weight_C1k[:, 0])
        return output_BC if bias_C is None else output_BC + bias_C


class ShortConvolution:
    def __init__(self, module: Any, config: Any, index: int, family: Family) -> None:
        self.inner, self.out = Projection([module.in_proj]), Projection([module.out_proj])
        self.projections = [self.inner, self.out]
        self.norms: list[Norm] = []
        self.convolution = Convolution(module.conv, index)
        self.keeps = [self.convolution.state]

    def __call__(self, hidden_NH: Tensor, at: Pass) -> Tensor:
        before_NH, behind_NH, inputs_NH = self.inner(hidden_NH).chunk(3, dim=-1)
        return behind_NH * self.convolution(before_NH * inputs_NH, at)
