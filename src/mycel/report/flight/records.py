"""Reading flight records: one dump a rank, as ``mycel.runtime.flight`` writes them. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mycel.brief import brief
from mycel.errors import MycelError, UsageError
from mycel.topology.json_format import from_json
from mycel.topology.model import Topology

__all__ = ["Call", "Connection", "Dump", "Group", "Program", "read_dumps"]

#: The version of the lines that is read here.
_FORMAT = 1
#: What a round after a collective is called, in groups that go on when links fail; it has the collective's number.
_CONFIRMING = "commit"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What one rank moved for a collective; calls of one program share it.

    Attributes:
        channels: ``(src, dst)`` of each of its channels, ranks in the group.
        paths: vertices of the group's topology on each channel's way.
        num_bytes, num_messages: on each.
    """

    channels: tuple[tuple[int, int], ...]
    paths: tuple[tuple[int, ...], ...]
    num_bytes: tuple[int, ...]
    num_messages: tuple[int, ...]

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One rank's side of a collective. Times are readings of that rank's clock, in nanoseconds.

    Attributes:
        group: identity of the group.
        sequence: of the collective in its group, counted from 1.
        what: as messages call it; ``collective`` is the one whose schedule ran.
        even: all blocks were of one length.
        state: ``queued``, ``running`` or ``done``.
        messages_done: of a running one, on each channel of the program.
    """

    group: str
    sequence: int
    what: str
    collective: str
    root: int | None
    num_bytes: int
    dtype: str
    op: str | None
    even: bool
    method: str
    piece_bytes: int
    program: Program
    state: str
    called_ns: int
    started_ns: int | None
    ended_ns: int | None
    messages_done: tuple[int, ...] | None

    __repr__ = brief

    @property
    def key(self) -> tuple[str, int, bool]:
        """Group, sequence and whether it is the round that confirms the collective: the same on every rank."""
        return self.group, self.sequence, self.what == _CONFIRMING


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What a rank's kernel counted on one connection that the rank sends on.

    Attributes:
        src, dst: ranks in the group.
        path: vertices of the group's topology.
    """

    src: int
    dst: int
    path: tuple[int, ...]
    sent_bytes: int
    busy_s: float
    receiver_full_s: float
    retransmitted: int
    round_trip_s: float

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group as one rank saw it.

    Attributes:
        ranks: of the whole job, in group order.
        described: the user has described the topology; else it is assumed, and its capacities mean little.
        connections: of this rank.
    """

    identity: str
    name: str
    ranks: tuple[int, ...]
    topology: Topology
    described: bool
    connections: tuple[Connection, ...]

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """All that one rank wrote down.

    Attributes:
        clock: ranks with the same text read the same clock.
        monotonic_ns, wall_ns: both clocks when the dump was made.
        why: what it was made for.
        recorded: collectives since the process began; the last of them are ``calls``.
    """

    file: Path
    rank: int
    world_size: int
    host: str
    clock: str
    monotonic_ns: int
    wall_ns: int
    why: str
    recorded: int
    groups: dict[str, Group]
    calls: tuple[Call, ...]

    __repr__ = brief


def read_dumps(places: Sequence[Path]) -> list[Dump]:
    """The dumps of a job, by rank.

    Args:
        places: files, or folders with files ``rank<N>.jsonl``.

    Raises:
        UsageError: there are none, a file is no flight record, or two are of one rank or of different jobs.
    """
    files = list(dict.fromkeys(file for place in places for file in _files(place)))
    if not files:
        raise UsageError(f"no flight records (rank<N>.jsonl) in {', '.join(map(str, places)) or 'nothing'}")
    dumps = sorted((_read(file) for file in files), key=lambda dump: dump.rank)
    for before, after in pairwise(dumps):
        if before.rank == after.rank:
            raise UsageError(f"{before.file} and {after.file} are both of rank {after.rank}; give one of them")
        if before.world_size != after.world_size:
            raise UsageError(
                f"{before.file} is of a job of {before.world_size} ranks, {after.file} of one of {after.world_size}"
            )
    for other in dumps[1:]:
        # Every rank knows the same identity of a group, and no other group ever had it.
        pair = (dumps[0], other)
        both = {dumps[0].rank, other.rank}
        known, theirs = ({g.identity for g in dump.groups.values() if both <= {*g.ranks}} for dump in pair)
        if known and theirs and not known & theirs:
            older = min(pair, key=lambda dump: dump.wall_ns)
            raise UsageError(
                f"{pair[0].file} and {other.file} are of two runs: neither knows a group of the other's; leave out "
                f"the older, {older.file}, or give each run a folder of its own"
            )
    return dumps


def _files(place: Path) -> Iterable[Path]:
    if place.is_dir():
        return sorted(place.glob("rank*.jsonl"))
    if not place.exists():
        raise UsageError(f"{place}: there is no such file or folder")
    return [place]


def _read(file: Path) -> Dump:
    head: dict[str, Any] | None = None
    groups: dict[str, Group] = {}
    programs: dict[int, Program] = {}
    calls: list[Call] = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
            if head is None:
                head = line
                if head["mycel_flight"] != _FORMAT:
                    raise UsageError(f"version {head['mycel_flight']} of flight records; this mycel reads {_FORMAT}")
            elif "topology" in line:
                groups[line["group"]] = _group(line, str(file))
            elif "sequence" in line:
                calls.append(_call(line, programs))
            else:
                programs[line["program"]] = _program(line)
        except (KeyError, TypeError, ValueError, MycelError) as error:
            what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{file}:{number}: no flight record: {what}") from None
    if head is None:
        raise UsageError(f"{file}: is empty")
    names = ("rank", "world_size", "host", "clock", "monotonic_ns", "wall_ns", "why", "recorded")
    try:
        known = {name: head[name] for name in names}
    except KeyError as error:
        raise UsageError(f"{file}:1: no flight record: key {error} is missing") from None
    return Dump(file=file, **known, groups=groups, calls=tuple(calls))


def _group(line: dict[str, Any], source: str) -> Group:
    return Group(
        identity=line["group"],
        name=line["name"],
        ranks=tuple(line["ranks"]),
        topology=from_json(line["topology"], source=source),
        described=line["described"],
        connections=tuple(Connection(**{**link, "path": tuple(link["path"])}) for link in line["connections"]),
    )


def _program(line: dict[str, Any]) -> Program:
    return Program(
        channels=tuple((channel["src"], channel["dst"]) for channel in line["channels"]),
        paths=tuple(tuple(channel["path"]) for channel in line["channels"]),
        num_bytes=tuple(line["bytes"]),
        num_messages=tuple(line["messages"]),
    )


def _call(line: dict[str, Any], programs: dict[int, Program]) -> Call:
    done = line.get("messages_done")
    same = (
        "group",
        "sequence",
        "what",
        "collective",
        "root",
        "dtype",
        "op",
        "even",
        "method",
        "piece_bytes",
        "state",
    )
    times = ("called_ns", "started_ns", "ended_ns")
    return Call(
        **{name: line[name] for name in (*same, *times)},
        num_bytes=line["bytes"],
        program=programs[line["program"]],
        messages_done=None if done is None else tuple(done),
    )
