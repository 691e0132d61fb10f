"""Whole files as documents, packed to as many bytes as the context has, and windows of them for a shorter context."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from mycel.demo.corpus import load_documents

#: Shorter files, and ends of files that were cut, are left away.
SHORTEST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One sequence of documents.

    Attributes:
        tokens: int64 of shape (1, tokens): bytes of all documents, one after the other.
        targets: the byte after each, of the same shape.
        before: of each token, how many bytes of its document are before it, int64 of shape (tokens,).
        is_counted: whether its loss counts, bool of shape (tokens,).
        documents: how many tokens each document has.
    """

    tokens: Tensor
    targets: Tensor
    before: Tensor
    is_counted: Tensor
    documents: tuple[int, ...]


def load(context: int, *, held_out: bool, max_bytes: int) -> list[bytes]:
    """Files of the standard library; of one that is longer than the context, pieces. Each a byte longer than read."""
    files = load_documents(max_bytes=max_bytes)[held_out]
    pieces = [file[start : start + context + 1] for file in files for start in range(0, len(file), context)]
    return [piece for piece in pieces if len(piece) > SHORTEST]


def packs(pieces: Sequence[bytes], context: int, *, seed: int) -> Iterator[list[bytes]]:
    """Documents that together fit a context, drawn in another order each time round, without end."""
    for epoch in count():
        drawn = random.Random(f"{seed} {epoch}")
        made: list[list[bytes]] = []
        room: dict[int, int] = {}
        for piece in drawn.sample(pieces, len(pieces)):
            place = next((place for place, left in room.items() if left >= len(piece) - 1), len(made))
            if place == len(made):
                made.append([])
            made[place].append(piece)
            room[place] = room.get(place, context) - len(piece) + 1
            if room[place] < SHORTEST:
                del room[place]
        yield from drawn.sample(made, len(made))


def whole(files: Sequence[bytes], seen: int) -> Pack:
    """Documents as they are, or cut to what a model sees at a time: the same bytes, and the same ones to predict."""
    lengths = [min(seen, len(file) - 1 - start) for file in files for start in range(0, len(file) - 1, seen)]
    return _packed([(file, 0, len(file) - 1, 0) for file in files], lengths)


def windows(files: Sequence[bytes], seen: int, step: int) -> Pack:
    """Windows, so many bytes apart that a model which sees few has almost all of them before each byte that counts.

    Of a document's first window all bytes count, of others the last ``step``.
    """
    spans = []
    for file in files:
        last = len(file) - 1
        spans.append((file, 0, min(seen, last), 0))
        for first in range(seen, last, step):
            stop = min(first + step, last)
            spans.append((file, stop - seen, stop, first))
    return _packed(spans, [stop - start for _, start, stop, _ in spans])


def blank(context: int) -> Pack:
    """Zeros that fill a context, in two documents: what a step is planned on before there is one."""
    return whole([bytes(context // 2 + 1), bytes(context - context // 2 + 1)], context)


def _packed(spans: Sequence[tuple[bytes, int, int, int]], documents: Sequence[int]) -> Pack:
    """Of each file bytes from one to another; those before a third do not count."""
    tokens = b"".join(file[start:stop] for file, start, stop, _ in spans)
    targets = b"".join(file[start + 1 : stop + 1] for file, start, stop, _ in spans)
    return Pack(
        tokens=torch.frombuffer(bytearray(tokens), dtype=torch.uint8).long()[None],
        targets=torch.frombuffer(bytearray(targets), dtype=torch.uint8).long()[None],
        before=torch.cat([torch.arange(start, stop) for _, start, stop, _ in spans]),
        is_counted=torch.cat([torch.arange(start, stop) >= first for _, start, stop, first in spans]),
        documents=tuple(documents),
    )
