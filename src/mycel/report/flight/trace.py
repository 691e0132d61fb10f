"""Flight records as a timeline for trace viewers: a process a rank, a track a group.

References:
    "Trace Event Format", the Chromium project (complete events ``X``, metadata ``M``; times in microseconds).
"""

from __future__ import annotations

import json
from typing import Any

from mycel.report.flight.findings import Findings, MatchedCall

__all__ = ["render_trace"]


def render_trace(findings: Findings) -> str:
    """The JSON text, to be opened in Perfetto or in chrome://tracing."""
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for dump in findings.dumps:
        name = f"rank {dump.rank} ({dump.host})"
        events.append({"ph": "M", "name": "process_name", "pid": dump.rank, "tid": 0, "args": {"name": name}})
    for seen in findings.matched:
        group = seen.group
        track = tracks.setdefault(group.identity, len(tracks))
        for rank in seen.sides:
            events += _events(seen, rank, track)
    named = {seen.group.identity: seen.group for seen in findings.matched}
    for identity, track in tracks.items():
        name = f"group {named[identity].name}: {len(named[identity].ranks)} ranks"
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
            for rank in named[identity].ranks
        ]
    about = {"clocks": findings.clocks.how, "uncertainty_us": findings.clocks.uncertainty_s * 1e6}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n"


def _events(seen: MatchedCall, rank: int, track: int) -> list[dict[str, Any]]:
    side = seen.sides[rank]
    call = side.call
    begin = side.called_s if side.started_s is None else side.started_s
    args: dict[str, Any] = {
        "sequence": call.sequence,
        "bytes": call.num_bytes,
        "dtype": call.dtype,
        "method": call.method,
        "piece_bytes": call.piece_bytes,
        "state": call.state,
        "queued_us": round((begin - side.called_s) * 1e6, 3),
    }
    whole = {"ph": "X", "name": call.what, "pid": rank, "tid": track, "ts": round(begin * 1e6, 3), "args": args}
    if side.ended_s is None:
        return [{**whole, "ph": "i", "s": "t", "name": f"{call.what}: {call.state}"}]
    whole["dur"] = round((side.ended_s - begin) * 1e6, 3)
    if not seen.is_whole:
        return [whole]
    _, waiting, _ = seen.parts_s(rank)
    if waiting == 0:
        return [whole]
    waited = {
        "ph": "X",
        "name": f"waiting for rank {seen.last}",
        "pid": rank,
        "tid": track,
        "ts": whole["ts"],
    }
    return [whole, {**waited, "dur": round(waiting * 1e6, 3)}]
