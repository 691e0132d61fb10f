"""A plan of one iteration: what happens to each block, and when everything begins."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["POLICIES", "Action", "MemoryPlan", "Policy", "Step"]

Policy = Literal["keep", "swap", "recompute", "recompute_swap"]
Action = Literal["forward", "backward", "recompute", "out", "in"]
#: What can happen to a block, in the order in which compiled loops number it.
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Something that begins.

    Attributes:
        action: what.
        block: of which block, from 0.
        start_us: when, in microseconds.
    """

    action: Action
    block: int
    start_us: int

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise UsageError(f"action {self.action!r}: one of {', '.join(get_args(Action))}")
        if self.block < 0 or self.start_us < 0:
            raise UsageError(f"{self.action} of block {self.block} at {self.start_us} us: nothing is below 0")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What is kept, moved and computed again, and how good that is.

    Attributes:
        policy: of each block.
        schedule: by start.
        iteration_us: until the last backward ends, in microseconds.
        lower_bound_us: that no plan is below.
        source: what found it.
        interrupted: whether Ctrl-C ended the search for a better one.

    Examples:
        >>> steps = (Step(action="forward", block=0, start_us=0), Step(action="backward", block=0, start_us=10))
        >>> MemoryPlan(policy=("keep",), schedule=steps, iteration_us=30, lower_bound_us=30).proved
        True
    """

    policy: tuple[Policy, ...]
    schedule: tuple[Step, ...]
    iteration_us: int
    lower_bound_us: int
    source: str = ""
    interrupted: bool = False

    __repr__ = brief

    def __post_init__(self) -> None:
        for index, each in enumerate(self.policy):
            if each not in POLICIES:
                raise UsageError(f"policy of block {index}: {each!r} is none of {', '.join(POLICIES)}")
        if self.lower_bound_us > self.iteration_us:
            raise UsageError(f"a plan of {self.iteration_us} us is below its bound of {self.lower_bound_us} us")

    @property
    def proved(self) -> bool:
        """Whether no plan is better."""
        return self.lower_bound_us == self.iteration_us

    @property
    def counts(self) -> dict[str, int]:
        """Blocks of each policy."""
        found = Counter(self.policy)
        return {policy: found[policy] for policy in POLICIES if found[policy]}

    def to_json(self) -> dict[str, Any]:
        """As ``mycel plan memory --json`` prints it."""
        return {
            "version": 1,
            "iteration_us": self.iteration_us,
            "lower_bound_us": self.lower_bound_us,
            "proved": self.proved,
            "source": self.source,
            "interrupted": self.interrupted,
            "policy": list(self.policy),
            "schedule": [{"action": s.action, "block": s.block, "start_us": s.start_us} for s in self.schedule],
        }

    @classmethod
    def from_json(cls, data: Any) -> MemoryPlan:
        """The plan that a JSON object says.

        Args:
            data: as ``to_json`` writes it.

        Raises:
            UsageError: it says none.
        """
        try:
            if data.get("version", 1) != 1:
                raise UsageError(f"plan of version {data['version']!r}: this mycel reads version 1")
            steps = tuple(
                Step(action=s["action"], block=int(s["block"]), start_us=int(s["start_us"])) for s in data["schedule"]
            )
            policy, iteration = tuple(data["policy"]), int(data["iteration_us"])
            bound = int(data["lower_bound_us"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"no plan of memory: {type(error).__name__} {error}") from None
        return cls(
            policy=policy,
            schedule=steps,
            iteration_us=iteration,
            lower_bound_us=bound,
            source=str(data.get("source", "")),
            interrupted=bool(data.get("interrupted", False)),
        )
