"""A pipeline's step as one picture: of every rank when each computation was planned, and under it when it was."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

from mycel.report.elements import page, render_cards
from mycel.report.pipeline import PipelineFlight, Row, compare, sentences

__all__ = ["render_pipelines"]

_FORWARD, _BACKWARD, _WEIGHTS, _WAITED = "#7fb3d5", "#f0b27a", "#82c99a", "#d9d9d4"
_WIDTH, _LEFT, _TOP, _LANE, _GAP = 1300, 116, 30, 22, 16
#: Width in pixels of a letter in a block; narrower ones have none.
_LETTER = 6.4
#: Computations that are drawn; of more there are the sentences.
_MOST = 8192
_STYLE = """<style>
.step svg { min-width: 1300px; } .step text { font: 11px Inter, system-ui, sans-serif; fill: var(--ink); }
.step text.block { fill: #1b2420; font-size: 10px; } .step line { stroke: var(--hairline); }
.said { margin: .5rem 0 2.6rem; padding-left: 1.2rem; max-width: 56rem; } .said li { margin: .25rem 0; }
</style>"""


def render_pipelines(flights: Sequence[PipelineFlight]) -> str:
    """A page of the records of one pipeline's ranks.

    Args:
        flights: of all ranks; at least one.
    """
    rows = compare(flights)
    name = next((flight.order for flight in flights if flight.order), "an order")
    said = sentences(flights)
    return page(
        f"A step of {name}",
        [
            _STYLE,
            f'<p class="lead">{escape(said[0])}</p>',
            _cards(rows),
            _step(rows),
            f'<ul class="said">{"".join(f"<li>{escape(sentence)}</li>" for sentence in said[1:])}</ul>',
            "<footer>Planned times are modelled, the others measured; all ranks on the clock of the one that began "
            "first.</footer>",
        ],
    )


def _cards(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    begin = min(row.measured[0] for row in rows)
    cards = [("ours", f"{1e3 * (max(row.measured[1] for row in rows) - begin):.0f} ms", "measured")]
    planned = [row.planned for row in rows if row.planned is not None]
    if planned:
        span = max(end for _, end in planned) - min(start for start, _ in planned)
        cards.append(("", f"{1e3 * span:.0f} ms", "planned, by the model"))
    waited = sum(row.waited_s for row in rows) / len({row.rank for row in rows})
    cards.append(("", f"{1e3 * waited:.0f} ms", "waited for messages, a rank on average"))
    return render_cards(cards)


def _step(rows: Sequence[Row]) -> str:
    if not rows or len(rows) > _MOST:
        return f'<p class="note">{len(rows)} computations are not drawn.</p>'
    first = min(row.measured[0] for row in rows)
    planned = [row.planned for row in rows if row.planned is not None]
    zero = min((start for start, _ in planned), default=0.0)
    span = max(
        max(row.measured[1] for row in rows) - first, max((end for _, end in planned), default=0.0) - zero, 1e-9
    )
    scale = (_WIDTH - _LEFT - 8) / span
    ranks = sorted({row.rank for row in rows})
    height = _TOP + len(ranks) * (2 * _LANE + _GAP) + 4
    drawn = _axis(span, scale, height)
    for place, rank in enumerate(ranks):
        top = _TOP + place * (2 * _LANE + _GAP)
        drawn.append(f'<text x="0" y="{top + 14}">rank {rank}</text>')
        for lane, word in enumerate(("planned", "measured")):
            drawn.append(f'<text x="{_LEFT - 6}" y="{top + lane * _LANE + 14}" text-anchor="end">{word}</text>')
        for row in rows:
            if row.rank != rank:
                continue
            if row.planned is not None:
                drawn += _block(row.action, row.planned[0] - zero, row.planned[1] - zero, scale, top, opacity=0.6)
            start, end = row.measured[0] - first, row.measured[1] - first
            if row.waited_s > 0:
                drawn += _block("", start, start + row.waited_s, scale, top + _LANE, colour=_WAITED)
            drawn += _block(row.action, start + row.waited_s, end, scale, top + _LANE)
    caption = "Each rank's computations, planned above and measured below"
    return (
        '<section><h2>Planned and measured</h2><p class="note">Upper lane: when the plan has it. Lower lane: when it '
        "was. Forwards blue, backwards orange, of weights alone green, waiting for a message grey.</p>"
        f'<div class="scroll step" tabindex="0" role="region" aria-label="{caption}">'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{caption}">{"".join(drawn)}</svg></div>'
        "</section>"
    )


def _axis(span: float, scale: float, height: int) -> list[str]:
    """Lines at round times, about ten of them."""
    rough = span / 10
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    drawn = []
    for number in range(int(span / step) + 1):
        x = _LEFT + number * step * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height}"/>')
        drawn.append(f'<text x="{x + 3:.1f}" y="{_TOP - 12}">{1e3 * number * step:g} ms</text>')
    return drawn


def _block(
    action: str, start: float, end: float, scale: float, top: float, *, colour: str = "", opacity: float = 1.0
) -> list[str]:
    kind = action.lstrip("0123456789")[:1]
    fill = colour or {"F": _FORWARD, "W": _WEIGHTS}.get(kind, _BACKWARD)
    x, width = _LEFT + start * scale, max(0.4, (end - start) * scale)
    title = f"<title>{escape(action)}: {1e3 * start:.1f} to {1e3 * end:.1f} ms</title>" if action else ""
    drawn = [
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_LANE - 3}" rx="2" fill="{fill}" '
        f'fill-opacity="{opacity}">{title}</rect>'
    ]
    if width > _LETTER * len(action) > 0:
        drawn.append(
            f'<text class="block" x="{x + width / 2:.1f}" y="{top + 13}" text-anchor="middle">{escape(action)}</text>'
        )
    return drawn
