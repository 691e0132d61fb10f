"""Whether collectives of groups that share ranks are called in one order by all.

Ranks that call two collectives in opposite order wait for each other for ever, each in the one that it called first.
That can hide behind any number of ranks: it is a circle in the union of all ranks' orders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mycel.errors import VerificationError

__all__ = ["Call", "check_collectives"]

#: A collective that a rank calls: the ranks of its group, and what it is.
Call = tuple[frozenset[int], str]


def check_collectives(calls: Mapping[int, Sequence[Call]]) -> int:
    """All ranks come to the end of their collectives.

    The n-th call of a group on one rank meets the n-th of that group on all others.

    Args:
        calls: of each rank, in the order in which it makes them. Calls of groups with one rank meet nobody.

    Returns:
        How many collectives there are.

    Raises:
        VerificationError: a rank calls another one, or one fewer, than the rest of its group, or calls wait for each
            other in a circle, which the message names.

    Examples:
        >>> a, b = frozenset({0, 1}), frozenset({0, 1, 2})
        >>> check_collectives({0: [(a, "x"), (b, "y")], 1: [(a, "x"), (b, "y")], 2: [(b, "y")]})
        2
        >>> check_collectives({0: [(a, "x"), (b, "y")], 1: [(b, "y"), (a, "x")], 2: [(b, "y")]})
        Traceback (most recent call last):
        mycel.errors.VerificationError: collectives wait for each other: x of ranks 0, 1 comes after y of ranks \
0, 1, 2 on rank 1, which comes after x of ranks 0, 1 on rank 0; let all ranks call them in one order
    """
    numbered: dict[int, list[tuple[frozenset[int], int]]] = {}
    names: dict[tuple[frozenset[int], int], tuple[str, int]] = {}
    counts: dict[frozenset[int], dict[int, int]] = defaultdict(dict)
    for rank, sequence in calls.items():
        done: dict[frozenset[int], int] = defaultdict(int)
        numbered[rank] = []
        for group, name in sequence:
            if rank not in group:
                raise VerificationError(f"rank {rank} calls {name} of {_ranks(group)}, to which it does not belong")
            event = (group, done[group])
            done[group] += 1
            known, first = names.setdefault(event, (name, rank))
            if known != name:
                raise VerificationError(
                    f"call {event[1]} of {_ranks(group)} is {known} on rank {first} and {name} on rank {rank}; "
                    "all of a group call the same"
                )
            numbered[rank].append(event)
        for group, count in done.items():
            counts[group][rank] = count
    for group, by_rank in counts.items():
        most = max(by_rank.values())
        for rank in sorted(group):
            if by_rank.get(rank, 0) < most:
                name = names[group, by_rank.get(rank, 0)][0]
                raise VerificationError(
                    f"rank {rank} never calls {name} of {_ranks(group)}, call {by_rank.get(rank, 0)} of that "
                    "group; the others would wait for it"
                )
    _check_no_circle(numbered, names)
    return len(names)


def _check_no_circle(
    numbered: Mapping[int, Sequence[tuple[frozenset[int], int]]],
    names: Mapping[tuple[frozenset[int], int], tuple[str, int]],
) -> None:
    place = dict.fromkeys(numbered, 0)
    arrived: dict[tuple[frozenset[int], int], set[int]] = defaultdict(set)
    ready = list(numbered)
    while ready:  # every rank goes on as far as it can; a call is over when its whole group is in it
        rank = ready.pop()
        if place[rank] == len(numbered[rank]):
            continue
        event = numbered[rank][place[rank]]
        arrived[event].add(rank)
        if arrived[event] == event[0]:
            for member in event[0]:
                place[member] += 1
                ready.append(member)
    stuck = [rank for rank in numbered if place[rank] < len(numbered[rank])]
    if not stuck:
        return
    # Who stands in a call waits for a member that stands in another one: following them leads into a circle.
    rank, path = stuck[0], list[int]()
    while rank not in path:
        path.append(rank)
        event = numbered[rank][place[rank]]
        rank = min(event[0] - arrived[event])
    path = path[path.index(rank) :]
    parts = []
    for position, member in enumerate(path):
        event, after = numbered[member][place[member]], path[(position + 1) % len(path)]
        parts.append((_said(names, event), after))
    text = parts[0][0]
    for (_, blocker), (following, _) in zip(parts, [*parts[1:], parts[0]], strict=True):
        text += f" comes after {following} on rank {blocker}, which"
    raise VerificationError(
        f"collectives wait for each other: {text.removesuffix(', which')}; let all ranks call them in one order"
    )


def _said(names: Mapping[tuple[frozenset[int], int], tuple[str, int]], event: tuple[frozenset[int], int]) -> str:
    return f"{names[event][0]} of {_ranks(event[0])}"


def _ranks(group: frozenset[int]) -> str:
    return f"ranks {', '.join(map(str, sorted(group)))}"
