"""The engine: runs one rank's program over sockets, in compiled code, without the interpreter lock.

A *job* is one run of one program: a row of 64-bit integers (the ``J_*`` fields below) that holds addresses of the
program's arrays, the bases of the caller's buffers, and the state of the run. All state lives there, so ``execute``
can return to Python at any moment (a signal, a word on a control connection, a deadline) and be called again to go
on where it stopped. ``job_ring.serve`` runs queued jobs one after the other on a thread of its own.

A job's time counts from when it begins, not from when it was queued; and it is here that it gets its sequence number,
in the order in which jobs are queued or begun.

Channels are non-blocking stream sockets that carry bytes one way, or rings in memory that two processes share
(``ring``), whose sockets only carry word that there is something to do. Per channel, messages go in the program's
order. The first message of a job on each channel is preceded by a header of four integers (magic, sequence number,
kind, bytes), so that ranks that call different collectives find out before any byte is written.
"""

from __future__ import annotations

from mycel.runtime.atomics import exchange, relax, yield_processor
from mycel.runtime.libc import (
    EAGAIN,
    EINTR,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    POLLIN,
    POLLOUT,
    int64_at,
    int64_table_at,
    last_errno,
    monotonic_ns,
    poll,
    read_fd,
    recv,
    send,
    sendmsg,
    write_fd,
)
from mycel.runtime.reduce_kernels import combine, copy, scale
from mycel.runtime.ring import (
    PIECE,
    RECEIVER_SLEEPS,
    SENDER_SLEEPS,
    at_hand,
    come,
    place,
    put,
    put_header,
    room,
    take,
    wants_bell,
)
from mycel.standalone import inlined, standalone

__all__ = ["again", "execute", "take_number"]

# Fields of a job.
J_STATUS = 0
J_NUM_ROWS = 1
J_NUM_CHANNELS = 2
J_ROWS = 3  # address: int64[rows, ROW_FIELDS]
J_PENDING0 = 4  # address: int64[rows], how many instructions each row needs
J_PENDING = 5  # address: int64[rows], how many of them are still unfinished
J_DEPENDENT_START = 6  # address: int64[rows + 1]
J_DEPENDENTS = 7  # address: int64[...], rows that need this row
J_QUEUE_START = 8  # address: int64[channels + 1]
J_QUEUE = 9  # address: int64[...], rows of each channel, in order
J_CHANNELS = 10  # address: int64[channels, CHANNEL_FIELDS]
J_BASES = 11  # three addresses: INPUT, OUTPUT, SCRATCH
J_DTYPE = 14
J_REDUCE_OP = 15
J_DIVISOR = 16  # 0: the result is not divided
J_REMAINING = 17
J_HEADER = 18  # four integers: magic, sequence number, kind, bytes (the channel's C_STATED in their place)
J_DEADLINE_NS = 22
J_POLL = 23  # address: struct pollfd[channels + extras + 1 + channels]
J_NUM_EXTRAS = 24
J_EXTRAS = 25  # address: int64[extras], descriptors whose readability ends the wait
J_FAILED_CHANNEL = 26
J_ERRNO = 27
J_STARTED_NS = 28
J_ENDED_NS = 29
J_ELEMENT_BYTES = 30
J_LIMIT_NS = 31  # from the run's begin to its deadline; 0 where the deadline is given
J_NUMBERS = 32  # address of the last sequence number that was given; a job whose own is 0 takes the next
J_POSITION = 33  # in the ring, counted from the first; -1 where it is in none
J_ASKING = 34  # address of the ASK_* integers, which all jobs of a group share
J_WORK = 35  # address of 24 integers to work in, which follow: clock, msghdr, iovec, outgoing header
JOB_FIELDS = 60

# Fields of a row.
R_OP, R_CHANNEL, R_ADDRESS_BUFFER, R_OFFSET, R_BYTES, R_OPERAND_BUFFER, R_OPERAND_OFFSET, R_FINAL = range(8)
ROW_FIELDS = 8

