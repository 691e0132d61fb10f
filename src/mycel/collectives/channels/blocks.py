"""Thread blocks: operations in the order in which they are written, and the meetings that this order takes.

A thread block's operations are each shared out over its threads, so nothing orders one after another but a meeting of
all threads, a ``nop``. Within a block the order of the program is meant, so a ``nop`` is put before an operation that
must come after an earlier one, if no meeting stands between them already:

- before work on data that an operation since the last meeting has written, or that is written and it has used;
- before work on data after a wait, which is what the wait was for;
- before a signal, or a release, after work on data or a wait: it says that these are over.

Packets need none for what they carry: whoever reads one waits for it. What need not be there after all, as something
else gives the order, is taken out when the plan is built (``ChannelPlan.build``). Between blocks and between ranks
the author says what waits for what, and the verifier judges.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mycel.collectives.channels.parts import BUFFERS, Part
from mycel.errors import UsageError

__all__ = ["PLACED", "Block", "Semaphore", "statement"]

Json = dict[str, Any]
#: Key of meetings that nobody has asked for; no plan has it in the end.
PLACED = "placed"
_OURS = ("mycel.collectives.channels", "contextlib")


def statement() -> tuple[str, int]:
    """File and line of the author's statement that is being carried out."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@dataclass(frozen=True, slots=True)
class Semaphore:
    """Counts what one thread block has done, for another of the same rank."""

    rank: int
    number: int


@dataclass(slots=True, eq=False)
class _Since:
    """What a block has done since its threads have met."""

    reads: list[Part] = field(default_factory=list)
    writes: list[Part] = field(default_factory=list)
    has_waited: bool = False

    def clear(self) -> None:
        self.reads.clear()
        self.writes.clear()
        self.has_waited = False

    def must_precede(self, reads: Sequence[Part], writes: Sequence[Part]) -> bool:
        """Whether work on data has to come after some of it."""
        after_write = any(a.overlaps(b) for a in self.writes for b in (*reads, *writes))
        return self.has_waited or after_write or any(a.overlaps(b) for a in self.reads for b in writes)


