"""Draws a fabric: boxes, ranks, switches and links, with one tree of a schedule's forest laid over it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from mycel.collectives.schedule import Schedule, Transfer
from mycel.report.style import LIGHT
from mycel.topology.model import Topology

__all__ = ["Layout", "draw_fabric", "lay_out", "tree_of"]

_Point = npt.NDArray[np.float64]

#: Distances in drawing units: neighbouring ranks are one apart.
_RANK_RADIUS = 0.27
_SWITCH_HALF = (0.52, 0.2)
_BOX_MARGIN = 0.55
_LANE = 0.075


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things are drawn.

    Attributes:
        places: of each vertex, x to the right and y up.
        boxes: name, left, bottom, width and height of each box.
    """

    places: dict[int, tuple[float, float]]
    boxes: tuple[tuple[str, float, float, float, float], ...]


def tree_of(schedule: Schedule) -> tuple[Transfer, ...]:
    """The copies of one chunk: of those that leave rank 0, or else of all, the widest one's tree."""
    copies: dict[int, list[Transfer]] = {}
    for transfer in schedule.transfers:
        if not transfer.reduce:
            copies.setdefault(transfer.chunk, []).append(transfer)
    if not copies:
        return ()
    rooted = [c for c in copies if copies[c][0].src == 0] or list(copies)
    best = max(rooted, key=lambda c: (schedule.chunks[c].num_units, -c))
    return tuple(copies[best])


def lay_out(topology: Topology) -> Layout:
    """Places for every vertex: boxes in two rows round the core; of fewer, a circle or layers."""
    names = list(dict.fromkeys(v.node for v in topology.vertices if v.node is not None))
    alone = len(names) == 1 and all(v.node is not None for v in topology.vertices)
    return _boxed(topology, names) if names and not alone else _unboxed(topology)


def draw_fabric(axes: Axes, topology: Topology, tree: Sequence[Transfer] = (), *, root: int | None = None) -> None:
    """Draws on ``axes``, which is cleared of ticks and made to fit.

    Args:
        axes: where to draw.
        topology: the fabric.
        tree: transfers laid over it, in the accent colour.
        root: node marked as the root of the tree; if not given, the source of the first transfer.
    """
    layout = lay_out(topology)
    scale = _scale(layout)
    places = {v: np.array(p) for v, p in layout.places.items()}
    for name, left, bottom, width, height in layout.boxes:
        axes.add_patch(
            FancyBboxPatch(
                (left, bottom),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.28",
                facecolor=LIGHT.panel,
                edgecolor=LIGHT.hairline,
                linewidth=1.0,
                zorder=0,
            )
        )
        above = bottom + height / 2 >= 0
        corner = bottom + height - 0.17 if above else bottom + 0.17
        axes.text(left + 0.2, corner, name, color=LIGHT.muted, fontsize=9, va="top" if above else "bottom", zorder=1)
    _draw_links(axes, topology, places, scale)
    for transfer in tree:
        _draw_transfer(axes, scale, [places[v] for v in transfer.path])
    marked = topology.compute_vertices[tree[0].src if root is None else root] if tree else None
    _draw_vertices(axes, topology, places, marked, scale)
    _fit(axes, layout)


# -- layout ---------------------------------------------------------------------------------------------------


def _boxed(topology: Topology, names: list[str]) -> Layout:
    members = {name: [i for i, v in enumerate(topology.vertices) if v.node == name] for name in names}
    core = [i for i, v in enumerate(topology.vertices) if v.node is None]
    above = names[: math.ceil(len(names) / 2)]
    below = names[len(above) :]
    places: dict[int, tuple[float, float]] = {}
    boxes = []
    for row, sign in ((above, 1.0), (below, -1.0)):
        sizes = [_box_width(topology, members[name]) for name in row]
        left = -(sum(sizes) + 0.5 * (len(row) - 1)) / 2
        for name, width in zip(row, sizes, strict=True):
            bottom, height = _place_box(topology, members[name], left + width / 2, sign, places)
            boxes.append((name, left, bottom, width, height))
            left += width + 0.5
    for vertex, x in zip(core, _spread(len(core), 2.2), strict=True):
        places[vertex] = (x, 0.0)
    return Layout(places=places, boxes=tuple(boxes))


