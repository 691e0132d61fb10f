"""The report's figures: the fabric, loss against wall-clock, and bandwidth beside the bound.

Each panel draws itself on given axes; ``write_png`` composes the three, ``panel_svg`` gives one alone for a page.
Only measured figures are drawn as bars; the bound is a mark beside them, never a bar.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from mycel.bench.measurement import Measurement
from mycel.report.data import Report, TrainingRun
from mycel.report.fabric import draw_fabric, tree_of
from mycel.report.style import LIGHT, figure_settings, themed
from mycel.units import format_seconds, format_size

__all__ = ["PANELS", "draw_bandwidth", "draw_cluster", "draw_loss", "panel_svg", "write_png"]

#: Backends as people write them.
NAMES = {"gloo": "Gloo", "mycel": "mycel"}


def draw_cluster(axes: Axes, report: Report) -> None:
    """The fabric with one tree of the schedule on it."""
    draw_fabric(axes, report.topology, tree_of(report.schedule) if report.schedule else ())


def draw_loss(axes: Axes, report: Report) -> None:
    """Loss of every step and on held-out text, against seconds of training."""
    runs = ((report.baseline, LIGHT.baseline, LIGHT.baseline_text), (report.ours, LIGHT.ours, LIGHT.ours))
    longest = max(report.baseline, report.ours, key=lambda run: run.total_s)
    highest = max(e.bits_per_byte for run, _, _ in runs for e in run.evaluations)
    lowest = min(e.bits_per_byte for run, _, _ in runs for e in run.evaluations)
    for run, colour, text_colour in runs:
        seconds = [e.elapsed_s for e in run.evaluations]
        bits = [e.bits_per_byte for e in run.evaluations]
        axes.plot(
            [s.elapsed_s for s in run.steps],
            [s.loss / np.log(2) for s in run.steps],
            color=colour,
            linewidth=1.0,
            alpha=0.45,
            zorder=2,
        )
        axes.plot(seconds, bits, color=colour, linewidth=2.2, marker="o", markersize=4.5, zorder=3)
        _label_run(axes, run, text_colour, longest)
    axes.set_xlim(0, longest.total_s * 1.03)
    axes.set_ylim(lowest - 0.4 * (highest - lowest), highest + 0.06 * (highest - lowest))
    axes.set_xlabel("seconds of training")
    axes.grid(axis="y", color=LIGHT.hairline, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)


def draw_bandwidth(axes: Axes, report: Report) -> None:
    """A pair of bars a collective, and the bound as a mark."""
    groups = _by_collective(report)
    reach = max(
        [without_credit(m, report.bounds.get(c)) for c, pair in groups.items() for m in pair]
        + [report.bounds.get(c, 0.0) for c in groups],
        default=1.0,
    )
    colours = {report.baseline.backend: LIGHT.baseline, report.ours.backend: LIGHT.ours}
    text_colours = {report.baseline.backend: LIGHT.baseline_text, report.ours.backend: LIGHT.ours}
    height = 0.34
    for position, (collective, pair) in enumerate(groups.items()):
        bound = report.bounds.get(collective)
        for offset, m in zip((-height / 2 - 0.02, height / 2 + 0.02), pair, strict=False):
            y = position + offset
            shown = without_credit(m, bound)
            axes.barh(y, shown, height=height, color=colours[m.backend], linewidth=0, zorder=3)
            share = "" if m.fraction_of_bound is None else f"  {100 * m.fraction_of_bound:.0f} %"
            name = f"{_name(m.backend)}  " if position == 0 else ""
            _bar_text(axes, shown, y, f"{name}{shown:.3g}{share}", reach, bound, text_colours[m.backend])
        if bound is not None:
            axes.plot([bound, bound], [position - 0.43, position + 0.43], color=LIGHT.bound, linewidth=2.0, zorder=4)
            label = f"bound {bound:.4g}" if position == 0 else f"{bound:.4g}"
            axes.text(bound + 0.012 * reach, position, label, color=LIGHT.bound, fontsize=8.5, va="center", zorder=5)
    axes.set_yticks(range(len(groups)), [c.replace("_", "-") for c in groups])
    axes.set_ylim(len(groups) - 0.45, -0.55)
    axes.set_xlim(0, reach * 1.2)
    for tick in axes.get_yticklabels():
        tick.set_color(LIGHT.ink)
    unit = next(iter(groups.values()))[0].unit if groups else report.topology.unit
    axes.set_xlabel(unit)
    axes.grid(axis="x", color=LIGHT.hairline, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)


#: Panels of a page by name: what draws them, their size in inches, and that in a narrow window where it is another:
#: letters are to be read there, too, so that the drawing is made anew and not made smaller.
PANELS: dict[str, tuple[Callable[[Axes, Report], None], tuple[float, float], tuple[float, float] | None]] = {
    "cluster": (draw_cluster, (5.2, 6.2), None),
    "loss": (draw_loss, (8.2, 3.5), (4.4, 3.4)),
    "bandwidth": (draw_bandwidth, (8.2, 3.8), (4.4, 4.2)),
}


def panel_svg(report: Report, name: str, *, narrow: bool = False) -> str:
    """One panel as an ``<svg>`` element that takes its colours from CSS variables.

    Args:
        report: what is drawn.
        name: of the panel.
        narrow: as windows of telephones want it.
    """
    draw, size, small = PANELS[name]
    size = small if narrow and small is not None else size
    with mpl.rc_context({**figure_settings(), "svg.hashsalt": f"{name}, narrow" if narrow else name}):
        figure = Figure(figsize=size, layout="constrained")
        figure.patch.set_alpha(0)
        draw(figure.add_subplot(), report)
        buffer = io.StringIO()
        FigureCanvasSVG(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    return themed(text[text.index("<svg") :])


def write_png(report: Report, file: Path) -> None:
    """The three panels in one picture, 200 dots an inch."""
    with mpl.rc_context(figure_settings()):
        figure = Figure(figsize=(13.2, 8.0))
        FigureCanvasAgg(figure)
        left, right, top = 0.035, 0.975, 0.955
        figure.text(left, top, report.headline, fontsize=20, fontweight="bold", va="top")
        figure.text(left, top - 0.058, _subtitle(report), fontsize=11, color=LIGHT.muted, va="top")
        figure.text(left, 0.022, _footer(report), fontsize=8, color=LIGHT.muted, va="bottom")
        draw_cluster(figure.add_axes((left, 0.075, 0.335, 0.685)), report)
        draw_loss(figure.add_axes((0.455, 0.53, right - 0.455, 0.235)), report)
        draw_bandwidth(figure.add_axes((0.485, 0.115, right - 0.485, 0.265)), report)
        for x, y, title, note in _titles(report, left):
            figure.text(x, y, title, fontsize=12, fontweight="bold", va="bottom")
            figure.text(x, y - 0.008, note, fontsize=9, color=LIGHT.muted, va="top")
        figure.savefig(file, dpi=200)


def captions(report: Report) -> dict[str, tuple[str, str]]:
    """Title and note of each panel, from the data."""
    tree = "one tree of the forest, from the rank in green" if report.schedule else "no schedule drawn"
    shown = report.topology.name if report.emulated else f"{report.topology.name}: not emulated, shown for reference"
    sizes = sorted({m.bytes for m in report.measurements})
    size = " and ".join(format_size(s) for s in sizes)
    where = "measured on the emulated cluster" if report.emulated else "measured on loopback, no fabric, no bound"
    mark = "; the mark is the bound" if report.bounds else ""
    return {
        "cluster": ("The cluster", f"{shown}; {tree}"),
        "loss": ("Loss against wall-clock", "bits per byte; thick: held-out text, thin: training batches"),
        "bandwidth": ("Achieved bandwidth", f"{size}, {where}{mark}"),
    }


def _titles(report: Report, left: float) -> list[tuple[float, float, str, str]]:
    notes = captions(report)
    return [
        (left, 0.815, *notes["cluster"]),
        (0.43, 0.815, *notes["loss"]),
        (0.43, 0.43, *notes["bandwidth"]),
    ]


def _subtitle(report: Report) -> str:
    base, ours = report.baseline, report.ours
    return (
        f"Median step {format_seconds(base.median_step_s)} over {_name(base.backend)}, "
        f"{format_seconds(ours.median_step_s)} over {_name(ours.backend)}; {report.loss_sentence}. "
        f"{report.topology.num_ranks} ranks, {_millions(base)} parameters."
    )


def _footer(report: Report) -> str:
    versions = ", ".join(
        f"{name} {value}" for name, value in report.versions.items() if name not in ("kernel", "numpy")
    )
    where = "links shaped in network namespaces" if report.emulated else "loopback, nothing shaped"
    return f"{report.hardware}; {where}; {versions}"


def _label_run(axes: Axes, run: TrainingRun, colour: str, longest: TrainingRun) -> None:
    """Name and duration at the end of a curve: above the longer run's, below the shorter one's, where it is free."""
    last = run.evaluations[-1]
    is_longest = run is longest
    ends_late = last.elapsed_s > 0.5 * longest.total_s  # to its right there would be no room
    above = 10 if _inches(axes) > 4.6 else 24  # curves are steeper in narrow drawings
    axes.annotate(
        f"{_name(run.backend)}\n{len(run.steps)} steps in {run.total_s:.0f} s",
        (last.elapsed_s, last.bits_per_byte),
        xytext=(3 if ends_late else -3, above if is_longest else -9),
        textcoords="offset points",
        color=colour,
        fontsize=9.5,
        fontweight="bold",
        ha="right" if ends_late else "left",
        va="bottom" if is_longest else "top",
        linespacing=1.35,
        zorder=5,
        path_effects=[withStroke(linewidth=3, foreground=LIGHT.paper)],
    )


def _inches(axes: Axes) -> float:
    """How wide the drawing is."""
    return float(axes.bbox.width / axes.figure.dpi)


def _by_collective(report: Report) -> dict[str, list[Measurement]]:
    order = {report.baseline.backend: 0, report.ours.backend: 1}
    groups: dict[str, list[Measurement]] = {}
    for m in report.measurements:
        if m.backend in order:
            groups.setdefault(m.collective, []).append(m)
    return {c: sorted(pair, key=lambda m: order[m.backend]) for c, pair in groups.items()}


def without_credit(m: Measurement, bound: float | None) -> float:
    """Bandwidth of a bar beside the bound's mark: what shaped links let through at once is in no fraction either."""
    if bound is None or m.fraction_of_bound is None:
        return m.algbw
    return min(m.algbw, m.fraction_of_bound * bound)


def _bar_text(axes: Axes, shown: float, y: float, text: str, reach: float, bound: float | None, colour: str) -> None:
    """Beside the bar where there is room before the bound's mark, else inside its end, else behind the mark."""
    takes = (0.03 + 0.1 / _inches(axes) * len(text)) * reach
    mark = bound if bound is not None and bound > shown else None
    fits = takes < (1.2 * reach if mark is None else mark) - shown
    inside = not fits and shown > takes
    end = shown if fits or inside or mark is None else mark
    axes.text(
        end + (-0.012 if inside else 0.012) * reach,
        y,
        text,
        color=LIGHT.paper if inside else colour,
        fontsize=8.5,
        fontweight="bold",
        ha="right" if inside else "left",
        va="center_baseline",
        zorder=6,
    )


def _name(backend: str) -> str:
    return NAMES.get(backend, backend)


def _millions(run: TrainingRun) -> str:
    return f"{run.settings['parameters'] / 1e6:.1f} M"
