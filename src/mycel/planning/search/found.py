"""What a search gives: the best way to train, those behind it, what was refused and why, and how good the best is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.planning.job import Job
from mycel.planning.predict import Prediction

__all__ = ["Candidate", "Found", "Refusal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train, with every rank and every layer in its place.

    Attributes:
        job: degrees, batch, recomputation, sharding.
        ranks: of the cluster at every place of the mesh: tensor parallelism is innermost, then context, data, and the
            pipeline outermost.
        cut: layers of each stage, in order of execution; the first has the embedding too, the last one norm and head.
        seconds: of a step, with the error seen of such predictions.
        stage_seconds: forward and backward of one micro-batch on each stage, with what is done again and exchanges
            inside the stage, on the slowest of its ranks.
        memory: bytes that each rank of the cluster holds; 0 for one that is not used.
        binding: what keeps it from being faster.
        bound_s: that no order of its stages can be faster than.
        replica_seconds: ``stage_seconds`` of each replica, where they have unlike many micro-batches; else empty.

    Raises:
        UsageError: ranks or stages that do not multiply.
    """

    job: Job
    ranks: tuple[int, ...]
    cut: tuple[int, ...]
    seconds: Prediction
    stage_seconds: tuple[tuple[float, float], ...]
    memory: tuple[int, ...]
    binding: str = ""
    bound_s: float = 0.0
    replica_seconds: tuple[tuple[tuple[float, float], ...], ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        mesh = self.job.mesh
        if len(self.ranks) != mesh.num_ranks or len(set(self.ranks)) != len(self.ranks):
            raise UsageError(
                f"{len(self.ranks)} ranks for a mesh of {mesh.num_ranks}; each place has a rank of its own"
            )
        if not len(self.cut) == len(self.stage_seconds) == mesh.pp * self.job.chunks:
            raise UsageError(
                f"{len(self.cut)} stages of layers and {len(self.stage_seconds)} of seconds for "
                f"{mesh.pp * self.job.chunks} stages; they must be as many"
            )
        if len(self.replica_seconds) != len(self.job.shares):
            raise UsageError(
                f"seconds of {len(self.replica_seconds)} replicas for {len(self.job.shares)} shares of the batch; "
                "they must be as many"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Ways that were looked at and lost for one reason.

    Attributes:
        reason: ``memory``, ``slower``, or the limit.
        count: of them.
        least_bytes: by which the nearest of them is too large; 0 where memory is not the reason.
        least_seconds: of the fastest of them, a lower bound; 0 where it is not known.
        nearest: the nearest of them.
    """

    reason: str
    count: int
    least_bytes: int = 0
    least_seconds: float = 0.0
    nearest: Job | None = None

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a search.

    Attributes:
        best: the fastest that was found.
        candidates: the best few, the fastest first, each of another job.
        refused: by degree and value, such as ``tp=8``, or by the text of a limit: why it is not among the best.
        visited: jobs that were looked at.
        simulated: ways whose order was simulated.
        bound_s: that no way in the space is faster than, by the model.
        is_proved: no way in the space is faster than the best.
        interrupted: Ctrl-C or the time limit ended the search.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    refused: Mapping[str, tuple[Refusal, ...]] = field(default_factory=dict)
    visited: int = 0
    simulated: int = 0
    bound_s: float = 0.0
    is_proved: bool = False
    interrupted: bool = False

    __repr__ = brief

    @property
    def gap(self) -> float:
        """How far the best may be above the least, relative: 0 where it is proved."""
        return 0.0 if self.is_proved or self.bound_s <= 0 else self.best.seconds.seconds / self.bound_s - 1.0