def _columns(num_ranks: int) -> int:
    return num_ranks if num_ranks <= 4 else math.ceil(num_ranks / 2)


def _box_width(topology: Topology, members: list[int]) -> float:
    ranks, gates, others = _parts(topology, members)
    return max(_columns(len(ranks)) - 1.0, 1.5 * (max(len(gates), len(others)) - 1), 1.0) + 2 * _BOX_MARGIN


def _parts(topology: Topology, members: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Ranks of a box, switches with a link out of it, and the other switches."""
    inside = set(members)
    leaving = {k.src for k in topology.links if k.dst not in inside} | {
        k.dst for k in topology.links if k.src not in inside
    }
    ranks = [i for i in members if topology.vertices[i].kind == "rank"]
    gates = [i for i in members if topology.vertices[i].kind == "switch" and i in leaving]
    return ranks, gates, [i for i in members if i not in ranks and i not in gates]


def _place_box(
    topology: Topology, members: list[int], centre: float, sign: float, places: dict[int, tuple[float, float]]
) -> tuple[float, float]:
    """From the core outwards: switches that lead out, ranks, other switches. Returns bottom and height of the box."""
    ranks, gates, others = _parts(topology, members)
    columns = max(1, _columns(len(ranks)))
    inner = 1.2
    y = inner + 0.55
    if gates:
        _place_row(gates, 1.5, centre, sign * y, places)
        y += 1.3
    for number, start in enumerate(range(0, len(ranks), columns)):
        # Rows are shifted so that links of the outer one do not run through the inner one.
        shift = 0.18 * number if len(ranks) > columns else 0.0
        _place_row(ranks[start : start + columns], 1.0, centre + shift, sign * y, places)
        y += 0.95
    if others:
        y += 0.35
        _place_row(others, 1.5, centre, sign * y, places)
        y += 0.95
    # The name of the box stands in its outer corner: there is room beside a switch, but not beside a row of ranks.
    height = y - 0.95 + (0.55 if others else 0.8) - inner
    return (inner, height) if sign > 0 else (-inner - height, height)


def _place_row(
    row: Sequence[int], step: float, centre: float, y: float, places: dict[int, tuple[float, float]]
) -> None:
    for vertex, x in zip(row, _spread(len(row), step), strict=True):
        places[vertex] = (centre + x, y)


def _unboxed(topology: Topology) -> Layout:
    ranks, switches = topology.ranks, topology.switches
    if not switches and (grid := _grid(topology)):
        return Layout(places=grid, boxes=())
    if len(switches) <= 1:
        radius = max(1.7, len(ranks) * 0.36)
        angles = [math.pi / 2 - 2 * math.pi * i / len(ranks) for i in range(len(ranks))]
        places = {v: (radius * math.cos(a), radius * math.sin(a)) for v, a in zip(ranks, angles, strict=True)}
        return Layout(places={**places, **dict.fromkeys(switches, (0.0, 0.0))}, boxes=())
    levels = _levels(topology)
    layered: dict[int, tuple[float, float]] = {}
    for level in sorted(set(levels.values())):
        row = [v for v in range(len(topology.vertices)) if levels[v] == level]
        room = 1.0 if level == 0 else 2 * _SWITCH_HALF[0] + 0.2
        step = max(room, (len(ranks) - 1) / max(1, len(row)))
        layered |= {v: (x, 1.7 * level) for v, x in zip(row, _spread(len(row), step), strict=True)}
    return Layout(places=layered, boxes=())


def _grid(topology: Topology) -> dict[int, tuple[float, float]]:
    """Rows and columns, where ranks are called ``row/column`` as those of tori are; else nothing.

    Rows and columns are bent a little, so that a cable from their end round to their start is seen beside the others.
    """
    at = [tuple(map(int, v.label.split("/"))) for v in topology.vertices if re.fullmatch(r"\d+/\d+", v.label)]
    if len(at) < len(topology.vertices):
        return {}
    rows, columns = 1 + max(row for row, _ in at), 1 + max(column for _, column in at)
    if rows * columns != len(at) or min(rows, columns) < 2:
        return {}
    step, bend = 1.5, 0.35

    def bent(i: int, count: int) -> float:
        return bend * (1.0 - (2.0 * i / (count - 1) - 1.0) ** 2)

    return {v: (step * c + bent(r, rows), -step * r + bent(c, columns)) for v, (r, c) in enumerate(at)}


def _levels(topology: Topology) -> dict[int, int]:
    """Hops from the nearest rank."""
    levels = dict.fromkeys(topology.ranks, 0)
    frontier = list(topology.ranks)
    while frontier:
        reached = []
        for link in topology.links:
            if link.src in frontier and link.dst not in levels:
                levels[link.dst] = levels[link.src] + 1
                reached.append(link.dst)
        frontier = reached
    return levels


def _spread(count: int, step: float) -> list[float]:
    return [(i - (count - 1) / 2) * step for i in range(count)]


# -- drawing --------------------------------------------------------------------------------------------------


def _draw_links(axes: Axes, topology: Topology, places: dict[int, _Point], scale: float) -> None:
    widest = max(topology.capacity.values())
    labelled: dict[tuple[str, bool], tuple[float, tuple[int, int]]] = {}
    for (src, dst), capacity in topology.capacity.items():
        back = topology.capacity.get((dst, src))
        if back is not None and src > dst:
            continue
        (x0, y0), (x1, y1) = places[src], places[dst]
        width = scale * (1.0 + 4.5 * math.sqrt(max(capacity, back or 0) / widest))
        axes.plot([x0, x1], [y0, y1], color=LIGHT.link, linewidth=width, solid_capstyle="round", zorder=2)
        text = f"{capacity:,}" if back in (None, capacity) else f"{capacity:,} / {back:,}"
        inside = (
            topology.vertices[src].node is not None and topology.vertices[src].node == topology.vertices[dst].node
        )
        # One link of a kind carries its label: the rightmost, then the topmost.
        place = (x0 + x1) / 2 + 0.01 * (y0 + y1)
        if place > labelled.get((text, inside), (-math.inf, (0, 0)))[0]:
            labelled[text, inside] = (place, (src, dst))
    for (text, _), (_, (src, dst)) in labelled.items():
        _label_link(
            axes, scale, f"{text} {topology.unit}" if topology.unit != "link" else text, places[src], places[dst]
        )


def _label_link(axes: Axes, scale: float, text: str, start: _Point, end: _Point) -> None:
    middle = (start + end) / 2
    steep = abs(end[1] - start[1]) >= 0.35 * abs(end[0] - start[0])
    axes.text(
        middle[0] + (0.2 if steep else 0.0),
        middle[1] + (0.0 if steep else 0.2),
        text,
        color=LIGHT.muted,
        fontsize=max(6.5, 8.5 * scale),
        ha="left" if steep else "center",
        va="center" if steep else "bottom",
        zorder=8,
        path_effects=[withStroke(linewidth=2.5, foreground=LIGHT.paper)],
    )


def _draw_transfer(axes: Axes, scale: float, stops: list[_Point]) -> None:
    """A smooth line from rank to rank that keeps to the right of every link and bends inside the switches."""
    lanes = []
    for start, end in pairwise(stops):
        along = (end - start) / np.linalg.norm(end - start)
        aside = _LANE * np.array([along[1], -along[0]])
        lanes.append((start + aside, end + aside, along))
    head = _RANK_RADIUS + 0.05
    points: list[_Point] = [lanes[0][0] + lanes[0][2] * _RANK_RADIUS * 0.9]
    codes: list[int] = [int(Path.MOVETO)]
    for (_, before, along_in), (after, _, along_out) in pairwise(lanes):
        reach = min(0.45, 0.5 * float(np.linalg.norm(before - points[-1])))
        points += [before - along_in * reach, (before + after) / 2, after + along_out * reach]
        codes += [int(Path.LINETO), int(Path.CURVE3), int(Path.CURVE3)]
    tip = lanes[-1][1] - lanes[-1][2] * head
    along = lanes[-1][2]
    points.append(tip - along * 0.12)
    codes.append(int(Path.LINETO))
    axes.add_patch(
        PathPatch(
            Path(np.array(points), codes),
            facecolor="none",
            edgecolor=LIGHT.ours,
            linewidth=2.0 * scale,
            capstyle="round",
            joinstyle="round",
            zorder=4,
        )
    )
    aside = np.array([along[1], -along[0]]) * 0.085
    base = tip - along * 0.2
    axes.add_patch(Polygon([tip, base + aside, base - aside], closed=True, color=LIGHT.ours, linewidth=0, zorder=5))


def _draw_vertices(axes: Axes, topology: Topology, places: dict[int, _Point], root: int | None, scale: float) -> None:
    for index, vertex in enumerate(topology.vertices):
        x, y = places[index]
        if vertex.kind == "switch":
            half_width, half_height = _SWITCH_HALF
            axes.add_patch(
                FancyBboxPatch(
                    (x - half_width, y - half_height),
                    2 * half_width,
                    2 * half_height,
                    boxstyle="round,pad=0,rounding_size=0.1",
                    facecolor=LIGHT.ours if index == root else LIGHT.paper,
                    edgecolor=LIGHT.ink if vertex.computes else LIGHT.muted,
                    linewidth=2.2 if vertex.computes else 1.1,
                    zorder=3,
                )
            )
            text = vertex.label if len(vertex.label) <= 9 else "switch"
            axes.text(
                x,
                y,
                text,
                color=LIGHT.paper if index == root else LIGHT.muted,
                fontsize=8.5 * scale,
                ha="center",
                va="center",
                zorder=7,
                path_effects=[] if index == root else [withStroke(linewidth=2.5, foreground=LIGHT.paper)],
            )
            continue
        is_root = index == root
        axes.add_patch(
            Circle(
                (x, y),
                _RANK_RADIUS,
                facecolor=LIGHT.ours if is_root else LIGHT.paper,
                edgecolor=LIGHT.ours if root is not None else LIGHT.ink,
                linewidth=1.5,
                zorder=6,
            )
        )
        axes.text(
            x,
            y - 0.01,
            str(topology.rank_of[index]),
            color=LIGHT.paper if is_root else LIGHT.ink,
            fontsize=10.5 * scale,
            fontweight="bold",
            ha="center",
            va="center_baseline",
            zorder=7,
        )


def _scale(layout: Layout) -> float:
    """Type and lines shrink with a large fabric, so that they keep their size beside the vertices."""
    xs, ys = _extent(layout)
    return min(1.0, 7.5 / max(max(xs) - min(xs), max(ys) - min(ys), 1.0))


def _extent(layout: Layout) -> tuple[list[float], list[float]]:
    xs = [x for x, _ in layout.places.values()] + [b[1] for b in layout.boxes] + [b[1] + b[3] for b in layout.boxes]
    ys = [y for _, y in layout.places.values()] + [b[2] for b in layout.boxes] + [b[2] + b[4] for b in layout.boxes]
    return xs, ys


def _fit(axes: Axes, layout: Layout) -> None:
    xs, ys = _extent(layout)
    margin = 0.15 if layout.boxes else 0.2 + _SWITCH_HALF[0]
    axes.set_xlim(min(xs) - margin, max(xs) + margin)
    axes.set_ylim(min(ys) - margin, max(ys) + margin)
    axes.set_aspect("equal")
    axes.axis("off")
