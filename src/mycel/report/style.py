"""Colours and type of the report, once, for figures and pages alike.

Figures are drawn with the light colours. In a page their hexadecimal values are replaced by CSS variables, so the
same drawing follows the reader's light or dark theme.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DARK", "LIGHT", "Palette", "css_variables", "figure_settings", "themed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Colours as ``#rrggbb``; all different, because a page tells them apart by value."""

    paper: str
    panel: str
    ink: str
    muted: str
    hairline: str
    link: str
    ours: str
    ours_soft: str
    baseline: str
    baseline_text: str
    bound: str


LIGHT = Palette(
    paper="#ffffff",
    panel="#f4f6f3",
    ink="#1b2420",
    muted="#66716b",
    hairline="#dfe4e0",
    link="#c3cbc5",
    ours="#1d7f55",
    ours_soft="#d5eadf",
    baseline="#b3a58f",
    baseline_text="#85765e",
    bound="#2c3732",
)

DARK = Palette(
    paper="#121714",
    panel="#1a211d",
    ink="#e8ede9",
    muted="#98a59d",
    hairline="#2c3530",
    link="#47534c",
    ours="#4cc38a",
    ours_soft="#1f3f30",
    baseline="#7d725f",
    baseline_text="#b8a98d",
    bound="#dce3de",
)

_FAMILIES = ("Inter", "Source Sans 3", "Source Sans Pro", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")


def figure_settings() -> dict[Any, Any]:
    """matplotlib rc parameters, for ``rc_context``: the first typeface of the list that this machine has.

    Untyped, because matplotlib types the keys as a literal of some three hundred names.
    """
    # Here and not above: pages without figures use the colours too, and need no matplotlib.
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    family = next((name for name in _FAMILIES if name in installed), "DejaVu Sans")
    return {
        "font.family": family,
        "font.size": 9.5,
        "text.color": LIGHT.ink,
        "axes.edgecolor": LIGHT.hairline,
        "axes.labelcolor": LIGHT.muted,
        "axes.facecolor": "none",
        "xtick.color": LIGHT.muted,
        "ytick.color": LIGHT.muted,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "path",
        "figure.facecolor": LIGHT.paper,
    }


def css_variables(palette: Palette) -> str:
    """``--ink: #...;`` for every colour."""
    return " ".join(f"--{name.replace('_', '-')}: {value};" for name, value in asdict(palette).items())


def themed(svg: str) -> str:
    """An SVG drawing whose colours are CSS variables."""
    for name, value in asdict(LIGHT).items():
        svg = svg.replace(value, f"var(--{name.replace('_', '-')})")
    return svg
