"""The collectives of a bench: how one is called on this rank, with which inputs, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from mycel.bench.case import Case
from mycel.bench.numbers import contribution, num_wrong, reduced
from mycel.comm.messages import all_gather_single, reduce_scatter_single

__all__ = ["Operands", "Work", "prepare"]

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


class Work(Protocol):
    """The part of ``torch.distributed.Work`` that is used here."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """Tensors of a case on one rank.

    Attributes:
        reset: puts the inputs, and rubbish outputs, in place.
        call: starts the collective, blocking or not.
        num_wrong: elements of this rank's result that are not what they must be.
        tensors: that the call reads or writes, where they are no parts of each other.
    """

    reset: Callable[[], None]
    call: Callable[[dist.ProcessGroup, bool], Work | None]
    num_wrong: Callable[[], int]
    tensors: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of a case: inputs and results of the case's type and operation."""

    case: Case
    rank: int
    world_size: int

    @property
    def num_elements(self) -> int:
        return self.case.num_elements(self.world_size)

    @property
    def block(self) -> slice:
        """Of the whole array, where it is one block a rank."""
        return self.block_of(self.rank)

    @property
    def is_root(self) -> bool:
        return self.rank == self.case.root

    def block_of(self, rank: int) -> slice:
        length = self.num_elements // self.world_size
        return slice(rank * length, (rank + 1) * length)

    def given(self, where: slice | None = None, rank: int | None = None) -> torch.Tensor:
        """What a rank, this one if none is named, contributes to some elements, all if none are named."""
        place = where or slice(0, self.num_elements)
        owner = self.rank if rank is None else rank
        case = self.case
        return contribution(place.start, place.stop, owner, self.world_size, dtype=case.dtype, op=case.op)

    def result(self, where: slice | None = None) -> torch.Tensor:
        """What the reduction of all contributions is."""
        place = where or slice(0, self.num_elements)
        return reduced(place.start, place.stop, self.world_size, dtype=self.case.dtype, op=self.case.op)

    def gathered(self) -> torch.Tensor:
        """Every rank's own block, one after the other."""
        return torch.cat([self.given(self.block_of(rank), rank) for rank in range(self.world_size)])

    def empty(self, num_elements: int) -> torch.Tensor:
        return torch.empty(num_elements, dtype=getattr(torch, self.case.dtype))

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        return _TORCH_OPS[self.case.op]


def prepare(case: Case, rank: int, world_size: int) -> Operands:
    """Inputs, call and check of a case on this rank."""
    return _PREPARED[case.collective](_Part(case, rank, world_size))


def _all_reduce(part: _Part) -> Operands:
    mine, array, whole = part.given(), part.empty(part.num_elements), part.result()
    return Operands(
        reset=lambda: _set(array, mine),
        call=lambda group, blocking: dist.all_reduce(array, op=part.op, group=group, async_op=not blocking),
        num_wrong=lambda: num_wrong(array, whole),
        tensors=(array,),
    )


def _reduce(part: _Part) -> Operands:
    mine, array, whole, root = part.given(), part.empty(part.num_elements), part.result(), part.case.root
    return Operands(
        reset=lambda: _set(array, mine),
        call=lambda group, blocking: dist.reduce(array, dst=root, op=part.op, group=group, async_op=not blocking),
        num_wrong=lambda: num_wrong(array, whole) if part.is_root else 0,
        tensors=(array,),
    )


def _broadcast(part: _Part) -> Operands:
    root = part.case.root
    sent, array = part.given(rank=root), part.empty(part.num_elements)
    return Operands(
        reset=lambda: _set(array, sent if part.is_root else None),
        call=lambda group, blocking: dist.broadcast(array, src=root, group=group, async_op=not blocking),
        num_wrong=lambda: num_wrong(array, sent),
        tensors=(array,),
    )


