"""Ends of channels: what a thread block can do on a memory, port or switch channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from mycel.collectives.channels.blocks import Block
from mycel.collectives.channels.parts import Part
from mycel.errors import UsageError

__all__ = ["MemoryEnd", "PortEnd", "SwitchEnd"]


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """One end of a channel between two ranks.

    Attributes:
        block: that uses it.
        peer: the other rank.
        number: of the channel among its rank's of this kind.
    """

    block: Block
    peer: int
    number: int

    def of(self, block: Block) -> Self:
        """The same end for another thread block of the rank, as of a group."""
        if block.rank != self.block.rank:
            raise UsageError(f"an end of rank {self.block.rank}'s channel for a thread block of rank {block.rank}")
        return replace(self, block=block)

    def _check(self, *parts: Part) -> None:
        for part in parts:
            if part.rank != self.peer:
                raise UsageError(
                    f"rank {self.block.rank}, thread block {self.block.number}: {part} on a channel to rank "
                    f"{self.peer}"
                )


class MemoryEnd(_End):
    """A memory channel: the peer's memory is mapped, and the block's threads work on it themselves."""

    def signal(self, *, is_relaxed: bool = False) -> None:
        """Say that all before is over; relaxed, only that the rank has begun."""
        self.block.signal("memory", self.number, is_relaxed=is_relaxed)

    def wait(self, *, is_relaxed: bool = False) -> None:
        """Wait for the peer's next signal; relaxed, what it had done before may still be under way."""
        self.block.wait("memory", self.number, is_relaxed=is_relaxed)

    def put(self, source: Part, target: Part) -> None:
        """Write own data to the peer."""
        self._check(target)
        self.block.over_memory("put", [source], [target])

    def get(self, source: Part, target: Part) -> None:
        """Read the peer's data; both parts begin at the same chunk."""
        self._check(source)
        self.block.over_memory("get", [source], [target])

    def put_packets(self, source: Part, target: Part) -> None:
        """Write own data as packets into the peer's scratch."""
        self._check(target)
        self.block.over_memory("ppkt", [source], [target])

    def forward_packets(self, source: Part, *targets: Part) -> None:
        """Wait for packets in own scratch and write them on, to this peer's scratch and others'."""
        self._check(*targets[:1])
        self.block.over_memory("rppkt", [source], targets)


class PortEnd(_End):
    """A port channel: what is put is moved later, by somebody else; ``flush`` waits until it has left."""

    def signal(self, *, is_relaxed: bool = False) -> None:
        """Say so after everything that was put before on this port."""
        self.block.signal("port", self.number, is_relaxed=is_relaxed)

    def wait(self, *, is_relaxed: bool = False) -> None:
        """Wait for the peer's next signal."""
        self.block.wait("port", self.number, is_relaxed=is_relaxed)

    def put(self, source: Part, target: Part, *, with_signal: bool = False, with_flush: bool = False) -> None:
        """Have own data written to the peer.

        Args:
            source: own data, to be left alone until a flush, or until the peer has said that it is there.
            target: of the peer.
            with_signal: signal after it.
            with_flush: and wait until it has left.
        """
        self._check(target)
        if with_flush and not with_signal:
            raise UsageError(f"rank {self.block.rank}: a put with flush has a signal too; or flush after it")
        name = "pwsf" if with_flush else "pws" if with_signal else "put"
        self.block.over_port(name, self.number, source, target)

    def forward_packets(self, source: Part, target: Part) -> None:
        """Wait for packets in own scratch and have them written to the peer's."""
        self._check(target)
        self.block.over_port("rppkt", self.number, source, target)

    def flush(self) -> None:
        """Wait until all that was put has left its source."""
        self.block.flush(self.number)


@dataclass(frozen=True, slots=True, eq=False)
class SwitchEnd:
    """A switch channel: one buffer of several ranks behind a switch that adds and copies.

    Attributes:
        block: that uses it.
        ranks: behind the switch, in order.
        letter: of the buffer.
        number: of the channel among its rank's switch channels.
    """

    block: Block
    ranks: tuple[int, ...]
    letter: str
    number: int

    def _side(self, index: int, size: int) -> dict[str, Any]:
        channel = self.block.channel("switch", self.number)
        return {"channel": channel, "index": index, "size": size, "ranks": self.ranks, "letter": self.letter}

    def reduce_broadcast(self, index: int, size: int = 1) -> None:
        """Add all ranks' chunks and write the sum to all of them, in place."""
        self.block.through_switch("glres", [self._side(index, size)], [self._side(index, size)])

    def reduce(self, index: int, target: Part) -> None:
        """Add all ranks' chunks from ``index`` on and write the sum to own memory."""
        self.block.through_switch("glre", [self._side(index, target.size)], [target])

    def broadcast(self, source: Part, index: int) -> None:
        """Write own data to all ranks, from chunk ``index`` on."""
        self.block.through_switch("gstore", [source], [self._side(index, source.size)])

    def broadcast_packets(self, source: Part, index: int) -> None:
        """Wait for packets in own scratch and write them to all ranks' scratch."""
        self.block.through_switch("gstorepkt", [source], [self._side(index, source.size)])


def group_of(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The ranks of blocks, of which no two may have the same.

    Raises:
        UsageError: two blocks of one rank, or fewer than two.
    """
    ranks = tuple(sorted(block.rank for block in blocks))
    if len(ranks) < 2 or len(set(ranks)) < len(ranks):
        raise UsageError(f"a switch channel over ranks {list(ranks)}: it is between blocks of different ranks")
    return ranks
