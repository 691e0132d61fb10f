"""What ``IMPLEMENTATION`` stands for in transformers: attention over ranks, and masks that the layout takes over."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.planning.sequence import CAUSAL, FULL, Mask
from mycel.sequence.models.active import here
from mycel.sequence.models.stand_in import with_stand_in, without_stand_in
from mycel.sequence.models.torch_calls import check_attention
from mycel.sequence.softmax import attention
from mycel.untraced import untraced

__all__ = ["attend", "mask_of", "no_mask"]

#: What attention functions are given beside that has no meaning over ranks, unless it is nothing.
_REFUSED = {
    "softcap": "soft-capped scores",
    "position_bias": "a bias by position",
    "cache": "a paged cache",
}


@untraced
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer of transformers, as its registry calls it.

    Args:
        module: the layer.
        query: shape [batch, heads, tokens here, width]; key, value: with key heads.
        attention_mask: none.
        dropout: of weights; none is possible.
        scaling: of scores.
        is_causal: if not as the layer says.
        kwargs: ``sliding_window``; ``s_aux``, which are sinks; nothing else that would change what is seen.

    Returns:
        Shape [batch, tokens here, heads, value width], and no weights.
    """
    name = type(module).__name__
    active = here()
    if active is None:
        raise UsageError(
            f"{name} computes outside of the model that mycel.sequence.apply was called on: call the model"
        )
    binding, context = active
    for refused, what in _REFUSED.items():
        if kwargs.get(refused) is not None:
            raise UsageError(f"{name} has {what}, which attention over ranks does not: train it in one process")
    if attention_mask is not None:
        raise UsageError(
            f"{name} was given an attention mask, which contradicts the layout: call the model without one"
        )
    check_attention(query, key, context, dropout)
    q, k, v = (without_stand_in(x, context, 2) for x in (query, key, value))
    mask = mask_of(module, is_causal, kwargs)
    seen = attention(q, k, v, context, mask=mask, scale=scaling, sinks=kwargs.get("s_aux"), way=binding.way)
    return with_stand_in(seen, context, 2).transpose(1, 2).contiguous(), None


def mask_of(module: nn.Module, is_causal: bool | None, given: dict[str, Any]) -> Mask:
    """The rule by which a layer of transformers sees keys.

    Args:
        module: the layer.
        is_causal: as it was called, if not as it says itself.
        given: what else it was called with.

    Raises:
        UsageError: a window that looks ahead, or a chunk of no size.
    """
    config = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[index] if kinds is not None and index is not None and index < len(kinds) else None
    width = given.get("sliding_window")
    if kind == "sliding_attention" and width is None:
        width = getattr(config, "sliding_window", None)
    if kind == "full_attention":
        width = None
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        if width is not None:
            raise UsageError(
                f"{type(module).__name__} sees a window of {width} tokens to both sides; only to the left"
            )
        return FULL
    if kind == "chunked_attention":
        chunk = getattr(config, "attention_chunk_size", None)
        if chunk is None:
            raise UsageError(
                f"{type(module).__name__} sees chunks of no size: its config has no attention_chunk_size"
            )
        return Mask(kind="chunked", width=int(chunk))
    return CAUSAL if width is None else Mask(kind="window", width=int(width))


def no_mask(*, mask_function: Any = None, use_vmap: bool = False, **_: Any) -> None:
    """Instead of a mask: layouts say what sees what.

    Args:
        mask_function: the rule, whose name says where it is one of its own.
        use_vmap: set by the library where a model has rules of its own.

    Raises:
        UsageError: the model has.
    """
    name = getattr(mask_function, "__qualname__", "")
    if use_vmap or name.startswith("or_masks"):
        raise UsageError(
            f"this model's attention has a rule of its own ({name}), which the layout contradicts: only causal, "
            "full, sliding and chunked attention are understood"
        )
