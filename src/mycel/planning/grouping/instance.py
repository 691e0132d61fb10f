"""Sequences of one step, the ranks they run on, and which groups of ranks may share a sequence: what is planned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.names import nearest

__all__ = ["Candidate", "SequenceInstance"]

#: What an instance may hold at most: more is a mistake, or meant to keep somebody busy.
_MOST_SEQUENCES, _MOST_RANKS, _MOST_CANDIDATES, _MOST_TOKENS = 1 << 16, 1 << 14, 1 << 14, 1 << 40
_KEYS = {"num_ranks", "capacity_tokens", "compute", "lengths", "degrees", "groups", "max_micro_batches"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group that may share sequences.

    Attributes:
        size: ranks in it, its degree.
        comm_us_per_token: what it exchanges for a token of a sequence, in microseconds.
        ranks: which; ``None`` where any ranks that nobody else takes will do.
    """

    size: int
    comm_us_per_token: float
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None and (len(self.ranks) != self.size or len(set(self.ranks)) != self.size):
            raise UsageError(f"group of ranks {list(self.ranks)}: it needs {self.size} different ranks")


@dataclass(frozen=True, kw_only=True)
class SequenceInstance:
    """One step's sequences and what they cost.

    A group of ``d`` ranks takes ``us_per_step + sum((us_per_token2 s^2 + us_per_token s) / d + comm s)`` over its
    sequences of ``s`` tokens, and holds ``d * capacity_tokens``. A micro-batch takes as long as its slowest group,
    a step the sum of its micro-batches; ranks may stay idle.

    Attributes:
        num_ranks: of the job.
        capacity_tokens: that one rank holds.
        us_per_token2: attention, in microseconds for the square of a token.
        us_per_token: all else, in microseconds a token.
        us_per_step: of a micro-batch, whatever is in it, in microseconds.
        lengths: tokens of each sequence.
        candidates: groups to choose from; of a size each where ``ranks`` is ``None``, else exactly these.
        max_micro_batches: into which the step may be cut.

    Raises:
        UsageError: something is zero, negative or no number, a candidate names ranks that are not there, or a
            sequence is longer than any group holds; the message says which, and what is missing.

    References:
        Y. Wang et al., "FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism",
        ASPLOS 2025, section 4 (the problem; here groups may also be those of a topology).

    Examples:
        >>> pair = SequenceInstance(
        ...     num_ranks=2, capacity_tokens=100, us_per_token2=0.0, us_per_token=1.0, us_per_step=10.0,
        ...     lengths=(150, 30), candidates=(Candidate(size=2, comm_us_per_token=0.5),),
        ... )
        >>> pair.cost(0, pair.candidates[0])
        150.0
    """

    num_ranks: int
    capacity_tokens: int
    us_per_token2: float
    us_per_token: float
    us_per_step: float
    lengths: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    max_micro_batches: int = 1

    __repr__ = brief

    def __post_init__(self) -> None:
        _whole(self.num_ranks, "num_ranks", most=_MOST_RANKS)
        _whole(self.capacity_tokens, "capacity_tokens", most=_MOST_TOKENS)
        _whole(self.max_micro_batches, "max_micro_batches", most=1 << 10)
        for name in ("us_per_token2", "us_per_token", "us_per_step"):
            _rate(getattr(self, name), f"compute.{name}")
        if self.us_per_token2 == 0 and self.us_per_token == 0:
            raise UsageError("compute: us_per_token2 and us_per_token are both 0: sequences must take time")
        if not self.lengths:
            raise UsageError("lengths: there are no sequences")
        if len(self.lengths) > _MOST_SEQUENCES:
            raise UsageError(f"lengths: {len(self.lengths)} sequences; at most {_MOST_SEQUENCES} are planned at once")
        for index, length in enumerate(self.lengths):
            _whole(length, f"lengths[{index}]", most=_MOST_TOKENS)
        self._check_candidates()
        self._check_room()

    def _check_candidates(self) -> None:
        if not self.candidates:
            raise UsageError("there is no group to choose: give degrees, or groups with their ranks")
        if len(self.candidates) > _MOST_CANDIDATES:
            raise UsageError(f"{len(self.candidates)} groups to choose from; at most {_MOST_CANDIDATES}")
        seen: set[object] = set()
        named = self.candidates[0].ranks is not None
        for candidate in self.candidates:
            where = (
                f"degree {candidate.size}" if candidate.ranks is None else f"group of ranks {list(candidate.ranks)}"
            )
            if (candidate.ranks is not None) != named:
                raise UsageError(f"{where}: some groups name their ranks and some do not: say all or none")
            _rate(candidate.comm_us_per_token, f"{where}: microseconds a token")
            _whole(candidate.size, f"{where}: its size", most=_MOST_RANKS)
            if candidate.size > self.num_ranks:
                raise UsageError(f"{where}: no set of {self.num_ranks} ranks has so many")
            unknown = [rank for rank in candidate.ranks or () if not 0 <= rank < self.num_ranks]
            if unknown:
                raise UsageError(f"{where}: there is no rank {unknown[0]}; ranks go from 0 to {self.num_ranks - 1}")
            key = candidate.size if candidate.ranks is None else frozenset(candidate.ranks)
            if key in seen:
                raise UsageError(f"{where}: it is there twice: leave one away")
            seen.add(key)

    def _check_room(self) -> None:
        largest = max(candidate.size for candidate in self.candidates)
        longest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        over = self.lengths[longest] - largest * self.capacity_tokens
        if over > 0:
            needed = -(-self.lengths[longest] // self.capacity_tokens)
            raise UsageError(
                f"lengths[{longest}]: {self.lengths[longest]} tokens, and the largest group, {largest} ranks, holds "
                f"{largest * self.capacity_tokens}: {over} too many. A group of {needed} ranks would hold it "
                f"({needed - largest} more), or capacity_tokens of {-(-self.lengths[longest] // largest)}"
            )
        room = self.num_ranks * self.capacity_tokens
        least = -(-sum(self.lengths) // room)
        if least > self.max_micro_batches:
            raise UsageError(
                f"{sum(self.lengths)} tokens in all, and {self.num_ranks} ranks hold {room} at a time: it takes at "
                f"least {least} micro-batches; max_micro_batches is {self.max_micro_batches}"
            )

    @property
    def has_named_ranks(self) -> bool:
        """Whether candidates are exact sets of ranks, and not any ranks of a number."""
        return self.candidates[0].ranks is not None

    @cached_property
    def kinds(self) -> tuple[tuple[int, float], ...]:
        """Size and cost of a token, of groups that differ in one of them; small and cheap ones first."""
        return tuple(sorted({(c.size, float(c.comm_us_per_token)) for c in self.candidates}))

    def cost(self, sequence: int, candidate: Candidate) -> float:
        """Microseconds that a sequence adds to a group's time.

        Args:
            sequence: its index.
            candidate: the group.
        """
        return self._cost(self.lengths[sequence], candidate.size, candidate.comm_us_per_token)

    def _cost(self, tokens: int, size: int, comm: float) -> float:
        return (self.us_per_token2 * tokens * tokens + self.us_per_token * tokens) / size + comm * tokens

    # -- JSON -------------------------------------------------------------------------------------------------

    @classmethod
    def from_json(cls, data: Any, *, source: str = "instance") -> SequenceInstance:
        """The instance that a JSON object says.

        Args:
            data: the object: ``num_ranks, capacity_tokens, compute {us_per_token2, us_per_token, us_per_step},
                lengths, degrees {"d": us a token}`` or ``groups [{ranks, comm_us_per_token}], max_micro_batches``.
            source: the file, for messages.

        Raises:
            UsageError: it says none; the message names the key.
        """
        if not isinstance(data, Mapping):
            raise UsageError(f"{source}: no instance: expected a JSON object, got {type(data).__name__}")
        try:
            return cls._read(data)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    @classmethod
    def parse(cls, text: str, *, source: str = "instance") -> SequenceInstance:
        """The instance in a text.

        Args:
            text: JSON.
            source: the file, for messages.

        Raises:
            UsageError: it is no JSON, or no instance.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{source}: no instance: not JSON ({error})") from None
        return cls.from_json(data, source=source)

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> SequenceInstance:
        if data.get("version", 1) != 1:
            raise UsageError(f"version {data['version']!r}: this mycel reads version 1")
        missing = [key for key in sorted(_KEYS) if key not in data]
        if "degrees" in data or "groups" in data:
            missing = [key for key in missing if key not in ("degrees", "groups")]
        for key in data:  # others tell people something; one that is nearly a key that is missing was meant to be it
            if key not in _KEYS and (meant := nearest(str(key), missing)):
                raise UsageError(f"unknown key {key!r}{meant}")
        compute = data.get("compute")
        if not isinstance(compute, Mapping):
            raise UsageError("compute: expected an object with us_per_token2, us_per_token and us_per_step")
        for name in ("num_ranks", "capacity_tokens", "lengths"):
            if name not in data:
                raise UsageError(f"there is no {name}")
        if not isinstance(data["lengths"], list):
            raise UsageError("lengths: expected a list of whole numbers of tokens")
        return cls(
            num_ranks=data["num_ranks"],
            capacity_tokens=data["capacity_tokens"],
            us_per_token2=_given(compute, "us_per_token2"),
            us_per_token=_given(compute, "us_per_token"),
            us_per_step=_given(compute, "us_per_step"),
            lengths=tuple(data["lengths"]),
            candidates=_candidates(data),
            max_micro_batches=data.get("max_micro_batches", 1),
        )

    def to_json(self) -> dict[str, Any]:
        """The same as an object that ``from_json`` reads."""
        data: dict[str, Any] = {
            "version": 1,
            "num_ranks": self.num_ranks,
            "capacity_tokens": self.capacity_tokens,
            "compute": {
                "us_per_token2": self.us_per_token2,
                "us_per_token": self.us_per_token,
                "us_per_step": self.us_per_step,
            },
            "lengths": list(self.lengths),
            "max_micro_batches": self.max_micro_batches,
        }
        if self.has_named_ranks:
            data["groups"] = [
                {"ranks": list(c.ranks or ()), "comm_us_per_token": c.comm_us_per_token} for c in self.candidates
            ]
        else:
            data["degrees"] = {str(c.size): c.comm_us_per_token for c in self.candidates}
        return data


def _candidates(data: Mapping[str, Any]) -> tuple[Candidate, ...]:
    degrees, groups = data.get("degrees"), data.get("groups")
    if (degrees is None) == (groups is None):
        raise UsageError("give either degrees or groups, and not both")
    if degrees is not None:
        if not isinstance(degrees, Mapping):
            raise UsageError('degrees: expected an object of microseconds a token by size, such as {"2": 6.5}')
        for size in degrees:
            if not (isinstance(size, str) and size.isascii() and size.isdigit() and len(size) < 10):
                raise UsageError(f"degrees: {size!r} is no number of ranks")
        return tuple(Candidate(size=int(size), comm_us_per_token=cost) for size, cost in degrees.items())
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise UsageError("groups: expected a list of objects with ranks and comm_us_per_token")
    found = []
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("ranks"), list):
            raise UsageError(f"groups[{index}]: expected an object with ranks and comm_us_per_token")
        ranks = group["ranks"]
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, int):
                raise UsageError(f"groups[{index}]: {rank!r} is no rank")
        if not ranks:
            raise UsageError(f"groups[{index}]: it has no ranks")
        cost = _given(group, "comm_us_per_token")
        found.append(Candidate(size=len(ranks), comm_us_per_token=cost, ranks=tuple(ranks)))
    return tuple(found)


def _given(data: Mapping[str, Any], key: str) -> Any:
    if key not in data:
        raise UsageError(f"there is no {key}")
    return data[key]


def _whole(value: object, name: str, *, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} is {value!r}; it must be a whole number")
    if not 1 <= value <= most:
        raise UsageError(f"{name} is {value}; it must be from 1 to {most}")


def _rate(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise UsageError(f"{name} is {value!r}; it must be a number")
    if not 0 <= value <= 1e15:
        raise UsageError(f"{name} is {value}; it must be from 0 to 1e15")
