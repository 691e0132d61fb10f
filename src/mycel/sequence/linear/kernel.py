"""Any kernel of linear attention with a state before and after it, over the ranks of a layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.sequence.context import SequenceContext
from mycel.sequence.scan import attached, start_scan
from mycel.sequence.scan.ways import Nodes

__all__ = ["parallel_scan"]

#: A kernel, as those of Hugging Face's models and flash-linear-attention are called.
Kernel = Callable[..., tuple[Tensor, Tensor | None]]


def parallel_scan(
    kernel: Kernel, context: SequenceContext, *, way: str = "auto", nodes: Nodes | None = None
) -> Kernel:
    """A kernel that is called like the one it is given, on the tokens of each rank.

    The kernel is not looked into. Each segment goes through it once from a state of zero, and, where one comes in,
    once more with values of zero from a state of one: what that gives is linear in the state that comes in, so that
    no third pass waits for it.

    Args:
        kernel: called as ``kernel(queries, keys, values, ..., initial_state=..., output_final_state=True)``; all
            tensors have the tokens in dimension 1, (batch, tokens, heads, width), states are (batch, value heads,
            keys, values). It gives outputs and the state after it, linear in values and initial state.
        context: whose tokens; it is used for every call.
        way, nodes: of the scan, as for ``scan``.

    Returns:
        The kernel for all ranks; it takes no initial state, and gives none.

    Raises:
        UsageError: when called with tensors of other tokens, an initial state, or a wish for the final one.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> def summed(q, k, v, initial_state=None, output_final_state=False):
        ...     states = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1)
        ...     states = states if initial_state is None else states + initial_state[:, None]
        ...     return torch.einsum("bthk,bthkv->bthv", q, states), states[:, -1]
        >>> one = torch.ones(1, 3, 1, 1)
        >>> kernel = parallel_scan(summed, SequenceContext(contiguous([2, 1], 1)))
        >>> kernel(one, one, one)[0].flatten().tolist()
        [1.0, 2.0, 1.0]
    """

    @wraps(kernel)
    def over_ranks(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        if options.pop("initial_state", None) is not None or options.pop("output_final_state", False):
            raise UsageError("a kernel over ranks: states of a cache are for decoding; call it without them")
        tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        if len(args) < 3 or any(x.dim() < 2 or x.shape[1] != context.num_tokens for x in tensors):
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
            raise UsageError(
                f"a kernel over ranks got {shapes}: queries, keys and values first, all tensors with the "
                f"{context.num_tokens} tokens of rank {context.rank} in dimension 1"
            )
        return _run(kernel, args, options, context, way, nodes), None

    return over_ranks


def _run(
    kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any], context: SequenceContext, way: str, nodes: Any
) -> Tensor:
    key, value = args[1], args[2]
    keys, (heads, values) = key.shape[-1], value.shape[-2:]
    kind = torch.promote_types(value.dtype, torch.float32)
    batch = value.shape[0]
    blank = value.new_zeros(batch, heads, keys, values, dtype=kind)
    one = torch.eye(keys, dtype=kind, device=value.device).expand(batch, heads, keys, keys)
    local: list[Tensor] = []
    linear: list[Tensor | None] = []
    transitions, updates = [], []
    for segment, start, stop in zip(context.segments, context.borders[:-1], context.borders[1:], strict=True):
        if not len(segment):
            transitions.append(one)
            updates.append(blank)
            linear.append(None)
            continue

        def cut(x: Any, start: int = start, stop: int = stop) -> Any:
            return x[:, start:stop] if isinstance(x, Tensor) else x

        given = [cut(x) for x in args]
        more = {name: cut(x) for name, x in options.items()}
        found, state = _called(kernel, given, more, None)
        local.append(found)
        updates.append(state.to(kind))
        if segment.start:
            nothing = given[2].new_zeros(batch, stop - start, heads, keys)
            through, moved = _called(kernel, [*given[:2], nothing, *given[3:]], more, one)
            linear.append(through)
            transitions.append(moved.to(kind))
        else:
            linear.append(None)
            transitions.append(one)
    if updates:
        transition, update = torch.stack(transitions), torch.stack(updates)
    else:
        transition, update = one.new_zeros(0, *one.shape), blank.new_zeros(0, *blank.shape)
    tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor) and x.is_floating_point()]
    incoming = start_scan(transition, attached(update, *tensors), context, way=way, nodes=nodes).wait()
    numbers = [number for number, segment in enumerate(context.segments) if len(segment)]
    parts = []
    for found, number in zip(local, numbers, strict=True):
        through_it = linear[number]
        if through_it is not None:
            added = torch.einsum("bthk,bhkv->bthv", through_it.to(kind), incoming[number])
            found = found + added.to(found.dtype)
        parts.append(found)
    whole = torch.cat(parts, 1) if parts else value
    return attached(whole, incoming)


def _called(kernel: Kernel, args: list[Any], options: dict[str, Any], state: Tensor | None) -> tuple[Tensor, Tensor]:
    found, after = kernel(*args, **options, initial_state=state, output_final_state=True)
    if after is None:
        raise UsageError(f"{getattr(kernel, '__name__', 'the kernel')} gave no final state")
    return found, after