# Fields of a channel.
C_FD = 0
C_OUTGOING = 1
C_HEAD = 2  # position in the channel's queue
C_DONE = 3  # bytes of the message at the head that went or came, its header included
C_STAGING = 4  # address where bytes to be reduced arrive
C_BLOCKED = 5  # the socket said it would block; wait for poll
C_HEADER = 6  # four integers: the header that came in
C_BYTES = 10  # payload bytes since the channel was opened
C_STATED = 11  # bytes that the header states: of the whole array, or on this channel where blocks differ in length
C_RING = 12  # address of the ring; 0: the bytes go through the socket
C_CAPACITY = 13  # of the ring
C_ENDED = 14  # the ring's socket has ended: nothing comes after what is in the ring
C_BELL = 15  # wakes the other end of the ring
C_OWN_BELL = 16  # wakes this end, of a ring that comes in; else ASK_BELL does
CHANNEL_FIELDS = 17

# How long to ask rings again before sleeping.
ASK_ROUNDS = 0  # now
ASK_MOST = 1  # at most
ASK_YIELD = 2  # whether to let other ranks of the node have the processor meanwhile
ASK_BELL = 3  # this rank's, which others ring
ASK_ONE = 4  # 1, for bells
ASK_FIELDS = 5

# What execute returns.
UNUSED = -1  # of fields that are of no job yet
PENDING = 0
DONE = 1
CLOSED = 2  # a channel was closed or failed; J_FAILED_CHANNEL, J_ERRNO
MISMATCHED = 3  # a header differs; J_FAILED_CHANNEL and the channel's C_HEADER
TIMED_OUT = 4
CONTROL = 5  # a control descriptor is readable
INTERRUPTED = 6  # a signal arrived
UNOPENED = 7  # a channel has no socket yet: its C_FD is -1

HEADER_MAGIC = 0x6D7963656C303031
HEADER_BYTES = 32
_SEND, _RECV, _RECV_REDUCE, _COPY = 0, 1, 2, 3
_BURST = 8  # messages on one channel before the others get their turn
_NEVER = -1
_LEAST_ROUNDS = 16


@inlined
def _finish(job, row) -> None:  # type: ignore[no-untyped-def]
    """Count a row as complete and release what waited for it."""
    starts = int64_at(job[J_DEPENDENT_START], job[J_NUM_ROWS] + 1)
    begin, end = starts[row], starts[row + 1]
    pending = int64_at(job[J_PENDING], job[J_NUM_ROWS])
    dependents = int64_at(job[J_DEPENDENTS], end + 1)
    for i in range(begin, end):
        pending[dependents[i]] -= 1
    job[J_REMAINING] -= 1


@inlined
def _absorb(job, row, staging) -> None:  # type: ignore[no-untyped-def]
    """Combine what arrived at ``staging`` with the row's operand into its destination."""
    destination = job[J_BASES + row[R_ADDRESS_BUFFER]] + row[R_OFFSET]
    operand = job[J_BASES + row[R_OPERAND_BUFFER]] + row[R_OPERAND_OFFSET]
    _reduce(job, row, destination, operand, staging, row[R_BYTES])


@inlined
def _reduce(job, row, destination, operand, incoming, num_bytes) -> None:  # type: ignore[no-untyped-def]
    count = num_bytes // job[J_ELEMENT_BYTES]
    combine(job[J_DTYPE], job[J_REDUCE_OP], destination, operand, incoming, count)
    if row[R_FINAL] != 0 and job[J_DIVISOR] != 0:
        scale(job[J_DTYPE], destination, count, job[J_DIVISOR])


