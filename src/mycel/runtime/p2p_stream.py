"""Bytes between two ranks of a node through memory that both have mapped, as compiled code sees it: by address.

A *line* is a row of integers (the ``L_*`` fields) about two rings, one each way: the same words as those of a channel
(``ring``), but bytes without messages, one behind the other. Whoever comes to the end of a ring asks for a while,
since the other end is most often at work on the next piece, and then says so to its caller, as a socket does.

Who is about to sleep says so in its rings and looks once more (``attend``); the other end rings its bell when it has
put or taken something.
"""

from __future__ import annotations

from array import array

from mycel.runtime.atomics import exchange, fetch, publish, relax, yield_processor
from mycel.runtime.libc import int64_at, write_fd
from mycel.runtime.reduce_kernels import copy
from mycel.runtime.ring import DATA, HEAD, PIECE, RECEIVER_SLEEPS, SENDER_SLEEPS, TAIL, come, wants_bell
from mycel.standalone import inlined, standalone

__all__ = ["attend", "get", "load", "put"]

# Fields of a line.
L_OUT = 0  # address of the ring that this end fills
L_OUT_CAPACITY = 1
L_IN = 2  # address of the ring that the other end fills
L_IN_CAPACITY = 3
L_BELL = 4  # wakes the other end
L_ONE = 5  # 1, for the bell
L_WAITS = 6  # whether this end has more to put than there was room for
L_SLEEPS = 7  # whether it has said that it sleeps
L_READY = 8  # what it can go on with: READABLE, WRITABLE
LINE_FIELDS = 9
READABLE, WRITABLE = 1, 2

# What attend is asked.
LOOK = 0  # what can go on
SLEEP = 1  # likewise, and ask for a while; if nothing can, say that this end sleeps
#: Added to what attend gives where asking has paid.
PAID = 1 << 32


@inlined
def _pause(yields: int, asked: int) -> None:
    if yields != 0 and asked % 8 == 0:
        yield_processor()
    else:
        relax()
        relax()


@standalone
def put(line: int, source: int, num_bytes: int, rounds: int, yields: int) -> int:
    """Put bytes into the ring out; how many, less than asked for where it is full.

    Args:
        line: address of its fields.
        source: address of the bytes.
        num_bytes: how many.
        rounds: how often to ask for more room; not while there is something to be got.
        yields: whether other ranks need the processor meanwhile.
    """
    fields = int64_at(line, LINE_FIELDS)
    ring, capacity = fields[L_OUT], fields[L_OUT_CAPACITY]
    done = 0
    asked = 0
    while done < num_bytes:
        head = fetch(ring + HEAD)
        at = head & (capacity - 1)
        n = min(num_bytes - done, capacity - (head - fetch(ring + TAIL)), capacity - at, PIECE)
        if n > 0:
            copy(ring + DATA + at, source + done, n)
            publish(ring + HEAD, head + n)
            if wants_bell(ring, RECEIVER_SLEEPS):
                write_fd(fields[L_BELL], line + L_ONE * 8, 8)
            done += n
            asked = 0
        elif asked >= rounds or come(fields[L_IN]) > 0:
            break
        else:
            asked += 1
            _pause(yields, asked)
    return done


@standalone
def get(line: int, target: int, num_bytes: int, rounds: int, yields: int) -> int:
    """Get bytes out of the ring in; how many, less than asked for where no more have come.

    Args:
        line: address of its fields.
        target: address for the bytes.
        num_bytes: how many.
        rounds: how often to ask for more; not while this end has something to put, and room for it.
        yields: whether other ranks need the processor meanwhile.
    """
    fields = int64_at(line, LINE_FIELDS)
    ring, capacity = fields[L_IN], fields[L_IN_CAPACITY]
    done = 0
    asked = 0
    while done < num_bytes:
        tail = fetch(ring + TAIL)
        at = tail & (capacity - 1)
        n = min(num_bytes - done, fetch(ring + HEAD) - tail, capacity - at, PIECE)
        if n > 0:
            copy(target + done, ring + DATA + at, n)
            publish(ring + TAIL, tail + n)
            if wants_bell(ring, SENDER_SLEEPS):
                write_fd(fields[L_BELL], line + L_ONE * 8, 8)
            done += n
            asked = 0
        elif asked >= rounds or (fields[L_WAITS] != 0 and come(fields[L_OUT]) < fields[L_OUT_CAPACITY]):
            break
        else:
            asked += 1
            _pause(yields, asked)
    return done


@inlined
def _look(lines, num_lines) -> int:  # type: ignore[no-untyped-def]
    """How many lines can go on; each one's ``L_READY``."""
    found = 0
    for i in range(num_lines):
        fields = int64_at(lines[i], LINE_FIELDS)
        ready = READABLE if come(fields[L_IN]) > 0 else 0
        if fields[L_WAITS] != 0 and come(fields[L_OUT]) < fields[L_OUT_CAPACITY]:
            ready |= WRITABLE
        fields[L_READY] = ready
        if ready != 0:
            found += 1
    return found


@inlined
def _say(lines, num_lines, sleeps) -> None:  # type: ignore[no-untyped-def]
    """Say in all rings whether this end sleeps."""
    for i in range(num_lines):
        fields = int64_at(lines[i], LINE_FIELDS)
        if sleeps != 0:
            exchange(fields[L_IN] + RECEIVER_SLEEPS, 1)
            if fields[L_WAITS] != 0:
                exchange(fields[L_OUT] + SENDER_SLEEPS, 1)
            fields[L_SLEEPS] = 1
        elif fields[L_SLEEPS] != 0:
            publish(fields[L_IN] + RECEIVER_SLEEPS, 0)
            publish(fields[L_OUT] + SENDER_SLEEPS, 0)
            fields[L_SLEEPS] = 0


@standalone
def attend(lines_address: int, num_lines: int, what: int, rounds: int, yields: int) -> int:
    """See which lines can go on, ``L_READY`` of each; how many, and ``PAID`` if they could not at once.

    Args:
        lines_address: of the addresses of the lines' fields.
        num_lines: how many.
        what: ``LOOK`` or ``SLEEP``.
        rounds: how often to ask again before sleeping.
        yields: whether other ranks need the processor meanwhile.
    """
    lines = int64_at(lines_address, num_lines)
    _say(lines, num_lines, 0)
    found = _look(lines, num_lines)
    if what == LOOK or found > 0:
        return found
    asked = 0
    while found == 0 and asked < rounds:
        asked += 1
        _pause(yields, asked)
        found = _look(lines, num_lines)
    if found > 0:
        return found + PAID
    _say(lines, num_lines, 1)
    found = _look(lines, num_lines)
    if found > 0:
        _say(lines, num_lines, 0)
    return found


def load() -> None:
    """Have the functions above ready, before anything with a deadline begins: compiled, where they were not."""
    fields = array("q", bytes(8 * LINE_FIELDS))
    nothing = fields.buffer_info()[0]
    put(nothing, 0, 0, 0, 0)
    get(nothing, 0, 0, 0, 0)
    attend(nothing, 0, LOOK, 0, 0)
