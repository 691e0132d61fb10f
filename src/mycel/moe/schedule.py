"""How one call of a layer is carried out, and what it may be chosen from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["ExpertSchedule", "Partition", "Tuner"]

#: What a chunk is: some tokens, or some experts of every rank.
Partition = Literal["tokens", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ExpertSchedule:
    """How one call is carried out; alike on all ranks. Results differ by rounding only.

    Attributes:
        r: degree of parallelism, one of ``ExpertLayout.ways``.
        degree: chunks whose exchanges overlap other chunks' experts.
        algorithm: of the exchange, a key of ``mycel.moe.dispatch.DISPATCHERS``; not looked at where ``r`` is 0.
        partition: what a chunk is.

    Raises:
        UsageError: fewer than one chunk, or an unknown partition.

    Examples:
        >>> from mycel.moe import MoE
        >>> MoE(dim=4, hidden=8, num_experts=2).routed.default  # of a layer whose experts are all on this rank
        ExpertSchedule(r=1, degree=1, algorithm='local', partition='tokens')
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """What a layer may choose from, and how much it tries.

    Attributes:
        ways: degrees of parallelism; ``None``: all.
        degrees: numbers of chunks.
        algorithms: exchanges; ``None``: all that the mesh and codec allow.
        partitions: what chunks are made of.
        finalists: schedules of a bucket that are measured, the best by prediction.
        trials: measured steps of each of them; the first one that a schedule ever has does not count.
        give_up: a finalist this much slower than the best after one step is not tried again.
        same_load: every rank's calls bring equally many tokens: the call need not ask the others.
        file: where choices are read from, if it is there, and written to by the first rank.

    Raises:
        UsageError: nothing to choose from, or no trial.

    Examples:
        >>> import torch
        >>> from mycel.moe import ExpertParallel, MoE
        >>> layer = MoE(dim=4, hidden=8, num_experts=2, parallel=ExpertParallel(tuner=Tuner(trials=1)))
        >>> _ = layer(torch.randn(16, 4))  # its first call of this load, which does not count
        >>> layer.explain().splitlines()[-1]
        '<= 16 tokens x 2 train   still trying'
    """

    ways: tuple[int, ...] | None = None
    degrees: tuple[int, ...] = (1, 2, 4)
    algorithms: tuple[str, ...] | None = None
    partitions: tuple[Partition, ...] = ("tokens",)
    finalists: int = 4
    trials: int = 2
    give_up: float = 1.3
    same_load: bool = False
    file: Path | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        if min(self.finalists, self.trials, len(self.degrees), len(self.partitions)) < 1 or self.give_up < 1:
            raise UsageError("Tuner: finalists, trials, degrees, partitions and give_up must all be at least 1")
