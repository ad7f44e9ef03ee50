"""loss: each token goes through the layers once. Common prefixes of rows are computed once, and padding never.

Only attention mixes positions, so only attention needs tokens in rows. All other layers, which do nearly all of the
work, process one line of tokens (`Tree` in records.py), in which a prompt, and any common beginning of answers, stands
once.

The attention function below arranges queries, keys and values in rows, as prompts and as answers that attend to their
prompt, calls the model's own attention, and puts the results back into the line. In layers with a state, only the
convolution and the delta rule mix positions. They also process each prompt once, and its answers start from the state
at its end.
"""

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from trainer.batch.pack import to_tensors
from trainer.model.families import ATTENTIONS, BY_CLASS, MIXERS, Family
from trainer.model.load import needs_repeated_keys
from trainer.records import TrainingBatch, TrainingRow

FLAT, SDPA = "octet_flat_sdpa", "sdpa"
MASK_STRIDE = 16  # PyTorch's attention kernels need the strides of a mask to be multiples of this


class Layout(NamedTuple):
    """The places of tokens in the line: P prompts of up to T tokens, A answers of up to C. Padding is at any place."""

    prompts_PT: Tensor
    answers_AC: Tensor
    keys_AK: Tensor  # the keys of an answer: its prompt, then its own tokens
    queries_N: Tensor  # the places of all prompts, then of all answers
    keys_N: Tensor  # the places of all prompts, then of the keys of all answers
    mask_ACK: Tensor  # bool: this query may attend to this key
    masks: dict[int | None, Tensor]  # additive masks made from `mask_ACK`, by window
    reaches: dict[int, tuple[Tensor, Tensor, Tensor]]  # results of `with_tokens_before`
    in_prompt_PT: Tensor  # bool: not padding
    own_prompt_A: Tensor  # the index of the prompt of an answer
    prompt_A: Tensor  # the length of the prompt of an answer
    rows_A: Tensor  # the row of an answer in `place_BT`
    source_N: Tensor  # for each token of the line, the one of `queries_N` that computes it
    place_BT: Tensor  # the places of whole rows

    def mask(self, window: int | None, query: Tensor) -> Tensor:
        """Return the additive mask of answers, which also excludes keys before the window. It is made once for all
        layers, in the dtype and with the strides that PyTorch's attention would otherwise produce in each layer."""
        if window not in self.masks:
            prompt, longest, may_see_ACK = self.prompts_PT.shape[1], self.answers_AC.shape[1], self.mask_ACK
            if window is not None and prompt + longest > window:
                query_AC = self.prompt_A[:, None] + torch.arange(longest, device=self.prompt_A.device)
                key_AT = torch.arange(prompt, device=self.prompt_A.device).expand(len(query_AC), -1)
                key_AK = torch.cat([key_AT, query_AC], dim=1)
                may_see_ACK = may_see_ACK & (key_AK[:, None] > query_AC[:, :, None] - window)
            wide = query.new_zeros(*may_see_ACK.shape[:2], -(-may_see_ACK.shape[2] // MASK_STRIDE) * MASK_STRIDE)
            self.masks[window] = wide[:, None, :, : may_see_ACK.shape[2]]
            self.masks[window].masked_fill_(~may_see_ACK[:, None], float("-inf"))
        return self.masks[window]

    def rows(self, line_1NX: Tensor, answers_AX: Tensor, places_N: Tensor) -> list[Tensor]:
        """Return rows of the line: those of prompts, and those at the places of `answers_AX`. `places_N` joins both."""
        indices = self.prompts_PT, answers_AX
        values = _Gather.apply(line_1NX.squeeze(0), places_N)
        parts = zip(values.split([index.numel() for index in indices]), indices, strict=True)
        return [part.unflatten(0, index.shape) for part, index in parts]

    def with_tokens_before(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places of answers with the `count` tokens before each answer, these places after those of prompts,
        and a mask of the tokens that do not exist. They are computed once for all layers."""
        if count not in self.reaches:
            reach = torch.arange(-count, self.answers_AC.shape[1], device=self.prompt_A.device)
            position_AX, places_AT = self.prompt_A[:, None] + reach, self.place_BT[self.rows_A]
            places_AX = places_AT.gather(1, position_AX.clamp(0, places_AT.shape[1] - 1))
            places_N = torch.cat([self.prompts_PT.flatten(), places_AX.flatten()])
            self.reaches[count] = places_AX, places_N, (position_AX < 0)[..., None]
        return self.reaches[count]

    def line(self, *rows: Tensor) -> Tensor:
        """Return the line, given the rows of prompts and of answers."""
        return torch.cat([part.flatten(0, 1) for part in rows]).index_select(0, self.source_N)[None]


class _Gather(torch.autograd.Function):
    """Reads a line at places that may repeat. PyTorch's own backward pass of indexing sorts the places, in eight kernel
    launches, and adds in bf16; this one adds in fp32."""

    @staticmethod
    def forward(context: Any, line_NX: Tensor, places: Tensor) -> Tensor:
        context.save_for_backward(places)
        context.tokens = len(line_NX)
        return line_NX.index_select(0, places)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = context.saved_tensors
        sums_NX = torch.zeros(context.tokens, *gradient.shape[1:], dtype=torch.float32, device=gradient.device)
        return sums_NX.index_add_(0, places, gradient.float()).to(gradient.dtype), None


def layout_of(batch: TrainingBatch) -> Layout:
    tree, width = batch.tree, batch.inputs_BT.shape[1]
    row_N, position_N = tree.line_N // width, tree.line_N % width
    prompt_B = batch.mask_BT.int().argmax(dim=1) + 1  # its last token predicts the first target
    is_first_B = tree.first_B == torch.arange(len(prompt_B), device=prompt_B.device)
    own_prompt_B = (is_first_B.cumsum(0) - 1)[tree.first_B]
    in_answer_N = position_N >= prompt_B[row_N]
    answers = row_N[in_answer_N].unique()  # without answers that are the beginning of another
    if not len(answers):
        answers = row_N[:1]
    own_answer_B = torch.zeros_like(prompt_B).index_put_((answers,), torch.arange(len(answers), device=answers.device))
    prompts_PT = tree.place_BT[is_first_B, : int(prompt_B.max())]
    longest = max(1, int((batch.present_BT.sum(dim=1) - prompt_B).max()))
    position_AC = prompt_B[answers][:, None] + torch.arange(longest, device=answers.device)
    answers_AC = tree.place_BT[answers].gather(1, position_AC.clamp(max=width - 1))
    in_prompt_PT = torch.arange(prompts_PT.shape[1], device=answers.device) < prompt_B[is_first_B][:, None]
    of_prompt_N = own_prompt_B[row_N] * prompts_PT.shape[1] + position_N
    of_answer_N = prompts_PT.numel() + own_answer_B[row_N] * longest + position_N - prompt_B[row_N]
    own_prompt_A = own_prompt_B[answers]
    keys_AK = torch.cat([prompts_PT[own_prompt_A], answers_AC], dim=1)
    # each token of an answer attends to its whole prompt, and to the answer up to itself
    before_CC = torch.ones(longest, longest, dtype=torch.bool, device=answers.device).tril()
    in_prompt_ACT = in_prompt_PT[own_prompt_A][:, None].expand(-1, longest, -1)
    return Layout(
        prompts_PT,
        answers_AC,
        keys_AK,
        queries_N=torch.cat([prompts_PT.flatten(), answers_AC.flatten()]),
        keys_N=torch.cat([prompts_PT.flatten(), keys_AK.flatten()]),
        mask_ACK=torch.cat([in_prompt_ACT, before_CC.expand(len(answers), -1, -1)], dim=2),
        masks={},
        reaches={},
        in_prompt_PT=in_prompt_PT,
        own_prompt_A=own_prompt_A,
        prompt_A=prompt_B[answers],
        rows_A=answers,
        source_N=torch.where(in_answer_N, of_answer_N, of_prompt_N),
        place_BT=tree.place_BT,
    )


def last_hidden(backbone: Any, batch: TrainingBatch) -> Tensor:
    """Return the last hidden state before each completion token of the tree."""
    tree, width = batch.tree, batch.inputs_BT.shape[1]
    hidden_1NH = backbone(
        batch.inputs_BT.flatten()[tree.line_N][None],
        position_ids=(tree.line_N % width)[None],
        attention_mask=torch.empty(1, 1, 1, 1, device=tree.line_N.device),  # transformers keeps a mask with four axes
        use_cache=False,
        layout=layout_of(batch),
    ).last_hidden_state
    return hidden_1NH[0, tree.place_BT.flatten()[tree.edge_E]]


def make_flat(model: Any) -> bool:
    """Make a model work on a line of tokens. Return False, and change nothing, if that would not be exact."""
    implementation = model.config._attn_implementation
    if implementation == FLAT:
        return True
    config = model.config.get_text_config()
    if implementation != SDPA or _has_unknown_layers(config, BY_CLASS.get(type(model).__name__)):
        return False
    model.set_attn_implementation(FLAT)
    code = sys.modules[type(model).__module__]
    for name, flat in FLAT_STATES.items():  # functions of layers with a state, which mix positions
        if (plain := getattr(code, name, None)) and not isinstance(plain, _Flat):
            setattr(code, name, _Flat(plain, flat))
    if _is_exact(model):
        return True
    model.set_attn_implementation(SDPA)
    return False


def _has_unknown_layers(config: Any, family: Family | None) -> bool:
    """Return True for unknown kinds of layers, and for a window in a family that may not pass it to its attention."""
    knows_windows = family is not None and family.decodes
    if kinds := getattr(config, "layer_types", None):
        return not set(kinds) <= {"full_attention", *MIXERS, *(ATTENTIONS if knows_windows else ())}
    return not knows_windows and bool(
        getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    )


@torch.no_grad()
def _is_exact(model: Any) -> bool:
    """Return True if two short answers to one prompt have the same hidden states in rows and in a line. This is False
    for a model family with its own kind of attention, or without positions that can be given to it."""
    batch = to_tensors([_answer(3, 4, 5), _answer(3, 6, 7, 8)], pad_token=0).to(model.device)
    backbone = model.get_decoder()
    if "position_ids" not in signature(backbone.forward).parameters:
        return False
    rows_BTH = backbone(batch.inputs_BT, use_cache=False).last_hidden_state
    expected_EH = rows_BTH.flatten(0, 1)[batch.tree.edge_E].float()
    try:
        line_EH = last_hidden(backbone, batch).float()
    except (TypeError, RuntimeError, LookupError):  # the model does not pass the layout to its attention
        return False
    is_fp32 = all(value.dtype == torch.float32 for value in model.parameters())
    rounding = 1e-3 if is_fp32 else 0.02  # bf16 rounds to 0.4 %
    return bool((line_EH - expected_EH).abs().max() <= rounding * expected_EH.abs().max())


def _answer(*tokens: int) -> TrainingRow:
    return TrainingRow((1, 2), tokens, (0.0,) * len(tokens), 0.0)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    layout: Layout | None = options.pop("layout", None)
    plain = AttentionInterface()[SDPA]
    if layout is None:  # while sampling
        return plain(module, query, key, value, attention_mask, **options)
    queries = _heads(layout, query, layout.answers_AC, layout.queries_N)
    keys, values = (_heads(layout, part, layout.keys_AK, layout.keys_N) for part in (key, value))
    mask, width, window = None, layout.prompts_PT.shape[1], options.get("sliding_window")
    before = width if window is None else window  # tokens that a query of a prompt attends to
    if before < width or needs_repeated_keys(query.device, query.dtype):  # transformers repeats keys only with a mask
        mask = torch.ones(1, 1, width, width, dtype=torch.bool, device=query.device).tril().triu(1 - before)
    prompts, _ = plain(module, queries[0], keys[0], values[0], mask, **options)
    answers, _ = plain(module, queries[1], keys[1], values[1], layout.mask(window, query), **options)
    return layout.line(prompts, answers), None


def _heads(layout: Layout, line: Tensor, answers_AX: Tensor, places_N: Tensor) -> list[Tensor]:
    """Return the rows of queries, keys or values, which have their heads before their tokens."""
    return [rows.transpose(1, 2) for rows in layout.rows(line.transpose(1, 2), answers_AX, places_N)]


class _Flat(NamedTuple):
    """Replaces a function in the code of a layer with a state. With a layout it works on a line."""

    plain: Callable[..., Any]
    flat: Callable[..., Any]

    def __call__(self, *inputs: Any, layout: Layout | None = None, **options: Any) -> Any:
        if layout is None:
            return self.plain(*inputs, **options)
        return self.flat(self.plain, layout, *inputs, **options)


def _convolution(
    plain: Callable[..., Tensor], layout: Layout, line_1DN: Tensor, weight_DK: Tensor, *bias: Any, **options: Any
) -> Tensor:
    """Convolve prompts, and answers together with the tokens before them that the kernel reaches."""
    before = weight_DK.shape[1] - 1
    places_AX, places_N, is_missing_AX1 = layout.with_tokens_before(before)
    prompts, answers = layout.rows(line_1DN.mT, places_AX, places_N)
    answers = answers.masked_fill(is_missing_AX1, 0.0)
    prompts, answers = (plain(part.mT, weight_DK, *bias, **options).mT for part in (prompts, answers))
    return layout.line(prompts, answers[:, before:]).mT


def _delta_rule(
    plain: Callable[..., Any], layout: Layout, *line: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Apply the rule to prompts, and to answers from the state at the end of their prompt. Padding does not change the
    state."""
    parts = [layout.rows(part, layout.answers_AC, layout.queries_N) for part in (*line, g, beta)]
    prompts, answers = zip(*parts, strict=True)
    fade, write = (part.masked_fill(~layout.in_prompt_PT[..., None], 0.0) for part in prompts[3:])
    options["output_final_state"] = True
    of_prompts, matrix_P = plain(*prompts[:3], g=fade, beta=write, **options)
    options["initial_state"] = matrix_P.index_select(0, layout.own_prompt_A)
    of_answers, _ = plain(*answers[:3], g=answers[3], beta=answers[4], **options)
    return layout.line(of_prompts, of_answers), None


FLAT_STATES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
AttentionInterface.register(FLAT, _attention)
AttentionMaskInterface.register(FLAT, AttentionMaskInterface()[SDPA])
