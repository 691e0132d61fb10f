"""Host side of the kernels: chunks, flattened, to launches. Importing this imports Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.sequence.linear.device import diagonal
from mycel.triton_kernels import Launch

__all__ = ["maps", "maps_back", "outputs", "outputs_back"]

#: Values that a program has at a time: with more, registers of an A100 do not suffice beside 128 keys.
_VALUES = 32


def maps(k: Tensor, v: Tensor, g: Tensor, transition: Tensor, update: Tensor) -> Launch:
    """``M`` and ``U`` of chunks: ``k``, ``g`` (chunks, L, K) and ``v`` (chunks, L, V)."""
    tensors = {"k": k, "v": v, "g": g, "transition": transition, "update": update}
    return _launch(diagonal.maps_kernel, tensors, k, v, by_block=True)


def maps_back(
    k: Tensor, v: Tensor, g: Tensor, d_transition: Tensor, d_update: Tensor, dk: Tensor, dv: Tensor, dg: Tensor
) -> Launch:
    """Gradients through ``maps``."""
    given = {"k": k, "v": v, "g": g, "d_transition": d_transition, "d_update": d_update}
    return _launch(diagonal.maps_back_kernel, {**given, "dk": dk, "dv": dv, "dg": dg}, k, v, by_block=False)


def outputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, out: Tensor) -> Launch:
    """Outputs of chunks into which states (chunks, K, V) come."""
    tensors = {"q": q, "k": k, "v": v, "g": g, "state": state, "out": out}
    return _launch(diagonal.outputs_kernel, tensors, k, v, by_block=True)


def outputs_back(given: tuple[Tensor, ...], d_out: Tensor, found: tuple[Tensor, ...]) -> Launch:
    """Gradients through ``outputs`` of what it was given; ``found`` is where they go."""
    names = ("q", "k", "v", "g", "state")
    gradients = ("dq", "dk", "dv", "dg", "d_state")
    tensors = {**dict(zip(names, given, strict=True)), "d_out": d_out, **dict(zip(gradients, found, strict=True))}
    return _launch(diagonal.outputs_back_kernel, tensors, given[1], given[2], by_block=False)


def _launch(kernel: object, tensors: dict[str, Tensor], k: Tensor, v: Tensor, *, by_block: bool) -> Launch:
    (chunks, length, keys), values = k.shape, v.shape[2]
    block = min(_VALUES, max(16, _power(values)))
    return Launch(
        kernel=kernel,
        grid=(chunks, -(-values // block)) if by_block else (chunks,),
        arguments={
            **tensors,
            "K": keys,
            "V": values,
            "L": length,
            "BK": max(16, _power(keys)),
            "BV": block,
            "PRECISION": "tf32" if k.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee",
        },
    )


def _power(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()
