"""What codecs with a scale for each row share: the scale and its two bytes, noise for rounding, work in blocks.

A row travels as its packed numbers followed by a bfloat16, the step that they are multiples of. The step is rounded
up, so that no number leaves the range. A row with a number that is not finite has the step NaN and arrives as NaN
everywhere: gradient scalers and checks on losses see it. A row of zeros arrives as zeros.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SCALE_BYTES", "Noise", "decode_scaled", "encode_scaled", "round_at_random"]

#: Of the bfloat16 at the end of a row.
SCALE_BYTES = 2

#: Numbers worked on at once on a CPU, so that every pass but the first finds them in the cache.
_BLOCK = 1 << 15

#: Steps are not smaller: the least normal float32, whose inverse is finite too.
_LEAST_STEP = 2.0**-126

_streams = itertools.count()


class Noise:
    """Random bytes for rounding, from a stream of their own: torch's generators stay where they are.

    Each rank and each object in the order in which a program makes them has another stream; the same in every run.
    """

    def __init__(self) -> None:
        self._number = next(_streams)
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, numbers: Tensor) -> Tensor:
        """Uniform ``uint8`` in the shape of ``numbers``."""
        words = torch.empty(-(-numbers.numel() // 8), dtype=torch.int64, device=numbers.device)
        words.random_(-(2**63), None, generator=self._generator(numbers.device))
        return words.view(torch.uint8)[: numbers.numel()].view(numbers.shape)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._generators[device] = torch.Generator(device).manual_seed((rank << 32) + self._number)
        return self._generators[device]


def round_at_random(numbers: Tensor, noise: Noise) -> Tensor:
    """To one of the two integers next to each number, in place, so that the mean over many draws is the number.

    Draws are the middles of 256 equal parts of [0, 1]: integers stay what they are, and the mean is right to a 512th.
    """
    return numbers.add_(noise.like(numbers).to(torch.float32).add_(0.5).mul_(1 / 256)).floor_()


def encode_scaled(rows_ND: Tensor, largest: float, packed_width: int, pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Packed rows with their steps.

    Args:
        rows_ND: of any floating type; worked on as float32.
        largest: magnitude that ``pack`` takes.
        packed_width: bytes of a packed row.
        pack: makes bytes ``[n, packed_width]`` of numbers ``[n, D]`` between ``-largest`` and ``largest``, which it
            may write on.

    Returns:
        ``uint8`` of shape ``[N, packed_width + 2]``.
    """
    wire = torch.empty(rows_ND.shape[0], packed_width + SCALE_BYTES, dtype=torch.uint8, device=rows_ND.device)
    for some, out in _blocks(rows_ND, wire):
        wide = some.to(torch.float32)
        step = _step(wide, largest)
        out[:, :packed_width] = pack(wide * step.reciprocal())
        out[:, packed_width:] = (step.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)
    return wire


def decode_scaled(
    wire: Tensor, width: int, packed_width: int, dtype: torch.dtype, unpack: Callable[[Tensor], Tensor]
) -> Tensor:
    """The rows that ``encode_scaled`` packed.

    Args:
        wire: what it returned.
        width: of the rows.
        packed_width: as there.
        dtype: of the rows.
        unpack: makes new ``float32`` numbers ``[n, width]`` of bytes ``[n, packed_width]``.
    """
    rows_ND = torch.empty(wire.shape[0], width, dtype=dtype, device=wire.device)
    for out, some in _blocks(rows_ND, wire):
        bits = some[:, packed_width:].clone(memory_format=torch.contiguous_format).view(torch.int16)
        step = (bits.to(torch.int32) << 16).view(torch.float32)
        numbers = unpack(some[:, :packed_width]).mul_(step)
        if dtype == torch.float16:  # a number next to the end of its range may have been rounded over it
            numbers.clamp_(-65504.0, 65504.0)
        out.copy_(numbers)
    return rows_ND


def _blocks(rows_ND: Tensor, wire: Tensor) -> list[tuple[Tensor, Tensor]]:
    if not rows_ND.is_cpu or rows_ND.numel() <= _BLOCK:
        return [(rows_ND, wire)]
    height = max(1, _BLOCK // rows_ND.shape[1])
    return list(zip(torch.split(rows_ND, height), torch.split(wire, height), strict=True))


def _step(wide_ND: Tensor, largest: float) -> Tensor:
    """``[N, 1]``, multiples of which the rows become; the low half of each float32 is zero."""
    top_N1 = wide_ND.abs().amax(dim=1, keepdim=True)
    step_N1 = (top_N1 / largest).clamp_min_(_LEAST_STEP)
    rounded_N1 = ((step_N1.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return rounded_N1.masked_fill_(~top_N1.isfinite(), torch.nan)
