"""Tensors as the calls of collectives: element types and operations as codes, memory as addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mycel.collectives.spec import CollectiveName
from mycel.runtime.calls import Call
from mycel.runtime.headers import ELEMENTS, UNKNOWN_ELEMENT
from mycel.runtime.reduce_kernels import DType, ReduceOp

__all__ = [
    "BITWISE",
    "COMPLEX",
    "DTYPES",
    "OPS",
    "aliases",
    "apart_from",
    "back_into",
    "check_parts",
    "dtype_name",
    "element_code",
    "flattened",
    "gather_call",
    "moving_call",
    "put_later",
    "put_results",
    "real_parts",
    "scatter_call",
    "split_elements",
    "summing_call",
    "uneven_lengths",
]

Tensor = torch.Tensor

#: Element types that are reduced here; every type can be moved.
DTYPES: dict[torch.dtype, DType] = {
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.int16: DType.INT16,
    torch.int8: DType.INT8,
    torch.uint8: DType.UINT8,
    torch.bool: DType.BOOL,
}
#: Sums of complex numbers are sums of their parts.
COMPLEX: dict[torch.dtype, DType] = {torch.complex64: DType.FLOAT32, torch.complex128: DType.FLOAT64}
_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(ELEMENTS) if hasattr(torch, name)
}
_RedOpType: Any = dist.ReduceOp.RedOpType
OPS: dict[Any, tuple[ReduceOp, bool]] = {
    _RedOpType.SUM: (ReduceOp.SUM, False),
    _RedOpType.AVG: (ReduceOp.SUM, True),
    _RedOpType.MAX: (ReduceOp.MAX, False),
    _RedOpType.MIN: (ReduceOp.MIN, False),
    _RedOpType.PRODUCT: (ReduceOp.PRODUCT, False),
    _RedOpType.BAND: (ReduceOp.BAND, False),
    _RedOpType.BOR: (ReduceOp.BOR, False),
    _RedOpType.BXOR: (ReduceOp.BXOR, False),
}
BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def dtype_name(code: int) -> str:
    """The name of an element type's code in headers, as torch has it."""
    return ELEMENTS[code] if code < len(ELEMENTS) else "a type without a code"


def element_code(dtype: torch.dtype) -> int:
    """Code of an element type in headers, the same in every release of torch."""
    return _CODES.get(dtype, UNKNOWN_ELEMENT)


