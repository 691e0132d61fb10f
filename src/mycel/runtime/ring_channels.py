"""Channels that are rings in shared memory (``ring``), as the engine drives them.

A long message is preceded by a *lead*, which says how it comes: as bytes through the ring, or by reference, where its
sender has it in an ``arena`` that the receiver has mapped. Then the lead says where in the arena it is, and the
receiver copies it from there, or adds it, without a copy in between. The sender leaves the memory alone until the
receiver has given the lead's room back, which it does when it is done: only then is the sender's row finished. A
sender whose group has failed says so in the ring (``REVOKED``) before its caller may write to the memory again, and a
receiver looks there when it has read.
"""

from __future__ import annotations

from mycel.runtime import job_fields as j
from mycel.runtime.atomics import exchange, fetch
from mycel.runtime.job_steps import finish, has_same_header, reduce_into
from mycel.runtime.libc import (
    EAGAIN,
    EINTR,
    MSG_DONTWAIT,
    int64_at,
    last_errno,
    recv,
    write_fd,
)
from mycel.runtime.reduce_kernels import copy
from mycel.runtime.ring import (
    HEAD,
    MAPPED,
    PIECE,
    RECEIVER_SLEEPS,
    REVOKED,
    SENDER_SLEEPS,
    TAIL,
    at_hand,
    come,
    place,
    put,
    put_slot,
    room,
    take,
    wants_bell,
)
from mycel.runtime.streaming import copy_past_caches
from mycel.standalone import inlined

__all__ = ["advance_ring", "fall_asleep", "hear", "wake_up"]

#: Bytes from which on a message has a lead.
LONG = 1 << 14
LEAD_BYTES = 32
_AS_BYTES, _BY_REFERENCE = 0, 1
_RECV_REDUCE = 2


@inlined
def _total(channel, row) -> int:  # type: ignore[no-untyped-def]
    """Bytes of a message with what precedes it."""
    total = row[j.R_BYTES]
    if channel[j.C_HEAD] == 0:
        total += j.HEADER_BYTES
    if row[j.R_BYTES] >= LONG:
        total += LEAD_BYTES
    return total  # type: ignore[no-any-return]


