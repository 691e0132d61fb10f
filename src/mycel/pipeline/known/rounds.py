"""Depth-first turns of chunks in rounds of micro-batches, which interleaved 1F1B and ZB-H1 take alike."""

from __future__ import annotations

from dataclasses import dataclass

from mycel.errors import UsageError

__all__ = ["Rounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """In which sequence a rank's chunks treat their micro-batches.

    A round is about p micro-batches: all of them through the first chunk, then through the second, and so on, before
    the next round begins. Backwards go through the chunks from the last to the first.

    Attributes:
        name: of the schedule, for messages.
        num_ranks: p.
        num_micro_batches: m; where there are more than p, a multiple of the number of rounds.
        chunks: v.

    Raises:
        UsageError: micro-batches that do not divide into rounds.
    """

    name: str
    num_ranks: int
    num_micro_batches: int
    chunks: int

    def __post_init__(self) -> None:
        if self.num_micro_batches % self.num_rounds:
            fitting = self.num_micro_batches - self.num_micro_batches % self.num_rounds
            raise UsageError(
                f"{self.name} on {self.num_ranks} ranks treats {self.num_micro_batches} micro-batches in "
                f"{self.num_rounds} rounds, which do not divide them; {fitting} would do"
            )

    @property
    def num_rounds(self) -> int:
        """As many as there are times p micro-batches, at least one."""
        return max(1, self.num_micro_batches // self.num_ranks)

    @property
    def length(self) -> int:
        """Micro-batches a round."""
        return self.num_micro_batches // self.num_rounds

    @property
    def total(self) -> int:
        """Forwards of a rank."""
        return self.num_micro_batches * self.chunks

    def warm_up(self, rank: int, *, a_hop: int) -> int:
        """Forwards that a rank does before it takes forwards and backwards in turn.

        Args:
            rank: whose.
            a_hop: forwards more for every rank that is between it and the last.
        """
        return min(self.total, (self.chunks - 1) * self.length + a_hop * (self.num_ranks - 1 - rank))

    def forward(self, turn: int) -> tuple[int, int]:
        """Chunk and micro-batch of a rank's n-th forward.

        Args:
            turn: n, from 0 on.
        """
        lap, place = divmod(turn, self.length * self.chunks)
        chunk, offset = divmod(place, self.length)
        return chunk, lap * self.length + offset

    def backward(self, turn: int) -> tuple[int, int]:
        """Chunk and micro-batch of a rank's n-th backward.

        Args:
            turn: n, from 0 on.
        """
        chunk, micro_batch = self.forward(turn)
        return self.chunks - 1 - chunk, micro_batch
