"""What every stage of a job takes and holds, for any number of layers: linear in them, by its own ranks and place."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mycel.brief import brief
from mycel.planning.cluster import Cluster
from mycel.planning.cuts import Chain
from mycel.planning.job import Job
from mycel.planning.memory.footprint import RESERVE_BYTES, RESERVE_SHARE
from mycel.planning.memory.parts import memory_parts
from mycel.planning.models.shape import ModelShape
from mycel.planning.search.groups import PlaceLinks, boundary_seconds
from mycel.planning.step.compute import head_seconds
from mycel.planning.step.points import Numbers, Points
from mycel.planning.step.times import exchange_seconds, layer_times, optimizer_seconds
from mycel.topology.device import Device

__all__ = ["HEAD_FORWARD", "Stages", "held_bytes", "stages_of"]

#: Of the head's time, what is forward: one product of three.
HEAD_FORWARD = 1.0 / 3.0


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A job on ranks, but for its cut.

    Attributes:
        cluster, shape, job: what and on what.
        ranks: at every place of the mesh, the pipeline outermost.
        groups: ranks of each place of the pipeline.
        batches: micro-batches of a step, of the replica with the most.
        forward_s, backward_s: of one layer on each, with its exchanges, on its slowest rank.
        tensor_s: of both, what exchanges take.
        head_s: of head and loss on the last one, forward and backward.
        message_s: from each to the next, all of their ranks at once.
        message_alone_s: of one of these messages alone.
        blocked_s: that each place stands still for every message, where the executor waits for them.
        gradient_s, layer_gradient_s: of each place's gradients and shards, with no layer, and for each.
        tied_s: of a tied embedding's gradients.
        update_s, layer_update_s: of the optimizer, likewise.
        fixed_bytes, layer_bytes: that a rank of each holds with no layer, and for each.
        memory_bytes: that it may hold.
        replicas: where replicas have unlike many micro-batches, the same of one replica of each kind, the one with
            the most; replicas of a kind are equally fast.
        kind_of: of each replica, which of them is of its kind.
    """

    cluster: Cluster
    shape: ModelShape
    job: Job
    ranks: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    batches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    tensor_s: tuple[float, ...]
    head_s: float
    message_s: tuple[float, ...]
    message_alone_s: tuple[float, ...]
    blocked_s: tuple[float, ...]
    gradient_s: tuple[float, ...]
    layer_gradient_s: tuple[float, ...]
    tied_s: float
    update_s: tuple[float, ...]
    layer_update_s: tuple[float, ...]
    fixed_bytes: tuple[float, ...]
    layer_bytes: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    replicas: tuple[Stages, ...] = ()
    kind_of: tuple[int, ...] = ()

    __repr__ = brief

    def chain(self) -> Chain:
        """What a cut is made for."""
        stages, layers, chunks = len(self.groups), self.shape.num_layers, self.job.chunks
        # A stage of the head alone is one; any other one has a layer for each of its chunks.
        least = [chunks] * stages
        if stages > 1 and chunks == 1:
            least[-1] = 0
        most = [
            min(layers, int((cap - fixed) // each)) if cap >= fixed else -1
            for cap, fixed, each in zip(self.memory_bytes, self.fixed_bytes, self.layer_bytes, strict=True)
        ]
        return Chain(
            num_layers=layers,
            batches=self.batches,
            layer_s=tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)),
            extra_s=tuple(
                2.0 * chunks * blocked + (self.head_s if place == stages - 1 else 0.0)
                for place, blocked in enumerate(self.blocked_s)
            ),
            message_s=self.message_alone_s,
            most=tuple(most),
            least=tuple(least),
            chunks=chunks,
        )

    def layer_s(self, place: int, layers: int) -> tuple[float, float]:
        """Forward and backward of a micro-batch through a place's layers, all chunks, without the head."""
        blocked = self.blocked_s[place] * self.job.chunks
        return self.forward_s[place] * layers + blocked, self.backward_s[place] * layers + blocked

    def spread(self, cut: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of every stage from those of every rank: as even as they can be, the first chunks have more."""
        chunks = self.job.chunks
        return tuple(layers // chunks + (chunk < layers % chunks) for chunk in range(chunks) for layers in cut)

    def seconds(self, cut: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """Forward and backward of one micro-batch on every stage (of all chunks).

        Args:
            cut: layers of every place of the pipeline.
        """
        places = len(self.groups)
        found = []
        layers = self.spread(cut)
        for stage, count in enumerate(layers):
            place = stage % places
            forward = self.forward_s[place] * count + self.blocked_s[place]
            backward = self.backward_s[place] * count + self.blocked_s[place]
            if stage == len(layers) - 1:
                forward += self.head_s * HEAD_FORWARD
                backward += self.head_s * (1.0 - HEAD_FORWARD)
            found.append((forward, backward))
        return tuple(found)

    def bytes_held(self, cut: tuple[int, ...]) -> tuple[float, ...]:
        """Bytes on a rank of every place."""
        return tuple(
            fixed + each * layers for fixed, each, layers in zip(self.fixed_bytes, self.layer_bytes, cut, strict=True)
        )

    def ending(self, cut: tuple[int, ...], busy_s: float) -> tuple[float, float, float]:
        """Seconds after the pipeline: gradients that are not hidden, the update, the wait for the slowest replica.

        Args:
            cut: layers of every place.
            busy_s: of the pipeline, behind which exchanges hide.
        """
        c = self.cluster.fit.coefficients
        each = max(a + b * n for a, b, n in zip(self.gradient_s, self.layer_gradient_s, cut, strict=True))
        gradients = c.unhidden * min(each, busy_s) + max(0.0, each - busy_s) + self.tied_s
        update = max(a + b * n for a, b, n in zip(self.update_s, self.layer_update_s, cut, strict=True))
        replicas = self.job.mesh.dp * self.job.mesh.cp
        waiting = busy_s * c.replica_wait * math.sqrt(2.0 * math.log(replicas))
        return gradients, update, waiting


def held_bytes(points: Points, stage: Numbers) -> Numbers:
    """Bytes that a rank of a stage holds, with what the allocator and the driver hold beside them."""
    held: Numbers = memory_parts(points, stage).total * (1.0 + RESERVE_SHARE) + RESERVE_BYTES
    return held


def stages_of(
    cluster: Cluster, shape: ModelShape, job: Job, ranks: tuple[int, ...], memory_bytes: tuple[int, ...]
) -> Stages:
    """What every stage of a job takes and holds.

    Args:
        cluster: whose ranks they are.
        shape: the model.
        job: how it is trained.
        ranks: at every place of the mesh, the pipeline outermost.
        memory_bytes: that a job may use on each rank of the cluster.
    """
    size = len(ranks) // job.mesh.pp
    groups = tuple(ranks[i : i + size] for i in range(0, len(ranks), size))
    whole = _stages(cluster, shape, job, ranks, groups, groups, memory_bytes)
    if not job.shares:
        return whole
    width = job.mesh.cp * job.mesh.tp
    own = [tuple(group[i : i + width] for group in groups) for i in range(0, size, width)]
    devices = [tuple(frozenset(cluster.devices[rank] for rank in place) for place in places) for places in own]
    kinds = list(dict.fromkeys(devices))
    kind_of = tuple(map(kinds.index, devices))
    replicas = []
    for kind in range(len(kinds)):
        one = _stages(cluster, shape, job, ranks, groups, own[kind_of.index(kind)], memory_bytes)
        most = max(share for share, other in zip(job.shares, kind_of, strict=True) if other == kind)
        replicas.append(replace(one, batches=most))
    return replace(whole, replicas=tuple(replicas), kind_of=kind_of)


def _stages(
    cluster: Cluster,
    shape: ModelShape,
    job: Job,
    ranks: tuple[int, ...],
    groups: tuple[tuple[int, ...], ...],
    own: tuple[tuple[int, ...], ...],
    memory_bytes: tuple[int, ...],
) -> Stages:
    """The same, as fast as the slowest of some ranks of each place."""
    mesh, c = job.mesh, cluster.fit.coefficients
    point = Points.of([(shape, job)])
    every = point.take(np.zeros(mesh.pp, dtype=int))
    links = PlaceLinks(cluster=cluster, places=groups)
    kinds, has = _kinds(cluster, own)
    times = [layer_times(every, kind, links, c) for kind in kinds]
    one = np.where(has, np.stack([t.forward + t.backward for t in times]), -1.0)
    slowest, at = one.argmax(axis=0), np.arange(mesh.pp)
    heads = [head_seconds(point, kind, c)[0] for kind, is_there in zip(kinds, has[:, -1], strict=True) if is_there]
    share = mesh.tp if job.is_sequence_parallel or job.is_scattered else 1
    message = shape.element_bytes * float(point.tokens[0]) * shape.hidden / share
    efficiencies = (c.link_efficiency, c.boundary_efficiency)
    between = [boundary_seconds(cluster, groups[i], groups[i + 1], message, efficiencies) for i in range(mesh.pp - 1)]
    together_s, alone_s = [list(column) for column in zip(*between, strict=True)] if between else ([], [])
    blocked = [0.0] * mesh.pp
    if job.executor != "mycel":
        # Whoever sends or receives waits; a stage in the middle does both, at the pace of the slower one.
        waits = [seconds + c.exchange_s for seconds in together_s]
        blocked = [max(waits[max(0, place - 1) : place + 1], default=0.0) for place in range(mesh.pp)]
        together_s = alone_s = [0.0] * len(waits)
    is_outer = (at == 0) | (at == mesh.pp - 1)
    bare, full = (replace(every, held=np.full(mesh.pp, held)) for held in (0.0, 1.0))
    none, held = held_bytes(bare, at.astype(float)), held_bytes(full, at.astype(float))
    # Of a pipeline's places only the ends have embedding or head, whose gradients are summed and updated too.
    bare, full = (replace(p, outer_parameters=np.where(is_outer, p.outer_parameters, 0.0)) for p in (bare, full))
    exchanged, tied = exchange_seconds(bare, links, c)
    more, _ = exchange_seconds(full, links, c)
    updates = [
        np.where(has, np.stack([optimizer_seconds(which, kind, c) for kind in kinds]), 0.0).max(axis=0)
        for which in (bare, full)
    ]
    return Stages(
        cluster=cluster,
        shape=shape,
        job=job,
        ranks=ranks,
        groups=groups,
        batches=job.num_micro_batches,
        forward_s=_column(np.stack([t.forward for t in times])[slowest, at]),
        backward_s=_column(np.stack([t.backward for t in times])[slowest, at]),
        tensor_s=_column(np.stack([t.tensor for t in times])[slowest, at]),
        head_s=float(max(heads)),
        message_s=tuple(together_s),
        message_alone_s=tuple(alone_s),
        blocked_s=tuple(blocked),
        gradient_s=_column(exchanged),
        layer_gradient_s=_column(more - exchanged),
        tied_s=float(tied.max()),
        update_s=_column(updates[0]),
        layer_update_s=_column(updates[1] - updates[0]),
        fixed_bytes=_column(none),
        layer_bytes=_column(held - none),
        memory_bytes=tuple(min(memory_bytes[rank] for rank in group) for group in groups),
    )


def _kinds(cluster: Cluster, groups: tuple[tuple[int, ...], ...]) -> tuple[list[Device], NDArray[np.bool_]]:
    """Kinds of devices, and whether a place has some of each."""
    first = cluster.devices[0]
    if all(device is first for device in cluster.devices):
        return [first], np.ones((1, len(groups)), dtype=bool)
    kinds = list(dict.fromkeys(cluster.devices[rank] for group in groups for rank in group))
    of = [{cluster.devices[rank] for rank in group} for group in groups]
    return kinds, np.array([[kind in there for there in of] for kind in kinds])


def _column(values: Numbers) -> tuple[float, ...]:
    return tuple(map(float, values))
