"""Small digits packed into bytes: as many of a base as 256 holds, five ternary ones for example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mycel.compiled import compiled_without_lock
from mycel.errors import UsageError

__all__ = ["digits_bytes", "pack_digits", "unpack_digits"]

#: Digits beyond one byte take two.
_LARGEST_BASE = 1 << 16


def digits_bytes(count: int, base: int) -> int:
    """Bytes of so many digits of a base.

    Raises:
        UsageError: the base is not between 2 and 65,536.

    Examples:
        >>> digits_bytes(11, 3), digits_bytes(11, 4), digits_bytes(11, 9), digits_bytes(11, 300)
        (3, 3, 6, 22)
    """
    if not 2 <= base <= _LARGEST_BASE:
        raise UsageError(f"digits of base {base} do not fit into two bytes")
    return 2 * count if base > 256 else -(-count // _in_byte(base))


def pack_digits(digits: Tensor, base: int) -> Tensor:
    """Bytes of digits below ``base`` (integers, 1-D), the first the least significant."""
    count = digits.numel()
    size = digits_bytes(count, base)
    if base > 256:
        wide = digits.to(torch.int32).view(-1, 1)
        return torch.cat([wide & 0xFF, wide >> 8], dim=1).to(torch.uint8).view(-1)
    small = digits.to(torch.uint8)
    per = _in_byte(base)
    if small.device.type == "cpu":
        packed = torch.empty(size, dtype=torch.uint8)
        _pack(small.numpy(), base, per, packed.numpy())
        return packed
    groups = torch.nn.functional.pad(small, (0, -count % per)).view(-1, per).int()
    weights = torch.tensor([base**i for i in range(per)], dtype=torch.int32, device=small.device)
    return (groups * weights).sum(dim=1).to(torch.uint8)


def unpack_digits(packed: Tensor, count: int, base: int) -> Tensor:
    """``count`` digits again: ``uint8``, or ``int32`` for bases beyond a byte."""
    if base > 256:
        pairs = packed.view(-1, 2).to(torch.int32)
        return pairs[:, 0] + (pairs[:, 1] << 8)
    per = _in_byte(base)
    if packed.device.type == "cpu":
        digits = torch.empty(count, dtype=torch.uint8)
        _unpack(packed.numpy(), base, per, digits.numpy())
        return digits
    weights = torch.tensor([base**i for i in range(per)], dtype=torch.int32, device=packed.device)
    groups = packed.int().view(-1, 1) // weights % base
    return groups.to(torch.uint8).view(-1)[:count].contiguous()


def _in_byte(base: int) -> int:
    per = 1
    while base ** (per + 1) <= 256:
        per += 1
    return per


@compiled_without_lock
def _pack(digits: Any, base: int, per: int, packed: Any) -> None:
    for i in range(len(packed)):
        word, weight = 0, 1
        for j in range(i * per, min(len(digits), (i + 1) * per)):
            word += digits[j] * weight
            weight *= base
        packed[i] = word


@compiled_without_lock
def _unpack(packed: Any, base: int, per: int, digits: Any) -> None:
    for i in range(len(packed)):
        word = int(packed[i])
        for j in range(i * per, min(len(digits), (i + 1) * per)):
            digits[j] = word % base
            word //= base
