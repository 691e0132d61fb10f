"""Records over a socket: whole ones in their order, however they arrive; an end where something else comes."""

from __future__ import annotations

import json
import socket
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.records import MalformedRecord, RecordSocket, packed

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


@pytest.mark.parametrize("payload", [b"{]}", b"[]", b"3", b"\xff", b"[" * 90])
def test_what_is_no_object_is_passed_over_by_who_takes_records_one_by_one(payload: bytes) -> None:
    a, b = socket.socketpair()
    with a, b:
        a.sendall(struct.pack("<I", len(payload)) + payload)
        RecordSocket(a, longest=100).send({"next": 1}, 5.0)
        receiver = RecordSocket(b, longest=100)
        receiver.read()
        with pytest.raises(MalformedRecord):
            receiver.take()
        assert receiver.take() == {"next": 1}


def test_deep_nesting_is_malformed() -> None:
    a, b = socket.socketpair()
    with a, b:
        payload = b"[" * 60_000
        a.sendall(struct.pack("<I", len(payload)) + payload)
        receiver = RecordSocket(b, longest=1 << 16)
        receiver.read()
        with pytest.raises(MalformedRecord):
            receiver.take()


def test_a_length_that_is_too_long_is_named_before_anything_is_kept() -> None:
    a, b = socket.socketpair()
    with a, b:
        a.sendall(struct.pack("<I", 1 << 30))
        receiver = RecordSocket(b, longest=1 << 16)
        receiver.read()
        with pytest.raises(EOFError, match="1073741824 bytes"):
            receiver.take()


def test_a_reader_that_takes_nothing_holds_nobody_up_and_gets_whole_records_later() -> None:
    a, b = socket.socketpair()
    with a, b:
        b.setblocking(False)
        sender, receiver = RecordSocket(a, longest=1 << 16), RecordSocket(b, longest=1 << 16)
        text = "x" * 60_000
        for number in range(100):  # far more than is kept
            sender.post(packed({"number": number, "text": text}, 1 << 16))
        assert sender.is_waiting
        found: list[int] = []
        done = False
        while not done:
            done = sender.flush()
            while _more(receiver):
                while (record := receiver.take()) is not None:
                    assert record["text"] == text
                    found.append(int(record["number"]))
        assert found == list(range(len(found)))
        assert 10 < len(found) < 100


def _more(receiver: RecordSocket) -> bool:
    try:
        receiver.read()
    except BlockingIOError:
        return False
    return True


def test_nothing_in_time_is_said_as_such() -> None:
    a, b = socket.socketpair()
    with a, b, pytest.raises(TimeoutError):
        RecordSocket(b, longest=100).receive(time.monotonic())
