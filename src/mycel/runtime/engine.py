"""The engine: runs one rank's program over sockets, in compiled code, without the interpreter lock.

A *job* is one run of one program: a row of 64-bit integers (``J_*`` of ``job_fields``) that holds addresses of the
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

from mycel.runtime import job_fields as j
from mycel.runtime.atomics import relax, yield_processor
from mycel.runtime.job_steps import finish, has_same_header, reduce_into
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
)
from mycel.runtime.reduce_kernels import copy
from mycel.runtime.ring_channels import advance_ring, fall_asleep, hear, wake_up
from mycel.runtime.streaming import copy_past_caches
from mycel.standalone import inlined, standalone

__all__ = ["again", "execute", "take_number"]

_RECV_REDUCE, _COPY, _REDUCE = 2, 3, 4
_BURST = 8  # messages on one channel before the others get their turn
_NEVER = -1
_LEAST_ROUNDS = 16
_SHORT_SLEEP_NS = 100_000  # what asking may take instead; a sleep and its wake alone take a third of it


@inlined
def _absorb(job, row, staging) -> None:  # type: ignore[no-untyped-def]
    """Combine what arrived at ``staging`` with the row's operand into its destination."""
    destination = job[j.J_BASES + row[j.R_ADDRESS_BUFFER]] + row[j.R_OFFSET]
    operand = job[j.J_BASES + row[j.R_OPERAND_BUFFER]] + row[j.R_OPERAND_OFFSET]
    reduce_into(job, row, destination, operand, staging, row[j.R_BYTES])


