"""Collectives as data: which rank holds what before, and which contributions it must hold after.

The array of a collective is the whole of it, as nccl-tests counts: for an all_gather over N ranks of one shard
each it is N shards long. It is divided into *blocks*; a block is what one rank owns (all_gather,
reduce_scatter), or the whole array (all_reduce, broadcast, reduce). gather and scatter have a block a rank as well.

all_to_all has a block a pair of ranks: block ``s * N + d`` goes from rank s to rank d. The array of that is N times
what a rank gives and gets; sizes and bandwidths that people see count one rank's part of it (``num_parts``).

Blocks are of one size unless ``weights`` say how they relate: the v forms of other libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import gcd
from numbers import Integral
from typing import Literal, get_args

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.names import spelled
from mycel.topology.model import Topology

__all__ = [
    "COLLECTIVES",
    "POINTED",
    "ROOTED",
    "UNEVEN",
    "Collective",
    "CollectiveName",
    "as_collective",
    "permutation",
]

CollectiveName = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all", "gather", "scatter"
]

#: Collectives that schedules can express so far.
COLLECTIVES: tuple[CollectiveName, ...] = get_args(CollectiveName)

#: Collectives that combine or copy nothing: every byte goes from one rank to one other.
POINTED: tuple[CollectiveName, ...] = ("all_to_all", "gather", "scatter")
#: Collectives with a root.
ROOTED: tuple[CollectiveName, ...] = ("broadcast", "reduce", "gather", "scatter")
#: Collectives whose blocks may differ in size: each block is one rank's, or goes from one rank to one other.
UNEVEN: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
#: Weights up to which a message names each of them.
_SPOKEN = 16
#: Sum of weights in lowest terms; thousands of times that are still whole numbers in floating point.
_MOST_WEIGHT = 1 << 40
_A_BLOCK_A_RANK = ("all_gather", "reduce_scatter", "gather", "scatter")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective operation over ranks ``0 .. num_ranks-1``.

    Attributes:
        name: one of ``COLLECTIVES``.
        num_ranks: world size, at least 2.
        root: the rank that has (broadcast, scatter) or gets (reduce, gather) the array; ``None`` for the others.
        weights: relative sizes of the blocks, whole numbers, 0 for a block of nothing; kept in lowest terms. ``None``
            stands for equal blocks, however they were given.

    Raises:
        UsageError: unknown name, too few ranks, a root missing, superfluous or out of range; weights for a collective
            without blocks, too few or too many, negative, above 2^40 in all, or none that has to move.

    Examples:
        >>> Collective("all_gather", 3, weights=(4, 2, 0)).weights
        (2, 1, 0)
        >>> print(Collective("all_gather", 3, weights=(5, 5, 5)).weights)
        None
    """

    name: CollectiveName
    num_ranks: int
    _: KW_ONLY
    root: int | None = None
    weights: tuple[int, ...] | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", spelled(self.name, COLLECTIVES, "collective"))
        if isinstance(self.num_ranks, bool) or not isinstance(self.num_ranks, Integral):
            raise UsageError(f"{self.name} over {self.num_ranks!r}: num_ranks is a whole number")
        if self.num_ranks < 2:
            raise UsageError(f"{self.name} over {self.num_ranks} rank(s); at least 2 are needed")
        if (self.name in ROOTED) != (self.root is not None):
            raise UsageError(f"{self.name} {'needs a root' if self.root is None else 'has no root'}")
        if self.root is not None and not 0 <= self.root < self.num_ranks:
            raise UsageError(f"{self.name}: root {self.root} is not among ranks 0..{self.num_ranks - 1}")
        if self.weights is not None:
            self._check_weights(self.weights)
            shared = gcd(*self.weights)
            lowest = tuple(weight // shared for weight in self.weights)
            if sum(lowest) > _MOST_WEIGHT:
                raise UsageError(f"{self.name}: in lowest terms, weights add up to more than {_MOST_WEIGHT}")
            object.__setattr__(self, "weights", None if set(lowest) == {1} else lowest)

    def _check_weights(self, weights: tuple[int, ...]) -> None:
        if self.name not in UNEVEN:
            raise UsageError(f"{self.name} has one array and no blocks to weigh; weights are for {', '.join(UNEVEN)}")
        if len(weights) != self.num_blocks:
            what = "a pair of ranks, row by row" if self.name == "all_to_all" else "a rank"
            raise UsageError(
                f"{self.name} over {self.num_ranks} ranks needs {self.num_blocks} weights, one {what}; "
                f"got {len(weights)}"
            )
        for block, weight in enumerate(weights):
            if isinstance(weight, bool) or not isinstance(weight, int) or weight < 0:
                raise UsageError(
                    f"{self.name}: weight {weight!r} of block {block}; weights are whole numbers, at least 0"
                )
        stays = range(0, self.num_blocks, self.num_ranks + 1) if self.root is None else (self.root,)
        moves = sum(weights) - (sum(weights[block] for block in stays) if self.name in POINTED else 0)
        if not moves:
            raise UsageError(f"{self.name}: no block that has to move has a weight above 0")

    @property
    def is_permutation(self) -> bool:
        """Whether each rank has one block, for one other, at most, and gets one; all of one size."""
        if self.name != "all_to_all" or self.weights is None or max(self.weights) > 1:
            return False
        n = self.num_ranks
        rows = [self.weights[row * n : (row + 1) * n] for row in range(n)]
        return all(sum(row) <= 1 for row in (*rows, *zip(*rows, strict=True)))

    @property
    def block_weights(self) -> tuple[int, ...]:
        """Relative size of every block; ones where they are equal."""
        return (1,) * self.num_blocks if self.weights is None else self.weights

    @property
    def total_weight(self) -> int:
        """Sum of ``block_weights``: the least number of equal units that blocks are whole numbers of."""
        return self.num_blocks if self.weights is None else sum(self.weights)

    @property
    def num_blocks(self) -> int:
        """Into how many blocks the array falls: one a rank where ranks own parts, one a pair, or one."""
        if self.name == "all_to_all":
            return self.num_ranks**2
        return self.num_ranks if self.name in _A_BLOCK_A_RANK else 1

    @property
    def num_parts(self) -> int:
        """How many times the size that people mean fits into the array: N for all_to_all, whose size is a rank's."""
        return self.num_ranks if self.name == "all_to_all" else 1

    @property
    def blocks_in_words(self) -> str:
        """`` (blocks 2 : 1 : 1)`` for messages; of many, how far they differ; empty where they are equal."""
        if self.weights is None:
            return ""
        if len(self.weights) <= _SPOKEN:
            return f" (blocks {' : '.join(map(str, self.weights))})"
        return f" ({len(self.weights)} blocks, weights from {min(self.weights)} to {max(self.weights)})"

    def to_text(self) -> str:
        """The operation in a line, as the text forms of schedules and programs have it."""
        root = "" if self.root is None else f" root {self.root}"
        weights = "" if self.weights is None else f" weights {','.join(map(str, self.weights))}"
        return f"{self.name} {self.num_ranks}{root}{weights}"

    @property
    def reduces(self) -> bool:
        """Whether contributions are combined."""
        return self.name in ("reduce_scatter", "all_reduce", "reduce")

    def holder(self, block: int) -> int | None:
        """The only rank that has a contribution to ``block`` before; ``None``: every rank has its own."""
        if self.name in ("all_gather", "gather"):
            return block
        if self.name == "all_to_all":
            return block // self.num_ranks
        return self.root if self.name in ("broadcast", "scatter") else None

    def taker(self, block: int) -> int | None:
        """The only rank that must hold something of ``block`` after; ``None``: every rank must."""
        if self.name in ("reduce_scatter", "scatter"):
            return block
        if self.name == "all_to_all":
            return block % self.num_ranks
        return self.root if self.name in ("reduce", "gather") else None

    def initial(self, rank: int, block: int) -> frozenset[int]:
        """Whose contribution to ``block`` rank ``rank`` holds before: its own, or nothing."""
        return frozenset({rank}) if self.holder(block) in (None, rank) else frozenset()

    def required(self, rank: int, block: int) -> frozenset[int] | None:
        """Whose contributions, once each, rank ``rank`` must hold after; ``None``: anything may be there."""
        if self.taker(block) not in (None, rank):
            return None
        holder = self.holder(block)
        return frozenset(range(self.num_ranks)) if self.reduces or holder is None else frozenset({holder})


def permutation(targets: Sequence[int | None]) -> Collective:
    """One block from each rank to one other: an all_to_all all of whose other blocks are empty.

    Args:
        targets: of each rank the one that gets its block; ``None``, or itself: none does. None of them twice.

    Raises:
        UsageError: a rank that there is not, one that gets two blocks, or nothing to move.

    Examples:
        >>> permutation([1, 2, 0]).weights  # row by row: who sends
        (0, 1, 0, 0, 0, 1, 1, 0, 0)
    """
    size = len(targets)
    weights, taken = [0] * (size * size), dict[int, int]()
    for source, target in enumerate(targets):
        if target is None or target == source:
            continue
        if isinstance(target, bool) or not isinstance(target, Integral) or not 0 <= target < size:
            raise UsageError(f"permutation: rank {source} sends to {target!r}; ranks are 0 to {size - 1}")
        if target in taken:
            raise UsageError(f"permutation: ranks {taken[target]} and {source} both send to rank {target}")
        taken[target] = source
        weights[source * size + target] = 1
    return Collective("all_to_all", size, weights=tuple(weights))


def as_collective(wanted: Collective | CollectiveName, num_ranks: int) -> Collective:
    """A collective by its name alone, over so many ranks; what is a collective already stays as it is.

    Args:
        wanted: a collective, or one of ``COLLECTIVES``; one with a root has it at rank 0 then.
        num_ranks: of the fabric.

    Raises:
        UsageError: an unknown name, or neither a name nor a collective.

    Examples:
        >>> as_collective("broadcast", 4).to_text()
        'broadcast 4 root 0'
    """
    if isinstance(wanted, Collective):
        return wanted
    if not isinstance(wanted, str):
        raise UsageError(
            f"{type(wanted).__name__} is no collective: give one of {', '.join(COLLECTIVES)}, or a mycel.Collective"
        )
    name: CollectiveName = spelled(wanted, COLLECTIVES, "collective")  # type: ignore[assignment]
    return Collective(name, num_ranks, root=0 if name in ROOTED else None)


def check_ranks(topology: Topology, collective: Collective) -> None:
    """Refuse a collective over other ranks than a topology has.

    Raises:
        UsageError: their numbers differ.
    """
    if collective.num_ranks != topology.num_ranks:
        ranks = f"{collective.name} over {collective.num_ranks} ranks"
        raise UsageError(f"{ranks}, but {topology.name} has {topology.num_ranks}")
