"""The gated delta rule, as in Qwen3.5: a row keeps a matrix for each head, and the last inputs of a convolution.

A token decays the matrix, reads the value that is stored under its key, and writes the difference from its own value.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from trainer.model.families import Family
from trainer.rollout.decoder.layers.passes import Pass, Prompts, State
from trainer.rollout.decoder.layers.short_convolution import Convolution
from trainer.rollout.decoder.weights import Norm, Projection

CONVOLUTION, MATRIX = 0, 1  # the states of a row


class GatedDelta:
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
        self.norms = [self.norm]
        self.convolution, self.activation = Convolution(module.conv1d, index, CONVOLUTION), ACT2FN[module.activation]
        matrix = State((self.value_heads, self.key_size, self.value_size), torch.float32)
        self.keeps = [self.convolution.state, matrix]

    def __call__(self, hidden_NH: Tensor, at: Pass) -> Tensor:
        mixed_NC, gate_NO, write_Nh, fade_Nh = self.inner(hidden_NH).split(self.sizes, dim=-1)
        mixed_NC = self.activation(self.convolution(mixed_NC, at))
        keys = self.key_heads * self.key_size
        parts = mixed_NC.split([keys, keys, self.value_heads * self.value_size], dim=-1)
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
