"""What communication has cost: bytes, collectives, seconds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CommStats"]


@dataclass(slots=True, kw_only=True)
class CommStats:
    """Counts since the last ``reset``, of this rank.

    Attributes:
        steps: synchronised steps.
        sent_bytes: that this rank has sent, without headers. An all_reduce counts ``2 (W-1)/W`` of its bytes, which
            is what a rank sends at least on average; other collectives count what they send directly.
        exact_bytes: that all_reduces of the same gradients in their own type would have sent.
        collectives: started.
        compute_s: seconds of compressing and decompressing.
        wait_s: seconds of waiting for collectives.

    Examples:
        >>> stats = CommStats(exact_bytes=4000.0)
        >>> stats.sent(500)
        >>> stats.collectives, stats.ratio
        (1, 8.0)
    """

    steps: int = 0
    sent_bytes: float = 0.0
    exact_bytes: float = 0.0
    collectives: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1.0 before anything was."""
        return self.exact_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def sent(self, num_bytes: float, *, collectives: int = 1) -> None:
        """Count one collective."""
        self.sent_bytes += num_bytes
        self.collectives += collectives

    def reset(self) -> None:
        """Begin at zero."""
        fresh = CommStats()
        for name in CommStats.__slots__:
            setattr(self, name, getattr(fresh, name))
