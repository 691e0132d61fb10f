"""What ranks say over control connections: nothing that anybody sends is believed unread, and nothing raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import examples

from mycel.runtime.evidence import Evidence
from mycel.runtime.inquiry import Inquiry
from mycel.runtime.messages import (
    LONGEST,
    Abort,
    Bye,
    Calling,
    Finding,
    Gone,
    Heard,
    Here,
    Identity,
    Message,
    Planning,
    Position,
    Question,
    Relayed,
    Routed,
    read_message,
    record_of,
)
from mycel.runtime.verdict import State, judge_states
from mycel.topology.builders import ring

SIZE, VERTICES = 4, 5
STATE = State(what="all_reduce #3", waits_for=(1,), header=(3, 7, 64), limit_s=5.0, recent=((2, 7, 64),))
EVIDENCE = Evidence(stuck=((1, (0, 4, 1), 3),), clear=((0, 4, 2),), got=((2, (2, 4, 0), 9),), heard=frozenset({1, 2}))
MESSAGES: tuple[Message, ...] = (
    Bye(),
    Identity(pid=17, started=123456, boot="c0ffee", namespace=4026531836),
    Abort(by=1, kind="lost", cause="rank 2 was lost", ranks=(2,)),
    Position(by=0, inquiry=(0, 1), state=STATE),
    Finding(by=3, inquiry=(1, 0), evidence=EVIDENCE, piece=1, pieces=2),
    Question(by=2, number=5, machine="c0ffee/net:[1]"),
    Heard(by=2, number=5, machine="c0ffee/net:[1]"),
    Calling(epoch=1, header=(3, 7, 64)),
    Planning(inquiry=(0, 2), what="all_gather over star4"),
    Gone(rank=3, has_ended=True),
    Here(),
    Relayed(by=2, number=5, said=record_of(Bye())),
    Routed(by=2, to=0, hops=5, said=record_of(Calling(epoch=1, header=(3, 7, 64))) | {"header": [3, 7, 64]}),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def over_the_wire(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(json.dumps(record_of(message)))
    return record


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.TYPE)
def test_what_is_said_survives_the_way(message: Message) -> None:
    assert read_message(over_the_wire(message), SIZE, VERTICES) == message


@examples(200, 3000)
@given(st.data())
def test_a_field_that_is_something_else_is_refused_or_means_something(data: st.DataObject) -> None:
    """One field of a right record becomes anything, or goes; what is read can be judged without an exception."""
    record = over_the_wire(data.draw(st.sampled_from(MESSAGES)))
    name = data.draw(st.sampled_from(sorted(record)))
    if data.draw(st.booleans()):
        record[name] = data.draw(VALUES)
    else:
        del record[name]
    try:
        message = read_message(record, SIZE, VERTICES)
    except ValueError as error:
        assert len(str(error)) < 1000
        return
    record_of(message)
    fabric = ring(num_ranks=5)
    if isinstance(message, Position):
        judge_states({0: STATE, message.by: message.state}, {0: EVIDENCE}, fabric, str)
    elif isinstance(message, Finding):
        judge_states({0: STATE}, {0: EVIDENCE, message.by: message.evidence}, fabric, str)


@examples(100, 1000)
@given(st.dictionaries(st.sampled_from(["mycel", "type", "by", "kind", "inquiry", "what"]) | st.text(), VALUES))
def test_anything_else_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        read_message(record, SIZE, VERTICES)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mycel": 2}, "of version 2; this is version 1"),
        ({"mycel": True}, "of version True"),
        ({"type": "news"}, "its type is 'news'; known: bye"),
        ({"by": 4}, "'by' is 4; expected an integer from 0 to 3"),
        ({"by": True}, "'by' is True"),
        ({"kind": "weather"}, "'kind' is 'weather'; expected one of lost, timeout, mismatch, failed"),
        ({"ranks": [9]}, "'ranks' is [9]; expected integers from 0 to 3"),
    ],
)
def test_a_complaint_says_what_is_wrong(change: dict[str, Any], complaint: str) -> None:
    record = over_the_wire(MESSAGES[2]) | change
    with pytest.raises(ValueError) as caught:
        read_message(record, SIZE, VERTICES)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("size", [2, 512, 20_000])
def test_the_longest_things_that_can_be_said_fit_into_a_record(size: int) -> None:
    text = "\U0001f344" * 10_000  # twelve bytes each as JSON
    everybody = tuple(range(size))
    header = (-(1 << 63), -(1 << 63), -(1 << 63))
    state = State(what=text, waits_for=everybody, header=header, mismatch=text, recent=(header,) * 500)
    evidence = Evidence(
        stuck=tuple((rank, (0, 4, rank), 1 << 40) for rank in everybody),
        got=tuple((rank, (rank, 4, 0), 1 << 40) for rank in everybody),
        heard=frozenset(everybody),
    )
    said: list[Message] = [Position(by=0, inquiry=(0, 0), state=state)]
    said.append(Abort(by=0, kind="failed", cause=text, ranks=everybody))
    said += Finding.of(0, (0, 0), evidence)
    for message in said:
        assert len(json.dumps(record_of(message), separators=(",", ":"))) <= LONGEST
        read_message(over_the_wire(message), size, size + 5)


def test_evidence_in_pieces_is_heard_when_it_is_whole() -> None:
    evidence = Evidence(got=tuple((0, (0, 4, 1), count) for count in range(9000)), heard=frozenset(range(SIZE)))
    pieces = Finding.of(2, (0, 0), evidence)
    assert len(pieces) > 2
    book = Inquiry(0)
    for piece in reversed(pieces):
        assert not book.evidence
        assert book.file(piece)
        assert not book.file(piece), "a piece that comes again, by way of another rank, is no news"
    assert book.evidence == {2: evidence}


def test_a_book_keeps_what_is_said_early_and_forgets_what_is_over() -> None:
    book = Inquiry(0)
    now, later = Position(by=1, inquiry=(0, 0), state=STATE), Position(by=1, inquiry=(0, 1), state=STATE)
    other, far = Position(by=1, inquiry=(1, 0), state=STATE), Position(by=1, inquiry=(0, 77), state=STATE)
    assert [book.file(each) for each in (now, now, later, other, far)] == [True, False, True, True, False]
    assert not book.file(Position(by=0, inquiry=(0, 0), state=STATE)), "its own words, passed on"
    assert book.is_open and list(book.states) == [1]
    book.again()
    assert book.number == (0, 1) and book.is_open
    assert not book.file(now), "that inquiry is over"
    book.again()
    assert not book.is_open
    book.next_epoch()
    assert book.number == (1, 0) and book.is_open
