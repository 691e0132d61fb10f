"""What has gone wrong, judged from what the ranks of a group say; a pure function, so all who hear the same agree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mycel.errors import TopologyError
from mycel.runtime.evidence import Evidence, Hop, failed_links, link_names
from mycel.runtime.fields import Fields
from mycel.runtime.headers import describe_header, states_own_bytes
from mycel.topology.model import Topology

__all__ = [
    "MOST_HEADERS",
    "State",
    "Verdict",
    "disagreement",
    "is_common",
    "is_whole_without",
    "judge_states",
    "without_links",
]

#: So that a state fits into a record of 64 KB: twelve bytes a character at most, seven a rank, sixty a header.
_LONGEST_TEXT, _MOST_AWAITED, MOST_HEADERS = 1_000, 3_000, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a rank stands.

    Attributes:
        what: the collective in words.
        waits_for: ranks it waits for.
        header: sequence number, kind and bytes of its collective.
        is_committing: the collective is through and the ranks are telling each other so.
        limit_s: the time-out that has passed, or 0 where none has and the rank was asked.
        mismatch: what it found on a channel that is not of its own call, in words; else empty.
        recent: headers of the calls before: a rank may have gone on where others cannot.
        may_wait: its connections are whole, so that it could go on where it stands.
    """

    what: str
    waits_for: tuple[int, ...]
    header: tuple[int, int, int]
    is_committing: bool = False
    limit_s: float = 0.0
    mismatch: str = ""
    recent: tuple[tuple[int, int, int], ...] = ()
    may_wait: bool = True

    def to_record(self) -> dict[str, Any]:
        """As JSON takes it; cut to what a record has room for, the oldest headers first."""
        return {
            "what": self.what[:_LONGEST_TEXT],
            "for": self.waits_for[:_MOST_AWAITED],
            "header": self.header,
            "commit": self.is_committing,
            "limit": self.limit_s,
            "mismatch": self.mismatch[:_LONGEST_TEXT],
            "recent": self.recent[-MOST_HEADERS:],
            "wait": self.may_wait,
        }

    @property
    def since(self) -> int:
        """Sequence number of the first call that it tells of."""
        return min(header[0] for header in (*self.recent, self.header))

    @classmethod
    def from_record(cls, record: Mapping[str, Any], size: int) -> State:
        """Back from ``to_record``.

        Args:
            record: what somebody has said.
            size: of the group.

        Raises:
            ValueError: it is no state of a rank of such a group.
        """
        fields = Fields(record)
        return cls(
            what=fields.text("what"),
            waits_for=fields.integers("for", 0, size - 1),
            header=fields.header("header"),
            is_committing=fields.flag("commit"),
            limit_s=fields.seconds("limit"),
            mismatch=fields.text("mismatch"),
            recent=fields.headers("recent"),
            may_wait=fields.flag("wait"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The cause of a failure.

    Attributes:
        kind: ``timeout`` or ``mismatch``.
        message: for people; the same on every rank that has heard the same.
        silent: ranks that are waited for and say nothing, or that they are planning.
        links: the links that have failed.
    """

    kind: Literal["timeout", "mismatch"]
    message: str
    silent: tuple[int, ...] = ()
    links: frozenset[Hop] = frozenset()


def judge_states(
    states: Mapping[int, State],
    evidence: Mapping[int, Evidence],
    topology: Topology,
    dtype_names: Callable[[int], str],
    planning: Mapping[int, str] | None = None,
) -> Verdict:
    """Say what has gone wrong.

    In this order: ranks that make different calls; ranks that are waited for and say nothing; links on which
    nothing arrives.

    Args:
        states: of the ranks that have been heard, at least one.
        evidence: of those that have had the time to gather it.
        topology: the fabric, for the names of links.
        dtype_names: from a type's code to its name.
        planning: what ranks are planning that have said so, and not where they stand.
    """
    different = disagreement(states, dtype_names)
    if different:
        return Verdict(kind="mismatch", message=different)
    first = next((states[rank] for rank in sorted(states) if states[rank].limit_s), states[min(states)])
    passed = f"{first.what} reached its timeout of {first.limit_s:g} s"
    if not first.limit_s:
        passed = f"{first.what} made no progress"
    awaited = {peer for state in states.values() for peer in state.waits_for}
    silent = tuple(sorted(awaited - set(states)))
    failures = failed_links(evidence)
    links = frozenset(hop for group in failures for hop in group)
    names = link_names(topology, failures, evidence)
    if silent:
        waiting = [rank for rank in sorted(states) if set(states[rank].waits_for) & set(silent)]
        about = _about_silent(silent, planning or {}, names)
        message = f"{passed}: {about}; waited for by {_ranks(waiting)}"
    elif links:
        waiting = [rank for rank in sorted(states) if states[rank].waits_for]
        message = f"{passed}: nothing gets through on {names}; {_ranks(waiting)} wait for each other"
    else:
        said = "; ".join(
            f"rank {rank} in {state.what} waits for {list(state.waits_for) or 'nobody'}"
            for rank, state in sorted(states.items())
        )
        message = f"{passed} with no rank silent and no link down: {said}"
    return Verdict(kind="timeout", message=message, silent=silent, links=links)


def _about_silent(silent: Sequence[int], planning: Mapping[int, str], links: str) -> str:
    """What is known of ranks that have not said where they stand.

    Examples:
        >>> _about_silent([1, 2], {2: "all_gather over star4"}, "")
        'rank 1 is silent (stopped, stuck, or never called it), rank 2 is planning all_gather over star4'
    """
    mute = [rank for rank in silent if rank not in planning]
    why = f"nothing gets through on {links}: it is down, or the machine behind it" if links else ""
    why = why or "stopped, stuck, or never called it"
    said = [f"{_ranks(mute)} {'is' if len(mute) == 1 else 'are'} silent ({why})"] if mute else []
    said += [f"rank {rank} is planning {planning[rank]}" for rank in silent if rank in planning]
    return ", ".join(said) + ("" if mute else " (the first call takes long on a busy machine: a longer time-out?)")


def disagreement(states: Mapping[int, State], dtype_names: Callable[[int], str]) -> str:
    """How the ranks' calls differ, in words; empty where they do not."""
    calls_of: dict[int, dict[tuple[int, int], list[int]]] = {}
    for rank, state in sorted(states.items()):
        own = () if state.is_committing else (state.header,)
        for sequence, kind, num_bytes in {*state.recent, *own}:
            call = (kind, 0 if states_own_bytes(kind) else num_bytes)
            calls_of.setdefault(sequence, {}).setdefault(call, []).append(rank)
    for sequence, calls in sorted(calls_of.items()):
        if len(calls) > 1:
            # The odd one out comes first.
            ordered = sorted(calls.items(), key=lambda item: (len(item[1]), item[1]))
            words = [describe_header(sequence, *call, dtype_names) for call, _ in ordered]
            note = " (with different schedules: do all ranks see the same topology and MYCEL_* settings?)"
            said = ", ".join(f"{_ranks(r)} called {w}" for w, (_, r) in zip(words, ordered, strict=True))
            return f"ranks do not agree: {said}{note if len(set(words)) < len(words) else ''}"
    found = [states[rank].mismatch for rank in sorted(states) if states[rank].mismatch]
    return f"ranks do not agree: {found[0]}" if found else ""


def is_common(states: Mapping[int, State]) -> bool:
    """Whether all of them tell of the call that the hindmost is in.

    Examples:
        >>> ahead, behind = (State(what="", waits_for=(), header=(number, 0, 0)) for number in (900, 3))
        >>> is_common({0: ahead, 1: behind}), is_common({0: ahead, 1: ahead})
        (False, True)
    """
    return max(state.since for state in states.values()) <= min(state.header[0] for state in states.values())


def _ranks(ranks: Collection[int] | Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks) or "nobody"


def without_links(topology: Topology, links: frozenset[Hop]) -> Topology:
    """The fabric without these links, and without those of the other direction: TCP needs both.

    Raises:
        TopologyError: the ranks that are left cannot all reach each other.
    """
    gone = links | {(dst, src) for src, dst in links}
    return replace(topology, links=tuple(link for link in topology.links if (link.src, link.dst) not in gone))


def is_whole_without(topology: Topology, links: frozenset[Hop]) -> bool:
    """Whether all ranks reach each other without these links."""
    try:
        without_links(topology, links)
    except TopologyError:
        return False
    return True
