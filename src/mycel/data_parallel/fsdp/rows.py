"""A row in bytes: some parameters compressed, the others as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mycel.data_parallel.compress import Compressor, Context
from mycel.data_parallel.fsdp.layout import Segment

__all__ = ["RowCodec"]


@runtime_checkable
class _TakesAll(Protocol):
    """Compressors that take the payloads of all ranks apart at once."""

    def accumulate_all(self, payloads: Sequence[Tensor], out: Tensor, contexts: Sequence[Context]) -> None:
        """Add what they stand for to a tensor."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What travels as one payload: one vector, or one shard.

    Attributes:
        name: of the parameter, or of the first of several.
        compressor: ``None`` copies bytes.
        spans: begin and end in the row.
        shape: of what is compressed.
        num_bytes: of the payload.
        wire: type of its elements.
    """

    name: str
    compressor: Compressor | None
    spans: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    num_bytes: int
    wire: torch.dtype

    def read(self, piece: Tensor) -> Tensor:
        """The payload from its bytes, which may lie at any address."""
        return piece if self.wire == torch.uint8 else piece.clone().view(self.wire)


class RowCodec:
    """Rows to bytes and back; the same bytes for every row of a unit.

    Parameters of one compressor that works element by element are joined into one vector, so that buckets fill;
    other compressors see each shard by itself, in its shape.

    Args:
        segments: of the row, in order.
        compressors: for each; ``None``: as it is.
        dtype: of the row.

    Attributes:
        row_numel: elements of a row.
        num_bytes: of its payload.
        exact_bytes: of those, bytes of parameters that travel as they are.
    """

    def __init__(
        self, segments: Sequence[Segment], compressors: Sequence[Compressor | None], dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        joined: dict[Compressor | None, list[tuple[Segment, tuple[int, int]]]] = {}
        begin, alone = 0, []
        for segment, chosen in zip(segments, compressors, strict=True):
            span = (begin, begin + segment.numel)
            begin = span[1]
            compressor = chosen if segment.numel else None
            if compressor is not None and not compressor.takes(segment.shard_shape):
                compressor = None
            if compressor is None or compressor.is_elementwise:
                joined.setdefault(compressor, []).append((segment, span))
            else:
                alone.append(self._part(compressor, [(segment, span)], segment.shard_shape))
        self.row_numel = begin
        parts = [
            self._part(compressor, members, (sum(segment.numel for segment, _ in members),))
            for compressor, members in joined.items()
        ]
        self._parts = (*parts, *alone)
        self.num_bytes = sum(part.num_bytes for part in self._parts)
        self.exact_bytes = sum(part.num_bytes for part in self._parts if part.compressor is None)

    def encode(self, row: Tensor, context: Context) -> Tensor:
        """The payload of a row.

        Args:
            row: of ``row_numel`` elements, of any floating type; what travels as it is, does in ``dtype``.
            context: whose name is the unit's; parts have names of their own.

        Returns:
            ``uint8`` of ``num_bytes``.
        """
        payloads = [torch.empty(0, dtype=torch.uint8, device=row.device)]
        for part in self._parts:
            values = _gathered(row, part.spans)
            if part.compressor is None:
                payloads.append(values.to(self.dtype).view(torch.uint8))
            else:
                made = part.compressor.compress(values.float().view(part.shape), replace(context, name=part.name))
                payloads.append(made.view(torch.uint8))
        return torch.cat(payloads)

    def add(self, payloads: Sequence[Tensor], row: Tensor, contexts: Sequence[Context]) -> None:
        """Add what payloads stand for to a row of float32.

        Args:
            payloads: of several ranks.
            row: contiguous, of ``row_numel`` elements.
            contexts: one for each payload.
        """
        sizes = [part.num_bytes for part in self._parts]
        pieces_of = [payload.split_with_sizes(sizes) for payload in payloads]
        for place, part in enumerate(self._parts):
            pieces, named = [p[place] for p in pieces_of], [replace(c, name=part.name) for c in contexts]
            if isinstance(part.compressor, _TakesAll) and pieces:
                out = row[slice(*part.spans[0])].view(part.shape)  # not element by element, so a part of its own
                part.compressor.accumulate_all([part.read(piece) for piece in pieces], out, named)
                continue
            for piece, context in zip(pieces, named, strict=True):
                self._add(part, part.read(piece), row, context)

    def _add(self, part: _Part, payload: Tensor, row: Tensor, context: Context) -> None:
        if part.compressor is None:
            self._scatter(row, part, payload, add=True)
        elif len(part.spans) == 1:
            part.compressor.accumulate(payload, row[slice(*part.spans[0])].view(part.shape), context)
        else:
            self._scatter(row, part, part.compressor.decompress(payload, part.shape, context), add=True)

    def decode(self, payload: Tensor, row: Tensor, context: Context) -> None:
        """Write what a payload stands for to a row of any floating type."""
        pieces = payload.split_with_sizes([part.num_bytes for part in self._parts])
        for part, piece in zip(self._parts, pieces, strict=True):
            found = part.read(piece)
            if part.compressor is not None:
                found = part.compressor.decompress(found, part.shape, replace(context, name=part.name))
            self._scatter(row, part, found, add=False)

    def _part(
        self,
        compressor: Compressor | None,
        members: Sequence[tuple[Segment, tuple[int, int]]],
        shape: tuple[int, ...],
    ) -> _Part:
        spans: list[tuple[int, int]] = []
        for _, (begin, end) in members:
            if spans and spans[-1][1] == begin:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((begin, end))
        count = sum(segment.numel for segment, _ in members)
        num_bytes = count * self.dtype.itemsize if compressor is None else compressor.wire_bytes(shape)
        wire = self.dtype
        if compressor is not None:  # casts have payloads of their type, all others of bytes
            wire = (
                compressor.compress(torch.zeros(0), Context(name="")).dtype
                if compressor.is_elementwise
                else torch.uint8
            )
        return _Part(members[0][0].name, compressor, tuple(spans), shape, num_bytes, wire)

    def _scatter(self, row: Tensor, part: _Part, values: Tensor, *, add: bool) -> None:
        lengths = [end - begin for begin, end in part.spans]
        for (begin, end), piece in zip(part.spans, values.reshape(-1).split_with_sizes(lengths), strict=True):
            if add:
                row[begin:end] += piece
            else:
                row[begin:end] = piece


def _gathered(row: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    return row[slice(*spans[0])] if len(spans) == 1 else torch.cat([row[begin:end] for begin, end in spans])
