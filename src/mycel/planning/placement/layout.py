"""Where experts lie, so that one layout of parameters serves every degree of parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from mycel.errors import UsageError

__all__ = ["ExpertLayout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Teams of ``S`` consecutive ranks share experts; each member has a slice of each of the team's experts.

    What a call does with that is its ``r``. Members of a team stand in ``S/r`` consecutive parties of ``r``. A party
    has its experts whole: each member puts ``S/r`` slices together, its own and those of the members at its place in
    the other parties. A token is sent to all members of one party, which add up to its expert's answer.

    ====================  =======================  ==================  ================
    ``r``                 weights that travel      copies of a token   known as
    ====================  =======================  ==================  ================
    0                     all experts, to all      none                data parallel
    1                     the team's, within it    1                   expert + data
    between               ``S/r`` slices           r                   expert + data + tensor
    S                     none                     S                   expert + model
    ====================  =======================  ==================  ================

    Attributes:
        num_experts: E.
        num_ranks: W.
        tensor_shards: S; 1 where every expert is whole on one rank.

    Raises:
        UsageError: S does not divide W.

    References:
        Hwang et al., "Tutel", MLSys 2023 (one layout for all degrees of parallelism).

    Examples:
        >>> layout = ExpertLayout(num_experts=2, num_ranks=8, tensor_shards=4)
        >>> layout.of(5), layout.ways
        (range(1, 2), (0, 1, 2, 4))
        >>> layout.members(5, r=2)  # whose slices rank 5 puts together
        (5, 7)
    """

    num_experts: int
    num_ranks: int
    tensor_shards: int = 1

    def __post_init__(self) -> None:
        if self.tensor_shards < 1 or self.num_ranks % self.tensor_shards:
            raise UsageError(f"{self.tensor_shards} shards of an expert do not divide {self.num_ranks} ranks")

    @property
    def num_teams(self) -> int:
        """W/S."""
        return self.num_ranks // self.tensor_shards

    @property
    def width(self) -> int:
        """Experts of a team that has its full share."""
        return -(-self.num_experts // self.num_teams)

    @property
    def num_slots(self) -> int:
        """Places that routes can lead to: experts, or, where ranks share them, ``width`` for every rank."""
        return self.num_experts if self.tensor_shards == 1 else self.num_ranks * self.width

    @property
    def ways(self) -> tuple[int, ...]:
        """Every ``r`` there is."""
        return (0, *(r for r in range(1, self.tensor_shards + 1) if self.tensor_shards % r == 0))

    def of(self, rank: int) -> range:
        """Experts of a rank, whole or in part."""
        first = min(self.num_experts, rank // self.tensor_shards * self.width)
        return range(first, min(self.num_experts, first + self.width))

    def members(self, rank: int, *, r: int) -> tuple[int, ...]:
        """Ranks that put their slices together, ``rank`` among them."""
        if r == 0:
            return tuple(range(self.num_ranks))
        first = rank // self.tensor_shards * self.tensor_shards
        return tuple(first + place for place in range(rank % r, self.tensor_shards, r))

    def checked(self, r: int) -> int:
        """``r``.

        Raises:
            UsageError: it is none of ``ways``.
        """
        if r not in self.ways:
            ways = ", ".join(str(way) for way in self.ways)
            raise UsageError(f"r = {r} with {self.tensor_shards} shards of an expert; expected one of {ways}")
        return r
