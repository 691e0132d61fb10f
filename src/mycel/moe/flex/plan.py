"""How one call of a layer is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["Partition", "Plan"]

#: What a chunk is: some tokens, or some experts of every rank.
Partition = Literal["tokens", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Plan:
    """How one call is carried out; alike on all ranks. Results differ by rounding only.

    Attributes:
        r: degree of parallelism, one of ``ExpertLayout.ways``.
        degree: chunks whose exchanges overlap other chunks' experts.
        algorithm: of the exchange, a key of ``mycel.moe.dispatch.DISPATCHERS``; not looked at where ``r`` is 0.
        partition: what a chunk is.

    Raises:
        UsageError: fewer than one chunk, or an unknown partition.
    """

    r: int
    degree: int
    algorithm: str
    partition: Partition = "tokens"

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise UsageError(f"degree {self.degree}; expected at least 1 chunk")
        if self.partition not in get_args(Partition):
            raise UsageError(f"partition {self.partition!r}; expected 'tokens' or 'experts'")
