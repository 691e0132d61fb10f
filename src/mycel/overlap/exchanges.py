"""Collectives of rows that go on while something else is computed: what tiles are made of.

Ranks may have different numbers of rows; shorter blocks travel padded, since not every backend takes uneven ones.
What arrived is kept for activation checkpointing, as all exchanges of ``mycel.comm`` are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from mycel.comm.messages import all_gather_single, reduce_scatter_single
from mycel.comm.meter import ByteMeter
from mycel.comm.pending import Pending, communicate

__all__ = ["Across", "padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """The ranks of an exchange, and what counts its bytes.

    Attributes:
        group: the ranks.
        rank: of this process in it.
        size: of the group.
        name: under which bytes are counted.
        meter: counts them; ``None``: nobody does.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    name: str
    meter: ByteMeter | None = None

    @staticmethod
    def of(group: dist.ProcessGroup, name: str, meter: ByteMeter | None = None) -> Across:
        """This process's place in a group."""
        return Across(group=group, rank=dist.get_rank(group), size=dist.get_world_size(group), name=name, meter=meter)

    def back(self) -> Across:
        """The same on the way back."""
        return Across(
            group=self.group, rank=self.rank, size=self.size, name=f"{self.name}.backward", meter=self.meter
        )

    def gather(self, rows: Tensor, into: Tensor | None = None) -> Pending[Tensor]:
        """Rows of all ranks, ``[size, rows, ...]``; all have as many.

        Args:
            rows: contiguous; must stay as they are until the result is awaited.
            into: contiguous memory for the result.
        """
        if self.size == 1:
            return Pending.done(_put(rows.unsqueeze(0), into))

        def launch() -> Pending[Tensor]:
            gathered = rows.new_empty(self.size, *rows.shape) if into is None else into
            flat = gathered.view(self.size * rows.shape[0], *rows.shape[1:])
            return self._under_way(
                lambda: all_gather_single(flat, rows, group=self.group, async_op=True), gathered, rows, rows.nbytes
            )

        return _into(communicate(launch), into)

    def scatter(self, blocks: Tensor, into: Tensor | None = None) -> Pending[Tensor]:
        """The ranks' sum of this rank's block.

        Args:
            blocks: shape ``[size, rows, ...]``, contiguous; must stay as they are until the result is awaited.
            into: contiguous memory for the result, ``[rows, ...]``.
        """
        if self.size == 1:
            return Pending.done(_put(blocks[0], into))

        def launch() -> Pending[Tensor]:
            summed = blocks.new_empty(blocks.shape[1:]) if into is None else into
            flat = blocks.view(self.size * blocks.shape[1], *blocks.shape[2:])
            return self._under_way(
                lambda: reduce_scatter_single(summed, flat, group=self.group, async_op=True),
                summed,
                blocks,
                summed.nbytes,
            )

        return _into(communicate(launch), into)

    def total(self, values: Tensor) -> Pending[Tensor]:
        """The ranks' sum of ``values``, written there; contiguous."""
        if self.size == 1:
            return Pending.done(values)

        def launch() -> Pending[Tensor]:
            each = 2 * values.nbytes // self.size
            return self._under_way(
                lambda: dist.all_reduce(values, group=self.group, async_op=True), values, values, each
            )

        return _into(communicate(launch), values)

    def _under_way(
        self, start: Callable[[], dist.Work | None], result: Tensor, source: Tensor, bytes_to_each: int
    ) -> Pending[Tensor]:
        if self.meter is not None:
            self.meter.add_even(self.name, bytes_to_each, self.group)
        work = start() if source.numel() else None

        def finish() -> Tensor:
            nonlocal source
            if work is not None:
                work.wait()
            del source  # lives until here: it is being sent
            return result

        return Pending(finish)


def padded(rows: Tensor, most: int) -> Tensor:
    """The rows, contiguous, and zeros behind them up to ``most`` rows."""
    if rows.shape[0] == most:
        return rows.contiguous()
    filled = rows.new_zeros(most, *rows.shape[1:])
    filled[: rows.shape[0]] = rows
    return filled


def _put(rows: Tensor, into: Tensor | None) -> Tensor:
    if into is None:
        return rows
    if into.data_ptr() != rows.data_ptr():
        into.copy_(rows)
    return into


def _into(pending: Pending[Tensor], into: Tensor | None) -> Pending[Tensor]:
    """What was kept of an earlier pass goes to where the caller wants it."""
    return pending if into is None else Pending(lambda: _put(pending.wait(), into))