@inlined
def _send_some(job, channel, row, work) -> int:  # type: ignore[no-untyped-def]
    """Hand over as much of a message as the socket takes; bytes, or -1 with errno set."""
    address = job[j.J_BASES + row[j.R_ADDRESS_BUFFER]] + row[j.R_OFFSET]
    length = row[j.R_BYTES]
    flags = MSG_DONTWAIT | MSG_NOSIGNAL
    if channel[j.C_HEAD] != 0:
        done = channel[j.C_DONE]
        return send(channel[j.C_FD], address + done, length - done, flags)  # type: ignore[no-any-return]
    done = channel[j.C_DONE]
    if done >= j.HEADER_BYTES:
        left = length + j.HEADER_BYTES - done
        return send(channel[j.C_FD], address + done - j.HEADER_BYTES, left, flags)  # type: ignore[no-any-return]
    work[j.SLOT_OFFSET // 8 + 3] = channel[j.C_STATED]
    # struct msghdr and two struct iovec, as 64-bit Linux lays them out.
    base = job[j.J_WORK]
    for i in range(7):
        work[2 + i] = 0
    work[4] = base + 9 * 8
    work[5] = 2
    work[9] = base + j.SLOT_OFFSET + done
    work[10] = j.HEADER_BYTES - done
    work[11] = address
    work[12] = length
    return sendmsg(channel[j.C_FD], base + 2 * 8, flags)  # type: ignore[no-any-return]


@inlined
def _recv_some(job, channel, row) -> int:  # type: ignore[no-untyped-def]
    """Take as much of a message as has arrived; bytes, 0 at the end of the stream, or -1 with errno set."""
    done, length = channel[j.C_DONE], row[j.R_BYTES]
    skip = 0
    if channel[j.C_HEAD] == 0:
        if done < j.HEADER_BYTES:
            where = job[j.J_CHANNELS] + (row[j.R_CHANNEL] * j.CHANNEL_FIELDS + j.C_HEADER) * 8
            left = j.HEADER_BYTES - done
            return recv(channel[j.C_FD], where + done, left, MSG_DONTWAIT)  # type: ignore[no-any-return]
        skip = j.HEADER_BYTES
    if row[j.R_OP] == _RECV_REDUCE:
        address = channel[j.C_STAGING]
    else:
        address = job[j.J_BASES + row[j.R_ADDRESS_BUFFER]] + row[j.R_OFFSET]
    left = length + skip - done
    return recv(channel[j.C_FD], address + done - skip, left, MSG_DONTWAIT)  # type: ignore[no-any-return]


@inlined
def _advance(job, number, channels, rows, pending, queue_start, queue, work) -> int:  # type: ignore[no-untyped-def]
    """Move messages on one channel. Returns how many bytes moved, or minus the status that ends the run."""
    channel = channels[number]
    moved = 0
    messages = 0
    while messages < _BURST:
        position = queue_start[number] + channel[j.C_HEAD]
        if position >= queue_start[number + 1]:
            break
        index = queue[position]
        if pending[index] > 0:
            break
        row = rows[index]
        outgoing = channel[j.C_OUTGOING] != 0
        n = _send_some(job, channel, row, work) if outgoing else _recv_some(job, channel, row)
        if n <= 0:
            error = 0 if n == 0 else last_errno()
            if n < 0 and error == EAGAIN:
                channel[j.C_BLOCKED] = 1
                break
            if n < 0 and error == EINTR:
                continue
            job[j.J_FAILED_CHANNEL] = number
            job[j.J_ERRNO] = error
            return -j.CLOSED
        moved += n
        channel[j.C_DONE] += n
        total = row[j.R_BYTES]
        if channel[j.C_HEAD] == 0:
            total += j.HEADER_BYTES
            if not outgoing and channel[j.C_DONE] == j.HEADER_BYTES and not has_same_header(job, channel):
                job[j.J_FAILED_CHANNEL] = number
                return -j.MISMATCHED
        if channel[j.C_DONE] < total:
            continue
        if row[j.R_OP] == _RECV_REDUCE:
            _absorb(job, row, channel[j.C_STAGING])
        channel[j.C_BYTES] += row[j.R_BYTES]
        channel[j.C_DONE] = 0
        channel[j.C_HEAD] += 1
        messages += 1
        finish(job, index)
    return moved


@inlined
def take_number(job) -> None:  # type: ignore[no-untyped-def]
    """Give a job the next sequence number, unless it has one.

    Here, and not in Python: a signal handler may run between any two steps of Python, and call a collective itself.
    """
    if job[j.J_HEADER + 1] == 0:
        last = int64_at(job[j.J_NUMBERS], 1)
        last[0] += 1
        job[j.J_HEADER + 1] = last[0]


@inlined
def _copy_own(job, channels, destination, source, num_bytes) -> None:  # type: ignore[no-untyped-def]
    """Copy what stays on this rank."""
    large = int64_at(job[j.J_ASKING], j.ASK_FIELDS)[j.ASK_LARGE]
    is_large = job[j.J_NUM_CHANNELS] > 0 and channels[0, j.C_STATED] >= large
    if is_large and (destination + num_bytes <= source or source + num_bytes <= destination):
        copy_past_caches(destination, source, num_bytes)
    else:
        copy(destination, source, num_bytes)


@inlined
def _do_local(job, channels, rows, pending, queue, first) -> int:  # type: ignore[no-untyped-def]
    """Do the local rows whose turn has come, one after the other; how many.

    Args:
        first: where they stand in the queue, behind those of the channels; -1 ends them.
    """
    before = job[j.J_LOCAL]
    index = queue[first + before]
    while index >= 0 and pending[index] <= 0:
        row = rows[index]
        destination = job[j.J_BASES + row[j.R_ADDRESS_BUFFER]] + row[j.R_OFFSET]
        source = job[j.J_BASES + row[j.R_OPERAND_BUFFER]] + row[j.R_OPERAND_OFFSET]
        if row[j.R_OP] == _REDUCE:
            reduce_into(job, row, destination, destination, source, row[j.R_BYTES])
        elif destination != source:
            _copy_own(job, channels, destination, source, row[j.R_BYTES])
        finish(job, index)
        job[j.J_LOCAL] += 1
        index = queue[first + job[j.J_LOCAL]]
    return job[j.J_LOCAL] - before  # type: ignore[no-any-return]


@inlined
def _begin(job, channels, rows, work) -> None:  # type: ignore[no-untyped-def]
    """Set the state of a fresh job and do the local copies that wait for nothing."""
    num_rows = job[j.J_NUM_ROWS]
    take_number(job)
    job[j.J_STARTED_NS] = monotonic_ns(job[j.J_WORK])
    if job[j.J_LIMIT_NS] != 0:
        job[j.J_DEADLINE_NS] = job[j.J_STARTED_NS] + job[j.J_LIMIT_NS]
    pending0, pending = int64_at(job[j.J_PENDING0], num_rows), int64_at(job[j.J_PENDING], num_rows)
    for i in range(num_rows):
        pending[i] = pending0[i]
    for c in range(job[j.J_NUM_CHANNELS]):
        channels[c, j.C_HEAD] = 0
        channels[c, j.C_DONE] = 0
        channels[c, j.C_TAKEN] = 0
        channels[c, j.C_BLOCKED] = 0
        channels[c, j.C_ENDED] = 0
    for i in range(3):
        work[j.SLOT_OFFSET // 8 + i] = job[j.J_HEADER + i]
    job[j.J_REMAINING] = num_rows
    job[j.J_LOCAL] = 0
    for i in range(num_rows):
        row = rows[i]
        if row[j.R_OP] == _COPY and pending0[i] == 0:
            destination = job[j.J_BASES + row[j.R_ADDRESS_BUFFER]] + row[j.R_OFFSET]
            source = job[j.J_BASES + row[j.R_OPERAND_BUFFER]] + row[j.R_OPERAND_OFFSET]
            if destination != source:
                _copy_own(job, channels, destination, source, row[j.R_BYTES])
            finish(job, i)


@inlined
def _wait(job, channels, pending, queue_start, queue, block) -> int:  # type: ignore[no-untyped-def]
    """Ask the kernel which blocked channels can go on. Returns j.PENDING, or the status that ends the run."""
    num_channels, num_extras = job[j.J_NUM_CHANNELS], job[j.J_NUM_EXTRAS]
    # struct pollfd is {int fd; short events; short revents}: one 64-bit integer, little-endian.
    bells = num_channels + num_extras  # this rank's comes first
    num_fds = bells + 1 + num_channels
    fds = int64_at(job[j.J_POLL], num_fds)
    extras = int64_at(job[j.J_EXTRAS], num_extras)
    for c in range(num_channels):
        channel = channels[c]
        waits = channel[j.C_BLOCKED] != 0 and (
            channel[j.C_RING] != 0 or queue_start[c] + channel[j.C_HEAD] < queue_start[c + 1]
        )
        events = POLLOUT if channel[j.C_OUTGOING] != 0 and channel[j.C_RING] == 0 else POLLIN
        fds[c] = (channel[j.C_FD] | (events << 32)) if waits else 0xFFFFFFFF
        rings = waits and channel[j.C_RING] != 0 and channel[j.C_OUTGOING] == 0
        fds[bells + 1 + c] = (channel[j.C_OWN_BELL] | (POLLIN << 32)) if rings else 0xFFFFFFFF
    for e in range(num_extras):
        fds[num_channels + e] = extras[e] | (POLLIN << 32)
    bell = int64_at(job[j.J_ASKING], j.ASK_FIELDS)[j.ASK_BELL]
    fds[bells] = (bell | (POLLIN << 32)) if bell >= 0 else 0xFFFFFFFF
    left = job[j.J_DEADLINE_NS] - monotonic_ns(job[j.J_WORK])
    if left <= 0:
        return j.TIMED_OUT
    patience = min(left // 1_000_000 + 1, 1000) if block else 0
    if block and not fall_asleep(channels, num_channels):
        return j.PENDING
    ready = poll(job[j.J_POLL], num_fds, patience)
    if block:
        wake_up(channels, num_channels)
    if ready < 0:
        return j.INTERRUPTED if last_errno() == EINTR else j.PENDING
    if ready == 0:
        return j.PENDING
    if fds[bells] >> 48 != 0:
        read_fd(bell, job[j.J_WORK] + 12 * 8, 8)
    for c in range(num_channels):
        if fds[bells + 1 + c] >> 48 != 0:
            read_fd(channels[c, j.C_OWN_BELL], job[j.J_WORK] + 12 * 8, 8)
        if fds[c] >> 48 != 0:
            if channels[c, j.C_RING] != 0:
                hear(channels[c], job[j.J_WORK] + 12 * 8)
            channels[c, j.C_BLOCKED] = 0
    if block:
        for e in range(num_extras):
            if fds[num_channels + e] >> 48 != 0:
                return j.CONTROL
    return j.PENDING


@inlined
def _pause(asking, asked) -> None:  # type: ignore[no-untyped-def]
    """Let a moment go by between two looks at rings."""
    if asking[j.ASK_YIELD] != 0 and asked % 8 == 0:
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
    job = int64_at(address, j.JOB_FIELDS)
    status = job[j.J_STATUS]
    if status in (j.DONE, j.MISMATCHED):
        return status  # type: ignore[no-any-return]  # another has run it; or what follows belongs to another call
    num_rows, num_channels = job[j.J_NUM_ROWS], job[j.J_NUM_CHANNELS]
    work = int64_at(job[j.J_WORK], 24)
    rows = int64_table_at(job[j.J_ROWS], num_rows, j.ROW_FIELDS)
    channels = int64_table_at(job[j.J_CHANNELS], num_channels, j.CHANNEL_FIELDS)
    pending = int64_at(job[j.J_PENDING], num_rows)
    queue_start = int64_at(job[j.J_QUEUE_START], num_channels + 1)
    queue = int64_at(job[j.J_QUEUE], num_rows + 1)
    if job[j.J_REMAINING] == _NEVER:
        _begin(job, channels, rows, work)
    if job[j.J_REMAINING] > 0:
        for c in range(num_channels):
            if channels[c, j.C_FD] < 0:
                return j.UNOPENED
    asking = int64_at(job[j.J_ASKING], j.ASK_FIELDS)
    asked = 0
    while job[j.J_REMAINING] > 0:
        moved = _do_local(job, channels, rows, pending, queue, queue_start[num_channels])
        blocked = 0
        rings = 0
        for c in range(num_channels):
            if channels[c, j.C_RING] != 0:
                n = advance_ring(job, c, channels, rows, pending, queue_start, queue, work)
                rings += 1
            elif channels[c, j.C_BLOCKED] == 0:
                n = _advance(job, c, channels, rows, pending, queue_start, queue, work)
            else:
                n = 0
            if n == -j.MISMATCHED:  # for good, whoever asks again: its bytes would be taken for this call's
                job[j.J_STATUS] = j.MISMATCHED
            if n < 0:
                return -n
            moved += n
            if channels[c, j.C_RING] == 0 and channels[c, j.C_BLOCKED] != 0:
                blocked += 1
        if job[j.J_REMAINING] == 0:
            break
        if moved == 0:
            if rings > 0 and asked < asking[j.ASK_ROUNDS]:
                asked += 1
                _pause(asking, asked)
                continue
            asleep = monotonic_ns(job[j.J_WORK])
            status = _wait(job, channels, pending, queue_start, queue, True)
            if rings > 0:
                if monotonic_ns(job[j.J_WORK]) - asleep < _SHORT_SLEEP_NS:  # to ask a little longer would have paid
                    asking[j.ASK_ROUNDS] = min(asking[j.ASK_MOST], asking[j.ASK_ROUNDS] * 2)
                elif asked > 0:
                    asking[j.ASK_ROUNDS] = max(_LEAST_ROUNDS, asking[j.ASK_ROUNDS] // 2)
            asked = 0
        else:
            if asked > 0:
                asking[j.ASK_ROUNDS] = min(asking[j.ASK_MOST], asking[j.ASK_ROUNDS] * 2)
            asked = 0
            if blocked == 0:
                continue
            status = _wait(job, channels, pending, queue_start, queue, False)
        if status != j.PENDING:
            return status
    job[j.J_ENDED_NS] = monotonic_ns(job[j.J_WORK])
    job[j.J_STATUS] = j.DONE
    return j.DONE


@standalone
def again(pattern_address: int, address: int, input_address: int, output_address: int) -> int:
    """Run a job that is like another one, but for its arrays, number and times.

    Args:
        pattern_address: of the other one's fields as they were before it was begun.
        address: of the new one's fields.
        input_address: of its INPUT, 0 where it has none.
        output_address: of its OUTPUT.

    Returns:
        Its sequence number, if it is done; else minus what ``execute`` returned, which goes on with it.
    """
    pattern, job = int64_at(pattern_address, j.JOB_FIELDS), int64_at(address, j.JOB_FIELDS)
    for i in range(j.J_WORK):
        job[i] = pattern[i]
    job[j.J_WORK] = address + (j.J_WORK + 1) * 8
    job[j.J_BASES] = input_address
    job[j.J_BASES + 1] = output_address
    status = execute(address)
    return job[j.J_HEADER + 1] if status == j.DONE else -status
