"""Which schedule, in pieces of which size, where every pipeline step is one group of operations.

A step costs a fixed time however little it moves, and the time of the bytes that the busiest link carries in it.
More pieces fill the pipeline sooner and cost more steps. Beside that the processor has to queue every message, which
may take longer than the device needs for them all. Both fixed times are assumptions, not measurements: nobody has yet
run this on several GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mycel.collectives.cost import Choice
from mycel.collectives.schedule import Schedule

__all__ = ["MESSAGE_S", "PIECE_BYTES", "STEP_S", "choose_for_steps"]

#: Seconds that a group of operations takes beside moving its bytes: a launch, and meeting the peers. Assumed.
STEP_S = 20e-6
#: Seconds of the processor's time for queueing one message. Assumed.
MESSAGE_S = 5e-6
#: Pieces worth trying: below, a step is all launch; above, a GPU's links gain nothing.
PIECE_BYTES = tuple(1 << power for power in range(17, 27))
#: Bytes a second that capacity 1 stands for where a topology gives only relative capacities.
_ASSUMED_RATE = 1e9


def choose_for_steps(candidates: Mapping[str, Schedule], num_bytes: int, *, piece_bytes: int | None = None) -> Choice:
    """The candidate and piece size with the least modelled time; ties go to the earlier name and the larger piece.

    Args:
        candidates: schedules of one collective on one topology, by method.
        num_bytes: of the whole array.
        piece_bytes: a piece size that is given, instead of those in ``PIECE_BYTES``.
    """
    best: Choice | None = None
    for method, schedule in candidates.items():
        rate = float(schedule.topology.bytes_per_second_per_unit or _ASSUMED_RATE)
        on_links_s = num_bytes / schedule.collective.num_parts / (float(schedule.algbw) * rate)
        depth = 1 + max(schedule.order_levels, default=-1)
        of_node = Counter(node for t in schedule.transfers for node in (t.src, t.dst))
        longest = max(chunk.num_units for chunk in schedule.chunks) * num_bytes / schedule.num_units
        for size in (piece_bytes,) if piece_bytes else PIECE_BYTES[::-1]:
            pieces = max(1, -(-int(longest) // size))
            steps = pieces - 1 + depth
            queueing_s = max(of_node.values(), default=0) * pieces * MESSAGE_S
            seconds = max(steps * (STEP_S + on_links_s / pieces), queueing_s)
            if best is None or seconds < best.seconds:
                best = Choice(method=method, piece_bytes=size, seconds=seconds)
    if best is None:
        raise ValueError("no candidate schedules")
    return best
