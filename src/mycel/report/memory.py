"""A picture of what a training step holds: memory by moment, stacked by what it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mycel.report.style import LIGHT, figure_settings

__all__ = ["draw_memory"]

#: By what memory is for: what stays in quiet colours, what comes and goes in loud ones.
_COLOURS = {
    "parameters": LIGHT.bound,
    "gradients": LIGHT.baseline_text,
    "optimizer": LIGHT.baseline,
    "inputs": LIGHT.link,
    "activations": LIGHT.ours,
    "exchanges": "#b3541e",
    "temporary": "#d9a441",
}
_MIB = float(1 << 20)


def draw_memory(
    rows: Sequence[Mapping[str, int]],
    labels: Sequence[tuple[str, str]],
    file: Path,
    *,
    title: str,
    caption: str = "",
    budget: int | None = None,
) -> None:
    """Draws bars of memory, one a moment, into an SVG or PNG file, as its ending says.

    Args:
        rows: bytes by kind, of each moment.
        labels: phase and block of each moment.
        file: where to.
        title: above the drawing.
        caption: one line below the title.
        budget: bytes that there are, drawn as a line.

    Raises:
        OSError: the file cannot be written.
    """
    kinds = [kind for kind in _COLOURS if any(row.get(kind) for row in rows)]
    with mpl.rc_context({**figure_settings(), "svg.hashsalt": title}):
        figure = Figure(figsize=(9.0, 4.4), layout="constrained")
        svg = file.suffix.lower() == ".svg"
        _ = FigureCanvasSVG(figure) if svg else FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        places = range(len(rows))
        below = [0.0] * len(rows)
        for kind in kinds:
            heights = [row.get(kind, 0) / _MIB for row in rows]
            axes.bar(places, heights, 1.0, bottom=below, color=_COLOURS[kind], label=kind, linewidth=0)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        if budget is not None:
            axes.axhline(budget / _MIB, color=LIGHT.ink, linestyle="--", linewidth=1.0)
            axes.annotate("budget", (0, budget / _MIB), xytext=(2, 3), textcoords="offset points", color=LIGHT.ink)
        _phases(axes, labels, max([*below, (budget or 0) / _MIB]))
        axes.set_ylabel("MiB held")
        axes.set_xlim(-0.5, len(rows) - 0.5)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, reverse=True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        axes.set_title(caption, loc="left", fontsize=9, color=LIGHT.muted)
        figure.savefig(file, dpi=160, metadata={"Date": None, "Creator": None} if svg else {})


def _phases(axes: mpl.axes.Axes, labels: Sequence[tuple[str, str]], top: float) -> None:
    """Names phases where they begin, instead of numbers of moments."""
    starts = [at for at, (phase, _) in enumerate(labels) if at == 0 or phase != labels[at - 1][0]]
    axes.set_xticks([start - 0.5 for start in starts], [labels[start][0] for start in starts], ha="left")
    axes.set_ylim(0, top * 1.08)
    for start in starts[1:]:
        axes.axvline(start - 0.5, color=LIGHT.hairline, linewidth=1.0)
