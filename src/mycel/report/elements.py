"""What pages of the house are put together from: the frame with its style sheet, cards and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mycel.report.style import DARK, LIGHT, css_variables

__all__ = ["page", "render_cards", "table"]

_STYLE = """
:root { color-scheme: light dark; %(light)s }
@media (prefers-color-scheme: dark) { :root { %(dark)s } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 Inter, system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 3.5rem 1.5rem 4rem; }
h1 { font-size: clamp(1.7rem, 4vw, 2.5rem); line-height: 1.15; letter-spacing: -.02em; margin: 0 0 .8rem; }
h2 { font-size: 1.15rem; margin: 0; letter-spacing: -.01em; }
.lead { font-size: 1.1rem; color: var(--muted); max-width: 46rem; margin: 0 0 2.2rem; }
.note, footer { color: var(--muted); font-size: .9rem; }
.key { white-space: nowrap; }
.note { margin: .15rem 0 .8rem; max-width: 56rem; }
.warning { border-left: 4px solid var(--baseline); background: var(--panel); padding: .9rem 1.2rem;
  border-radius: 0 .5rem .5rem 0; margin: 0 0 2rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 1rem; margin: 0 0 3rem; }
.card { background: var(--panel); border: 1px solid var(--hairline); border-radius: .8rem; padding: 1.1rem 1.3rem; }
.card b { display: block; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.card.ours b { color: var(--ours); }
.card span { color: var(--muted); font-size: .9rem; }
.figures { display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 8fr); gap: 2.5rem 3rem; margin: 0 0 3rem; }
.figures section:first-child { grid-row: span 2; }
@media (max-width: 800px) {
  .figures { grid-template-columns: 1fr; }
  .figures section:first-child { grid-row: auto; }
}
svg { width: 100%%; height: auto; display: block; }
svg.narrow { display: none; }
@media (max-width: 560px) {
  main { padding: 2rem 1rem 3rem; }
  .cards { grid-template-columns: 1fr 1fr; gap: .7rem; }
  .card { padding: .8rem .9rem; }
  .card b { font-size: 1.4rem; }
  svg.wide { display: none; }
  svg.narrow { display: block; }
}
.scroll { overflow-x: auto; margin: 0 0 3rem; }
.timeline svg { min-width: 820px; } /* its letters stay readable; a narrow window scrolls along the time */
table { border-collapse: collapse; width: 100%%; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: .45rem .8rem; text-align: right; border-bottom: 1px solid var(--hairline); white-space: nowrap; }
th { color: var(--muted); font-weight: 500; }
th:first-child, td:first-child, td.text, th.text { text-align: left; padding-left: 0; }
tr.ours td { color: var(--ours); font-weight: 600; }
.picture { max-width: 560px; margin: 0 0 3rem; }
tr.warn td { color: var(--baseline-text); font-weight: 600; }
footer { border-top: 1px solid var(--hairline); padding-top: 1.2rem; }
"""


def page(headline: str, parts: Sequence[str]) -> str:
    """A whole page: no script, no font, no image from elsewhere; light and dark by the reader's preference.

    Args:
        headline: its title, as text.
        parts: what follows, as HTML.
    """
    style = _STYLE % {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>mycel: {escape(headline)}</title>",
            f"<style>{style}</style></head><body><main>",
            f"<h1>{escape(headline)}</h1>",
            *parts,
            "</main></body></html>",
            "",
        ]
    )


def render_cards(cards: Sequence[tuple[str, str, str]]) -> str:
    """Figures that catch the eye: ``(kind, figure, text)``, with kind ``"ours"`` for the house's colour."""
    body = "".join(
        f'<div class="card {kind}"><b>{escape(number)}</b><span>{escape(text)}</span></div>'
        for kind, number, text in cards
    )
    return f'<div class="cards">{body}</div>'


def table(
    title: str, note: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], *, num_text: int
) -> str:
    """A table under its title. Where it is wider than the window it scrolls, and what is said about it does not.

    Args:
        title, note: above it.
        heads: of the columns.
        rows: ``(kind, cells)``, with kind ``"ours"`` for the house's colour, ``"warn"`` for what stands out.
        num_text: so many columns are text, aligned to the left.
    """

    def cell(tag: str, position: int, text: str) -> str:
        kind = ' class="text"' if position < num_text else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(heads))
    body = "".join(
        f'<tr class="{kind}">' + "".join(cell("td", i, text) for i, text in enumerate(cells)) + "</tr>"
        for kind, cells in rows
    )
    return (
        f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )
