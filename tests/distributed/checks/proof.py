"""Lowering is broken in the ranks' own processes, after the schedules were verified: nobody runs what comes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mycel.collectives.lower import RankTemplate
from mycel.collectives.program import Op, Program
from mycel.errors import CommunicationError


def broken(program: Program, how: str) -> Program:
    """One instruction dropped, put elsewhere or exchanged with another; or all waits forgotten."""
    columns = program.columns.copy()
    receives, sends = (columns["op"] != Op.SEND).nonzero()[0], (columns["op"] == Op.SEND).nonzero()[0]
    if how == "drop":  # a copy onto itself is left of it
        row = int(receives[columns["channel"][receives] >= 0][-1])
        columns[row] = (Op.COPY, -1, *columns[row].tolist()[2:5], *columns[row].tolist()[2:4], 0)
    elif how == "redirect":  # what comes in lands one element off
        row = int(receives[columns["offset"][receives] > 0][0])
        columns["offset"][row] -= 1
    elif how == "reorder":
        pair = sends[columns["channel"][sends] == columns["channel"][sends[0]]][:2]
        columns[pair] = columns[pair[::-1]]
    else:
        return replace(program, need_start=program.need_start * 0, need_index=program.need_index[:0])
    return replace(program, columns=columns)


def refused(rank: int, size: int, how: str, culprits: list[int]) -> list[str]:
    """What the ranks hear when lowering goes wrong on some of them."""
    right = RankTemplate.expand
    data = torch.full((1000,), float(rank))

    def expand(self: RankTemplate, *args: Any, **kwargs: Any) -> Program:
        program = right(self, *args, **kwargs)
        return broken(program, how) if self.rank == 0 else program

    if rank in culprits:
        RankTemplate.expand = expand  # type: ignore[method-assign]
    heard = []
    try:
        for is_async in (False, True):
            with pytest.raises(CommunicationError) as caught:
                work = dist.all_reduce(data, async_op=is_async)
                if work is not None:
                    work.wait()
            heard.append(str(caught.value))
    finally:
        RankTemplate.expand = right  # type: ignore[method-assign]
    return heard


def broken_later(rank: int, size: int) -> int:
    """The schedule has run before, at another size."""
    right = RankTemplate.expand
    data = torch.full((1000,), float(rank))
    dist.all_reduce(data)
    assert data.eq(size * (size - 1) / 2).all()

    def expand(self: RankTemplate, *args: Any, **kwargs: Any) -> Program:
        return broken(right(self, *args, **kwargs), "drop")

    RankTemplate.expand = expand  # type: ignore[method-assign]
    try:
        with pytest.raises(CommunicationError, match="refuses to run all_reduce"):
            dist.all_reduce(torch.ones(1001))
    finally:
        RankTemplate.expand = right  # type: ignore[method-assign]
    return 1


def every_size(rank: int, size: int) -> int:
    """With ``MYCEL_VERIFY=sizes``: right at first, then broken at one size only, and only in many pieces."""
    right = RankTemplate.expand
    for length in (1000, 5):
        data = torch.full((length,), float(rank))
        dist.all_reduce(data)
        assert data.eq(size * (size - 1) / 2).all()

    def expand(self: RankTemplate, num_elements: int, pieces: int, **kwargs: Any) -> Program:
        program = right(self, num_elements, pieces, **kwargs)
        return broken(program, "drop") if num_elements == 7770 and pieces == 8 else program

    RankTemplate.expand = expand  # type: ignore[method-assign]
    try:
        dist.all_reduce(torch.ones(7780))
        with pytest.raises(CommunicationError, match="refuses to run all_reduce"):
            dist.all_reduce(torch.ones(7770))
    finally:
        RankTemplate.expand = right  # type: ignore[method-assign]
    return 1
