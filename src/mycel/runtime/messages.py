"""What ranks of a group say to each other over their control connections, and how it is read.

Nothing that comes is believed before its version, its type and every field have been looked at (``read_message``);
what is none of these messages is passed over. Records have at most ``LONGEST`` bytes, whatever is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mycel.runtime.evidence import Evidence
from mycel.runtime.fields import Fields
from mycel.runtime.verdict import State

__all__ = [
    "LONGEST",
    "MOST_HOPS",
    "Abort",
    "Bye",
    "Calling",
    "Finding",
    "Gone",
    "Heard",
    "Here",
    "Identity",
    "Message",
    "Planning",
    "Position",
    "Question",
    "Relayed",
    "Routed",
    "Whereabouts",
    "read_message",
    "record_of",
    "shortened",
]

#: Bytes of the longest record; who announces a longer one is none of ours.
LONGEST = 1 << 16
#: Of the words below and what they mean; ranks of one release speak one.
_VERSION = 1
#: Characters of a cause, and ranks that it names: twelve bytes a character, seven a rank.
_LONGEST_CAUSE, _MOST_RANKS = 3_000, 3_000
#: Connections that a word for one rank passes at most, far more than any way has.
MOST_HOPS = 64
#: Bytes of evidence in one record; more of it goes in several.
_PIECE = 40_000
_MOST_PIECES = 256
KINDS = ("lost", "timeout", "mismatch", "failed")


def shortened(cause: str) -> str:
    """A cause of a failure, no longer than a record has room for."""
    return cause if len(cause) <= _LONGEST_CAUSE else f"{cause[: _LONGEST_CAUSE - 4]} ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """I leave on purpose."""

    TYPE: ClassVar[str] = "bye"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which process I am; said once.

    Attributes:
        pid, started: its number, and the kernel's tick at which it began: numbers are given again.
        boot, namespace: of its machine since it was last started, and where its number is valid.
    """

    TYPE: ClassVar[str] = "identity"
    pid: int
    started: int
    boot: str
    namespace: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The group has failed.

    Attributes:
        by: rank that found out.
        kind: of the error: one of ``KINDS``.
        cause: for people.
        ranks: that are lost.
    """

    TYPE: ClassVar[str] = "abort"
    by: int
    kind: str
    cause: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank stands in an inquiry, see ``mycel.runtime.inquiry``."""

    TYPE: ClassVar[str] = "state"
    by: int
    inquiry: tuple[int, int]
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """On which channels of a rank nothing arrives; number ``piece`` of ``pieces``."""

    TYPE: ClassVar[str] = "evidence"
    by: int
    inquiry: tuple[int, int]
    evidence: Evidence
    piece: int = 0
    pieces: int = 1

    @classmethod
    def of(cls, by: int, inquiry: tuple[int, int], evidence: Evidence) -> tuple[Finding, ...]:
        """What a rank has found, in as many pieces as it takes."""
        found = evidence.split(_PIECE)[:_MOST_PIECES]
        return tuple(
            cls(by=by, inquiry=inquiry, evidence=each, piece=number, pieces=len(found))
            for number, each in enumerate(found)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Who still hears this machine? I do not.

    Attributes:
        by, number: who asks, and how often it has asked.
        machine: as addresses name it.
    """

    TYPE: ClassVar[str] = "question"
    by: int
    number: int
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The answer to a question: I do. Who does not says nothing."""

    TYPE: ClassVar[str] = "heard"
    by: int
    number: int
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """I wait for you to open a channel that my call needs; you may be at another one, which uses none such.

    Attributes:
        epoch: how often the group has gone on with another fabric.
        header: sequence number, kind and bytes of the call.
    """

    TYPE: ClassVar[str] = "calling"
    epoch: int
    header: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """I have not come to the call that somebody asks about, for I am planning something.

    Attributes:
        inquiry: in which it was asked.
        what: in words.
    """

    TYPE: ClassVar[str] = "planning"
    inquiry: tuple[int, int]
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where I can be found by a group that is formed of those who are left: a handle, see ``runtime.elastic``."""

    TYPE: ClassVar[str] = "whereabouts"
    handle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A rank's connection to me, its neighbour, has ended without a goodbye, or its process has.

    Attributes:
        rank: whose.
        has_ended: the kernel says that its process has, whoever holds its connections.
    """

    TYPE: ClassVar[str] = "gone"
    rank: int
    has_ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Somebody has said that I am gone; I am not."""

    TYPE: ClassVar[str] = "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """A word for all ranks, which each passes on once; see ``mycel.runtime.relay``.

    Attributes:
        by, number: its author, and the author's number for it.
        said: the word, as a record that has not been looked at yet.
    """

    TYPE: ClassVar[str] = "relayed"
    by: int
    number: int
    said: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A word for one rank, on its way there.

    Attributes:
        by, to: its author, and whom it is for.
        hops: connections that it may pass yet.
        said: as for ``Relayed``.
    """

    TYPE: ClassVar[str] = "routed"
    by: int
    to: int
    hops: int
    said: Mapping[str, Any]


Message = (
    Bye
    | Identity
    | Abort
    | Position
    | Finding
    | Question
    | Heard
    | Calling
    | Planning
    | Whereabouts
    | Gone
    | Here
    | Relayed
    | Routed
)


def record_of(message: Message) -> dict[str, Any]:
    """As JSON takes it."""
    record: dict[str, Any] = {"mycel": _VERSION, "type": message.TYPE}
    if isinstance(message, Position):
        return record | {"by": message.by, "inquiry": message.inquiry, **message.state.to_record()}
    if isinstance(message, Finding):
        piece = {"piece": message.piece, "pieces": message.pieces}
        return record | {"by": message.by, "inquiry": message.inquiry, **piece, **message.evidence.to_record()}
    if isinstance(message, Abort):
        return record | {
            "by": message.by,
            "kind": message.kind,
            "cause": shortened(message.cause),
            "ranks": message.ranks[:_MOST_RANKS],
        }
    return record | {name: getattr(message, name) for name in message.__slots__}


def read_message(record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    """The message that a record is.

    Args:
        record: what came.
        size: of the group.
        num_vertices: of its fabric.

    Raises:
        ValueError: it is of another version or none that is known, or a field is not what it should be.
    """
    version, kind = record.get("mycel"), record.get("type")
    if type(version) is not int or version != _VERSION:
        raise ValueError(f"it is of version {version!r:.40}; this is version {_VERSION}")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise ValueError(f"its type is {kind!r:.40}; known: {', '.join(_READERS)}")
    try:
        return reader(Fields(record), record, size, num_vertices)
    except ValueError as error:
        raise ValueError(f"of type {kind!r}, {error}") from None


_Reader = Callable[[Fields, Mapping[str, Any], int, int], Message]


def _bye(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Bye()


def _identity(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Identity(
        pid=fields.integer("pid", 1, (1 << 31) - 1),
        started=fields.integer("started", 0),
        boot=fields.text("boot"),
        namespace=fields.integer("namespace", 0),
    )


def _abort(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    kind = fields.text("kind")
    if kind not in KINDS:
        raise ValueError(f"'kind' is {kind!r:.40}; expected one of {', '.join(KINDS)}")
    return Abort(
        by=fields.integer("by", 0, size - 1),
        kind=kind,
        cause=shortened(fields.text("cause")),
        ranks=fields.integers("ranks", 0, size - 1),
    )


def _inquiry(fields: Fields) -> tuple[int, int]:
    found = fields.integers("inquiry", 0)
    if len(found) != 2:
        raise ValueError(f"'inquiry' is {found!r:.40}; expected two integers")
    return found[0], found[1]


def _position(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Position(
        by=fields.integer("by", 0, size - 1), inquiry=_inquiry(fields), state=State.from_record(record, size)
    )


def _finding(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    pieces = fields.integer("pieces", 1, _MOST_PIECES)
    return Finding(
        by=fields.integer("by", 0, size - 1),
        inquiry=_inquiry(fields),
        evidence=Evidence.from_record(record, size, num_vertices),
        piece=fields.integer("piece", 0, pieces - 1),
        pieces=pieces,
    )


def _question(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Question(
        by=fields.integer("by", 0, size - 1), number=fields.integer("number", 0), machine=fields.text("machine")
    )


def _heard(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Heard(
        by=fields.integer("by", 0, size - 1), number=fields.integer("number", 0), machine=fields.text("machine")
    )


def _calling(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Calling(epoch=fields.integer("epoch", 0), header=fields.header("header"))


def _planning(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Planning(inquiry=_inquiry(fields), what=fields.text("what"))


def _whereabouts(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Whereabouts(handle=fields.text("handle"))


def _gone(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Gone(rank=fields.integer("rank", 0, size - 1), has_ended=fields.flag("has_ended"))


def _here(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Here()


def _relayed(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Relayed(
        by=fields.integer("by", 0, size - 1), number=fields.integer("number", 1), said=fields.record("said")
    )


def _routed(fields: Fields, record: Mapping[str, Any], size: int, num_vertices: int) -> Message:
    return Routed(
        by=fields.integer("by", 0, size - 1),
        to=fields.integer("to", 0, size - 1),
        hops=fields.integer("hops", 0, MOST_HOPS),
        said=fields.record("said"),
    )


_READERS: dict[str, _Reader] = {
    Bye.TYPE: _bye,
    Identity.TYPE: _identity,
    Abort.TYPE: _abort,
    Position.TYPE: _position,
    Finding.TYPE: _finding,
    Question.TYPE: _question,
    Heard.TYPE: _heard,
    Calling.TYPE: _calling,
    Planning.TYPE: _planning,
    Whereabouts.TYPE: _whereabouts,
    Gone.TYPE: _gone,
    Here.TYPE: _here,
    Relayed.TYPE: _relayed,
    Routed.TYPE: _routed,
}
