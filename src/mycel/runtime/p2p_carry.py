"""Passing on bytes from socket to socket, in compiled code, while the rank computes.

A *way* is a row of integers (the ``W_*`` fields): where bytes come from, where they go, and a buffer between the two.
It takes in no more than its buffer holds: who sends too fast is told so by TCP.
"""

from __future__ import annotations

import os
from array import array

from mycel.runtime.libc import (
    EAGAIN,
    EINTR,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    POLLIN,
    POLLOUT,
    int64_at,
    last_errno,
    poll,
    read_fd,
    recv,
    send,
)
from mycel.standalone import inlined, standalone

__all__ = ["WAY_FIELDS", "W_BEGIN", "W_BUFFER", "W_CAPACITY", "W_END", "W_IN", "W_OUT", "carry", "load"]

# Fields of a way.
W_IN = 0  # socket that bytes come from
W_OUT = 1  # socket that they go to
W_BUFFER = 2  # address of the buffer between them
W_CAPACITY = 3  # of the buffer, in bytes
W_BEGIN = 4  # of what the buffer holds
W_END = 5
WAY_FIELDS = 6

#: What a descriptor's turn came to, beside a number of bytes.
_NONE, _ENDED = 0, -1


@inlined
def _take_in(way) -> int:  # type: ignore[no-untyped-def]
    """Fill the buffer."""
    if way[W_BEGIN] == way[W_END]:
        way[W_BEGIN] = 0
        way[W_END] = 0
    room = way[W_CAPACITY] - way[W_END]
    if room == 0:
        return _NONE
    got = recv(way[W_IN], way[W_BUFFER] + way[W_END], room, MSG_DONTWAIT)
    if got > 0:
        way[W_END] += got
        return got  # type: ignore[no-any-return]
    if got == 0:
        return _ENDED
    failed = last_errno()
    return _NONE if failed == EAGAIN or failed == EINTR else _ENDED  # noqa: SIM109


@inlined
def _hand_on(way) -> int:  # type: ignore[no-untyped-def]
    """Empty the buffer."""
    if way[W_BEGIN] == way[W_END]:
        return _NONE
    sent = send(way[W_OUT], way[W_BUFFER] + way[W_BEGIN], way[W_END] - way[W_BEGIN], MSG_DONTWAIT | MSG_NOSIGNAL)
    if sent >= 0:
        way[W_BEGIN] += sent
        return sent  # type: ignore[no-any-return]
    failed = last_errno()
    return _NONE if failed == EAGAIN or failed == EINTR else _ENDED  # noqa: SIM109


@standalone
def carry(ways_address: int, num_ways: int, polls_address: int, wake_fd: int) -> int:
    """Pass on what comes until a way ends, or somebody calls.

    Args:
        ways_address: of the ways' rows, one behind the other.
        num_ways: how many.
        polls_address: of ``2 * num_ways + 1`` integers to work in.
        wake_fd: eventfd that is written by who calls.

    Returns:
        The number of a way that has ended; -1: somebody has called.
    """
    polls = int64_at(polls_address, 2 * num_ways + 1)
    nobody = (1 << 32) - 1  # the descriptor -1, which poll passes over
    while True:
        for i in range(num_ways):
            way = int64_at(ways_address + i * WAY_FIELDS * 8, WAY_FIELDS)
            polls[2 * i] = nobody
            if way[W_BEGIN] == way[W_END] or way[W_END] < way[W_CAPACITY]:
                polls[2 * i] = way[W_IN] + (POLLIN << 32)
            polls[2 * i + 1] = nobody
            if way[W_BEGIN] < way[W_END]:
                polls[2 * i + 1] = way[W_OUT] + (POLLOUT << 32)
        polls[2 * num_ways] = wake_fd + (POLLIN << 32)
        poll(polls_address, 2 * num_ways + 1, -1)
        if (polls[2 * num_ways] >> 48) != 0:
            read_fd(wake_fd, polls_address, 8)
            return -1
        for i in range(num_ways):
            way = int64_at(ways_address + i * WAY_FIELDS * 8, WAY_FIELDS)
            got = _NONE
            if polls[2 * i] >> 48 != 0:
                got = _take_in(way)
            sent = _NONE
            if got > 0 or polls[2 * i + 1] >> 48 != 0:
                sent = _hand_on(way)
            if got == _ENDED or sent == _ENDED:
                return i


def load() -> None:
    """Have ``carry`` ready, before anything with a deadline begins: compiled, where it was not."""
    polls = array("q", bytes(8))
    calling = os.eventfd(1, os.EFD_CLOEXEC)
    carry(0, 0, polls.buffer_info()[0], calling)
    os.close(calling)
