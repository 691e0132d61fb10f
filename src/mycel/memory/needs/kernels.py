"""What torch's CPU kernels hold beside their operands and results while they run.

A dispatcher sees operands and results. Some kernels take more from the allocator and give it back before they return;
where that is not small beside their results it is here, from torch's sources, and ``counted`` measures against it.

References:
    pytorch ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`` (buffers of a thread),
    ``aten/src/ATen/TensorIterator.cpp`` (operands in the common type), ``native/mkldnn/Conv.cpp`` (reordered
    operands), ``native/layer_norm.cpp`` (root mean square).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["workspace"]

_ATEN = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def workspace(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes that an operator's CPU kernel takes beside its results.

    Args:
        func: the operator, as a dispatcher gets it.
        args: its operands.
        kwargs: its options.

    Examples:
        >>> a, b = torch.ones(4, dtype=torch.bfloat16), torch.ones(4)
        >>> workspace(torch.ops.aten.mul.Tensor, (a, b), {})  # the first operand, as float32
        16
    """
    of = _KERNELS.get(func.overloadpacket)
    if of is not None:
        return of(args, kwargs)
    if torch.Tag.pointwise in func.tags:
        return _promoted(args)
    return 0


def _promoted(args: Sequence[Any]) -> int:
    """Operands of a pointwise kernel that have another type than it computes in."""
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() and arg.device.type in ("cpu", "meta")]
    if len({tensor.dtype for tensor in tensors}) < 2 or any(t.dtype is torch.bool for t in tensors):
        return 0
    common = tensors[0].dtype
    for tensor in tensors[1:]:
        common = torch.promote_types(common, tensor.dtype)
    return sum(tensor.numel() * common.itemsize for tensor in tensors if tensor.dtype != common)


def _splits(queries: int, keys: int) -> tuple[int, int]:
    """Rows of queries and of keys that a thread takes at a time."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    query, key = args[0], args[1]
    rows, columns = _splits(query.shape[2], key.shape[2])
    threads, width = torch.get_num_threads(), query.shape[3]
    each = 4 * (rows * columns + 2 * rows + rows * width)
    if query.dtype in _HALVES:
        each += query.itemsize * rows * columns
    return int(threads * each)


def _attention_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    grad, query, key = args[0], args[1], args[2]
    rows, columns = _splits(query.shape[2], key.shape[2])
    each = 4 * 2 * rows * columns
    if query.dtype in _HALVES:
        each += query.itemsize * 2 * rows * columns
    copied = 0 if grad.transpose(1, 2).is_contiguous() else grad.numel() * grad.itemsize
    return int(torch.get_num_threads() * each + copied)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.itemsize) if isinstance(tensor, Tensor) else 0


def _root_mean_square(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return _bytes(args[0]) * (5 if args[0].dtype in _HALVES else 1)


def _root_mean_square_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return int(args[0].numel()) * 4 * 3


def _convolution(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return _bytes(args[0]) + _bytes(args[1])


def _convolution_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return _bytes(args[0]) + _bytes(args[1]) + _bytes(args[2])


def _mean(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return int(args[0].numel()) * 4 if args[0].dtype in _HALVES else 0


_KERNELS: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._fused_rms_norm: _root_mean_square,
    _ATEN._fused_rms_norm_backward: _root_mean_square_backward,
    _ATEN.convolution: _convolution,
    _ATEN.convolution_backward: _convolution_backward,
    _ATEN.mean: _mean,
}