def aliases(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors' memory as it is now: what a tensor is given later (``x.data = ...``) does not change these."""
    return [tensor.detach() for tensor in tensors]


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """One contiguous vector with all elements: the tensor's memory where that is possible without a copy.

    It is an object of its own, which holds the memory even if the tensor is given another.
    """
    lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)
    if len(tensors) == 1 and tensors[0].is_contiguous() and not lazy:
        return tensors[0].view(-1) if tensors[0].dim() != 1 else tensors[0].detach()
    if lazy:
        tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def real_parts(flat: Tensor) -> Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def put_later(flat: Tensor, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """What copies a vector's elements to where the tensors have their memory now."""
    places = aliases(tensors)
    return lambda: put_results(torch.split(flat, [place.numel() for place in places]), places)


def back_into(flat: Tensor, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
    """What copies a vector's elements back into the tensors it was made of; ``None`` where it is their memory."""
    return None if flat.data_ptr() == tensors[0].data_ptr() else put_later(flat, tensors)


def put_results(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy results to where the caller wants them, parameters and inference tensors too.

    This may be another thread than the caller's, or another place: the modes are set here.
    """
    with torch.inference_mode(any(tensor.is_inference() for tensor in tensors)), torch.no_grad():
        for result, tensor in zip(results, tensors, strict=True):
            _put(result.reshape(tensor.shape), tensor)


def _put(result: Tensor, tensor: Tensor) -> None:
    """Copy, into an expanded tensor too, several of whose elements are one in memory.

    Raises:
        ValueError: such elements have results that differ.
    """
    if 0 not in tensor.stride():  # nearly always
        tensor.copy_(result)
        return
    whole = result
    for dim, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if length > 1 and stride == 0:
            tensor, result = tensor.narrow(dim, 0, 1), result.narrow(dim, 0, 1)
    same = (whole == result) | ((whole != whole) & (result != result))
    if not bool(same.all()):
        raise ValueError(
            f"the result, of shape {tuple(whole.shape)}, does not fit into an expanded tensor: elements that are one "
            "in memory have different results; pass a tensor with memory of its own, such as tensor.contiguous()"
        )
    tensor.copy_(result)


def apart_from(output: Tensor, input: Tensor) -> Tensor:
    """The input as a vector that does not share memory with the output: it is read while that is being written."""
    if output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
        return input.clone(memory_format=torch.contiguous_format).view(-1)
    return flattened([input])


def uneven_lengths(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Lengths of the parts, in real numbers where they are complex; ``None`` where they are equal."""
    lengths = tuple(t.numel() * (2 if t.is_complex() else 1) for t in tensors)
    return lengths if len(set(lengths)) > 1 else None


def gather_call(target: Tensor, source: Tensor, block_elements: tuple[int, ...] | None = None) -> Call:
    element = element_code(target.dtype)
    target, source = real_parts(target), real_parts(source)
    return Call(
        name="all_gather",
        num_elements=target.numel(),
        item_bytes=target.element_size(),
        input_address=source.data_ptr(),
        output_address=target.data_ptr(),
        element=element,
        block_elements=block_elements,
        keep=(target, source),
    )


def summing_call(
    name: CollectiveName, flat: Tensor, op: ReduceOp, average: bool, dtype: DType, *, root: int | None = None
) -> Call:
    """An all_reduce or reduce of a vector, in place."""
    parts = real_parts(flat)
    return Call(
        name=name,
        root=root,
        num_elements=parts.numel(),
        item_bytes=parts.element_size(),
        output_address=flat.data_ptr(),
        dtype=dtype,
        element=element_code(flat.dtype),
        reduce_op=op,
        average=average,
        keep=(flat,),
    )


def moving_call(
    name: CollectiveName, num_elements: int, target: Tensor, source: Tensor, *, root: int | None = None
) -> Call:
    return Call(
        name=name,
        root=root,
        num_elements=num_elements,
        item_bytes=target.element_size(),
        input_address=source.data_ptr(),
        output_address=target.data_ptr(),
        element=element_code(target.dtype),
        keep=(target, source),
    )


def scatter_call(
    target: Tensor,
    source: Tensor,
    op: ReduceOp,
    average: bool,
    dtype: DType,
    block_elements: tuple[int, ...] | None = None,
) -> Call:
    parts = real_parts(source)
    return Call(
        name="reduce_scatter",
        num_elements=parts.numel(),
        item_bytes=parts.element_size(),
        input_address=source.data_ptr(),
        output_address=target.data_ptr(),
        dtype=dtype,
        element=element_code(source.dtype),
        reduce_op=op,
        average=average,
        block_elements=block_elements,
        keep=(target, source),
    )


def check_parts(where: str, parts: Sequence[Tensor], own: Tensor, rank: int, n: int) -> None:
    """A list has one tensor a rank, all of this rank's own type, and its own part is as long as its own tensor.

    Raises:
        ValueError: it has not; ``where`` says whose list it is.
    """
    if len(parts) != n:
        raise ValueError(f"{where}, {len(parts)} tensors; expected {n}")
    for number, part in enumerate(parts):
        if part.dtype != own.dtype or (number == rank and part.numel() != own.numel()):
            raise ValueError(
                f"{where}, tensor {number} has {part.numel()} elements of {part.dtype}; rank {rank}'s own tensor has "
                f"{own.numel()} of {own.dtype}"
            )


def split_elements(tensor: Tensor, sizes: list[int], n: int, which: str) -> list[int]:
    """Elements that go to or come from each rank; equal parts of the rows if no sizes are given."""
    rows = tensor.shape[:1].numel()
    if not sizes:
        if rows % n:
            raise ValueError(f"all_to_all over {n} ranks: {rows} rows of {which} do not divide by {n}")
        sizes = [rows // n] * n
    if len(sizes) != n or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"all_to_all over {n} ranks: {which} has {rows} rows and split sizes {sizes}; expected {n} sizes "
            "that add up to the rows"
        )
    width = tensor.numel() // rows if rows else 0
    return [size * width for size in sizes]
