"""Whether a job fits: what each rank holds with the library's own share, and what would save how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from mycel.errors import UsageError
from mycel.planning.job import Job
from mycel.planning.memory.parts import MemoryParts, memory_parts
from mycel.planning.models.shape import ModelShape
from mycel.planning.step.points import Points

__all__ = ["MEMORY_ERROR", "RESERVE_BYTES", "RESERVE_SHARE", "Footprint", "footprints", "memory_of", "ways_to_save"]

#: What a device holds beside the parts: fragments of the allocator, as a share of them, and the contexts of the
#: driver and of communicators. Fitted to the thirteen sizes that torchtitan publishes: mean error 3.6 %, largest
#: 9.2 %.
RESERVE_SHARE, RESERVE_BYTES = 0.06, 2.0 * (1 << 30)
#: No error there is larger: a job is called impossible only beyond it.
MEMORY_ERROR = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on a rank of one stage at the fullest moment of a step.

    Attributes:
        stage: of the pipeline.
        parameters, gradients, optimizer, activations, boundary, logits, gathered: as in ``MemoryParts``.
        reserve: what the allocator and the driver hold beside them.
        error: relative, the largest seen about published sizes.

    Examples:
        >>> from mycel.planning.job import Mesh
        >>> from mycel.planning.models import named
        >>> job = Job(mesh=Mesh(dp=8), global_batch=16, micro_batch=2, seq=8192, recompute="alternate", zero=3)
        >>> whole = memory_of(named("llama3-8b"), job)  # torchtitan measured 77.0 GiB
        >>> round(whole.total / 2**30, 1), whole.largest_part
        (78.3, 'activations')
    """

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    boundary: float
    logits: float
    gathered: float
    reserve: float
    error: float = MEMORY_ERROR

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part."""
        return {f.name: getattr(self, f.name) for f in fields(MemoryParts)} | {"reserve": self.reserve}

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.parts.values())

    @property
    def largest_part(self) -> str:
        """The part that most of it is."""
        return max(self.parts, key=lambda name: self.parts[name])

    def fits(self, memory_bytes: float) -> bool:
        """That it is expected to fit."""
        return self.total <= memory_bytes

    def is_impossible(self, memory_bytes: float) -> bool:
        """That it does not fit even if the model is as wrong as it has ever been seen to be."""
        return self.total * (1.0 - self.error) > memory_bytes


def footprints(shape: ModelShape, job: Job) -> tuple[Footprint, ...]:
    """What a rank of each stage holds, in order of stages.

    Args:
        shape: the model.
        job: how it is trained.

    Raises:
        UsageError: the model cannot be shared so.
    """
    job.check(shape)
    stages = job.mesh.pp
    points = Points.of([(shape, job)]).take(np.zeros(stages, dtype=int))
    parts = memory_parts(points, np.arange(stages, dtype=float))
    reserve = RESERVE_SHARE * parts.total + RESERVE_BYTES
    return tuple(
        Footprint(
            stage=stage,
            **{f.name: float(getattr(parts, f.name)[stage]) for f in fields(MemoryParts)},
            reserve=float(reserve[stage]),
        )
        for stage in range(stages)
    )


def memory_of(shape: ModelShape, job: Job, *, stage: int | None = None) -> Footprint:
    """What a rank of one stage holds, or of the fullest.

    Args:
        shape: the model.
        job: how it is trained.
        stage: which one; the fullest if not given.

    Raises:
        UsageError: the model cannot be shared so, or there is no such stage.
    """
    every = footprints(shape, job)
    if stage is None:
        return max(every, key=lambda one: one.total)
    if not 0 <= stage < len(every):
        raise UsageError(f"stage {stage} of {len(every)}: it must be from 0 to {len(every) - 1}")
    return every[stage]


def ways_to_save(shape: ModelShape, job: Job) -> dict[str, float]:
    """Bytes of the fullest rank that each change of the job alone would save, the most first.

    Only changes that keep the mesh and the batch: recomputation, sharding, sequence parallelism, pieces of layers,
    smaller micro-batches, offloading, fewer copies.

    Args:
        shape: the model.
        job: how it is trained.
    """
    now = memory_of(shape, job).total
    changes: dict[str, Any] = {}
    if job.recompute != "full":
        changes["recompute=full"] = {"recompute": "full"}
    if job.mesh.dp * job.mesh.cp > 1:
        changes |= {f"zero={zero}": {"zero": zero} for zero in range(job.zero + 1, 4)}
    if job.mesh.tp > 1 and not job.is_sequence_parallel:
        changes["sequence parallelism"] = {"is_sequence_parallel": True}
    pieces = next((k for k in (8, 4, 2) if k > job.coshard and _changed(shape, job, {"coshard": k})), None)
    if pieces is not None:
        changes[f"coshard={pieces}"] = {"coshard": pieces}
    if not job.is_flash:
        changes["flash attention"] = {"is_flash": True}
    if not job.is_loss_fused:
        changes["a fused loss"] = {"is_loss_fused": True}
    if job.micro_batch > 1 and job.micro_batch % 2 == 0:
        shares = tuple(2 * share for share in job.shares)
        changes[f"micro_batch={job.micro_batch // 2}"] = {"micro_batch": job.micro_batch // 2, "shares": shares}
    if not job.is_offloaded:
        changes["optimizer offloaded"] = {"is_offloaded": True}
    others = {name: other for name, change in changes.items() if (other := _changed(shape, job, change)) is not None}
    saved = {name: now - memory_of(shape, other).total for name, other in others.items()}
    return dict(sorted(((n, s) for n, s in saved.items() if s > 0), key=lambda item: -item[1]))


def _changed(shape: ModelShape, job: Job, change: Mapping[str, Any]) -> Job | None:
    """The job with some fields changed; ``None`` where they do not go together."""
    try:
        other = replace(job, **change)
        other.check(shape)
    except UsageError:
        return None
    return other
