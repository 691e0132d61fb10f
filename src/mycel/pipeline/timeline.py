"""A simulated order as a picture: Chrome trace for a viewer, SVG for a page.

References:
    "Trace Event Format", the Chromium project (complete events ``X``, metadata ``M``, counters ``C``; times in
    microseconds).
"""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from mycel.pipeline.order import Action, Kind
from mycel.pipeline.simulate import Run

__all__ = ["chrome_trace", "svg"]

#: Colours by kind of work: forward, backward (whole or of the input), of weights, shared, in two parts.
_COLOURS = {
    Kind.FORWARD: "#7fb3d5",
    Kind.BACKWARD: "#f0b27a",
    Kind.INPUT: "#f0b27a",
    Kind.WEIGHT: "#82c99a",
    Kind.SHARED: "#c39bd3",
    Kind.OVERLAP: "#f7dc6f",
}
_WIDTH, _ROW, _LEFT, _TOP = 1200, 28, 64, 34
#: Width in pixels from which on an action has its text in it.
_LETTER = 7


def chrome_trace(run: Run, *, unit_s: float = 1e-6) -> dict[str, Any]:
    """The JSON object of a run: a process a rank, in it its actions, its messages and the memory that it holds.

    Args:
        run: a simulated run.
        unit_s: what a microsecond of the viewer stands for; a run in seconds is to scale, for one in a placement's
            units give a larger one.

    Examples:
        >>> from mycel.pipeline.known import one_f_one_b
        >>> from mycel.pipeline.simulate import simulate
        >>> trace = chrome_trace(simulate(one_f_one_b(2, 2), {"F": 1e-3, "B": 2e-3}))
        >>> [e["name"] for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
        ['1F0', '1B0', '1F1', '1B1']
    """
    events: list[dict[str, Any]] = []
    for rank in range(run.order.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        names = {0: "computation"} | {1 + other: f"to rank {other}" for other in sorted(_peers(run, rank))}
        for thread, name in names.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
    for rank, row in enumerate(run.order.rows):
        for action, start, end in zip(row, run.starts[rank], run.ends[rank], strict=True):
            events.append(_event(str(action), rank, 0, start / unit_s, end / unit_s, {"kind": action.kind.value}))
        for at, held in run.memory(rank):
            events.append(
                {"ph": "C", "name": "memory", "pid": rank, "ts": round(at / unit_s, 3), "args": {"held": held}}
            )
    for message in run.messages:
        letter, place, number = message.result
        told = {"bytes": message.num_bytes, "complete": round(message.done_s / unit_s, 3)}
        name = f"{letter}{place} of {number}"
        events.append(
            _event(
                name, message.source, 1 + message.destination, message.start_s / unit_s, message.sent_s / unit_s, told
            )
        )
    what = f"{run.order.name or 'order'}: {run.order.num_micro_batches} micro-batches on {run.order.ranks} ranks"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"simulated": what}}


def _peers(run: Run, rank: int) -> set[int]:
    return {message.destination for message in run.messages if message.source == rank}


def _event(name: str, rank: int, thread: int, start: float, end: float, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": thread,
        "ts": round(start, 3),
        "dur": round(end - start, 3),
        "args": told,
    }


def svg(run: Run, *, caption: str = "") -> str:
    """A picture: a row a rank, an action a box, a message a line from its rank to the other.

    Args:
        run: a simulated run.
        caption: above it; what ran and how long it took if not given.
    """
    begin = min(map(min, run.starts))
    scale = (_WIDTH - _LEFT - 8) / (run.makespan or 1.0)
    height = _TOP + run.order.ranks * _ROW + 24
    name = run.order.name or "order"
    caption = caption or f"{name}: {run.order.num_micro_batches} micro-batches, makespan {run.makespan:g}, simulated"

    def x(at: float) -> float:
        return round(_LEFT + (at - begin) * scale, 2)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11">',
        f"<title>{escape(caption)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="13">{escape(caption)}</text>',
    ]
    for rank, row in enumerate(run.order.rows):
        top = _TOP + rank * _ROW
        parts.append(f'<text x="8" y="{top + 17}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top + 2}" width="{_WIDTH - _LEFT - 8}" height="{_ROW - 4}" fill="#f2f3f4"/>'
        )
        for action, start, end in zip(row, run.starts[rank], run.ends[rank], strict=True):
            parts.append(_box(action, x(start), x(end) - x(start), top))
    for message in run.messages:
        ends = [_TOP + rank * _ROW + _ROW / 2 for rank in (message.source, message.destination)]
        parts.append(
            f'<line x1="{x(message.start_s)}" y1="{ends[0]}" x2="{x(message.done_s)}" y2="{ends[1]}" '
            f'stroke="#34495e" stroke-width="0.6" opacity="0.5"/>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _box(action: Action, left: float, width: float, top: int) -> str:
    text = str(action)
    number = "" if action.micro_batch is None else str(action.micro_batch)
    shown = next((t for t in (text, number) if t and len(t) * _LETTER <= width), "")
    box = (
        f'<rect x="{left}" y="{top + 2}" width="{width:.2f}" height="{_ROW - 4}" fill="{_COLOURS[action.kind]}" '
        f'stroke="white" stroke-width="0.8"><title>{escape(text)}</title></rect>'
    )
    if not shown:
        return box
    middle = left + width / 2
    return f'{box}<text x="{middle:.2f}" y="{top + 18}" text-anchor="middle">{escape(shown)}</text>'
