"""Records over a socket: whole ones in their order, however they arrive; an end where something else comes."""

from __future__ import annotations

import json
import socket
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.records import RecordSocket

VALUES = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=40) | st.none(), max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=5), st.integers(1, 17))
def test_records_arrive_whole_and_in_order(records: list[dict[str, object]], cut: int) -> None:
    a, b = socket.socketpair()
    with a, b:
        sender, receiver = RecordSocket(a, longest=1 << 16), RecordSocket(b, longest=1 << 16)
        for record in records:
            sender.send(record, 5.0)
        a.shutdown(socket.SHUT_WR)
        assert [receiver.receive(time.monotonic() + 5) for _ in records] == records
        assert receiver.take() is None
        with pytest.raises(EOFError):
            receiver.read()
    a, b = socket.socketpair()
    with a, b:
        data = b"".join(struct.pack("<I", len(text)) + text for text in (json.dumps(r).encode() for r in records))
        receiver, found = RecordSocket(b, longest=1 << 16), []
        for begin in range(0, len(data), cut):
            a.sendall(data[begin : begin + cut])
            receiver.read()
            while (record := receiver.take()) is not None:
                found.append(record)
        assert found == records


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 101), struct.pack("<I", 3) + b"{]}", struct.pack("<I", 2) + b"[]"],
)
def test_what_is_not_a_record_ends_the_conversation(data: bytes) -> None:
    a, b = socket.socketpair()
    with a, b:
        a.sendall(data)
        with pytest.raises(EOFError):
            RecordSocket(b, longest=100).receive(time.monotonic() + 5)


def test_nothing_in_time_is_said_as_such() -> None:
    a, b = socket.socketpair()
    with a, b, pytest.raises(TimeoutError):
        RecordSocket(b, longest=100).receive(time.monotonic())
