"""Why ways to train are not the best: by degree and value, memory or time, by how much; and why none fits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mycel.planning.cluster import Cluster
from mycel.planning.memory.footprint import footprints, ways_to_save
from mycel.planning.models.shape import ModelShape
from mycel.planning.search.bounds import Room
from mycel.planning.search.found import Candidate, Refusal
from mycel.planning.search.limits import Limits
from mycel.planning.search.space import Space
from mycel.planning.step.points import Numbers

__all__ = ["nothing_fits", "reasons"]

_GIB = float(1 << 30)


def reasons(
    space: Space, room: Room, bounds: Numbers, best: Candidate, broken: dict[str, int]
) -> dict[str, tuple[Refusal, ...]]:
    """Of every value of every degree that the best does not have, why.

    Args:
        space: all jobs.
        room: whether each fits.
        bounds: seconds that each takes at least.
        best: that was found.
        broken: placements that each limit ruled out.
    """
    job = best.job
    has = {
        **{name: getattr(job.mesh, name) for name in ("pp", "dp", "tp", "cp", "ep")},
        "micro_batch": job.micro_batch,
        "chunks": job.chunks,
        "recompute": space.recomputes.index(job.recompute),
        "zero": job.zero,
        "coshard": job.coshard,
        "offload": int(job.is_offloaded),
        "shares": int(bool(job.shares)),
    }
    found: dict[str, tuple[Refusal, ...]] = {}
    for name, column in space.columns.items():
        words = space.words.get(name, ())
        for value in np.unique(column):
            if value == has[name]:
                continue
            rows = np.flatnonzero(column == value)
            text = f"{name}={words[int(value)] if words else int(value)}"
            found[text] = tuple(_of_rows(space, room, bounds, rows))
    for text, count in broken.items():
        found[text] = (Refusal(reason="limit", count=count),)
    return found


def _of_rows(space: Space, room: Room, bounds: Numbers, rows: NDArray[np.int_]) -> list[Refusal]:
    fits = room.fits[rows]
    found = []
    if large := int(np.count_nonzero(~fits)):
        row = rows[~fits][int(np.argmin(room.over_bytes[rows[~fits]]))]
        found.append(
            Refusal(
                reason="memory",
                count=large,
                least_bytes=int(room.over_bytes[row]),
                least_seconds=float(bounds[row]),
                nearest=space.job(int(row)),
            )
        )
    if slow := int(np.count_nonzero(fits)):
        row = rows[fits][int(np.argmin(bounds[rows[fits]]))]
        found.append(
            Refusal(reason="slower", count=slow, least_seconds=float(bounds[row]), nearest=space.job(int(row)))
        )
    return found


def nothing_fits(
    cluster: Cluster, shape: ModelShape, space: Space, room: Room, memory_bytes: tuple[int, ...], limits: Limits
) -> str:
    """What is short of fitting by the least, on which rank, of what, and three ways to save it.

    Args:
        cluster: whose ranks they are.
        shape: the model.
        space: all jobs.
        room: whether each fits.
        memory_bytes: that a job may use on each rank.
        limits: of the user.
    """
    over = np.where(room.over_bytes > 0, room.over_bytes, np.inf)
    if not np.isfinite(over).any():
        return (
            f"{shape.name} fits on no placement of {cluster.name}: ranks with less memory would have to hold a "
            "stage; leave them out, or offload the optimizer ('offload=yes')"
        )
    row = int(np.argmin(over))
    job = space.job(row)
    every = footprints(shape, job)
    fullest = max(every, key=lambda one: one.total)
    size = cluster.num_ranks // job.mesh.pp
    rank = cluster.rank_names[fullest.stage * size]
    saved = [f"{way} saves {_gib(bytes_)}" for way, bytes_ in list(ways_to_save(shape, job).items())[:3]]
    if len(saved) < 3:
        saved.append("a shorter sequence or fewer tokens a micro-batch")
    if len(saved) < 3:
        saved.append(f"more than {cluster.num_ranks} ranks")
    mesh = job.mesh
    within = f" within the limits {', '.join(limits.texts)}" if limits.limits else ""
    return (
        f"{shape.name} does not fit on {cluster.name}{within}: the nearest (pp {mesh.pp}, dp {mesh.dp}, "
        f"tp {mesh.tp}, cp {mesh.cp}, micro-batch {job.micro_batch}, recompute {job.recompute}, zero {job.zero}) is "
        f"{_gib(float(over[row]))} over the {_gib(float(max(memory_bytes)))} of rank {rank}, most of it "
        f"{fullest.largest_part}; {'; '.join(saved)}"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"
