"""Thread blocks: schedules as MSCCL's runtimes run them, one program a thread block and chunk-sized places.

Every rank has three buffers: input ``i``, output ``o`` and scratch ``s``, in chunks. A block runs its steps in
order. It sends to one rank and receives from one, each over one channel, first in, first out; a step may wait for
one step of another block of its rank.

=========  ==========================================================================
``s``      send ``source``
``r``      receive into ``target``
``rcs``    receive into ``target`` and send the same on
``rrs``    receive, add ``source``, send the sum on
``rrc``    receive, add ``source``, put the sum into ``target``
``rrcs``   as ``rrc``, and send the sum on
``cpy``    copy ``source`` into ``target``
``re``     add ``source`` to ``target``
``nop``    only wait
=========  ==========================================================================

References:
    M. Cowan, S. Maleki, M. Musuvathi, O. Saarikivi, Y. Xiong, "MSCCLang: Microsoft collective communication
    language", ASPLOS 2023, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mycel.collectives.spec import Collective

__all__ = [
    "BUFFERS",
    "READS_SOURCE",
    "RECEIVES",
    "SENDS",
    "STEP_KINDS",
    "WRITES_TARGET",
    "Block",
    "BlockPlan",
    "BufferLetter",
    "Place",
    "RankBlocks",
    "Step",
    "StepKind",
]

StepKind = Literal["s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop"]
BufferLetter = Literal["i", "o", "s"]
BUFFERS: tuple[BufferLetter, ...] = get_args(BufferLetter)
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)
SENDS: frozenset[StepKind] = frozenset({"s", "rcs", "rrs", "rrcs"})
RECEIVES: frozenset[StepKind] = frozenset({"r", "rcs", "rrs", "rrc", "rrcs"})
READS_SOURCE: frozenset[StepKind] = frozenset({"s", "rrs", "rrc", "rrcs", "cpy", "re"})
WRITES_TARGET: frozenset[StepKind] = frozenset({"r", "rcs", "rrc", "rrcs", "cpy", "re"})


@dataclass(frozen=True, slots=True)
class Place:
    """Chunks of a buffer from ``offset`` on."""

    buffer: BufferLetter
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step; see the module's table.

    Attributes:
        count: chunks; 0 for ``nop``.
        waits: ``(block, step)`` of the same rank that must be complete first.
    """

    kind: StepKind
    source: Place
    target: Place
    count: int
    waits: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One thread block.

    Attributes:
        send, recv: the ranks it sends to and receives from; -1 for none.
        channel: of both.
    """

    send: int
    recv: int
    channel: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlocks:
    """One rank: chunks of scratch, and its blocks."""

    scratch: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """All ranks.

    Attributes:
        collective: what it is meant to do.
        num_chunks: of the whole array, a multiple of the number of blocks of the collective.
        ranks: one of each.
        in_place, out_of_place: whether input and output may be the same memory, and different memory.
        slots: messages that a connection can hold, at least; a sender waits where it is full.
    """

    collective: Collective
    num_chunks: int
    ranks: tuple[RankBlocks, ...]
    in_place: bool
    out_of_place: bool
    slots: int

    def length(self, rank: int, buffer: str) -> int:
        """Chunks of a rank's buffer."""
        share = self.num_chunks // self.collective.num_ranks
        if buffer == "s":
            return self.ranks[rank].scratch
        if buffer == "i":
            return share if self.collective.name == "all_gather" else self.num_chunks
        return share if self.collective.name == "reduce_scatter" else self.num_chunks
