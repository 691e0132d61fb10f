"""A ring of bytes in memory that two processes share, as compiled code sees it: by address.

The sender writes behind ``HEAD`` and publishes it, the receiver reads behind ``TAIL`` and publishes that; both count
bytes from the first and never turn back. Messages begin at multiples of ``SLOT`` bytes and are published in multiples
of it but for their ends, so elements never straddle the end of the ring, and sums are made straight from it.

Who finds nothing to do may sleep: it says so (``SENDER_SLEEPS``, ``RECEIVER_SLEEPS``), looks once more, and waits for
its bell, which the other side rings when it has published something and sees the word (``wants_bell``).
"""

from __future__ import annotations

from mycel.runtime.atomics import exchange, fetch, publish
from mycel.runtime.reduce_kernels import copy
from mycel.standalone import inlined

__all__ = [
    "DATA",
    "HEAD",
    "MAPPED",
    "PIECE",
    "RECEIVER_SLEEPS",
    "REVOKED",
    "SENDER_SLEEPS",
    "SLOT",
    "TAIL",
    "at_hand",
    "come",
    "place",
    "put",
    "put_slot",
    "room",
    "take",
    "wants_bell",
]

# Places in the memory, in bytes: each word on cache lines of its own.
HEAD, TAIL, SENDER_SLEEPS, RECEIVER_SLEEPS = 0, 128, 256, 384
# Written once. The receiver has mapped the sender's arena; the sender takes back what it has told by reference.
MAPPED, REVOKED = 512, 576
DATA = 640
SLOT = 64
#: Bytes that are published at once: they stay in the caches of both sides.
PIECE = 1 << 16


@inlined
def come(ring: int) -> int:
    """Bytes that have come and are not taken."""
    return fetch(ring + HEAD) - fetch(ring + TAIL)  # type: ignore[no-any-return]


@inlined
def room(ring: int, capacity: int) -> int:
    """Bytes that may be put."""
    return capacity - come(ring)


@inlined
def _end(position: int, num_bytes: int, is_last: bool) -> int:
    end = position + num_bytes
    return (end + SLOT - 1) & ~(SLOT - 1) if is_last else end


@inlined
def put_slot(ring: int, capacity: int, integers: int) -> bool:
    """Put four integers from an address; ``False``: there is no room."""
    if room(ring, capacity) <= 0:
        return False
    head = fetch(ring + HEAD)
    copy(ring + DATA + (head & (capacity - 1)), integers, 32)
    publish(ring + HEAD, head + SLOT)
    return True


@inlined
def put(ring: int, capacity: int, source: int, left: int) -> int:
    """Put as much of a message as there is room for, at most a piece; bytes.

    Args:
        ring, capacity: of the ring.
        source: address of what is left of the message.
        left: its bytes.
    """
    head = fetch(ring + HEAD)
    at = head & (capacity - 1)
    n = min(left, room(ring, capacity), capacity - at, PIECE)
    if n <= 0:
        return 0
    copy(ring + DATA + at, source, n)
    publish(ring + HEAD, _end(head, n, n == left))
    return n  # type: ignore[no-any-return]


@inlined
def place(ring: int, capacity: int) -> int:
    """Address of what has come first."""
    return ring + DATA + (fetch(ring + TAIL) & (capacity - 1))  # type: ignore[no-any-return]


@inlined
def at_hand(ring: int, capacity: int, left: int) -> int:
    """Bytes of a message that can be taken from ``place`` at once, at most a piece.

    Args:
        ring, capacity: of the ring.
        left: bytes of the message that were not taken.
    """
    return min(left, come(ring), capacity - (fetch(ring + TAIL) & (capacity - 1)), PIECE)  # type: ignore[no-any-return]


@inlined
def take(ring: int, num_bytes: int, is_last: bool) -> None:
    """Give the room of bytes back that were used.

    Args:
        ring: of the ring.
        num_bytes: how many.
        is_last: they are the last of their message.
    """
    publish(ring + TAIL, _end(fetch(ring + TAIL), num_bytes, is_last))


@inlined
def wants_bell(ring: int, word: int) -> bool:
    """Whether the side that ``word`` is of has said that it sleeps; it is as good as told then."""
    # An exchange, for what was published must be seen by whoever says just now that it sleeps.
    return exchange(ring + word, 0) != 0  # type: ignore[no-any-return]
