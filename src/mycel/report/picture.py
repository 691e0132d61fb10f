"""One fabric as a picture of its own, SVG or PNG: with the links that bind, and with a tree."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mycel.collectives.schedule import Transfer
from mycel.report.fabric import draw_fabric, lay_out
from mycel.report.style import LIGHT, figure_settings, themed
from mycel.topology.model import Topology

__all__ = ["CUT_COLOUR", "picture_svg", "write_picture"]

CUT_COLOUR = "#b3541e"

#: Inches above the drawing, for title and caption.
_HEAD = 0.7


def write_picture(
    topology: Topology,
    file: Path,
    *,
    title: str,
    caption: str = "",
    tree: Sequence[Transfer] = (),
    root: int | None = None,
    cut: Collection[tuple[int, int]] = (),
) -> None:
    """Draws the fabric into an SVG or PNG file, as its ending says.

    Args:
        topology: the fabric.
        file: where to.
        title: above it.
        caption: one line below the title.
        tree: transfers laid over it.
        root: its root, to be marked.
        cut: links that bind, in the direction of the data; dashed, with an arrow.

    Raises:
        OSError: the file cannot be written.
    """
    with mpl.rc_context({**figure_settings(), "svg.hashsalt": topology.fingerprint}):
        places = lay_out(topology).places
        width, height = _size(list(places.values()))
        figure = Figure(figsize=(width, height + _HEAD))
        svg = file.suffix.lower() == ".svg"
        _ = FigureCanvasSVG(figure) if svg else FigureCanvasAgg(figure)
        axes = figure.add_axes((0.02, 0.02, 0.96, (height - 0.1) / (height + _HEAD)))
        draw_fabric(axes, topology, tree, root=root)
        _mark(axes, topology, places, cut)
        top = 1 - 0.15 / (height + _HEAD)
        figure.text(0.03, top, title, fontsize=13, fontweight="bold", va="top")
        figure.text(0.03, top - 0.3 / (height + _HEAD), caption, fontsize=9, color=LIGHT.muted, va="top")
        figure.savefig(file, dpi=160, metadata={"Date": None, "Creator": None} if svg else {})


def picture_svg(topology: Topology, cut: Collection[tuple[int, int]] = ()) -> str:
    """The fabric as an ``<svg>`` element for a page, in the page's colours, with some links marked."""
    with mpl.rc_context({**figure_settings(), "svg.hashsalt": topology.fingerprint}):
        places = lay_out(topology).places
        figure = Figure(figsize=_size(list(places.values())), layout="constrained")
        figure.patch.set_alpha(0)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw_fabric(axes, topology)
        _mark(axes, topology, places, cut)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    return themed(text[text.index("<svg") :])


def _mark(
    axes: Axes, topology: Topology, places: dict[int, tuple[float, float]], cut: Collection[tuple[int, int]]
) -> None:
    for src, dst in cut:
        start, end = _shortened(topology, places, src, dst)
        style = {"arrowstyle": "-|>", "linestyle": (0, (4, 3)), "color": CUT_COLOUR, "linewidth": 1.6}
        axes.annotate(
            "",
            xy=end,
            xytext=start,
            arrowprops=style | {"shrinkA": 0, "shrinkB": 0, "mutation_scale": 13},
            zorder=5,
        )


def _size(places: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Inches for a drawing of these places, in their proportion."""
    wide, high = (max(axis) - min(axis) + 2.0 for axis in zip(*places, strict=True))
    width = min(14.0, max(6.5, wide))
    return width, min(14.0, max(2.5, width * high / wide))


def _shortened(
    topology: Topology, places: dict[int, tuple[float, float]], src: int, dst: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ends of an arrow between two vertices that stops at their outlines."""
    (x0, y0), (x1, y1) = places[src], places[dst]
    length = math.hypot(x1 - x0, y1 - y0)
    steep = abs(y1 - y0) / length
    cuts = []
    for vertex in (src, dst):
        is_rank = topology.vertices[vertex].kind == "rank"
        cuts.append(0.29 if is_rank else min(0.54 / max(1 - steep, 1e-3), 0.22 / max(steep, 1e-3)))
    along = ((x1 - x0) / length, (y1 - y0) / length)
    start = (x0 + along[0] * cuts[0], y0 + along[1] * cuts[0])
    return start, (x1 - along[0] * cuts[1], y1 - along[1] * cuts[1])
