"""What a job with its cut takes: its pipeline in simulation, and what comes after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from mycel.pipeline import known_order, simulate
from mycel.pipeline.needs import Result, needs_of, result_of
from mycel.pipeline.order import Action, Kind, Order
from mycel.planning.cuts import cut_bound
from mycel.planning.job import Job
from mycel.planning.predict import Prediction
from mycel.planning.search.found import Candidate
from mycel.planning.search.stages import Stages
from mycel.planning.step.wires import message_rate

__all__ = ["candidate_of", "order_of", "pipeline_seconds", "unhindered_seconds"]

#: Actions that are played; of more, the rest is taken from the pace of the last half.
_MOST_PLAYED = 1500


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One action of an order, after all that it needs."""

    place: int
    stage: int
    is_forward: bool
    needed: tuple[tuple[int, int, int], ...]  # turn that makes it, from which place, over which boundary


@lru_cache(maxsize=32)
def _turns(pp: int, micro_batches: int, chunks: int) -> tuple[_Turn, ...]:
    """Actions of all places in an order in which everything that one needs comes before it."""
    order = _order(pp, micro_batches, chunks)
    needs = needs_of(order)
    made: dict[object, tuple[int, int, int]] = {}
    at = [0] * pp
    turns: list[_Turn] = []
    left = sum(map(len, order.rows))
    while left:
        for place, row in enumerate(order.rows):
            while at[place] < len(row):
                action = row[at[place]]
                wanted = list(needs(action))
                if any(result not in made for result in wanted):
                    break
                needed = []
                for result in wanted:
                    turn, source, stage = made[result]
                    needed.append((turn, source, min(stage, action.stage)))
                made[result_of(action)] = (len(turns), place, action.stage)
                turns.append(_made(place, action, needed))
                at[place] += 1
                left -= 1
    return tuple(turns)


def _made(place: int, action: Action, needed: list[tuple[int, int, int]]) -> _Turn:
    return _Turn(place=place, stage=action.stage, is_forward=action.kind is Kind.FORWARD, needed=tuple(needed))


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
    job = stages.job
    times = stages.seconds(cut)
    message = stages.message_alone_s if is_alone else stages.message_s
    if is_free:
        message = (0.0,) * len(message)
    return _extended(lambda count: _play(_turns(job.mesh.pp, count, job.chunks), times, message, job.mesh.pp), job)


def _play(
    turns: Sequence[_Turn], times: tuple[tuple[float, float], ...], message: tuple[float, ...], places: int
) -> float:
    free = [0.0] * places
    ends: list[float] = []
    there: dict[tuple[int, int], float] = {}
    line: dict[tuple[int, int], float] = {}
    for turn in turns:
        start = free[turn.place]
        for made, source, boundary in turn.needed:
            ready = ends[made]
            if source != turn.place:
                key = (made, turn.place)
                if key not in there:
                    pair = (source, turn.place)
                    # Between the last and the first place chunks meet over no boundary of their own.
                    seconds = message[boundary % places] if boundary % places < len(message) else max(message)
                    line[pair] = max(ready, line.get(pair, 0.0)) + seconds
                    there[key] = line[pair]
                ready = there[key]
            start = max(start, ready)
        end = start + times[turn.stage][0 if turn.is_forward else 1]
        free[turn.place] = end
        ends.append(end)
    return max(ends)


def _extended(play: Callable[[int], float], job: Job) -> float:
    """Played whole, or, of very many micro-batches, as far as its pace is steady."""
    count, pp = job.num_micro_batches, job.mesh.pp
    rounds = max(3, _MOST_PLAYED // (2 * pp * job.chunks * pp))
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
    job, topology = stages.job, stages.cluster.topology
    if job.mesh.pp == 1:
        (forward, backward), *_ = stages.seconds(cut)
        return job.num_micro_batches * (forward + backward)
    if topology is None or job.executor != "mycel":
        return unhindered_seconds(stages, cut, is_alone=False)
    times = stages.seconds(cut)
    places = job.mesh.pp
    players = [group[0] for group in stages.groups]
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

    return _extended(play, job)


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
    batches = job.num_micro_batches
    works = [
        sum(stages.layer_s(place, layers)) + (stages.head_s if place == len(cut) - 1 else 0.0)
        for place, layers in enumerate(cut)
    ]
    busiest = max(range(len(cut)), key=lambda place: works[place])
    tensor = batches * stages.tensor_s[busiest] * cut[busiest]
    head = batches * stages.head_s if busiest == len(cut) - 1 else 0.0
    load = batches * works[busiest]
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
        binding=_binding(parts, busiest, job.mesh.pp),
        bound_s=cut_bound(stages.chain(), cut),
    )


def _binding(parts: dict[str, float], busiest: int, pp: int) -> str:
    """The largest part of a step."""
    name = max(parts, key=lambda part: parts[part])
    share = parts[name] / sum(parts.values())
    where = f" of stage {busiest}" if pp > 1 and name in ("compute", "head", "tensor") else ""
    return f"{name}{where}: {share:.0%} of the step"
