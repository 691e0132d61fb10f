"""Kernels of transformers' layers over ranks, by the names under which layers call them.

A gated delta rule is linear in the state that comes in: a chunk maps ``S`` to ``M S + U``. ``U`` is what the
library's own kernel gives from no state, ``M`` what it makes of the identity where values are zero. So the kernel
stays the library's, whichever it is, and the scan over ranks needs to know nothing of it. In Mamba2 ``M`` is one
number for each head, which is worked out here: that is far less to send than a matrix.

References:
    S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks", ICLR 2025 (section 3); T. Dao, A. Gu, "Transformers are
    SSMs", ICML 2024 (section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.sequence.context import SequenceContext
from mycel.sequence.convolution import causal_conv1d
from mycel.sequence.linear import parallel_scan
from mycel.sequence.models.stand_in import with_stand_in, without_stand_in
from mycel.sequence.models.transformers_api import activated
from mycel.sequence.scan import attached, scan

__all__ = ["KERNELS"]

#: Of a layer's kernel: calls the original, under a layout.
Kernel = Callable[..., Any]


def _delta_rule(
    original: Kernel,
    context: SequenceContext,
    *args: Any,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Gated delta rule and KDA: tensors [batch, tokens here, heads, width]."""
    _without_cache(initial_state, output_final_state)
    tensors = [without_stand_in(x, context, 1) for x in args]
    others = {name: value for name, value in kwargs.items() if not isinstance(value, Tensor)}
    of_tokens = {name: without_stand_in(kwargs[name], context, 1) for name in ("g", "beta") if name in kwargs}
    seen, _ = parallel_scan(original, context)(*tensors, **(others | of_tokens))
    return with_stand_in(seen, context, 1), None


def _mamba2(
    original: Kernel,
    context: SequenceContext,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 (the library's name)
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Mamba2: ``hidden_states`` [batch, tokens here, heads, width], ``B`` and ``C`` [..., groups, state]."""
    _without_cache(initial_states, return_final_states)
    kwargs.pop("seq_idx", None)
    x, steps, keys, queries = (without_stand_in(t, context, 1) for t in (hidden_states, dt, B, C))
    rows, heads, deep, wide = len(x), x.shape[2], x.shape[-1], B.shape[-1]
    segments = list(zip(*(_cut(t, context) for t in (x, steps, keys, queries)), strict=True))
    outs, maps, updates = [], [], []
    for inputs, step, key, query in segments:
        if not inputs.shape[1]:
            maps.append(torch.ones(rows, heads, device=x.device))
            updates.append(torch.zeros(rows, heads, wide, deep, device=x.device))
            outs.append(inputs)
            continue
        out, last = original(inputs, step, A, key, query, chunk_size=chunk_size, return_final_states=True, **kwargs)
        outs.append(out)
        updates.append(last.mT)  # the library has [..., width, state]
        maps.append(_decays(step, A, kwargs).sum(1).exp().to(last.dtype))
    states = _scanned(maps, updates, x, (rows, heads, wide, deep), context)
    without_skip = {name: value for name, value in kwargs.items() if name != "D"}
    for number, (inputs, step, key, query) in enumerate(segments):
        if inputs.shape[1]:
            seen = original(
                torch.zeros_like(inputs),
                step,
                A,
                key,
                query,
                chunk_size=chunk_size,
                initial_states=states[number].mT.contiguous(),
                **without_skip,
            )
            outs[number] = outs[number] + seen
    return with_stand_in(attached(_joined(outs, x), states), context, 1)


def _decays(dt: Tensor, of_heads: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Logarithms of what each step leaves of the state, [batch, tokens, heads]: as the kernel works them out."""
    bias, limit = kwargs.get("dt_bias"), kwargs.get("dt_limit", (0.0, float("inf")))
    steps = dt if bias is None else dt + bias.to(dt.dtype)
    steps = torch.nn.functional.softplus(steps) if kwargs.get("dt_softplus") else steps
    return of_heads.float() * steps.clamp(min=limit[0], max=limit[1]).float()


def _convolution(
    original: Kernel,
    context: SequenceContext,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Short causal convolutions: ``hidden_states`` [batch, channels, tokens here], ``weight`` [channels, kernel]."""
    x = without_stand_in(hidden_states, context, 2)
    seen = causal_conv1d(x.to(weight.dtype), weight, bias, context)
    seen = seen if activation is None else activated(seen, activation)
    return with_stand_in(seen.to(x.dtype), context, 2)


def _not_fused(original: Kernel, context: SequenceContext, *_: Any, **__: Any) -> None:
    """Layers fall back to convolution and scan one after the other where this gives nothing."""


def _without_cache(state: Tensor | None, output: bool) -> None:
    if state is not None or output:
        raise UsageError("a cache of states over ranks is not there: close() the handle to generate")


def _cut(x: Tensor, context: SequenceContext) -> list[Tensor]:
    """Each segment's tokens, of dimension 1."""
    return list(x.split_with_sizes([len(s) for s in context.segments], 1)) if context.segments else []


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.to(like.dtype) for part in parts], 1) if parts else like


def _scanned(
    maps: list[Tensor],
    updates: list[Tensor],
    like: Tensor,
    shape: tuple[int, int, int, int],
    context: SequenceContext,
) -> Tensor:
    """States that come into each segment, [segments, batch, heads, keys, values]; the kernel has float32."""
    if not updates:
        nothing = attached(
            like.new_zeros(0, *shape, dtype=torch.float32), like
        )  # so that the rank joins the way back
        return scan(nothing.new_zeros(0, *shape[:2]), nothing, context)
    return scan(torch.stack([m.float() for m in maps]), torch.stack(updates).float(), context)


#: What stands for a function of a layer's module while its model is applied.
KERNELS: dict[str, Kernel] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "causal_conv1d_fn": _convolution,
}
