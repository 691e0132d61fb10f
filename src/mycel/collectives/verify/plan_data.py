"""MSCCL++ execution plans as data: operations on chunks of ranks' buffers, thread block by thread block.

References:
    microsoft/mscclpp, ``src/core/include/execution_common.hpp`` (limits, August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mycel.collectives.spec import Collective, CollectiveName

__all__ = [
    "ALIGNMENT",
    "COLLECTIVE_NAMES",
    "PACKETS",
    "PUTS",
    "SENDRECV",
    "SIGNALS",
    "SUMS",
    "SUPPORTED",
    "TO_ALL",
    "UNLOADED",
    "WAITS",
    "Chunks",
    "End",
    "ForeignPlan",
    "Operation",
]

#: Collectives by their names in plans. Plans have no place for a root.
COLLECTIVE_NAMES: dict[str, CollectiveName] = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
#: Every rank's whole input goes to one other rank: an all_to_all of which all blocks but one a rank are empty.
SENDRECV = "sendrecv"
SIGNALS = ("signal", "rlxsignal", "pws", "pwsf")
WAITS = ("wait", "rlxwait")
PUTS = ("put", "pws", "pwsf")
#: Operations that add all their sources and write the sum to all their targets.
SUMS = ("re", "res", "rre", "rres", "glre", "glres", "repkt", "respkt", "recpkt", "recspkt")
#: Operations that write their one source to all their targets.
TO_ALL = ("rppkt", "gstore", "gstorepkt")
#: Operations on packets: data and a flag side by side, so that whoever reads waits for what it reads.
PACKETS = ("ppkt", "rppkt", "cpkt", "upkt", "repkt", "respkt", "recpkt", "recspkt", "gstorepkt")
#: Operations that the public language writes and that the runtime's loader (August 2026) has no name for.
UNLOADED = ("glre", "gstorepkt")
#: All operations but ``pipeline``, which repeats some of these.
SUPPORTED = (
    "nop", "barrier", "put", "pws", "pwsf", "get", "copy", "signal", "wait", "rlxsignal", "rlxwait", "flush",
    "re", "res", "rre", "rres", "sem_acquire", "sem_release", *PACKETS, "glre", "glres", "gstore",
)  # fmt: skip
#: Bytes in which the runtime counts sizes; a reduction works on so many at a time and misplaces what is left over.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks ``index .. index+size-1`` of a rank's buffer ``"i"``, ``"o"`` or ``"s"``.

    Attributes:
        is_packet: each element has a flag beside it, and whoever reads it waits until it has this run's.
    """

    rank: int
    buffer: str
    index: int
    size: int
    is_packet: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """One end of a channel: the ``number``-th of its kind at a rank."""

    rank: int
    kind: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation; what it has no use for is empty.

    Attributes:
        at: its place among the thread block's; one in a pipeline has the pipeline's.
        sources, targets: of one through a switch, the places at all ranks behind it.
        part, num_parts: which part of the data is this thread block's, where a group of them shares it.
        step: of a pipeline, in which it stands; -1: in none.
        inner: of a pipeline, what it repeats, for ``num_chunks`` chunks in steps of ``unit_bytes``.
    """

    name: str
    at: int = 0
    kind: str = ""
    sources: tuple[Chunks, ...] = ()
    targets: tuple[Chunks, ...] = ()
    ends: tuple[End, ...] = ()
    semaphores: tuple[int, ...] = ()
    barrier: int = -1
    num_blocks: int = 0
    part: int = 0
    num_parts: int = 1
    step: int = -1
    inner: tuple[Operation, ...] = ()
    unit_bytes: int = 0
    num_chunks: int = 0

    @property
    def label(self) -> str:
        """Its place and name, for messages."""
        return f"op {self.at} ({f'step {self.step} of a pipeline: ' if self.step >= 0 else ''}{self.name})"


@dataclass(frozen=True, kw_only=True)
class ForeignPlan:
    """A plan of well-formed operations.

    Attributes:
        collective: what it carries out; an all_to_all where it is a ``sendrecv``.
        is_sendrecv: every rank's whole input goes to one other rank.
        protocol: ``Simple``, or ``LL`` where packets are used.
        chunks: of each rank, chunks in its buffers ``"i"``, ``"o"`` and ``"s"``.
        blocks: of each rank, the operations of each thread block.
        semaphores: of each rank, what its semaphores count at the start.
        peers: the other end of every channel that has one.
        has_two_scratches: runs use two halves of scratch in turns.
        folds: scratch is of a fixed length, and pipelines of long chunks go through it again and again.
        message_bytes: least and greatest length of what a run is for.
    """

    name: str
    collective: Collective
    is_sendrecv: bool
    in_place: bool
    protocol: str
    chunks: tuple[Mapping[str, int], ...]
    blocks: tuple[tuple[tuple[Operation, ...], ...], ...]
    semaphores: tuple[tuple[int, ...], ...]
    peers: Mapping[End, End]
    has_two_scratches: bool
    folds: bool
    message_bytes: tuple[int, int]

    @property
    def title(self) -> str:
        """What it is, for messages."""
        return f"{SENDRECV if self.is_sendrecv else self.collective.name} over {self.collective.num_ranks} ranks"
