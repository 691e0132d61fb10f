"""A plan of one step: which ranks share which sequences, in which micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["PlannedGroup", "SequencePlan"]

#: Part of the time by which plan and bound may differ where the plan is called proved: costs are rounded to it.
PROVED = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group at work.

    Attributes:
        micro_batch: in which.
        ranks: that share each of the sequences.
        sequences: indices of their lengths.
    """

    micro_batch: int
    ranks: tuple[int, ...]
    sequences: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.micro_batch < 0 or not self.ranks or not self.sequences:
            raise UsageError("a group of a plan has a micro-batch from 0, ranks and sequences")


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Groups of one step and how good they are.

    Attributes:
        groups: by micro-batch, then by their ranks.
        total_us: that the step takes, in microseconds.
        lower_bound_us: that no plan is below.
        source: what found it.
        interrupted: whether Ctrl-C ended the search for a better one.

    Examples:
        >>> one = PlannedGroup(micro_batch=0, ranks=(0, 1), sequences=(0,))
        >>> SequencePlan(groups=(one,), total_us=10.0, lower_bound_us=10.0).proved
        True
    """

    groups: tuple[PlannedGroup, ...]
    total_us: float
    lower_bound_us: float
    source: str = ""
    interrupted: bool = False

    __repr__ = brief

    def __post_init__(self) -> None:
        if not self.lower_bound_us <= self.total_us * (1 + 1e-9):
            raise UsageError(f"a plan of {self.total_us} us is below its bound of {self.lower_bound_us} us")

    @property
    def proved(self) -> bool:
        """Whether no plan is better, up to a hundred-thousandth."""
        return self.gap <= PROVED

    @property
    def gap(self) -> float:
        """Part of the time by which a better plan could be shorter, at most."""
        return max(0.0, 1 - self.lower_bound_us / self.total_us)

    @property
    def num_micro_batches(self) -> int:
        """Of the step."""
        return 1 + max(group.micro_batch for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        """As ``mycel plan sequences --json`` prints it."""
        return {
            "version": 1,
            "total_us": self.total_us,
            "lower_bound_us": self.lower_bound_us,
            "proved": self.proved,
            "source": self.source,
            "interrupted": self.interrupted,
            "groups": [
                {"micro_batch": g.micro_batch, "ranks": list(g.ranks), "sequences": list(g.sequences)}
                for g in self.groups
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> SequencePlan:
        """The plan that a JSON object says.

        Args:
            data: as ``to_json`` writes it.

        Raises:
            UsageError: it says none.
        """
        try:
            if data.get("version", 1) != 1:
                raise UsageError(f"plan of version {data['version']!r}: this mycel reads version 1")
            groups = tuple(
                PlannedGroup(
                    micro_batch=int(g.get("micro_batch", 0)),
                    ranks=tuple(map(int, g["ranks"])),
                    sequences=tuple(map(int, g["sequences"])),
                )
                for g in data["groups"]
            )
            total, bound = float(data["total_us"]), float(data["lower_bound_us"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"no plan of sequences: {type(error).__name__} {error}") from None
        return cls(
            groups=groups,
            total_us=total,
            lower_bound_us=bound,
            source=str(data.get("source", "")),
            interrupted=bool(data.get("interrupted", False)),
        )