class Block:
    """One thread block of a rank; made by ``Rank.block`` and ``Rank.group``.

    Attributes:
        rank, number: whose, and which.
        ops: operations so far, as plans have them.
        statements: of each operation the file and line that asked for it.
    """

    def __init__(self, rank: int, number: int, *, part: int = 0, num_parts: int = 1) -> None:
        self.rank, self.number = rank, number
        self.part, self.num_parts = part, num_parts
        self.ops: list[Json] = []
        self.statements: list[tuple[str, int]] = []
        self.channels: dict[str, list[int]] = {}
        self.remote: dict[str, list[tuple[int, str]]] = {}
        self._into = self.ops
        self._since = _Since()

    # -- data ---------------------------------------------------------------------------------------------

    def copy(self, source: Part, target: Part) -> None:
        """Copy within the rank."""
        self._check_own(source, target)
        self._data("copy", [source], [target])

    def reduce(self, target: Part, *sources: Part, to: Sequence[Part] = ()) -> None:
        """Add parts and write the sum.

        Args:
            target: of this rank.
            sources: at least two; the first is of this rank, and the others all are or all are other ranks'.
            to: parts of other ranks that get the sum as well.
        """
        self._check_own(target, *sources[:1])
        others = {source.rank == self.rank for source in sources[1:]}
        if len(others) != 1:
            raise UsageError(
                f"rank {self.rank}, thread block {self.number}: a sum is of at least two parts, the first of this "
                "rank, and the others all of this rank or all of others; add in two steps"
            )
        name = ("re" if others == {True} else "rre") + ("s" if to else "")
        kind = "memory" if name != "re" else ""
        self._data(name, list(sources), [target, *to], kind=kind, reduces=True)

    def pack(self, source: Part, target: Part) -> None:
        """Write data as packets into own scratch."""
        self._check_own(source, target)
        self._data("cpkt", [source], [target])

    def unpack(self, source: Part, target: Part) -> None:
        """Wait for packets in own scratch and write what they carry."""
        self._check_own(source, target)
        self._data("upkt", [source], [target], packets=1)

    def reduce_packets(
        self, target: Part, own: Part, *packets: Part, copy: Part | None = None, to: Sequence[Part] = ()
    ) -> None:
        """Wait for packets, add what they carry to own data, and write the sum.

        Args:
            target: of this rank, for plain data.
            own: plain data of this rank.
            packets: in own scratch.
            copy: in own scratch, where the sum goes as packets.
            to: in other ranks' scratch, where it goes as packets.
        """
        self._check_own(target, own, *packets)
        name = {(False, False): "repkt", (False, True): "respkt", (True, False): "recpkt", (True, True): "recspkt"}
        chosen = name[copy is not None, bool(to)]
        targets = [target, *([] if copy is None else [copy]), *to]
        self._data(chosen, [own, *packets], targets, kind="memory" if to else "", reduces=True, packets=len(packets))

    # -- order --------------------------------------------------------------------------------------------

    def release(self, *semaphores: Semaphore) -> None:
        """Tell other blocks of the rank that all before this is over."""
        self._meet_if(bool(self._since.has_waited or self._since.reads or self._since.writes))
        self._semaphores("sem_release", semaphores)

    def acquire(self, *semaphores: Semaphore) -> None:
        """Wait until each has been released once more."""
        self._semaphores("sem_acquire", semaphores)
        self._since.has_waited = True

    def meet(self) -> None:
        """All threads of the block meet, whether or not something asks for it."""
        self._emit({"name": "nop"})
        self._since.clear()

    @contextmanager
    def pipeline(self, unit_bytes: int, num_chunks: int = 1) -> Iterator[None]:
        """What is written inside is repeated, on a piece of ``unit_bytes`` of each part after the other.

        Args:
            unit_bytes: length of a piece, a multiple of 16.
            num_chunks: of each part that is worked on.
        """
        if self._into is not self.ops:
            raise UsageError(f"rank {self.rank}, thread block {self.number}: a pipeline within a pipeline")
        self._meet_if(bool(self._since.has_waited or self._since.reads or self._since.writes))
        inner: list[Json] = []
        self._into = inner
        try:
            yield
        finally:
            self._into = self.ops
        if self._begins_late(inner):
            inner.append({"name": "nop", PLACED: True})
            self._since.clear()
        self._emit(
            {
                "name": "pipeline",
                "iter_context": {"unit_size": unit_bytes, "num_chunks": num_chunks},
                "ops": inner,
            }
        )

    def _begins_late(self, inner: Sequence[Json]) -> bool:
        """Whether the next round's first operations would come too early without a meeting before them."""
        busy = bool(self._since.reads or self._since.writes)
        for op in inner:
            if op["name"] == "nop":
                return False
            if op["name"] in ("signal", "sem_release", "pws", "pwsf"):
                return self._since.has_waited or busy
            if "dst_buff" in op:
                return self._since.has_waited
        return False

    # -- for ends of channels -----------------------------------------------------------------------------

    def channel(self, kind: str, number: int) -> int:
        """The number by which the block knows a channel of its rank."""
        known = self.channels.setdefault(kind, [])
        if number not in known:
            known.append(number)
        return known.index(number)

    def signal(self, kind: str, number: int, *, is_relaxed: bool) -> None:
        """Signal on a channel."""
        if not is_relaxed:
            self._meet_if(bool(self._since.has_waited or self._since.reads or self._since.writes))
        self._emit(_on("rlxsignal" if is_relaxed else "signal", kind, self.channel(kind, number)))

    def wait(self, kind: str, number: int, *, is_relaxed: bool) -> None:
        """Wait for a signal on a channel."""
        self._emit(_on("rlxwait" if is_relaxed else "wait", kind, self.channel(kind, number)))
        self._since.has_waited = True

    def flush(self, number: int) -> None:
        """Wait until everything on a port has left its source."""
        self._emit(_on("flush", "port", self.channel("port", number)))
        self._since.has_waited = True

    def over_memory(self, name: str, sources: Sequence[Part], targets: Sequence[Part]) -> None:
        """Work of the block's own threads on other ranks' memory."""
        packets = len(sources) if name == "rppkt" else 0
        self._data(name, list(sources), list(targets), kind="memory", packets=packets)

    def over_port(self, name: str, number: int, source: Part, target: Part) -> None:
        """Hand data to a port, which moves it later: what follows in the block does not come after it."""
        self._check_own(source)
        if self.num_parts > 1:
            raise UsageError(f"rank {self.rank}, thread block {self.number}: a group cannot share what a port moves")
        signals = name in ("pws", "pwsf") and bool(self._since.reads or self._since.writes)
        self._meet_if(signals or self._since.must_precede([] if name == "rppkt" else [source], []))
        entry = self._entry(name, [source], [target], "port")
        self._emit({**entry, "channel_ids": [self.channel("port", number)]})
        if name == "rppkt":  # its threads meet before they hand the packets over
            self._since.clear()
        if name == "pwsf":
            self._since.has_waited = True

    def through_switch(self, name: str, sources: Sequence[Part | Json], targets: Sequence[Part | Json]) -> None:
        """Work on all ranks' memory behind a switch; of these sides, what plans say."""
        packets = len(sources) if name == "gstorepkt" else 0
        self._data(name, list(sources), list(targets), kind="switch", reduces=name.startswith("gl"), packets=packets)

    # -- inside -------------------------------------------------------------------------------------------

    def _data(
        self,
        name: str,
        sources: Sequence[Part | Json],
        targets: Sequence[Part | Json],
        *,
        kind: str = "",
        reduces: bool = False,
        packets: int = 0,
    ) -> None:
        """Work on data; the last ``packets`` sources are packets, which are waited for."""
        plain = sources[: len(sources) - packets]
        reads = [part for source in plain for part in self._touched(source)]
        writes = [part for target in targets for part in self._touched(target)]
        self._meet_if(self._since.must_precede(reads, writes))
        entry = self._entry(name, sources, targets, kind)
        if reduces:
            entry["reduce_op"] = "sum"
        if self.num_parts > 1:
            entry["tbg_info"] = {"tb_id": self.part, "tbg_size": self.num_parts}
        self._emit(entry)
        self._since.reads += [part for source in sources for part in self._touched(source)]
        self._since.writes += writes

    def _touched(self, side: Part | Json) -> list[Part]:
        if isinstance(side, Part):
            return [side]
        return [Part(rank, side["letter"], side["index"], side["size"]) for rank in side["ranks"]]

    def _entry(self, name: str, sources: Sequence[Part | Json], targets: Sequence[Part | Json], kind: str) -> Json:
        entry: Json = {
            "name": name,
            "src_buff": [self._place(source, kind) for source in sources],
            "dst_buff": [self._place(target, kind) for target in targets],
        }
        if kind:
            entry["channel_type"] = kind
        return entry

    def _place(self, side: Part | Json, kind: str) -> Json:
        if not isinstance(side, Part):
            return {"switch_channel_id": side["channel"], "index": side["index"], "size": side["size"]}
        span = {"index": side.index, "size": side.size}
        if side.rank == self.rank:
            return {"type": side.letter, **span}
        known = self.remote.setdefault(kind, [])
        if (side.rank, side.letter) not in known:
            known.append((side.rank, side.letter))
        return {"buffer_id": known.index((side.rank, side.letter)), **span}

    def _semaphores(self, name: str, semaphores: Sequence[Semaphore]) -> None:
        for semaphore in semaphores:
            if semaphore.rank != self.rank:
                raise UsageError(
                    f"rank {self.rank}, thread block {self.number}: semaphore {semaphore.number} is of rank "
                    f"{semaphore.rank}; ranks tell each other by signals"
                )
        self._emit({"name": name, "semaphore_ids": [semaphore.number for semaphore in semaphores]})

    def barrier(self, number: int, num_blocks: int) -> None:
        """Meet other blocks; see ``Rank.barrier``."""
        self._emit({"name": "barrier", "barrier_id": number, "num_threadblocks": num_blocks})
        self._since.clear()

    def _check_own(self, *parts: Part) -> None:
        for part in parts:
            if part.rank != self.rank:
                raise UsageError(
                    f"rank {self.rank}, thread block {self.number}: {part} is not this rank's; "
                    f"{BUFFERS['s']} and the others of another rank are reached over a channel"
                )

    def _meet_if(self, needed: bool) -> None:
        if needed:
            self._emit({"name": "nop", PLACED: True})
            self._since.clear()

    def _emit(self, entry: Json) -> None:
        self._into.append(entry)
        if self._into is self.ops:
            self.statements.append(statement())


def _on(name: str, kind: str, number: int) -> Json:
    return {"name": name, "channel_ids": [number], "channel_type": kind}