@inlined
def _put(job, channel, row, work) -> int:  # type: ignore[no-untyped-def]
    """Write as much of a message into a ring as there is room for; bytes."""
    ring, capacity = channel[j.C_RING], channel[j.C_CAPACITY]
    slot = job[j.J_WORK] + j.SLOT_OFFSET
    done, length = channel[j.C_DONE], row[j.R_BYTES]
    if channel[j.C_HEAD] == 0:
        if done == 0:
            work[j.SLOT_OFFSET // 8 + 3] = channel[j.C_STATED]
            return j.HEADER_BYTES if put_slot(ring, capacity, slot) else 0
        done -= j.HEADER_BYTES
    source = job[j.J_BASES + row[j.R_ADDRESS_BUFFER]] + row[j.R_OFFSET]
    if length >= LONG:
        if done == 0:
            asking = int64_at(job[j.J_ASKING], j.ASK_FIELDS)
            offset = source - asking[j.ASK_ARENA]
            refers = offset >= 0 and offset + length <= asking[j.ASK_ARENA_BYTES] and fetch(ring + MAPPED) != 0
            lead = job[j.J_WORK] + j.LEAD_OFFSET
            work[j.LEAD_OFFSET // 8] = _BY_REFERENCE if refers else _AS_BYTES
            work[j.LEAD_OFFSET // 8 + 1] = offset
            if not put_slot(ring, capacity, lead):
                return 0
            if not refers:
                return LEAD_BYTES
            row[j.R_TAKEN] = fetch(ring + HEAD)
            return LEAD_BYTES + length  # type: ignore[no-any-return]
        done -= LEAD_BYTES
    return put(ring, capacity, source + done, length - done)


@inlined
def _take(job, channel, row) -> int:  # type: ignore[no-untyped-def]
    """Take as much of a message out of a ring as has come, summed up where that is asked for.

    Returns:
        Bytes; -1: the message cannot be had.
    """
    ring, capacity = channel[j.C_RING], channel[j.C_CAPACITY]
    done, length = channel[j.C_DONE], row[j.R_BYTES]
    if channel[j.C_HEAD] == 0:
        if done == 0:
            if come(ring) <= 0:
                return 0
            header = int64_at(place(ring, capacity), 4)
            for i in range(4):
                channel[j.C_HEADER + i] = header[i]
            take(ring, j.HEADER_BYTES, True)
            return j.HEADER_BYTES
        done -= j.HEADER_BYTES
    refers = False
    if length >= LONG:
        if done == 0:
            return _take_lead(channel, length)
        done -= LEAD_BYTES
        refers = channel[j.C_FROM] != 0
    if refers:
        source, n = channel[j.C_FROM] + done, min(length - done, PIECE)
    else:
        source, n = place(ring, capacity), at_hand(ring, capacity, length - done)
    if n <= 0:
        return 0
    destination = job[j.J_BASES + row[j.R_ADDRESS_BUFFER]] + row[j.R_OFFSET] + done
    if row[j.R_OP] == _RECV_REDUCE:
        operand = job[j.J_BASES + row[j.R_OPERAND_BUFFER]] + row[j.R_OPERAND_OFFSET] + done
        reduce_into(job, row, destination, operand, source, n)
    elif channel[j.C_STATED] >= int64_at(job[j.J_ASKING], j.ASK_FIELDS)[j.ASK_LARGE]:
        copy_past_caches(destination, source, n)
    else:
        copy(destination, source, n)
    if not refers:
        take(ring, n, n == length - done)
    elif n == length - done:
        exchange(job[j.J_WORK], 0)  # what was read was read before it is asked whether that may be used
        if fetch(ring + REVOKED) != 0:
            return -1
        take(ring, LEAD_BYTES, True)
    return n  # type: ignore[no-any-return]


@inlined
def _take_lead(channel, length) -> int:  # type: ignore[no-untyped-def]
    """See how a message comes; bytes, or -1: from outside of what the sender shares.

    The lead of a message that comes by reference keeps its room until that has been used.
    """
    ring, capacity = channel[j.C_RING], channel[j.C_CAPACITY]
    if come(ring) <= 0:
        return 0
    lead = int64_at(place(ring, capacity), 4)
    if lead[0] == _AS_BYTES:
        channel[j.C_FROM] = 0
        take(ring, LEAD_BYTES, True)
    elif lead[1] < 0 or lead[1] + length > channel[j.C_ARENA_BYTES]:
        return -1
    else:
        channel[j.C_FROM] = channel[j.C_ARENA] + lead[1]
    return LEAD_BYTES


@inlined
def _finish_taken(job, channel, rows, queue, first) -> int:  # type: ignore[no-untyped-def]
    """Finish the rows whose messages were told by reference and have been taken; their bytes."""
    tail = fetch(channel[j.C_RING] + TAIL)
    num_bytes = 0
    while channel[j.C_TAKEN] < channel[j.C_HEAD]:
        row = rows[queue[first + channel[j.C_TAKEN]]]
        if row[j.R_TAKEN] > tail:
            channel[j.C_AWAITED] = row[j.R_TAKEN]
            break
        if row[j.R_TAKEN] > 0:
            finish(job, queue[first + channel[j.C_TAKEN]])
            num_bytes += row[j.R_BYTES]
        channel[j.C_TAKEN] += 1
    return num_bytes


@inlined
def advance_ring(  # type: ignore[no-untyped-def]
    job, number, channels, rows, pending, queue_start, queue, work
) -> int:
    """Move messages on a channel that is a ring.

    Returns:
        How many bytes moved, or minus the status that ends the run.
    """
    channel = channels[number]
    outgoing = channel[j.C_OUTGOING] != 0
    first = queue_start[number]
    channel[j.C_BLOCKED] = 0
    moved = _finish_taken(job, channel, rows, queue, first) if outgoing else 0
    while moved < PIECE:
        position = first + channel[j.C_HEAD]
        if position >= queue_start[number + 1]:
            break
        index = queue[position]
        if pending[index] > 0:
            break
        row = rows[index]
        if channel[j.C_DONE] == 0 and outgoing:
            row[j.R_TAKEN] = 0
        total = _total(channel, row)
        n = 0
        if channel[j.C_DONE] < total:
            n = _put(job, channel, row, work) if outgoing else _take(job, channel, row)
            if n == 0:
                channel[j.C_BLOCKED] = j.STUCK
                break
            if n < 0:
                job[j.J_FAILED_CHANNEL] = number
                job[j.J_ERRNO] = 0
                return -j.CLOSED
        moved += n
        channel[j.C_DONE] += n
        if (
            not outgoing
            and channel[j.C_HEAD] == 0
            and channel[j.C_DONE] == j.HEADER_BYTES
            and not has_same_header(job, channel)
        ):
            job[j.J_FAILED_CHANNEL] = number
            return -j.MISMATCHED
        if channel[j.C_DONE] < total:
            continue
        channel[j.C_BYTES] += row[j.R_BYTES]
        channel[j.C_DONE] = 0
        channel[j.C_HEAD] += 1
        if not outgoing or row[j.R_TAKEN] == 0:
            finish(job, index)
    if outgoing:
        moved += _finish_taken(job, channel, rows, queue, first)
        if channel[j.C_TAKEN] < channel[j.C_HEAD]:
            channel[j.C_BLOCKED] |= j.NOT_TAKEN
    if moved > 0:
        if wants_bell(channel[j.C_RING], RECEIVER_SLEEPS if outgoing else SENDER_SLEEPS):
            write_fd(channel[j.C_BELL], job[j.J_ASKING] + j.ASK_ONE * 8, 8)
    elif channel[j.C_BLOCKED] != 0 and channel[j.C_ENDED] != 0:
        job[j.J_FAILED_CHANNEL] = number
        job[j.J_ERRNO] = 0
        return -j.CLOSED
    return moved


@inlined
def _say(channel, sleeps) -> None:  # type: ignore[no-untyped-def]
    """Say in a ring whether this side sleeps."""
    exchange(channel[j.C_RING] + (SENDER_SLEEPS if channel[j.C_OUTGOING] != 0 else RECEIVER_SLEEPS), sleeps)


@inlined
def _has_news(channel) -> bool:  # type: ignore[no-untyped-def]
    """Whether a blocked ring can go on."""
    ring, blocked = channel[j.C_RING], channel[j.C_BLOCKED]
    if channel[j.C_OUTGOING] == 0:
        return come(ring) > 0
    if blocked & j.STUCK != 0 and room(ring, channel[j.C_CAPACITY]) > 0:
        return True
    return blocked & j.NOT_TAKEN != 0 and fetch(ring + TAIL) >= channel[j.C_AWAITED]  # type: ignore[no-any-return]


@inlined
def fall_asleep(channels, num_channels) -> bool:  # type: ignore[no-untyped-def]
    """Say on blocked rings that this side sleeps; whether there is nothing to do, even so."""
    for c in range(num_channels):
        channel = channels[c]
        if channel[j.C_RING] != 0 and channel[j.C_BLOCKED] != 0:
            _say(channel, 1)
            if _has_news(channel):
                wake_up(channels, c + 1)
                return False
    return True


@inlined
def wake_up(channels, num_channels) -> None:  # type: ignore[no-untyped-def]
    """Take back what ``fall_asleep`` has said."""
    for c in range(num_channels):
        channel = channels[c]
        if channel[j.C_RING] != 0 and channel[j.C_BLOCKED] != 0:
            _say(channel, 0)


@inlined
def hear(channel, scratch) -> None:  # type: ignore[no-untyped-def]
    """Note that a ring's socket has ended; nothing else comes on it."""
    n = recv(channel[j.C_FD], scratch, 16, MSG_DONTWAIT)
    if n == 0 or (n < 0 and last_errno() != EAGAIN and last_errno() != EINTR):
        channel[j.C_ENDED] = 1
