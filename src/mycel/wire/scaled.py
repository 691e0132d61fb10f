"""Rows of numbers in a format with a scale: a step for each row, at the end of the row.

A row travels as its packed codes followed by a bfloat16, the step that they are multiples of. The step is rounded
up, so that no number leaves the range. A row with a number that is not finite has the step NaN and arrives as NaN
everywhere: gradient scalers and checks on losses see it. A row of zeros arrives as zeros.

Tokens and results are rounded to the nearest, gradients up or down at random, so that they are right on average. The
noise is a function of the row, its place, the rank and the codec's seed (``mycel.wire.noise.row_noise``): a run that
goes on from a checkpoint rounds as the unbroken one would have, and a codec has no state.
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mycel.errors import UsageError
from mycel.wire.base import WireCodec
from mycel.wire.formats import Float8, Format, Integers
from mycel.wire.noise import row_noise

__all__ = ["Float8Codec", "Int4Codec", "Int8Codec", "ScaledCodec"]

#: Of the bfloat16 at the end of a row.
_SCALE_BYTES = 2

#: Numbers worked on at once on a CPU, so that every pass but the first finds them in the cache.
_BLOCK = 1 << 15

#: Steps are not smaller: the least normal float32, whose inverse is finite too.
_LEAST_STEP = 2.0**-126

#: Bfloat16 rounds steps up by as much.
_WIDER = 1 + 2.0**-7


class ScaledCodec(WireCodec):
    """Rows of codes with a step each; what such codecs share.

    Args:
        gradients: ``"coded"``, or ``"exact"``: as they are (rounding then is straight-through).
        seed: of the noise that gradients are rounded with.

    Raises:
        UsageError: another word.
    """

    name: ClassVar[str]
    #: Of tokens and results, and of gradients.
    formats: ClassVar[tuple[Format, Format]]

    def __init__(self, gradients: Literal["coded", "exact"] = "coded", *, seed: int = 0) -> None:
        if gradients not in ("coded", "exact"):
            raise UsageError(f"{self.name} rows: gradients {gradients!r}; expected 'coded' or 'exact'")
        self.gradients, self.seed = gradients, seed

    def encode(self, rows: Tensor, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``: ``uint8``, worked on as float32."""
        if gradient and self.gradients == "exact":
            return rows
        form = self.formats[gradient]
        packed = _packed_width(rows.shape[1], form)
        rank = dist.get_rank() if gradient and dist.is_initialized() else 0
        wire = torch.empty(rows.shape[0], packed + _SCALE_BYTES, dtype=torch.uint8, device=rows.device)
        for begin, some_ND, out in _blocks(rows, wire):
            wide_ND = some_ND.to(torch.float32)
            step_N1 = _step(wide_ND, form.largest)
            noise_ND = row_noise(wide_ND, (self.seed << 32) + rank, begin) if gradient else None
            codes_ND = form.to_codes(wide_ND * step_N1.reciprocal(), noise_ND)
            out[:, :packed] = _halves(codes_ND) if form.bits == 4 else codes_ND
            out[:, packed:] = (step_N1.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)
        return wire

    def decode(self, wire: Tensor, width: int, dtype: torch.dtype, *, gradient: bool = False) -> Tensor:
        """See ``WireCodec``."""
        if gradient and self.gradients == "exact":
            return wire
        form = self.formats[gradient]
        packed = _packed_width(width, form)
        rows = torch.empty(wire.shape[0], width, dtype=dtype, device=wire.device)
        for _, out_ND, some in _blocks(rows, wire):
            bits = some[:, packed:].clone(memory_format=torch.contiguous_format).view(torch.int16)
            step_N1 = (bits.to(torch.int32) << 16).view(torch.float32)
            codes = some[:, :packed]
            numbers_ND = form.from_codes(_whole(codes, width) if form.bits == 4 else codes).mul_(step_N1)
            if dtype == torch.float16:  # a number next to the end of its range may have been rounded over it
                numbers_ND.clamp_(-65504.0, 65504.0)
            out_ND.copy_(numbers_ND)
        return rows

    def row_error(self, *, gradient: bool = False) -> float:
        """See ``WireCodec``; for rows whose largest magnitude is from 1e-32 up."""
        if gradient and self.gradients == "exact":
            return 0.0
        form = self.formats[gradient]
        return (1 + gradient) * form.coarsest / form.largest * _WIDER


class Int8Codec(ScaledCodec):
    """One byte a number and two a row: multiples of a step, 127 of which are the largest magnitude of the row.

    Args:
        gradients: see ``ScaledCodec``, as for ``seed``.

    References:
        Dettmers et al., "LLM.int8()", NeurIPS 2022, section 2.1 (absmax scales of rows).
    """

    name = "int8"
    formats = (Integers(8), Integers(8))


class Int4Codec(ScaledCodec):
    """Two numbers a byte and two bytes a row: multiples of a step, 7 of which are the row's largest magnitude.

    The first half of a row is in the low halves of its bytes. Otherwise as ``Int8Codec``, with steps 18 times as
    wide: nearest rounding would lose every gradient below a fourteenth of the largest one in its row, random rounding
    keeps them on average.
    """

    name = "int4"
    formats = (Integers(4), Integers(4))


class Float8Codec(ScaledCodec):
    """One byte a number and two a row: floating-point numbers of eight bits, e4m3 forward, e5m2 backward.

    Errors are a part of each number, down to a hundred-thousandth of the largest one in its row, where those of
    ``Int8Codec`` are a part of the largest.
    """

    name = "fp8"
    formats = (Float8(torch.float8_e4m3fn), Float8(torch.float8_e5m2))


def _packed_width(width: int, form: Format) -> int:
    return -(-width * form.bits // 8)


def _halves(codes_ND: Tensor) -> Tensor:
    """Two codes of four bits in a byte: the row's first half below, its second above."""
    half = -(-codes_ND.shape[1] // 2)
    upper = functional.pad(codes_ND[:, half:], (0, 2 * half - codes_ND.shape[1]))
    return (codes_ND[:, :half] & 15) | (upper << 4)


def _whole(packed: Tensor, width: int) -> Tensor:
    """The reverse of ``_halves``, as signed bytes."""
    lower, upper = (packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4
    return torch.cat([lower, upper], dim=1)[:, :width].view(torch.uint8)


def _blocks(rows_ND: Tensor, wire: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First row of each block, its rows, their bytes."""
    if not rows_ND.is_cpu or rows_ND.numel() <= _BLOCK:
        yield 0, rows_ND, wire
        return
    height = max(1, _BLOCK // rows_ND.shape[1])
    for i, (some, out) in enumerate(zip(torch.split(rows_ND, height), torch.split(wire, height), strict=True)):
        yield i * height, some, out


def _step(wide_ND: Tensor, largest: float) -> Tensor:
    """``[N, 1]``, multiples of which the rows become; the low half of each float32 is zero."""
    top_N1 = wide_ND.abs().amax(dim=1, keepdim=True)
    step_N1 = (top_N1 / largest).clamp_min_(_LEAST_STEP)
    rounded_N1 = ((step_N1.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return rounded_N1.masked_fill_(~top_N1.isfinite(), torch.nan)
