"""What a job with its cut takes: its pipeline in simulation, and what comes after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

from mycel.pipeline import known_order, simulate
from mycel.pipeline.known.interleaved import interleaved_cells
from mycel.pipeline.known.one_f_one_b import one_f_one_b_cells
from mycel.pipeline.needs import Result
from mycel.pipeline.order import Kind, Order
from mycel.pipeline.wires import path_between
from mycel.planning.cuts import cut_bound
from mycel.planning.predict import Prediction
from mycel.planning.search.found import Candidate
from mycel.planning.search.stages import Stages
from mycel.planning.step.wires import message_rate

__all__ = ["binding_of", "candidate_of", "order_of", "pipeline_seconds", "unhindered_seconds"]

#: Actions that are played; of more, the rest is taken from the pace of the last half.
_MOST_PLAYED = 3000


def order_of(pp: int, micro_batches: int, chunks: int) -> Order:
    """The order that a search plans with: 1F1B, interleaved where ranks hold several stages.

    Args:
        pp: places of the pipeline.
        micro_batches: of a step.
        chunks: stages of each.
    """
    return _order(pp, micro_batches, chunks)


@lru_cache(maxsize=64)
def _order(pp: int, micro_batches: int, chunks: int) -> Order:
    if chunks == 1:
        return known_order("1f1b", pp, micro_batches)
    return known_order("interleaved", pp, micro_batches, chunks)


#: Place, stage, whether it is a forward, the turn that makes what it needs (-1 for none), and that one's place.
_Turn = tuple[int, int, bool, int, int]


@lru_cache(maxsize=64)
def _turns(pp: int, micro_batches: int, chunks: int) -> tuple[_Turn, ...]:
    """Actions of all places in an order in which everything that one needs comes before it.

    A forward needs the one of the stage before, a backward that of the stage after; what a place itself has made is
    there, since orders of one place are in turn.
    """
    rows = one_f_one_b_cells(pp, micro_batches) if chunks == 1 else interleaved_cells(pp, micro_batches, chunks)
    last = pp * chunks - 1
    made: dict[tuple[int, bool, int], int] = {}
    at = [0] * pp
    turns: list[_Turn] = []
    left = sum(map(len, rows))
    while left:
        for place, row in enumerate(rows):
            while at[place] < len(row):
                stage, is_forward, batch = row[at[place]]
                other = stage - 1 if is_forward else stage + 1
                needed = -1
                if 0 <= other <= last:
                    needed = made.get((other, is_forward, batch), -1)
                    if needed < 0:
                        break
                made[stage, is_forward, batch] = len(turns)
                turns.append((place, stage, is_forward, needed, other % pp))
                at[place] += 1
                left -= 1
    return tuple(turns)


def unhindered_seconds(
    stages: Stages, cut: tuple[int, ...], *, is_alone: bool = True, is_free: bool = False
) -> float:
    """The pipeline where messages of one pair of ranks go one after the other, and none hinders those of another.

    No simulation on a fabric with these messages is shorter; on one where nothing is shared it takes as long.

    Args:
        stages: with their ranks.
        cut: layers of every place.
        is_alone: messages as fast as one alone; else as fast as all of a boundary at once.
        is_free: messages take no time.
    """
    if stages.replicas:
        return max(unhindered_seconds(one, cut, is_alone=is_alone, is_free=is_free) for one in stages.replicas)
    job = stages.job
    times = stages.seconds(cut)
    message = stages.message_alone_s if is_alone else stages.message_s
    if is_free:
        message = (0.0,) * len(message)
    return _extended(lambda count: _play(_turns(job.mesh.pp, count, job.chunks), times, message, job.mesh.pp), stages)


def _play(
    turns: Sequence[_Turn], times: tuple[tuple[float, float], ...], message: tuple[float, ...], places: int
) -> float:
    free = [0.0] * places
    ends: list[float] = []
    line: dict[tuple[int, int], float] = {}
    for place, stage, is_forward, needed, source in turns:
        start = free[place]
        if needed >= 0:
            ready = ends[needed]
            if source != place:
                # Between the last and the first place chunks meet over no boundary of their own.
                boundary = (stage - 1 if is_forward else stage) % places
                seconds = message[boundary] if boundary < len(message) else max(message)
                ready = max(ready, line.get((source, place), 0.0)) + seconds
                line[source, place] = ready
            start = max(start, ready)
        end = start + times[stage][0 if is_forward else 1]
        free[place] = end
        ends.append(end)
    return max(ends)


def _extended(play: Callable[[int], float], stages: Stages) -> float:
    """Played whole, or, of very many micro-batches, as far as its pace is steady."""
    count, pp = stages.batches, stages.job.mesh.pp
    rounds = max(3, _MOST_PLAYED // (2 * pp * stages.job.chunks * pp))
    most = rounds * pp
    if count <= most:
        return play(count)
    half = (rounds - rounds // 3) * pp
    whole, part = play(most), play(half)
    return whole + (count - most) * (whole - part) / (most - half)


def pipeline_seconds(stages: Stages, cut: tuple[int, ...]) -> float:
    """The pipeline in simulation: on the topology's links, or where there is none on messages that hinder no others.

    Args:
        stages: with their ranks.
        cut: layers of every place.
    """
    if stages.replicas:
        return max(pipeline_seconds(one, cut) for one in stages.replicas)
    job, topology = stages.job, stages.cluster.topology
    if job.mesh.pp == 1:
        (forward, backward), *_ = stages.seconds(cut)
        return stages.batches * (forward + backward)
    if topology is None or job.executor != "mycel":
        return unhindered_seconds(stages, cut, is_alone=False)
    times = stages.seconds(cut)
    places = job.mesh.pp
    players = _slowest_lane(stages)
    rate, alone = _alone(stages, players)

    def size(result: Result) -> float:
        kind, stage, _ = result
        boundary = (int(stage) if kind == "F" else int(stage) - 1) % places
        if boundary < len(stages.message_s):
            return stages.message_s[boundary] * rate[boundary]
        return max(stages.message_s) * alone

    def play(count: int) -> float:
        return simulate(
            _order(places, count, job.chunks),
            lambda action: times[action.stage][0 if action.kind is Kind.FORWARD else 1],
            topology=topology,
            ranks=players,
            message_bytes=size,
        ).makespan

    return _extended(play, stages)


def _slowest_lane(stages: Stages) -> list[int]:
    """Of the pipelines side by side, the ranks of the one whose messages take longest alone."""
    topology = stages.cluster.topology
    assert topology is not None
    lanes = [tuple(group[i] for group in stages.groups) for i in range(len(stages.groups[0]))]

    def seconds(lane: tuple[int, ...]) -> tuple[float, float]:
        # Of equally wide ones, the one of the longest way.
        pairs = list(pairwise(lane))
        delay = sum(topology.latency_s[hop] for pair in pairs for hop in pairwise(path_between(topology, *pair)))
        return sum(1.0 / message_rate(topology, (pair,)) for pair in pairs), delay

    slowest = max(lanes, key=seconds)
    return list(slowest)


def _alone(stages: Stages, players: list[int]) -> tuple[list[float], float]:
    """Bytes a second of one message alone on every boundary between the ranks that are simulated, and round it."""
    topology = stages.cluster.topology
    assert topology is not None
    rates = [message_rate(topology, ((a, b),)) for a, b in pairwise(players)]
    return rates, message_rate(topology, ((players[-1], players[0]),))


def candidate_of(stages: Stages, cut: tuple[int, ...], pipeline_s: float) -> Candidate:
    """A job with its cut as what a search gives.

    Args:
        stages: with their ranks.
        cut: layers of every place of the pipeline.
        pipeline_s: what the pipeline takes.
    """
    job, cluster = stages.job, stages.cluster
    fit = cluster.fit
    gradients, update, waiting = stages.ending(cut, pipeline_s)
    one = max(stages.replicas or (stages,), key=lambda some: some.batches * max(_works(some, cut)))
    works = _works(one, cut)
    busiest = max(range(len(cut)), key=lambda place: works[place])
    tensor = one.batches * one.tensor_s[busiest] * cut[busiest]
    head = one.batches * one.head_s if busiest == len(cut) - 1 else 0.0
    load = one.batches * works[busiest]
    free = unhindered_seconds(stages, cut, is_free=True) if len(cut) > 1 else load
    free = min(free, pipeline_s)
    parts = {
        "compute": load - tensor - head,
        "head": head,
        "tensor": tensor,
        "bubble": free - load,
        "boundary": pipeline_s - free,
        "gradients": gradients,
        "optimizer": update,
        "waiting": waiting,
        "fixed": fit.coefficients.step_s,
    }
    held = stages.bytes_held(cut)
    memory = [0] * cluster.num_ranks
    for place, group in enumerate(stages.groups):
        for rank in group:
            memory[rank] = int(held[place])
    seconds = Prediction(
        seconds=sum(parts.values()), error=fit.mean_error, parts=parts, num_rows=fit.num_rows, source=fit.source
    )
    return Candidate(
        job=job,
        ranks=stages.ranks,
        cut=stages.spread(cut),
        seconds=seconds,
        stage_seconds=stages.seconds(cut),
        memory=tuple(memory),
        binding=binding_of(parts, busiest, job.mesh.pp),
        bound_s=max(cut_bound(some.chain(), cut) for some in stages.replicas or (stages,)),
        replica_seconds=tuple(stages.replicas[kind].seconds(cut) for kind in stages.kind_of),
    )


def _works(stages: Stages, cut: tuple[int, ...]) -> list[float]:
    """Of every place, one micro-batch."""
    return [
        sum(stages.layer_s(place, layers)) + (stages.head_s if place == len(cut) - 1 else 0.0)
        for place, layers in enumerate(cut)
    ]


def binding_of(parts: dict[str, float], busiest: int, pp: int) -> str:
    """The largest part of a step, for people.

    Args:
        parts: seconds of each.
        busiest: place of the pipeline with the most to compute.
        pp: places.
    """
    name = max(parts, key=lambda part: parts[part])
    share = parts[name] / sum(parts.values())
    where = f" of stage {busiest}" if pp > 1 and name in ("compute", "head", "tensor") else ""
    return f"{name}{where}: {share:.0%} of the step"
