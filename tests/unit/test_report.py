"""The report: what it says is what was measured, and it needs nothing from elsewhere."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from mycel.bench.measurement import Measurement, summarize
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective
from mycel.demo.run import MEASURED, write_report
from mycel.errors import UsageError
from mycel.report.data import Report, TrainingRun
from mycel.report.fabric import draw_fabric, lay_out, tree_of
from mycel.report.figures import PANELS, draw_bandwidth, panel_svg
from mycel.report.html import render_html
from mycel.report.style import DARK, LIGHT, css_variables, themed
from mycel.topology.builders import dgx_a100, fat_tree, ring, star, two_boxes
from mycel.topology.model import Topology

RATES = {"all_reduce": (27, 178), "all_gather": (54, 362), "reduce_scatter": (25, 355), "broadcast": (36, 171)}
BOUNDS = {"all_reduce": 200.0, "all_gather": 400.0, "reduce_scatter": 400.0, "broadcast": 200.0}


def _run(backend: str, step_s: float, *, final_bits: float = 3.25) -> TrainingRun:
    settings = {
        "event": "start",
        "backend": backend,
        "world_size": 8,
        "steps": 20,
        "parameters": 1_820_352,
        "gradient_bytes": 7_281_408,
        "corpus_bytes": 8_390_691,
    }
    records: list[dict[str, object]] = [settings, {"event": "alone", "seconds": [0.3, 0.1, 0.2]}]
    records.append({"event": "eval", "step": 0, "bits_per_byte": 8.0, "elapsed_s": 0.1})
    for step in range(1, 21):
        seconds = step_s if step != 3 else 5 * step_s
        records.append(
            {"event": "step", "step": step, "loss": 5 / step, "step_s": seconds, "elapsed_s": step * step_s}
        )
        if step % 10 == 0:
            bits = final_bits + (20 - step) / 10
            records.append({"event": "eval", "step": step, "bits_per_byte": bits, "elapsed_s": step * step_s})
    records.append({"event": "end", "elapsed_s": 20 * step_s})
    return TrainingRun.from_records(records)


def _measurements() -> tuple[Measurement, ...]:
    return tuple(
        summarize(
            [(16 << 20) / (rate * 125_000)],
            collective=collective,
            num_bytes=16 << 20,
            backend=backend,
            unit="Mbit/s",
            bound_algbw=Fraction(int(BOUNDS[collective])),
            correct=True,
            world_size=8,
            topology="two_boxes",
            fingerprint=None,
            emulated=True,
        )
        for collective, rates in RATES.items()
        for backend, rate in zip(("gloo", "mycel"), rates, strict=True)
    )


def _schedule(topology: Topology) -> Schedule:
    """A broadcast down one chain through the node's switch, then across, then down the other."""
    ranks = topology.ranks
    inside = [next(v for v in topology.switches if (r, v) in topology.capacity) for r in ranks]
    core = topology.switches[-1]
    hops = [(0, 1), (1, 2), (2, 3), (0, 4), (4, 5), (5, 6), (6, 7)]
    transfers = tuple(
        Transfer(
            chunk=0,
            src=a,
            dst=b,
            reduce=False,
            path=(ranks[a], core if (a, b) == (0, 4) else inside[a], ranks[b]),
        )
        for a, b in hops
    )
    return Schedule(
        collective=Collective(name="broadcast", num_ranks=8, root=0),
        topology=topology,
        method="hand",
        num_units=1,
        chunks=(Chunk(start=0, stop=1),),
        transfers=transfers,
    )


def made_report() -> Report:
    """What the demo could have measured."""
    topology = two_boxes()
    return Report(
        topology=topology,
        emulated=True,
        why_not_emulated="",
        schedule=_schedule(topology),
        baseline=_run("gloo", 2.5),
        ours=_run("mycel", 0.5),
        measurements=_measurements(),
        bounds=BOUNDS,
        hardware="a machine, 2 cores",
        versions={"mycel": "0", "torch": "2"},
    )


@pytest.fixture(scope="module")
def report() -> Report:
    return made_report()


class _Tags(HTMLParser):
    """Collects tags and attributes, and checks that what opens is closed in order."""

    VOID = frozenset({"meta", "br", "img", "link", "path", "use", "rect", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_figures_of_a_run() -> None:
    run = _run("gloo", 2.0)
    assert run.median_step_s == 2.0  # one slow step does not move it
    assert run.alone_step_s == 0.2
    assert run.total_s == 40.0
    assert run.final_loss == pytest.approx(3.25 * math.log(2))


def test_an_interrupted_run_is_refused() -> None:
    with pytest.raises(UsageError, match="incomplete"):
        TrainingRun.from_records([{"event": "start", "backend": "gloo"}])


def test_ratio_is_that_of_the_medians(report: Report) -> None:
    assert report.speedup == 5.0
    assert "5.0x faster" in report.headline
    slower = replace(report, ours=_run("mycel", 5.0))
    assert slower.speedup == 0.5
    assert "2.00x the time" in slower.headline


def test_losses_that_differ_are_said_to_differ(report: Report) -> None:
    assert report.loss_sentence == "final held-out losses are identical"
    assert "agree to" in replace(report, ours=_run("mycel", 1, final_bits=3.2501)).loss_sentence
    different = replace(report, ours=_run("mycel", 1, final_bits=3.3))
    assert "do not agree" in different.loss_sentence
    assert "same loss" in report.headline
    assert "same loss" not in different.headline


def test_page_needs_nothing_from_elsewhere(report: Report) -> None:
    page = render_html(report)
    parser = _Tags()
    parser.feed(page)
    assert parser.open == []
    assert not [tag for tag, _ in parser.tags if tag in ("script", "link", "img", "iframe", "object")]
    for _, attributes in parser.tags:
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith("#")
    namespaces = re.findall(r'xmlns(?::\w+)?="[^"]*"', page)
    for text in namespaces:
        page = page.replace(text, "")
    assert "://" not in page
    assert "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", page))


