"""Torch functions that mix tokens, answered over the ranks of a layout while an applied model computes.

A ``TorchFunctionMode`` sees calls by any name that they were imported under. It is off within its own handler, so
functions that call others of interest in their body (``multi_head_attention_forward``) are run with it on again.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mycel.errors import UsageError
from mycel.planning.sequence import CAUSAL, FULL
from mycel.sequence.context import SequenceContext
from mycel.sequence.convolution import causal_conv1d
from mycel.sequence.models.stand_in import rows_of, with_stand_in, without_stand_in
from mycel.sequence.softmax import Way, attention
from mycel.sequence.softmax.attention import WayName
from mycel.untraced import untraced

__all__ = ["SequenceCalls", "attend", "convolve"]


@untraced
class SequenceCalls(TorchFunctionMode):
    """Attention and causal convolutions over ranks, and everything else as it is.

    Args:
        context: of the tokens here.
        way: of attention.
    """

    def __init__(self, context: SequenceContext, way: Way | WayName) -> None:
        super().__init__()
        self.context = context
        self.way = way

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is None:
            return func(*args, **(kwargs or {}))
        return answer(self, *args, **(kwargs or {}))


@untraced
def _scaled_dot_product_attention(
    calls: SequenceCalls,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    context = calls.context
    if attn_mask is not None:
        raise UsageError(
            f"an attention mask of {tuple(attn_mask.shape)} is of the tokens of one rank, and contradicts the "
            "layout, under which queries see keys of others; use is_causal=True, and documents for borders"
        )
    if query.shape[:-3] != key.shape[:-3] or query.dim() not in (3, 4):
        raise UsageError(
            f"attention with queries of {tuple(query.shape)}: [batch, heads, tokens, width] is understood"
        )
    if query.dim() == 3:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return attend(query, key, value, context, causal=is_causal, dropout=dropout_p, scale=scale, way=calls.way)[
            :, 0
        ]
    return attend(query, key, value, context, causal=is_causal, dropout=dropout_p, scale=scale, way=calls.way)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: SequenceContext,
    *,
    causal: bool,
    dropout: float,
    scale: float | None,
    way: Way | WayName,
) -> Tensor:
    """Attention of the tokens here to those of all ranks, checked.

    Args:
        query, key, value: of shape [batch, heads, tokens here, width].
        context: of the tokens here.
        causal: or full.
        dropout: of weights; none is possible.
        scale: of scores.
        way: of attention.
    """
    check_attention(query, key, context, dropout)
    q, k, v = (without_stand_in(x, context, 2) for x in (query, key, value))
    seen = attention(q, k, v, context, mask=CAUSAL if causal else FULL, scale=scale, way=way)
    return with_stand_in(seen, context, 2)


def check_attention(query: Tensor, key: Tensor, context: SequenceContext, dropout: float) -> None:
    """Refuse what would be silently wrong."""
    here = rows_of(context)
    if query.shape[2] != here or key.shape[2] != here:
        raise UsageError(
            f"attention of {query.shape[2]} queries to {key.shape[2]} keys, where this rank holds {here} tokens: "
            "only attention of the whole sequence to itself is understood, not of parts of it, nor to another one"
        )
    if dropout:
        raise UsageError(
            f"dropout of attention weights ({dropout}): ranks would draw weights of their own for the same heads; "
            "set it to 0"
        )


@untraced
def _conv1d(
    calls: SequenceCalls,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    context, here, size = calls.context, rows_of(calls.context), weight.shape[-1]
    step, apart = _one(stride), _one(dilation)
    halo, length = (size - 1) * apart, input.shape[-1]
    if size == 1 and step == 1:
        return functional.conv1d(input, weight, bias, stride, padding, dilation, groups)
    around = padding if isinstance(padding, str) else _one(padding)
    if step != 1 or (length, around) not in ((here, halo), (here + halo, 0)):
        raise UsageError(
            f"conv1d of {length} tokens with kernel {size}, stride {step}, padding {around!r}: this rank holds "
            f"{here}; only causal convolutions are understood, with padding={halo} and the last {halo} cut off, "
            "or "
            f"with {halo} zeros before the tokens"
        )
    if length == here:
        seen = convolve(input, weight, bias, context, dilation=apart, groups=groups)
        # What would be here is of no causal model, which cuts it off; a model that does use it should notice.
        return functional.pad(seen, (0, halo), value=float("nan"))
    return convolve(input[..., halo:], weight, bias, context, dilation=apart, groups=groups)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, context: SequenceContext, *, dilation: int, groups: int
) -> Tensor:
    """A causal convolution over the tokens here, which looks back to those of other ranks.

    Args:
        x: shape [batch, channels, tokens here].
        weight: shape [channels out, channels / groups, kernel].
        bias: shape [channels out].
        context: of the tokens.
        dilation, groups: as torch has them.
    """
    seen = causal_conv1d(without_stand_in(x, context, 2), weight, bias, context, groups=groups, dilation=dilation)
    return with_stand_in(seen, context, 2)


@untraced
def _multi_head_attention_forward(calls: SequenceCalls, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("need_weights", True):
        raise UsageError("nn.MultiheadAttention with need_weights=True: no rank has all weights; call it with False")
    if kwargs.get("key_padding_mask") is not None:
        raise UsageError("key_padding_mask is of the tokens of one rank, and contradicts the layout: pad no rows")
    with calls:
        return _BODY(*args, **kwargs)


def _one(number: int | Sequence[int]) -> int:
    return number if isinstance(number, int) else int(number[0])


def _without_dispatch(function: Any) -> Any:
    """A function of torch whose body runs, instead of asking modes first."""
    own = {**function.__globals__, "has_torch_function": lambda _: False}
    copied = types.FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_BODY = _without_dispatch(functional.multi_head_attention_forward)

_ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _scaled_dot_product_attention,
    functional.conv1d: _conv1d,
    functional.multi_head_attention_forward: _multi_head_attention_forward,
}