@inlined
def _send_some(job, channel, row, work) -> int:  # type: ignore[no-untyped-def]
    """Hand over as much of a message as the socket takes; bytes, or -1 with errno set."""
    address = job[J_BASES + row[R_ADDRESS_BUFFER]] + row[R_OFFSET]
    length = row[R_BYTES]
    flags = MSG_DONTWAIT | MSG_NOSIGNAL
    if channel[C_HEAD] != 0:
        done = channel[C_DONE]
        return send(channel[C_FD], address + done, length - done, flags)  # type: ignore[no-any-return]
    done = channel[C_DONE]
    if done >= HEADER_BYTES:
        left = length + HEADER_BYTES - done
        return send(channel[C_FD], address + done - HEADER_BYTES, left, flags)  # type: ignore[no-any-return]
    work[_HEADER_OFFSET // 8 + 3] = channel[C_STATED]
    # struct msghdr and two struct iovec, as 64-bit Linux lays them out.
    base = job[J_WORK]
    for i in range(7):
        work[2 + i] = 0
    work[4] = base + 9 * 8
    work[5] = 2
    work[9] = base + _HEADER_OFFSET + done
    work[10] = HEADER_BYTES - done
    work[11] = address
    work[12] = length
    return sendmsg(channel[C_FD], base + 2 * 8, flags)  # type: ignore[no-any-return]


# Place of the outgoing header inside the 24 integers of J_WORK.
_HEADER_OFFSET = 16 * 8


@inlined
def _recv_some(job, channel, row) -> int:  # type: ignore[no-untyped-def]
    """Take as much of a message as has arrived; bytes, 0 at the end of the stream, or -1 with errno set."""
    done, length = channel[C_DONE], row[R_BYTES]
    skip = 0
    if channel[C_HEAD] == 0:
        if done < HEADER_BYTES:
            where = job[J_CHANNELS] + (row[R_CHANNEL] * CHANNEL_FIELDS + C_HEADER) * 8
            left = HEADER_BYTES - done
            return recv(channel[C_FD], where + done, left, MSG_DONTWAIT)  # type: ignore[no-any-return]
        skip = HEADER_BYTES
    if row[R_OP] == _RECV_REDUCE:
        address = channel[C_STAGING]
    else:
        address = job[J_BASES + row[R_ADDRESS_BUFFER]] + row[R_OFFSET]
    left = length + skip - done
    return recv(channel[C_FD], address + done - skip, left, MSG_DONTWAIT)  # type: ignore[no-any-return]


@inlined
def _same_header(job, channel) -> bool:  # type: ignore[no-untyped-def]
    same = channel[C_HEADER + 3] == channel[C_STATED]
    for i in range(3):
        same &= job[J_HEADER + i] == channel[C_HEADER + i]
    return same  # type: ignore[no-any-return]


@inlined
def _advance(job, number, channels, rows, pending, queue_start, queue, work) -> int:  # type: ignore[no-untyped-def]
    """Move messages on one channel. Returns how many bytes moved, or minus the status that ends the run."""
    channel = channels[number]
    moved = 0
    messages = 0
    while messages < _BURST:
        position = queue_start[number] + channel[C_HEAD]
        if position >= queue_start[number + 1]:
            break
        index = queue[position]
        if pending[index] > 0:
            break
        row = rows[index]
        outgoing = channel[C_OUTGOING] != 0
        n = _send_some(job, channel, row, work) if outgoing else _recv_some(job, channel, row)
        if n <= 0:
            error = 0 if n == 0 else last_errno()
            if n < 0 and error == EAGAIN:
                channel[C_BLOCKED] = 1
                break
            if n < 0 and error == EINTR:
                continue
            job[J_FAILED_CHANNEL] = number
            job[J_ERRNO] = error
            return -CLOSED
        moved += n
        channel[C_DONE] += n
        total = row[R_BYTES]
        if channel[C_HEAD] == 0:
            total += HEADER_BYTES
            if not outgoing and channel[C_DONE] == HEADER_BYTES and not _same_header(job, channel):
                job[J_FAILED_CHANNEL] = number
                return -MISMATCHED
        if channel[C_DONE] < total:
            continue
        if row[R_OP] == _RECV_REDUCE:
            _absorb(job, row, channel[C_STAGING])
        channel[C_BYTES] += row[R_BYTES]
        channel[C_DONE] = 0
        channel[C_HEAD] += 1
        messages += 1
        _finish(job, index)
    return moved


@inlined
def _put(job, channel, row, work) -> int:  # type: ignore[no-untyped-def]
    """Write as much of a message into a ring as there is room for; bytes."""
    done = channel[C_DONE]
    if channel[C_HEAD] == 0:
        if done == 0:
            work[_HEADER_OFFSET // 8 + 3] = channel[C_STATED]
            header = job[J_WORK] + _HEADER_OFFSET
            return HEADER_BYTES if put_header(channel[C_RING], channel[C_CAPACITY], header) else 0
        done -= HEADER_BYTES
    source = job[J_BASES + row[R_ADDRESS_BUFFER]] + row[R_OFFSET] + done
    return put(channel[C_RING], channel[C_CAPACITY], source, row[R_BYTES] - done)


@inlined
def _take(job, channel, row) -> int:  # type: ignore[no-untyped-def]
    """Take as much of a message out of a ring as has come, summed up where that is asked for; bytes."""
    ring, capacity = channel[C_RING], channel[C_CAPACITY]
    done = channel[C_DONE]
    if channel[C_HEAD] == 0:
        if done == 0:
            if come(ring) <= 0:
                return 0
            header = int64_at(place(ring, capacity), 4)
            for i in range(4):
                channel[C_HEADER + i] = header[i]
            take(ring, HEADER_BYTES, True)
            return HEADER_BYTES
        done -= HEADER_BYTES
    left = row[R_BYTES] - done
    n = at_hand(ring, capacity, left)
    if n <= 0:
        return 0
    destination = job[J_BASES + row[R_ADDRESS_BUFFER]] + row[R_OFFSET] + done
    if row[R_OP] == _RECV_REDUCE:
        operand = job[J_BASES + row[R_OPERAND_BUFFER]] + row[R_OPERAND_OFFSET] + done
        _reduce(job, row, destination, operand, place(ring, capacity), n)
    else:
        copy(destination, place(ring, capacity), n)
    take(ring, n, n == left)
    return n


@inlined
def _advance_ring(job, number, channels, rows, pending, queue_start, queue, work) -> int:  # type: ignore[no-untyped-def]
    """Move messages on a channel that is a ring; returns as ``_advance``."""
    channel = channels[number]
    outgoing = channel[C_OUTGOING] != 0
    moved = 0
    channel[C_BLOCKED] = 0
    while moved < PIECE:
        position = queue_start[number] + channel[C_HEAD]
        if position >= queue_start[number + 1]:
            break
        index = queue[position]
        if pending[index] > 0:
            break
        row = rows[index]
        total = row[R_BYTES]
        if channel[C_HEAD] == 0:
            total += HEADER_BYTES
        n = 0
        if channel[C_DONE] < total:
            n = _put(job, channel, row, work) if outgoing else _take(job, channel, row)
            if n == 0:
                channel[C_BLOCKED] = 1
                break
        moved += n
        channel[C_DONE] += n
        if (
            not outgoing
            and channel[C_HEAD] == 0
            and channel[C_DONE] == HEADER_BYTES
            and not _same_header(job, channel)
        ):
            job[J_FAILED_CHANNEL] = number
            return -MISMATCHED
        if channel[C_DONE] < total:
            continue
        channel[C_BYTES] += row[R_BYTES]
        channel[C_DONE] = 0
        channel[C_HEAD] += 1
        _finish(job, index)
    if moved > 0:
        if wants_bell(channel[C_RING], RECEIVER_SLEEPS if outgoing else SENDER_SLEEPS):
            write_fd(channel[C_BELL], job[J_ASKING] + ASK_ONE * 8, 8)
    elif channel[C_BLOCKED] != 0 and channel[C_ENDED] != 0:
        job[J_FAILED_CHANNEL] = number
        job[J_ERRNO] = 0
        return -CLOSED
    return moved


@inlined
def _say(channel, sleeps) -> None:  # type: ignore[no-untyped-def]
    """Say in a ring whether this side sleeps."""
    exchange(channel[C_RING] + (SENDER_SLEEPS if channel[C_OUTGOING] != 0 else RECEIVER_SLEEPS), sleeps)


@inlined
def _fall_asleep(channels, num_channels) -> bool:  # type: ignore[no-untyped-def]
    """Say on blocked rings that this side sleeps; whether there is nothing to do, even so."""
    for c in range(num_channels):
        channel = channels[c]
        if channel[C_RING] != 0 and channel[C_BLOCKED] != 0:
            _say(channel, 1)
            outgoing = channel[C_OUTGOING] != 0
            if (room(channel[C_RING], channel[C_CAPACITY]) if outgoing else come(channel[C_RING])) > 0:
                _wake_up(channels, c + 1)
                return False
    return True


@inlined
def _wake_up(channels, num_channels) -> None:  # type: ignore[no-untyped-def]
    """Take back what ``_fall_asleep`` has said."""
    for c in range(num_channels):
        channel = channels[c]
        if channel[C_RING] != 0 and channel[C_BLOCKED] != 0:
            _say(channel, 0)


@inlined
def _hear(channel, scratch) -> None:  # type: ignore[no-untyped-def]
    """Note that a ring's socket has ended; nothing else comes on it."""
    n = recv(channel[C_FD], scratch, 16, MSG_DONTWAIT)
    if n == 0 or (n < 0 and last_errno() != EAGAIN and last_errno() != EINTR):
        channel[C_ENDED] = 1


@inlined
def take_number(job) -> None:  # type: ignore[no-untyped-def]
    """Give a job the next sequence number, unless it has one.

    Here, and not in Python: a signal handler may run between any two steps of Python, and call a collective itself.
    """
    if job[J_HEADER + 1] == 0:
        last = int64_at(job[J_NUMBERS], 1)
        last[0] += 1
        job[J_HEADER + 1] = last[0]


@inlined
def _begin(job, channels, rows, work) -> None:  # type: ignore[no-untyped-def]
    """Set the state of a fresh job and do its local copies."""
    num_rows = job[J_NUM_ROWS]
    take_number(job)
    job[J_STARTED_NS] = monotonic_ns(job[J_WORK])
    if job[J_LIMIT_NS] != 0:
        job[J_DEADLINE_NS] = job[J_STARTED_NS] + job[J_LIMIT_NS]
    pending0, pending = int64_at(job[J_PENDING0], num_rows), int64_at(job[J_PENDING], num_rows)
    for i in range(num_rows):
        pending[i] = pending0[i]
    for c in range(job[J_NUM_CHANNELS]):
        channels[c, C_HEAD] = 0
        channels[c, C_DONE] = 0
        channels[c, C_BLOCKED] = 0
        channels[c, C_ENDED] = 0
    for i in range(3):
        work[_HEADER_OFFSET // 8 + i] = job[J_HEADER + i]
    job[J_REMAINING] = num_rows
    for i in range(num_rows):
        row = rows[i]
        if row[R_OP] == _COPY:
            destination = job[J_BASES + row[R_ADDRESS_BUFFER]] + row[R_OFFSET]
            source = job[J_BASES + row[R_OPERAND_BUFFER]] + row[R_OPERAND_OFFSET]
            if destination != source:
                copy(destination, source, row[R_BYTES])
            _finish(job, i)


@inlined
def _wait(job, channels, pending, queue_start, queue, block) -> int:  # type: ignore[no-untyped-def]
    """Ask the kernel which blocked channels can go on. Returns PENDING, or the status that ends the run."""
    num_channels, num_extras = job[J_NUM_CHANNELS], job[J_NUM_EXTRAS]
    # struct pollfd is {int fd; short events; short revents}: one 64-bit integer, little-endian.
    bells = num_channels + num_extras  # this rank's comes first
    num_fds = bells + 1 + num_channels
    fds = int64_at(job[J_POLL], num_fds)
    extras = int64_at(job[J_EXTRAS], num_extras)
    for c in range(num_channels):
        channel = channels[c]
        waits = channel[C_BLOCKED] != 0 and queue_start[c] + channel[C_HEAD] < queue_start[c + 1]
        events = POLLOUT if channel[C_OUTGOING] != 0 and channel[C_RING] == 0 else POLLIN
        fds[c] = (channel[C_FD] | (events << 32)) if waits else 0xFFFFFFFF
        rings = waits and channel[C_RING] != 0 and channel[C_OUTGOING] == 0
        fds[bells + 1 + c] = (channel[C_OWN_BELL] | (POLLIN << 32)) if rings else 0xFFFFFFFF
    for e in range(num_extras):
        fds[num_channels + e] = extras[e] | (POLLIN << 32)
    bell = int64_at(job[J_ASKING], ASK_FIELDS)[ASK_BELL]
    fds[bells] = (bell | (POLLIN << 32)) if bell >= 0 else 0xFFFFFFFF
    left = job[J_DEADLINE_NS] - monotonic_ns(job[J_WORK])
    if left <= 0:
        return TIMED_OUT
    patience = min(left // 1_000_000 + 1, 1000) if block else 0
    if block and not _fall_asleep(channels, num_channels):
        return PENDING
    ready = poll(job[J_POLL], num_fds, patience)
    if block:
        _wake_up(channels, num_channels)
    if ready < 0:
        return INTERRUPTED if last_errno() == EINTR else PENDING
    if ready == 0:
        return PENDING
    if fds[bells] >> 48 != 0:
        read_fd(bell, job[J_WORK] + 12 * 8, 8)
    for c in range(num_channels):
        if fds[bells + 1 + c] >> 48 != 0:
            read_fd(channels[c, C_OWN_BELL], job[J_WORK] + 12 * 8, 8)
        if fds[c] >> 48 != 0:
            if channels[c, C_RING] != 0:
                _hear(channels[c], job[J_WORK] + 12 * 8)
            channels[c, C_BLOCKED] = 0
    if block:
        for e in range(num_extras):
            if fds[num_channels + e] >> 48 != 0:
                return CONTROL
    return PENDING


@inlined
def _pause(asking, asked) -> None:  # type: ignore[no-untyped-def]
    """Let a moment go by between two looks at rings."""
    if asking[ASK_YIELD] != 0 and asked % 8 == 0:
        yield_processor()
    else:
        relax()
        relax()


@standalone
def execute(address: int) -> int:
    """Run the job at ``address`` until it is done or something happens that Python must look at.

    Args:
        address: of the job's ``JOB_FIELDS`` integers. A job whose ``J_REMAINING`` is negative is fresh and is begun,
            one that is ``DONE`` or ``MISMATCHED`` stays so, any other is resumed.

    Returns:
        ``DONE``, or why the run stopped (``CLOSED``, ``MISMATCHED``, ``TIMED_OUT``, ``CONTROL``, ``INTERRUPTED``,
        ``UNOPENED``). After the last three, and after a time-out that was forgiven, the call may be repeated.
    """
    job = int64_at(address, JOB_FIELDS)
    status = job[J_STATUS]
    if status in (DONE, MISMATCHED):
        return status  # type: ignore[no-any-return]  # another has run it; or what follows belongs to another call
    num_rows, num_channels = job[J_NUM_ROWS], job[J_NUM_CHANNELS]
    work = int64_at(job[J_WORK], 24)
    rows = int64_table_at(job[J_ROWS], num_rows, ROW_FIELDS)
    channels = int64_table_at(job[J_CHANNELS], num_channels, CHANNEL_FIELDS)
    pending = int64_at(job[J_PENDING], num_rows)
    queue_start = int64_at(job[J_QUEUE_START], num_channels + 1)
    queue = int64_at(job[J_QUEUE], num_rows)
    if job[J_REMAINING] == _NEVER:
        _begin(job, channels, rows, work)
    if job[J_REMAINING] > 0:
        for c in range(num_channels):
            if channels[c, C_FD] < 0:
                return UNOPENED
    asking = int64_at(job[J_ASKING], ASK_FIELDS)
    asked = 0
    while job[J_REMAINING] > 0:
        moved = 0
        blocked = 0
        rings = 0
        for c in range(num_channels):
            if channels[c, C_RING] != 0:
                n = _advance_ring(job, c, channels, rows, pending, queue_start, queue, work)
                rings += 1
            elif channels[c, C_BLOCKED] == 0:
                n = _advance(job, c, channels, rows, pending, queue_start, queue, work)
            else:
                n = 0
            if n == -MISMATCHED:  # for good, whoever asks again: its bytes would be taken for this call's
                job[J_STATUS] = MISMATCHED
            if n < 0:
                return -n
            moved += n
            if channels[c, C_RING] == 0 and channels[c, C_BLOCKED] != 0:
                blocked += 1
        if job[J_REMAINING] == 0:
            break
        if moved == 0:
            if rings > 0 and asked < asking[ASK_ROUNDS]:
                asked += 1
                _pause(asking, asked)
                continue
            if asked > 0:  # it has not paid
                asking[ASK_ROUNDS] = max(_LEAST_ROUNDS, asking[ASK_ROUNDS] // 2)
            asked = 0
            status = _wait(job, channels, pending, queue_start, queue, True)
        else:
            if asked > 0:
                asking[ASK_ROUNDS] = min(asking[ASK_MOST], asking[ASK_ROUNDS] * 2)
            asked = 0
            if blocked == 0:
                continue
            status = _wait(job, channels, pending, queue_start, queue, False)
        if status != PENDING:
            return status
    job[J_ENDED_NS] = monotonic_ns(job[J_WORK])
    job[J_STATUS] = DONE
    return DONE


@standalone
def again(pattern_address: int, address: int, array_address: int) -> int:
    """Run a job that is like another one, but for its array, number and times.

    Args:
        pattern_address: of the other one's fields as they were before it was begun.
        address: of the new one's fields.
        array_address: of its array, which is changed in place.

    Returns:
        Its sequence number, if it is done; else minus what ``execute`` returned, which goes on with it.
    """
    pattern, job = int64_at(pattern_address, JOB_FIELDS), int64_at(address, JOB_FIELDS)
    for i in range(J_WORK):
        job[i] = pattern[i]
    job[J_WORK] = address + (J_WORK + 1) * 8
    job[J_BASES + 1] = array_address
    status = execute(address)
    return job[J_HEADER + 1] if status == DONE else -status
