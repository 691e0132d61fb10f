"""Many jobs at once, as columns: formulas are written once and hold for one job and for a hundred thousand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mycel.planning.job import Job
from mycel.planning.models.shape import ModelShape

__all__ = ["Numbers", "Points"]

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Columns of jobs and their models, one row each, in floating point.

    Attributes are those of ``ModelShape``, ``Mesh`` and ``Job`` by name; yes and no are 1 and 0. ``recompute`` is
    three columns: ``full``, ``attention``, ``alternate``. ``held`` is the layers of the stage in question, where a
    pipeline is cut unevenly. ``micro_batches`` is of the replica with the most; where replicas are ``unequal`` and
    it is not known yet how, the mean.
    """

    layers: Numbers
    dense_layers: Numbers
    hidden: Numbers
    heads: Numbers
    kv_heads: Numbers
    head_dim: Numbers
    ffn: Numbers
    gated: Numbers
    vocab: Numbers
    experts: Numbers
    top_k: Numbers
    expert_ffn: Numbers
    shared_ffn: Numbers
    tied: Numbers
    layer_parameters: Numbers
    routed_parameters: Numbers
    outer_parameters: Numbers
    position_parameters: Numbers
    element_bytes: Numbers
    pp: Numbers
    dp: Numbers
    tp: Numbers
    cp: Numbers
    ep: Numbers
    seq: Numbers
    micro_batch: Numbers
    micro_batches: Numbers
    chunks: Numbers
    full: Numbers
    attention: Numbers
    alternate: Numbers
    sequence_parallel: Numbers
    scattered: Numbers
    zero: Numbers
    flash: Numbers
    offloaded: Numbers
    compiled: Numbers
    float8: Numbers
    async_tp: Numbers
    loss_fused: Numbers
    dropout: Numbers
    torch_executor: Numbers
    megatron_executor: Numbers
    gradient_bytes: Numbers
    unequal: Numbers
    coshard: Numbers
    held: Numbers | None = None

    def __len__(self) -> int:
        return len(self.layers)

    @staticmethod
    def of(jobs: Sequence[tuple[ModelShape, Job]]) -> Points:
        """Columns of some jobs.

        Args:
            jobs: each a model and a way to train it.

        Examples:
            >>> from mycel.planning.job import Job, Mesh
            >>> from mycel.planning.models import named
            >>> job = Job(mesh=Mesh(dp=8, tp=2), global_batch=64, micro_batch=1, seq=8192)
            >>> points = Points.of([(named("llama3-8b"), job)])
            >>> len(points), points.micro_batches
            (1, array([8.]))
        """
        table = np.array([_row(shape, job) for shape, job in jobs], dtype=float).reshape(len(jobs), -1)
        return Points(**{name: table[:, i].copy() for i, name in enumerate(_COLUMNS)})

    def take(self, rows: NDArray[np.int_] | NDArray[np.bool_]) -> Points:
        """Some of the rows."""
        held = None if self.held is None else self.held[rows]
        return Points(**{name: getattr(self, name)[rows] for name in _COLUMNS}, held=held)

    # -- what several formulas need -------------------------------------------------------------------------

    @property
    def tokens(self) -> Numbers:
        """Of a micro-batch on one rank of a context-parallel group."""
        return self.micro_batch * self.seq / self.cp

    @property
    def stage_layers(self) -> Numbers:
        """Layers of the fullest stage, all its chunks; or those that it is said to hold."""
        if self.held is not None:
            return self.held
        return np.ceil(self.layers / (self.pp * self.chunks)) * self.chunks

    @property
    def moe_share(self) -> Numbers:
        """Share of the layers that have experts."""
        return np.where(self.experts > 0, 1.0 - self.dense_layers / self.layers, 0.0)

    @property
    def rank_experts(self) -> Numbers:
        """Parameters of routed experts on one rank: replicas of them are ``ep`` times fewer than of the rest."""
        return self.stage_layers * self.moe_share * self.routed_parameters / (self.tp * self.ep)

    @property
    def rank_dense(self) -> Numbers:
        """Parameters of all else on the first rank of the pipeline: its share of its layers and the embedding."""
        outer = self.outer_parameters / self.tp * np.where(self.pp > 1, 1.0, 2.0 - self.tied)
        return self.stage_layers * self.layer_parameters / self.tp + outer


_COLUMNS = tuple(f.name for f in fields(Points) if f.name != "held")


def _row(shape: ModelShape, job: Job) -> list[float]:
    mesh = job.mesh
    moe = shape.num_moe_layers
    routed = shape.expert_parameters if moe else 0
    feed = (shape.num_layers - moe) * shape.ffn_parameters + moe * ((shape.moe_parameters if moe else 0) - routed)
    layer = shape.attention_parameters + shape.norm_parameters + feed / shape.num_layers
    return [
        shape.num_layers,
        shape.num_layers - moe if moe else 0,
        shape.hidden,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.ffn,
        shape.is_gated,
        shape.vocab,
        shape.num_experts,
        shape.top_k,
        shape.expert_ffn,
        shape.shared_ffn,
        shape.is_tied,
        layer,
        routed,
        shape.vocab * shape.hidden,
        shape.num_positions * shape.hidden,
        shape.element_bytes,
        mesh.pp,
        mesh.dp,
        mesh.tp,
        mesh.cp,
        mesh.ep,
        job.seq,
        job.micro_batch,
        job.num_micro_batches,
        job.chunks,
        job.recompute == "full",
        job.recompute == "attention",
        job.recompute == "alternate",
        job.is_sequence_parallel,
        job.is_scattered,
        job.zero,
        job.is_flash,
        job.is_offloaded,
        job.is_compiled,
        job.is_float8,
        job.is_async_tp,
        job.is_loss_fused,
        job.has_dropout,
        job.executor == "torch",
        job.executor == "megatron",
        job.gradient_bytes,
        bool(job.shares),
        job.coshard,
    ]