def test_numbers_in_the_page_are_the_data(report: Report) -> None:
    page = render_html(report)
    for m in report.measurements:
        assert f"<td>{m.algbw:.4g}</td>" in page
        assert f"<td>{m.fraction_of_bound:.3f}</td>" in page
    for run in (report.baseline, report.ours):
        assert f"<td>{run.evaluations[-1].bits_per_byte:.6f}</td>" in page
        assert f"<td>{run.steps[-1].loss:.6f}</td>" in page
    assert "<b>2.5 s</b>" in page
    assert "<b>500 ms</b>" in page
    assert f"<b>{report.speedup:.2f}x</b>" in page


def test_page_follows_the_theme(report: Report) -> None:
    page = render_html(report)
    assert "prefers-color-scheme: dark" in page
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == len(PANELS) + sum(narrow is not None for _, _, narrow in PANELS.values())
    for drawing in drawings:
        assert "var(--ink)" in drawing or "var(--muted)" in drawing
        assert LIGHT.ours not in drawing
    assert css_variables(DARK) in page
    assert themed(f"fill: {LIGHT.ours}") == "fill: var(--ours)"


def test_names_from_files_are_escaped(report: Report) -> None:
    hostile = replace(report, hardware="<script>alert(1)</script>")
    assert "<script>" not in render_html(hostile)


def test_loopback_is_said_in_plain_words(report: Report) -> None:
    local = replace(report, emulated=False, why_not_emulated="no root.", bounds={}, measurements=())
    page = render_html(local)
    assert "No cluster was emulated." in page
    assert "no root." in page
    assert "show no fabric" in page
    assert "loopback" in local.headline
    assert "faster" not in local.headline
    assert "No cluster was emulated." not in render_html(report)


def test_files_are_written(report: Report, tmp_path: Path) -> None:
    files = write_report(report, tmp_path / "deep" / "folder")
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    data = json.loads(files["json"].read_text(encoding="utf-8"))
    assert data["speedup"] == report.speedup
    assert [Measurement.from_json(row) for row in data["rows"]] == list(report.measurements)
    assert len(data["ours"]["steps"]) == 20


def test_bars_are_as_long_as_the_measurements(report: Report) -> None:
    axes = Figure().add_subplot()
    draw_bandwidth(axes, report)
    lengths = sorted(patch.get_width() for patch in axes.patches)  # type: ignore[attr-defined]
    assert lengths == pytest.approx(sorted(m.algbw for m in report.measurements))
    marks = sorted(float(line.get_xdata()[0]) for line in axes.lines)  # type: ignore[index, arg-type]
    assert marks == sorted(BOUNDS[c] for c in MEASURED)


def test_same_data_same_drawing(report: Report) -> None:
    assert panel_svg(report, "cluster") == panel_svg(report, "cluster")


def test_tree_is_one_chunk_from_rank_0(report: Report) -> None:
    assert report.schedule is not None
    tree = tree_of(report.schedule)
    assert tree[0].src == 0
    assert {t.chunk for t in tree} == {tree[0].chunk}
    assert sorted([t.dst for t in tree]) == list(range(1, 8))


@pytest.mark.parametrize(
    "topology",
    [two_boxes(), two_boxes(num_ranks=5), star(num_ranks=3), ring(num_ranks=6), fat_tree(), dgx_a100(num_nodes=2)],
    ids=lambda t: t.name,
)
def test_every_vertex_has_a_place_of_its_own(topology: Topology) -> None:
    layout = lay_out(topology)
    assert set(layout.places) == set(range(len(topology.vertices)))
    points = list(layout.places.values())
    nearest = min(math.dist(p, q) for i, p in enumerate(points) for q in points[:i])
    assert nearest > 0.5
    for name, left, bottom, width, height in layout.boxes:
        inside = sorted(
            i for i, (x, y) in layout.places.items() if left <= x <= left + width and bottom <= y <= bottom + height
        )
        assert [i for i, v in enumerate(topology.vertices) if v.node == name] == inside
    axes = Figure().add_subplot()
    draw_fabric(axes, topology)
    drawn = {text.get_text() for text in axes.texts}
    assert {str(rank) for rank in range(topology.num_ranks)} <= drawn
