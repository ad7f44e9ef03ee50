"""Layers whose rows keep a state of fixed size: gated short convolutions, as in LFM2, and the gated delta rule of
Qwen3.5."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from trainer.model.families import Family
from trainer.rollout.decoder.layers.passes import Pass, Prompts, State
from trainer.rollout.decoder.weights import Norm, Projection

INPUTS, MATRIX = 0, 1  # the states of a row: inputs of a convolution, and the matrix of the gated delta rule


class Convolution:
    """A causal convolution of each channel. A row keeps the last inputs, as the first state of layer `index`."""

    def __init__(self, conv: Any, index: int) -> None:
        self.conv, self.index = conv, index
        self.before = conv.kernel_size[0] - 1  # number of inputs that are kept
        self.state = State((conv.in_channels, self.before), conv.weight.dtype)

    def __call__(self, inputs_NC: Tensor, at: Pass) -> Tensor:
        weight_C1k, bias_C = self.conv.weight, self.conv.bias
        if isinstance(at, Prompts):
            inputs_PCT = inputs_NC.view(len(at.lengths_P), at.width, -1).transpose(1, 2)
            padded_PCT = F.pad(inputs_PCT, (self.before, 0))
            if at.before:
                padded_PCT[:, :, : self.before] = at.beginning(self.index, INPUTS)
            last_Pk = at.lengths_P[:, None] + torch.arange(self.before, device=inputs_NC.device)
            last_PCk = last_Pk[:, None].expand(-1, inputs_NC.shape[1], -1)
            at.keep(self.index, INPUTS, padded_PCT.gather(2, last_PCk))
            output_PCT = F.conv1d(padded_PCT, weight_C1k, bias_C, groups=inputs_NC.shape[1])
            return output_PCT.transpose(1, 2).reshape(inputs_NC.shape)
        state_BCk = at.state(self.index, INPUTS)
        seen_BCk = torch.cat((state_BCk, inputs_NC[:, :, None]), dim=2)
        state_BCk.copy_(seen_BCk[:, :, 1:].where(at.running_B[:, None, None], state_BCk))
        output_BC = torch.linalg.vecdot(seen_BCk, weight_C1k[:, 0])
        return output_BC if bias_C is None else output_BC + bias_C


class ShortConvolution:
    """Each token reads the few tokens before it, and a row keeps only those."""

    def __init__(self, module: Any, config: Any, index: int, family: Family) -> None:
        self.inner, self.out = Projection([module.in_proj]), Projection([module.out_proj])
        self.projections = [self.inner, self.out]
        self.convolution = Convolution(module.conv, index)
        self.keeps = [self.convolution.state]

    def __call__(self, hidden_NH: Tensor, at: Pass) -> Tensor:
        before_NH, behind_NH, inputs_NH = self.inner(hidden_NH).chunk(3, dim=-1)
        return behind_NH * self.convolution(before_NH * inputs_NH, at)


class GatedDelta:
    """Keeps a matrix for each head. A token decays the matrix, reads the value that is stored under its key, and writes
    the difference from its own value."""

    def __init__(self, module: Any, config: Any, index: int, family: Family) -> None:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling  # not imported for other models

        self.module, self.index = module, index
        self.in_chunks, self.l2norm = modeling.torch_chunk_gated_delta_rule, modeling.l2norm
        self.key_heads, self.value_heads = module.num_k_heads, module.num_v_heads
        self.key_size, self.value_size = module.head_k_dim, module.head_v_dim
        self.sizes = [module.conv_dim, module.value_dim, self.value_heads, self.value_heads]
        self.inner = Projection([module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a])
        self.out = Projection([module.out_proj])
        self.projections = [self.inner, self.out]
        self.norm = Norm(module.norm, adds_one=False)
        self.convolution, self.activation = Convolution(module.conv1d, index), ACT2FN[module.activation]
        matrix = State((self.value_heads, self.key_size, self.value_size), torch.float32)
        self.keeps = [self.convolution.state, matrix]

    def __call__(self, hidden_NH: Tensor, at: Pass) -> Tensor:
        mixed_NC, gate_NO, write_Nh, fade_Nh = self.inner(hidden_NH).split(self.sizes, dim=-1)
        mixed_NC = self.activation(self.convolution(mixed_NC, at))
        parts = mixed_NC.split([self.module.key_dim, self.module.key_dim, self.module.value_dim], dim=-1)
        sizes = self.key_size, self.key_size, self.value_size
        heads = [part.reshape(len(part), -1, size) for part, size in zip(parts, sizes, strict=True)]
        fade_Nh = -self.module.A_log.float().exp() * F.softplus(fade_Nh.float() + self.module.dt_bias)
        rule = self._within if isinstance(at, Prompts) else self._behind
        read_NhD = rule(heads, fade_Nh, write_Nh.sigmoid(), at).to(hidden_NH.dtype)
        gate_NhD = F.silu(gate_NO.reshape(read_NhD.shape).float())
        return (self.norm(read_NhD) * gate_NhD).to(hidden_NH.dtype).flatten(1)

    def _within(self, heads: list[Tensor], fade_Nh: Tensor, write_Nh: Tensor, at: Any) -> Tensor:
        """Read each prompt in chunks. Padding does not change the matrix."""
        prompts = len(at.lengths_P)
        parts = *map(self._for_values, heads[:2]), heads[2], fade_Nh, write_Nh
        rows = [part.view(prompts, at.width, *part.shape[1:]) for part in parts]
        is_padding_PT = torch.arange(at.width, device=rows[0].device) >= at.lengths_P[:, None]
        fade, write = (part.masked_fill(is_padding_PT[..., None], 0.0) for part in rows[3:])
        beginning = {"initial_state": at.beginning(self.index, MATRIX)} if at.before else {}
        read_PThD, matrix_PhKD = self.in_chunks(
            *rows[:3], g=fade, beta=write, output_final_state=True, use_qk_l2norm_in_kernel=True, **beginning
        )
        at.keep(self.index, MATRIX, matrix_PhKD)
        return read_PThD.flatten(0, 1)

    def _behind(self, heads: list[Tensor], fade_Bh: Tensor, write_Bh: Tensor, at: Any) -> Tensor:
        """Read and write a token in each running row. Both products are taken with the old matrix in one pass, and the
        result for the new matrix follows from them."""
        value_BhD = heads[2].float()
        query_BhK, key_BhK = (self._for_values(self.l2norm(part.float())) for part in heads[:2])
        query_BhK = query_BhK * self.key_size**-0.5
        kept_Bh1 = fade_Bh.exp().where(at.running_B[:, None], 1.0)[..., None]
        write_Bh1 = write_Bh.float().where(at.running_B[:, None], 0.0)[..., None]
        matrix_BhKD = at.state(self.index, MATRIX)
        stored_Bh2D = torch.stack((key_BhK, query_BhK), dim=2) @ matrix_BhKD * kept_Bh1[..., None]
        new_BhD = (value_BhD - stored_Bh2D[:, :, 0]) * write_Bh1
        matrix_BhKD.mul_(kept_Bh1[..., None]).addcmul_(key_BhK[..., None], new_BhD[:, :, None])
        return stored_Bh2D[:, :, 1] + torch.linalg.vecdot(query_BhK, key_BhK)[..., None] * new_BhD

    def _for_values(self, part: Tensor) -> Tensor:
        """Repeat the key heads for the value heads that share them. `repeat_interleave` would wait for the card."""
        shared = self.value_heads // self.key_heads
        return part[:, :, None].expand(-1, -1, shared, -1).flatten(1, 2)
