"""Chrome trace: a simulated run as a timeline, a process a sending rank and a thread a channel.

References:
    "Trace Event Format", the Chromium project (complete events ``X``, metadata ``M``; times in microseconds).
"""

from __future__ import annotations

import json
from typing import Any

from mycel.collectives.cost import PIECE_BYTES
from mycel.collectives.schedule import Schedule
from mycel.collectives.simulate import Simulation, simulate

__all__ = ["export", "timeline"]


def timeline(run: Simulation) -> dict[str, Any]:
    """The JSON object of a simulated run."""
    topology = run.schedule.topology
    events: list[dict[str, Any]] = []
    num_ranks = run.schedule.collective.num_ranks
    for number, vertex in enumerate(topology.compute_vertices[: run.schedule.num_compute_vertices]):
        name = f"{_kind(number, num_ranks)} ({topology.label(vertex)})"
        events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}})
    for number, channel in enumerate(run.channels):
        via = " > ".join(topology.label(vertex) for vertex in channel.path)
        name = f"to {_kind(channel.dst, num_ranks)}: {via}"
        events.append({"ph": "M", "name": "thread_name", "pid": channel.src, "tid": number, "args": {"name": name}})
    for row in run.events:
        channel = run.channels[row["channel"]]
        start, sent, done = (float(row[key]) * 1e6 for key in ("start_s", "sent_s", "done_s"))
        events.append(
            {
                "ph": "X",
                "name": f"{channel.src} -> {channel.dst}",
                "pid": channel.src,
                "tid": int(row["channel"]),
                "ts": round(start, 3),
                "dur": round(sent - start, 3),
                "args": {"bytes": int(row["num_bytes"]), "complete_us": round(done, 3)},
            }
        )
    what = f"{run.schedule.collective.name} of {run.num_bytes} bytes on {topology.name} by {run.schedule.method}"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"simulated": what}}


def _kind(number: int, num_ranks: int) -> str:
    return f"rank {number}" if number < num_ranks else f"switch {number}"


def export(schedule: Schedule, num_bytes: int, piece_bytes: int | None = None) -> str:
    """Timeline of the schedule at a size, simulated; in messages of the runtime's size if none is given."""
    run = simulate(schedule, num_bytes, piece_bytes=piece_bytes or PIECE_BYTES[-1])
    return json.dumps(timeline(run), indent=0) + "\n"
