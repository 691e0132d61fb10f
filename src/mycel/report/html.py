"""One self-contained page: no script, no font, no image from elsewhere; light and dark by the reader's preference."""

from __future__ import annotations

from html import escape
from pathlib import Path

from mycel.report.data import Report, TrainingRun
from mycel.report.elements import page, render_cards, table
from mycel.report.figures import NAMES, PANELS, captions, panel_svg
from mycel.units import format_seconds, format_size

__all__ = ["render_html", "write_html"]


def write_html(report: Report, file: Path) -> None:
    """Writes the page; nothing in it refers to another file or host."""
    file.write_text(render_html(report), encoding="utf-8")


def render_html(report: Report) -> str:
    """The page as text. Every number in it is taken from the report's data."""
    return page(
        report.headline,
        [
            f'<p class="lead">{escape(_lead(report))}</p>',
            _warning(report),
            _cards(report),
            _figures(report),
            _training_table(report),
            _bandwidth_table(report),
            _footer(report),
        ],
    )


def _lead(report: Report) -> str:
    settings = report.ours.settings
    where = (
        f"an emulated cluster, {report.topology.name}, whose links carry what the drawing says"
        if report.emulated
        else "this machine's loopback"
    )
    return (
        f"A byte-level language model of {settings['parameters'] / 1e6:.1f} million parameters, trained with "
        f"unchanged DistributedDataParallel on {settings['corpus_bytes'] / 1e6:.1f} MB of Python's standard library, "
        f"by {settings['world_size']} ranks on {where}: once over {_name(report.baseline.backend)}, "
        f"once over {_name(report.ours.backend)}, from the same seed."
    )


def _warning(report: Report) -> str:
    if report.emulated:
        return ""
    return (
        '<p class="warning"><strong>No cluster was emulated.</strong> '
        f"{escape(report.why_not_emulated)} The ranks ran over loopback: the speed figures are of loopback and show "
        "no fabric; there is no bound to compare with. What the page does show is that both backends train the "
        "same model.</p>"
    )


def _cards(report: Report) -> str:
    base, ours = report.baseline, report.ours
    difference = f"{report.loss_difference:.1e}" if report.loss_difference else "0"
    cards = [
        ("", format_seconds(base.median_step_s), f"median step over {_name(base.backend)}"),
        ("ours", format_seconds(ours.median_step_s), f"median step over {_name(ours.backend)}"),
        ("ours", f"{report.speedup:.2f}x", "ratio of the medians"),
        ("", difference, "relative difference of the final held-out losses"),
    ]
    return render_cards(cards)


def _figures(report: Report) -> str:
    sections = []
    for name, (title, note) in captions(report).items():
        if name == "bandwidth" and not report.measurements:
            continue
        has_narrow = PANELS[name][2] is not None
        drawings = [("wide" if has_narrow else "", panel_svg(report, name))]
        drawings += [("narrow", panel_svg(report, name, narrow=True))] if has_narrow else []
        shown = "".join(
            svg.replace("<svg ", f'<svg class="{kind}" role="img" aria-label="{escape(title)}" ', 1)
            for kind, svg in drawings
        )
        sections.append(f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{shown}</section>')
    return f'<div class="figures">{"".join(sections)}</div>'


def _training_table(report: Report) -> str:
    rows = []
    for run, kind in ((report.baseline, ""), (report.ours, "ours")):
        exposed = max(0.0, run.median_step_s - run.alone_step_s)
        rows.append(
            (
                kind,
                [
                    _name(run.backend),
                    str(len(run.steps)),
                    format_seconds(run.median_step_s),
                    format_seconds(run.alone_step_s),
                    format_seconds(exposed),
                    format_seconds(run.total_s),
                    f"{run.steps[-1].loss:.6f}",
                    f"{run.evaluations[-1].bits_per_byte:.6f}",
                ],
            )
        )
    heads = [
        "backend",
        "steps",
        "median step",
        "forward + backward alone",
        "the rest",
        "training",
        "last batch, nats a byte",
        "held-out, bits a byte",
    ]
    note = f"{_gradient(report.ours)} of gradients are reduced in every step."
    return table("Training", note, heads, rows, num_text=1)


def _bandwidth_table(report: Report) -> str:
    if not report.measurements:
        return ""
    rows = []
    for m in report.measurements:
        share = "" if m.fraction_of_bound is None else f"{m.fraction_of_bound:.3f}"
        bound = report.bounds.get(m.collective)
        cells = [
            m.collective,
            _name(m.backend),
            format_size(m.bytes),
            format_seconds(m.median_s),
            format_seconds(m.p10_s),
            format_seconds(m.p90_s),
            f"{m.algbw:.4g}",
            f"{m.busbw:.4g}",
            "" if bound is None else f"{bound:.4g}",
            share,
            "yes" if m.correct else "NO",
        ]
        rows.append(("ours" if m.backend == report.ours.backend else "", cells))
    unit = report.measurements[0].unit
    heads = [
        "collective",
        "backend",
        "size",
        "median",
        "p10",
        "p90",
        f"algbw, {unit}",
        f"busbw, {unit}",
        "bound",
        "of bound",
        "right",
    ]
    note = (
        "Measured in one run, rounds of the backends alternating; a time is that of the slowest rank. Size is "
        "that of the whole array; algbw is size over time. Shares of the bound, and the bars above, are without what "
        "shaped links let through at once. The bound is exact: no schedule on this fabric moves data faster"
        + (
            ", for all-reduce among those that add each part up a tree and copy it down one."
            if report.bounds
            else "."
        )
    )
    if not report.bounds:
        note = "Measured in one run over loopback, rounds of the backends alternating; no fabric, hence no bound."
    return table("Bandwidth", note, heads, rows, num_text=2)


def _footer(report: Report) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    return (
        f"<footer>{escape(report.hardware)}; {escape(versions)}; topology {escape(report.topology.name)} "
        f"({report.topology.fingerprint}). Link latency is not emulated. "
        "All times and bandwidths are measured.</footer>"
    )


def _gradient(run: TrainingRun) -> str:
    return f"{run.settings['gradient_bytes'] / 1e6:.1f} MB"


def _name(backend: str) -> str:
    return NAMES.get(backend, backend)
