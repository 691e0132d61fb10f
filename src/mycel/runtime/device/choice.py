"""Which schedule, in pieces of which size, where every pipeline step is one group of operations.

A step takes a fixed time, and the time of the bytes that its busiest link carries in it; a step's bytes are known
exactly. More pieces fill the pipeline sooner and cost more steps. Beside that the processor has to queue every
message, which may take longer than the device needs for them all. Both fixed times are assumptions, not measurements:
nobody has yet run this on several GPUs.

Deep chains, which suit sockets (nobody is sent to by many at once), are costly in steps. So the classics, which are
shallow where links are alike, are candidates too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mycel.collectives.cost import Choice
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective
from mycel.collectives.synth.classics import classics_for
from mycel.cost import bytes_per_second
from mycel.errors import SynthesisError
from mycel.runtime.planner import verified_schedules
from mycel.topology.model import Topology

__all__ = ["MESSAGE_S", "PIECE_BYTES", "STEP_S", "choose_for_steps", "estimate_steps", "with_classics"]

#: Seconds that a group of operations takes beside moving its bytes: a launch, and meeting the peers. Assumed.
STEP_S = 20e-6
#: Seconds of the processor's time for queueing one message. Assumed.
MESSAGE_S = 5e-6
#: Pieces worth trying: below, a step is all launch; above, a GPU's links gain nothing.
PIECE_BYTES = tuple(1 << power for power in range(17, 27))
#: Ranks up to which classics are tried: making and verifying them all takes under a second there.
_MOST_RANKS = 32


def with_classics(
    schedules: Mapping[str, Schedule], topology: Topology, collective: Collective
) -> Mapping[str, Schedule]:
    """Given schedules and those classics that exist on the fabric, verified.

    Args:
        schedules: of the collective, by method.
        topology: the fabric.
        collective: what to move.
    """
    made = dict(schedules)
    for method in classics_for(collective.name) if topology.num_ranks <= _MOST_RANKS else ():
        with suppress(SynthesisError):
            made |= verified_schedules(topology, collective.name, collective.root, [method]) | made
    return made


def _level_loads(schedule: Schedule) -> npt.NDArray[np.float64]:
    """Parts of the whole array over a link's bytes a second, shape ``[levels, links]``."""
    rate = bytes_per_second(schedule.topology)
    number = {hop: i for i, hop in enumerate(schedule.link_load)}
    loads = np.zeros((1 + max(schedule.order_levels), len(number)))
    for level, t in zip(schedule.order_levels, schedule.transfers, strict=True):
        part = schedule.chunks[t.chunk].num_units / schedule.num_units
        for hop in pairwise(t.path):
            loads[level, number[hop]] += part / (schedule.topology.capacity[hop] * rate)
    return loads


def _links_s(loads: npt.NDArray[np.float64], pieces: int) -> float:
    """Sum over the pipeline steps of the busiest link's time: step s has piece ``s - level`` of each level."""
    depth = len(loads)
    until = np.concatenate([np.zeros_like(loads[:1]), np.cumsum(loads, axis=0)])
    steps = np.arange(min(depth, pieces) + depth - 1)  # where pieces are many, all but these steps are alike
    window = until[np.minimum(steps + 1, depth)] - until[np.maximum(steps + 1 - min(depth, pieces), 0)]
    alike = max(0, pieces - depth) * until[-1].max()
    return float((window.max(axis=1).sum() + alike) / pieces)


def estimate_steps(schedule: Schedule, num_bytes: int, piece_bytes: int) -> float:
    """Modelled seconds of a schedule.

    Args:
        schedule: what runs.
        num_bytes: of the collective's whole array.
        piece_bytes: longest message.
    """
    return _estimate(schedule, _level_loads(schedule), num_bytes, piece_bytes)


def _estimate(schedule: Schedule, loads: npt.NDArray[np.float64], num_bytes: int, piece_bytes: int) -> float:
    longest = max(chunk.num_units for chunk in schedule.chunks) * num_bytes / schedule.num_units
    pieces = max(1, -(-int(longest) // piece_bytes))
    messages = max(Counter(node for t in schedule.transfers for node in (t.src, t.dst)).values()) * pieces
    steps_s = (pieces - 1 + len(loads)) * STEP_S + num_bytes * _links_s(loads, pieces)
    return max(steps_s, messages * MESSAGE_S)


def choose_for_steps(candidates: Mapping[str, Schedule], num_bytes: int, *, piece_bytes: int | None = None) -> Choice:
    """The candidate and piece size with the least modelled time; ties go to the earlier name and the larger piece.

    Args:
        candidates: schedules of one collective on one topology, by method.
        num_bytes: of the whole array.
        piece_bytes: a piece size that is given, instead of those in ``PIECE_BYTES``.
    """
    best: Choice | None = None
    for method, schedule in candidates.items():
        loads = _level_loads(schedule)
        for size in (piece_bytes,) if piece_bytes else PIECE_BYTES[::-1]:
            seconds = _estimate(schedule, loads, num_bytes, size)
            if best is None or seconds < best.seconds:
                best = Choice(method=method, piece_bytes=size, seconds=seconds)
    if best is None:
        raise ValueError("no candidate schedules")
    return best
