"""What a stage computes again in its backward instead of keeping it, as a plan says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mycel.parallel.chain import module_of
from mycel.planning.job import Recompute

__all__ = ["recompute"]

_aten = torch.ops.aten
#: The core of attention.
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._softmax.default,
        _aten.bmm.default,
    }
)
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
#: Without a type of torch's own.
_contexts: Callable[..., Any] = create_selective_checkpoint_contexts
_PolicyOf = Callable[[], Callable[..., CheckpointPolicy]]


def recompute(
    model: nn.Module,
    layers: Sequence[str],
    what: Recompute,
    at_work: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
    *,
    exchanges: bool = False,
) -> None:
    """Have layers keep less and compute it again, in place; names of parameters stay.

    Args:
        model: a part.
        layers: names of those of its layers that it has.
        what: ``full``: all but the layer's input; ``attention``: attention's core; ``alternate``: all but every
            second matrix product.
        at_work: entered around a layer's forward, also where it is done again: what else its hooks would bring.
        exchanges: whether layers send and receive, into buffers that cannot be kept one operation at a time:
            ``attention`` then keeps matrix products and does everything else again.

    References:
        Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., MLSys 2023, section 5
        (selective recomputation).
    """
    if what == "none":
        return
    but_attention = _products if exchanges else _but_attention
    policies: dict[str, _PolicyOf] = {"attention": lambda: but_attention, "alternate": _every_second}
    more: dict[str, Any] = {}
    if what in policies:
        make, contexts = policies[what], _contexts
        more["context_fn"] = lambda: contexts(make())
    for name in layers:
        layer = module_of(model, name)
        # The forward of this one module: a wrapper would rename its parameters.
        forward = layer.forward if at_work is None else _within(at_work, layer, layer.forward)
        layer.forward = functools.partial(checkpoint, forward, use_reentrant=False, **more)


def _within(
    at_work: Callable[[nn.Module], AbstractContextManager[None]], layer: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def within(*args: Any, **kwargs: Any) -> Any:
        with at_work(layer):
            return forward(*args, **kwargs)

    return within


def _but_attention(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    is_core = operation in _ATTENTION
    return CheckpointPolicy.PREFER_RECOMPUTE if is_core else CheckpointPolicy.PREFER_SAVE


def _products(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _every_second() -> Callable[..., CheckpointPolicy]:
    seen = {True: 0, False: 0}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        keeps = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
