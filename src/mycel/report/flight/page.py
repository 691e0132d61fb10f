"""Flight records of all ranks as one self-contained page, in the style of the house."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from mycel.report.elements import page, render_cards, table
from mycel.report.flight.findings import Findings, MatchedCall
from mycel.report.flight.links import Carried, Suspect
from mycel.report.flight.words import (
    KIND_HEADS,
    headline,
    kind_row,
    late_sentence,
    plural,
    suspect_sentence,
    unfinished_sentence,
)
from mycel.report.picture import picture_svg
from mycel.units import format_seconds, format_size

__all__ = ["render_page"]

#: Collectives, ranks and connections that are shown; the JSON form has all of them.
_MOST_CALLS, _MOST_RANKS, _MOST_CONNECTIONS, _MOST_KINDS = 40, 32, 24, 40
#: Fabrics up to this size are drawn.
_MOST_VERTICES = 64
#: Geometry of the timeline, in its own units.
_WIDTH, _LEFT, _ROW, _BAR = 1040.0, 64.0, 26.0, 16.0
_COLOURS = {"queued": "var(--link)", "waiting": "var(--baseline)", "moving": "var(--ours)"}


def render_page(findings: Findings, connections: Sequence[Carried], slow: Suspect | None) -> str:
    """The page as text. Every number in it is taken from the records."""
    return page(
        headline(findings, slow),
        [
            f'<p class="lead">{escape(_lead(findings))}</p>',
            _warnings(findings),
            _cards(findings),
            _timeline(findings),
            _kinds(findings),
            _ranks(findings),
            _picture(findings, slow),
            _connections(connections, slow),
            _unfinished(findings),
            f"<footer>{escape(_footer(findings))}</footer>",
        ],
    )


def _lead(findings: Findings) -> str:
    first = findings.dumps[0]
    hosts = len({dump.host for dump in findings.dumps})
    where = f"{hosts} hosts" if hosts > 1 else "one host"
    whole = len(findings.whole)
    about = f"{plural(whole)}, written down by "
    about += f"{len(findings.dumps)} of {first.world_size} ranks on {where}."
    return f"{about} {late_sentence(findings)}" if whole else about


def _warnings(findings: Findings) -> str:
    texts = [f"{unfinished_sentence(u)}." for u in findings.unfinished]
    if findings.silent:
        texts.append(
            f"No records of {'ranks' if len(findings.silent) > 1 else 'rank'} "
            f"{', '.join(map(str, findings.silent))}: killed before they could write, or not copied here. What the "
            "others waited for them counts as moving."
        )
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


def _cards(findings: Findings) -> str:
    queued, waiting, moving = findings.parts_s
    if not findings.whole:
        return ""
    latest = findings.latest
    cards = [
        ("ours", format_seconds(moving) if moving else "0", "moving bytes, average rank"),
        ("", format_seconds(waiting) if waiting else "0", "waiting for the last rank to begin"),
        ("", format_seconds(queued) if queued else "0", "queued behind others, or being planned"),
        ("", "none" if latest is None else f"rank {latest.rank}", "awaited longest"),
    ]
    return render_cards(cards)


def _timeline(findings: Findings) -> str:
    shown = [m for m in findings.matched if m.is_whole][-_MOST_CALLS:]
    if not shown:
        return ""
    begin = min(side.called_s for m in shown for side in m.sides.values())
    end = max(side.ended_s or 0.0 for m in shown for side in m.sides.values())
    ranks = [dump.rank for dump in findings.dumps][:_MOST_RANKS]
    scale = (_WIDTH - _LEFT) / max(end - begin, 1e-9)
    height = len(ranks) * _ROW + 24
    parts = [f'<svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" aria-label="Timeline of collectives">']
    style = 'font-size="12" fill="var(--muted)"'
    for row, rank in enumerate(ranks):
        y = row * _ROW
        parts.append(f'<text x="0" y="{y + 13:.1f}" {style}>rank {rank}</text>')
        line = y + _ROW - 4
        parts.append(f'<path d="M{_LEFT} {line:.1f}H{_WIDTH}" stroke="var(--hairline)" stroke-width="1"/>')
        # What is queued is queued while something else moves: that is drawn over it.
        for names in (("queued",), ("waiting", "moving")):
            for seen in shown:
                parts += _bars(seen, rank, y, begin, scale, names)
    for tick in range(5):
        x = _LEFT + (_WIDTH - _LEFT) * tick / 4
        anchor = ("start", "middle", "middle", "middle", "end")[tick]
        text = format_seconds((end - begin) * tick / 4) if tick else "0"
        parts.append(f'<text x="{x:.1f}" y="{height - 6:.1f}" text-anchor="{anchor}" {style}>{text}</text>')
    parts.append("</svg>")
    key = " ".join(
        f'<span class="key"><span style="color:{colour}">&#9632;</span> {name}</span>'
        for name, colour in _COLOURS.items()
    )
    last = "collective" if len(shown) == 1 else plural(len(shown))
    note = f"The last {last} that ended everywhere. {key}"
    return (
        f'<section><h2>Timeline</h2><p class="note">{note}</p>'
        f'<div class="scroll timeline" tabindex="0" role="region" aria-label="Timeline">{"".join(parts)}</div>'
        "</section>"
    )


def _bars(seen: MatchedCall, rank: int, y: float, begin: float, scale: float, names: Sequence[str]) -> list[str]:
    side = seen.sides.get(rank)
    if side is None:
        return []
    at = side.called_s
    bars = []
    call = side.call
    for name, seconds in zip(_COLOURS, seen.parts_s(rank), strict=True):
        width = seconds * scale
        if width >= 0.2 and name in names:
            x = _LEFT + (at - begin) * scale
            title = f"{call.what} #{call.sequence}, {format_size(call.num_bytes)}: {name} {format_seconds(seconds)}"
            bars.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_BAR}" fill="{_COLOURS[name]}">'
                f"<title>{escape(title)}</title></rect>"
            )
        at += seconds
    return bars


def _kinds(findings: Findings) -> str:
    rows = [("", kind_row(kind)) for kind in findings.kinds[:_MOST_KINDS]]
    note = (
        "Seconds of an average rank, summed. Queued: called, but an earlier one of the group is under way, or its "
        "program is being made, as at the first call of a size. Waiting: "
        "begun, but some rank has not begun. Moving: the rest. Median and fraction of the bound count from the last "
        "rank's beginning to the last rank's end; data that went ahead can lift the fraction above 1."
    )
    if len(findings.kinds) > _MOST_KINDS:
        note += f" The first {_MOST_KINDS} of {len(findings.kinds)}."
    return table("Where time went", note, KIND_HEADS, rows, num_text=2) if rows else ""


def _ranks(findings: Findings) -> str:
    latest = findings.latest
    shown = sorted(findings.ranks, key=lambda r: -r.awaited_s)[:_MOST_RANKS]
    rows = [
        (
            "warn" if latest is not None and r.rank == latest.rank else "",
            [
                f"rank {r.rank}",
                r.host,
                str(r.collectives),
                *(_seconds(value) for value in (r.window_s, r.window_s - r.inside_s, r.waiting_s, r.moving_s)),
                str(r.late),
                _seconds(r.awaited_s),
            ],
        )
        for r in shown
    ]
    heads = [
        "rank",
        "host",
        "collectives",
        "from first to last",
        "none under way",
        "waited",
        "moved",
        "times last",
        "was awaited",
    ]
    note = f"{late_sentence(findings)} Only what the program decides counts as late, not the queue before it."
    return table("Ranks", note, heads, rows, num_text=2)


def _connections(connections: Sequence[Carried], slow: Suspect | None) -> str:
    if not connections:
        return ""
    pair = None if slow is None else frozenset(slow.ends)
    rows = [
        (
            "warn" if pair is not None and any(pair == frozenset(hop) for hop in pairwise(c.path)) else "",
            [
                f"rank {c.src} to {c.dst}",
                " > ".join(c.path),
                format_size(c.num_bytes) if c.num_bytes % 1024 == 0 else f"{c.num_bytes / 2**20:.1f}MB",
                f"{c.rate * 8 / 1e6:,.0f}",
                f"{c.fair * 8 / 1e6:,.0f}",
                f"{c.reached:.2f}" if c.rate <= c.fair else "all",
                f"{c.limit * 8 / 1e6:,.0f}",
                "more" if c.of_path is None else f"{c.of_path:.2f}",
                _seconds(c.receiver_full_s),
                str(c.retransmitted),
            ],
        )
        for c in connections[:_MOST_CONNECTIONS]
    ]
    said = "No connection is much slower than the others." if slow is None else f"{suspect_sentence(slow)}."
    note = (
        f"{said} Rates while busy, with room at the receiver, since the group began; beside each connection's part "
        "of what its path was to carry, of which it has got all where others left theirs, and beside the whole path. "
        "TCP/IP headers leave 0.956 of a link. More than the path: it is wider than the topology says, or it lets "
        "some bytes through at once, as emulated links do."
    )
    heads = ["connection", "path", "sent", "Mbit/s", "its part", "reached", "the path", "of it"]
    heads += ["receiver full", "sent again"]
    return table("Connections, slowest first", note, heads, rows, num_text=2)


def _picture(findings: Findings, slow: Suspect | None) -> str:
    """The largest described fabric that has the suspected cable, with the cable marked."""
    if slow is None:
        return ""
    groups = {group.identity: group for dump in findings.dumps for group in dump.groups.values()}
    for group in sorted(groups.values(), key=lambda group: -len(group.ranks)):
        topology = group.topology
        vertices = {topology.label(v): v for v in range(len(topology.vertices))}
        if not group.described or len(vertices) > _MOST_VERTICES or not set(slow.ends) <= set(vertices):
            continue
        a, b = (vertices[label] for label in slow.ends)
        cut = [hop for hop in ((a, b), (b, a)) if hop in topology.capacity]
        note = f"{topology.name}, as the job was told; marked: the cable that is suspected."
        return (
            f'<section class="picture"><h2>The fabric</h2><p class="note">{escape(note)}</p>'
            f"{picture_svg(topology, cut)}</section>"
        )
    return ""


def _unfinished(findings: Findings) -> str:
    rows = [
        (
            "warn" if done == u.stalled[0][2] else "",
            [f"{u.call.what} #{u.call.sequence}", f"{src} to {dst}", f"rank {by}", str(done), str(every)],
        )
        for u in findings.unfinished
        for src, dst, done, every, by in u.stalled
    ]
    note = "Channels with messages left when the records were written; those that came least far first."
    heads = ["collective", "ranks", "seen by", "messages done", "messages"]
    return table("What did not end", note, heads, rows, num_text=3) if rows else ""


def _footer(findings: Findings) -> str:
    sure = findings.clocks.uncertainty_s
    about = f"Times: {findings.clocks.how}"
    about += f", to {format_seconds(sure)}" if sure else ""
    if findings.skipped:
        about += f"; {findings.skipped} that not every rank has in its records are left out"
    return f"{about}. Everything here is measured; bounds are of the topology that the job was given."


def _seconds(value: float) -> str:
    return "0" if value <= 0 else format_seconds(value)
