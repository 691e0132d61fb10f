"""Vectors in buckets that share a scale, and codes of a few bits side by side: loops over elements.

Loops are compiled for CPU tensors and torch operations for tensors elsewhere; both give the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mycel.compiled import compiled_without_lock
from mycel.wire.noise import one_of

__all__ = [
    "bucket_scales",
    "bytes_of",
    "decode_integers",
    "encode_integers",
    "floats_in",
    "of_elements",
    "pack",
    "packed_bytes",
    "unpack",
]


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of so many codes of so many bits.

    Examples:
        >>> packed_bytes(9, 4), packed_bytes(9, 1), packed_bytes(0, 3)
        (5, 2, 0)
    """
    return -(-count * bits // 8)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, 1-D, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def floats_in(payload: Tensor) -> Tensor:
    """Bytes, at any address, as float32."""
    return payload.clone().view(torch.float32)


def bucket_scales(values: Tensor, bucket_size: int) -> Tensor:
    """Largest magnitude of each bucket of a vector; NaN where a bucket holds one."""
    if not values.numel():
        return values.new_zeros(0)
    tail = -values.numel() % bucket_size
    padded = torch.nn.functional.pad(values, (0, tail)) if tail else values
    scales: Tensor = torch.linalg.vector_norm(padded.view(-1, bucket_size), ord=float("inf"), dim=1)
    return scales


def of_elements(scales: Tensor, bucket_size: int, count: int) -> Tensor:
    """The scale of each of ``count`` elements."""
    return scales.repeat_interleave(bucket_size)[:count]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes below ``2^bits`` (``uint8``, 1-D) side by side, the first in the lowest bits."""
    if bits == 1 and codes.is_cpu:
        return torch.from_numpy(np.packbits(codes.numpy(), bitorder="little"))
    groups = torch.nn.functional.pad(codes, (0, -len(codes) % 8)).view(-1, 8).long()
    word = (groups << torch.arange(0, 8 * bits, bits, device=codes.device)).sum(dim=1, keepdim=True)
    spread = (word >> torch.arange(0, 8 * bits, 8, device=codes.device)) & 0xFF
    return spread.to(torch.uint8).view(-1)[: packed_bytes(len(codes), bits)].contiguous()


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """``count`` codes (``uint8``, 1-D) again."""
    if bits == 1 and packed.is_cpu:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little"))
    groups = torch.nn.functional.pad(packed, (0, -len(packed) % bits)).view(-1, bits).long()
    word = (groups << torch.arange(0, 8 * bits, 8, device=packed.device)).sum(dim=1, keepdim=True)
    codes = (word >> torch.arange(0, 8 * bits, bits, device=packed.device)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).view(-1)[:count].contiguous()


@compiled_without_lock
def encode_integers(
    values: Any, scales: Any, bucket_size: int, bits: int, by_chance: bool, seed: Any, packed: Any
) -> None:
    """Compiled: ``Integers.encode`` on numpy arrays."""
    limit = (1 << (bits - 1)) - 1
    top = np.float32(limit)
    count, at, word, filled = len(values), 0, np.uint64(0), 0
    for bucket in range(len(scales)):
        scale = scales[bucket]
        inverse = top / scale if scale > 0 and np.isfinite(scale) else np.float32(0)
        for i in range(bucket * bucket_size, min(count, (bucket + 1) * bucket_size)):
            level = values[i] * inverse
            level = min(max(level, -top), top) + top
            level += one_of(seed, i) if by_chance else np.float32(0.5)
            code = min(int(level), 2 * limit) if level == level else 0
            word |= np.uint64(code) << np.uint64(filled)
            filled += bits
            while filled >= 8:
                packed[at] = word & np.uint64(255)
                word >>= np.uint64(8)
                filled -= 8
                at += 1
    if filled:
        packed[at] = word & np.uint64(255)


@compiled_without_lock
def decode_integers(packed: Any, scales: Any, bucket_size: int, bits: int, add: bool, out: Any) -> None:
    """Compiled: ``Integers.decode`` on numpy arrays."""
    limit = (1 << (bits - 1)) - 1
    count, at, word, filled = len(out), 0, np.uint64(0), 0
    mask = np.uint64((1 << bits) - 1)
    for bucket in range(len(scales)):
        scale = scales[bucket]
        step = scale / np.float32(limit) if np.isfinite(scale) else np.float32(np.nan)
        for i in range(bucket * bucket_size, min(count, (bucket + 1) * bucket_size)):
            while filled < bits:
                word |= np.uint64(packed[at]) << np.uint64(filled)
                filled += 8
                at += 1
            value = np.float32(np.int64(word & mask) - limit) * step
            word >>= np.uint64(bits)
            filled -= bits
            out[i] = out[i] + value if add else value
