"""The best plan of a small cluster by trying everything, as what a search is held against.

Every mesh, micro-batch, policy, share of the batch, order of ranks and cut is held against memory and simulated: no
bound, no symmetry, no dynamic programming. ``random_case`` makes clusters and models that are small enough, most of
them unequal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations

import numpy as np

from mycel.planning.cluster import Cluster, load_cluster
from mycel.planning.job import Job, Mesh
from mycel.planning.memory.footprint import RESERVE_BYTES, RESERVE_SHARE
from mycel.planning.memory.parts import memory_parts
from mycel.planning.models.shape import ModelShape
from mycel.planning.search.limits import Limits
from mycel.planning.search.score import pipeline_seconds
from mycel.planning.search.space import space_of
from mycel.planning.search.stages import stages_of
from mycel.planning.step.points import Points
from mycel.topology.device import Device
from mycel.topology.model import Link, Topology, Vertex

__all__ = ["Case", "brute_force", "random_case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One small search.

    Attributes:
        cluster: two to four ranks on a topology.
        shape: a few layers.
        batch, seq: of a step.
        limits: so that everything can be tried.
    """

    cluster: Cluster
    shape: ModelShape
    batch: int
    seq: int
    limits: Limits


def random_case(seed: int) -> Case:
    """A cluster, a model and limits by chance, the same for the same seed.

    Args:
        seed: of it.
    """
    chance = random.Random(seed)
    shape = ModelShape(
        name=f"small{seed}",
        num_layers=chance.choice((2, 3, 4, 5)),
        hidden=chance.choice((512, 1024, 2048)),
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        ffn=chance.choice((1024, 4096)),
        vocab=chance.choice((256, 32000, 128000)),
        is_tied=chance.random() < 0.3,
    )
    ranks = chance.choice((2, 3, 3, 4))
    batch = chance.choice((2, 4, 6)) * (3 if ranks == 3 else 1)
    texts = [f"recompute={chance.choice(('none', 'full', 'alternate'))}", f"zero={chance.choice((0, 1, 3))}"]
    texts += ["micro_batch<=2"] + ([] if ranks < 4 else [chance.choice(("tp<=2", "pp>=2", "dp<=2"))])
    limits = Limits.from_text(*texts)
    for _ in range(20):
        case = Case(cluster=_cluster(chance, ranks), shape=shape, batch=batch, seq=512, limits=limits)
        if brute_force(case, is_any_enough=True) is not None:
            return case
    raise AssertionError(f"seed {seed}: nothing fits anywhere")


def _cluster(chance: random.Random, ranks: int) -> Cluster:
    def device(number: int) -> Device:
        speed = chance.choice((1.0, 1.0, 0.5, 0.3))
        memory = chance.choice((4, 6, 8, 16))
        return Device(
            name=f"d{number}", flops=20e12 * speed, memory_bytes=memory << 30, memory_gbps=400 * chance.choice((1, 2))
        )

    kinds = [device(0), device(1)]
    devices = [kinds[0] if chance.random() < 0.6 else kinds[1] for _ in range(ranks)]
    boxes = [chance.choice(("left", "right")) for _ in range(ranks)]
    vertices = [Vertex(kind="rank", label=f"r{i}", node=boxes[i], device=devices[i]) for i in range(ranks)]
    inside, between = chance.choice((4000, 20000)), chance.choice((200, 1000, 5000))
    links = []
    names = sorted(set(boxes))
    for place, name in enumerate(names):
        vertices.append(Vertex(kind="switch", label=f"{name}/switch", node=name))
        links += [(i, ranks + place, inside) for i in range(ranks) if boxes[i] == name]
    if len(names) > 1:
        vertices.append(Vertex(kind="switch", label="core"))
        links += [(ranks + place, len(vertices) - 1, between) for place in range(len(names))]
    cables = tuple(
        Link(src=a, dst=b, capacity=rate, latency_s=1e-5)
        for one, other, rate in links
        for a, b in ((one, other), (other, one))
    )
    topology = Topology(name="small", unit="MB/s", vertices=tuple(vertices), links=cables)
    return load_cluster(topology, machine="generic")


Best = tuple[float, Job, tuple[int, ...], tuple[int, ...]]


def brute_force(case: Case, *, is_any_enough: bool = False) -> Best | None:
    """The least time of a step with its job, ranks and cut; ``None`` where nothing fits.

    Args:
        case: what is searched.
        is_any_enough: the first that fits is returned.
    """
    cluster, shape = case.cluster, case.shape
    base = Job(mesh=Mesh(), global_batch=case.batch, micro_batch=1, seq=case.seq)
    space = space_of(cluster, shape, base, case.limits)
    step_s = cluster.fit.coefficients.step_s
    best: Best | None = None
    for job in (each for row in range(len(space)) for each in _shared(space.job(row))):
        cuts = list(_cuts(shape.num_layers, job))
        held = [_held(shape, job, cut) for cut in cuts]
        for ranks in permutations(range(cluster.num_ranks)):
            size = len(ranks) // job.mesh.pp
            groups = [ranks[i : i + size] for i in range(0, len(ranks), size)]
            room = [min(cluster.memory_bytes[rank] for rank in group) for group in groups]
            fitting = [cut for cut, sizes in zip(cuts, held, strict=True) if np.all(sizes <= room)]
            if not fitting:
                continue
            if is_any_enough:
                return 0.0, job, ranks, fitting[0]
            stages = stages_of(cluster, shape, job, ranks, cluster.memory_bytes)
            for cut in fitting:
                pipeline = pipeline_seconds(stages, cut)
                seconds = pipeline + sum(stages.ending(cut, pipeline)) + step_s
                if best is None or seconds < best[0]:
                    best = (seconds, job, ranks, cut)
    return best


def _shared(job: Job) -> Iterator[Job]:
    """The job with all shares of its batch, where replicas have unequal ones."""
    if not job.shares:
        yield job
        return
    total, dp = sum(job.shares), job.mesh.dp
    for marks in combinations(range(1, total), dp - 1):
        shares = tuple(b - a for a, b in pairwise((0, *marks, total)))
        if len(set(shares)) > 1:
            yield replace(job, shares=shares)


def _cuts(layers: int, job: Job) -> Iterator[tuple[int, ...]]:
    """All cuts of the layers over the places: each has a layer for each chunk, but the last may be the head alone."""
    pp = job.mesh.pp
    for marks in combinations(range(layers + pp - 1), pp - 1):
        edges = [-1, *marks, layers + pp - 1]
        cut = tuple(b - a - 1 for a, b in pairwise(edges))
        is_bare = pp > 1 and job.chunks == 1
        if all(n >= job.chunks for n in (cut[:-1] if is_bare else cut)):
            yield cut


def _held(shape: ModelShape, job: Job, cut: tuple[int, ...]) -> np.ndarray:  # type: ignore[type-arg]
    """Bytes on a rank of every place."""
    pp = job.mesh.pp
    points = replace(Points.of([(shape, job)]).take(np.zeros(pp, dtype=int)), held=np.array(cut, dtype=float))
    total: np.ndarray = memory_parts(points, np.arange(pp, dtype=float)).total  # type: ignore[type-arg]
    return total * (1.0 + RESERVE_SHARE) + RESERVE_BYTES