def _all_gather(part: _Part) -> Operands:
    in_place = part.case.in_place
    array, given, whole = part.empty(part.num_elements), part.given(part.block), part.gathered()
    mine = array[part.block] if in_place else given

    def reset() -> None:
        _set(array, None)
        if in_place:
            _set(mine, given)

    return Operands(
        reset=reset,
        call=lambda group, blocking: all_gather_single(array, mine, group=group, async_op=not blocking),
        num_wrong=lambda: num_wrong(array, whole),
        tensors=() if in_place else (array, mine),
    )


def _reduce_scatter(part: _Part) -> Operands:
    in_place = part.case.in_place
    mine = part.given()
    array = mine.clone() if in_place else mine
    shard = array[part.block] if in_place else part.empty(part.num_elements // part.world_size)
    expected = part.result(part.block)

    # Out of place the input belongs to the caller: one that is scribbled on would spoil the next round's sum.
    def reset() -> None:
        _set(array, mine) if in_place else _set(shard, None)

    return Operands(
        reset=reset,
        call=lambda group, blocking: reduce_scatter_single(
            shard, array, op=part.op, group=group, async_op=not blocking
        ),
        num_wrong=lambda: num_wrong(shard, expected),
        tensors=() if in_place else (shard, array),
    )


def _all_to_all(part: _Part) -> Operands:
    mine, array = part.given(), part.empty(part.num_elements)
    whole = torch.cat([part.given(part.block, rank) for rank in range(part.world_size)])
    return Operands(
        reset=lambda: _set(array, None),
        call=lambda group, blocking: dist.all_to_all_single(array, mine, group=group, async_op=not blocking),
        num_wrong=lambda: num_wrong(array, whole),
        tensors=(array, mine),
    )


def _gather(part: _Part) -> Operands:
    root, mine, whole = part.case.root, part.given(part.block), part.gathered()
    array = part.empty(part.num_elements)
    parts = [array[part.block_of(rank)] for rank in range(part.world_size)] if part.is_root else None
    return Operands(
        reset=lambda: _set(array, None),
        call=lambda group, blocking: dist.gather(mine, parts, dst=root, group=group, async_op=not blocking),
        num_wrong=lambda: num_wrong(array, whole) if part.is_root else 0,
    )


def _scatter(part: _Part) -> Operands:
    root = part.case.root
    sent, mine = part.given(rank=root), part.empty(part.num_elements // part.world_size)
    parts = [sent[part.block_of(rank)] for rank in range(part.world_size)] if part.is_root else None
    expected = part.given(part.block, rank=root)
    return Operands(
        reset=lambda: _set(mine, None),
        call=lambda group, blocking: dist.scatter(mine, parts, src=root, group=group, async_op=not blocking),
        num_wrong=lambda: num_wrong(mine, expected),
    )


class _Both:
    """Two messages as one work."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _sendrecv(part: _Part) -> Operands:
    """Every rank sends to the next and receives from the one before, the last to and from the first."""
    after, before = (part.rank + 1) % part.world_size, (part.rank - 1) % part.world_size
    mine, array, expected = part.given(), part.empty(part.num_elements), part.given(rank=before)

    def call(group: dist.ProcessGroup, blocking: bool) -> Work | None:
        receiving = dist.irecv(array, src=before, group=group)
        sending = dist.isend(mine, dst=after, group=group)
        assert receiving is not None and sending is not None  # this process is a member
        both = _Both([receiving, sending])
        if not blocking:
            return both
        both.wait()
        return None

    return Operands(
        reset=lambda: _set(array, None),
        call=call,
        num_wrong=lambda: num_wrong(array, expected),
        tensors=(array, mine),
    )


_PREPARED: dict[str, Callable[[_Part], Operands]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "sendrecv": _sendrecv,
}


def _set(target: torch.Tensor, source: torch.Tensor | None) -> None:
    """The input; or what no result is: contributions are positive, and 0 is below them in every type."""
    if source is None:
        target.zero_()
    else:
        target.copy_(source)
