"""Changed fabrics, what more capacity buys, and the commands ``whatif`` and ``draw``."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from fractions import Fraction
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mycel.cli import bound as bound_command
from mycel.cli import draw, whatif
from mycel.collectives.bound import bound
from mycel.collectives.sensitivity import sensitivity
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.errors import TopologyError, UsageError
from mycel.report.dot import fabric_dot
from mycel.topology import load_topology
from mycel.topology.change import add_link, change_link, remove_link, scale_interfaces, scale_link

ROOT = Path(__file__).resolve().parents[2]
TWO_BOXES = str(ROOT / "examples" / "clusters" / "two_boxes.yaml")
BOXES = load_topology(TWO_BOXES)
STAR = load_topology("star:ranks=3")


def run(module, *arguments: str):
    app = typer.Typer()
    module.register(app)
    return CliRunner().invoke(app, list(arguments))


def changed_links(before, after) -> dict[str, int]:
    assert after.unit == before.unit
    return {
        f"{after.label(a)}>{after.label(b)}": c
        for (a, b), c in after.capacity.items()
        if before.capacity.get((a, b)) != c
    }


# -- changes ----------------------------------------------------------------------------------------------------


def test_change_one_way_both_ways_and_by_pattern() -> None:
    assert changed_links(STAR, change_link(STAR, "0->switch=1 Gbit/s")) == {"0>switch": 1000}
    assert changed_links(STAR, change_link(STAR, "0 <-> switch = 100")) == {"0>switch": 100, "switch>0": 100}
    assert len(changed_links(BOXES, change_link(BOXES, "left/*->core=60 Mbit/s"))) == 4
    assert change_link(BOXES, "left/0->core=60 Mbit/s").latency_s == BOXES.latency_s


def test_unit_changes_only_where_it_must() -> None:
    fine = change_link(STAR, "0->switch=100.5 Mbit/s")
    assert fine.unit == "kbit/s"
    assert set(fine.capacity.values()) == {400_000, 100_500}


def test_add_and_remove() -> None:
    assert changed_links(STAR, add_link(STAR, "0<->1=50 Mbit/s")) == {"0>1": 50, "1>0": 50}
    assert changed_links(STAR, add_link(STAR, "0->switch=50 Mbit/s")) == {"0>switch": 450}
    ring = load_topology("ring:ranks=4,bandwidth=2")
    assert (0, 1) not in remove_link(ring, "0->1").capacity
    with pytest.raises(TopologyError, match="disconnected"):
        remove_link(STAR, "0<->switch")


def test_scale() -> None:
    assert changed_links(STAR, scale_link(STAR, "1->switch=1.5")) == {"1>switch": 600}
    assert set(changed_links(BOXES, scale_interfaces(BOXES, "2")).values()) == {100}
    two = load_topology("dgx_a100:nodes=2")
    faster = changed_links(two, scale_interfaces(two, "2"))
    assert set(faster.values()) == {50}
    assert len(faster) == 16 * 4  # GPU to interface and interface to network, both ways


@pytest.mark.parametrize(
    ("change", "text", "expected"),
    [
        (change_link, "0->switch", "write for example"),
        (change_link, "0=5", "write for example"),
        (change_link, "0->=5", "write for example"),
        (change_link, "0->swich=5 Mbit/s", "did you mean 'switch'"),
        (change_link, "0->1=5 Mbit/s", "there is no link 0 -> 1"),
        (change_link, "0->switch=0", "must be positive"),
        (change_link, "0->switch=fast", "cannot read 'fast' as a bandwidth"),
        (add_link, "0->0=5 Mbit/s", "cannot end where it starts"),
        (remove_link, "0", "write for example"),
        (scale_link, "0->switch", "write for example"),
        (scale_link, "0->switch=-1", "as a factor"),
        (scale_link, "0->switch=0", "as a factor"),
        (scale_interfaces, "2", "no link leaves a node"),
    ],
)
def test_changes_that_make_no_sense(change, text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        change(STAR, text)


def test_relative_capacities_stay_whole() -> None:
    ring = load_topology("ring:ranks=3,bandwidth=3")
    assert set(scale_link(ring, "*->*=2").capacity.values()) == {6}
    with pytest.raises(UsageError, match=r"4\.5 is no whole capacity"):
        scale_link(ring, "0->1=1.5")
    with pytest.raises(UsageError, match="are relative"):
        change_link(ring, "0->1=1 GB/s")


# -- what more capacity buys ------------------------------------------------------------------------------------


def test_sensitivity_is_what_a_changed_fabric_gives() -> None:
    best = bound(BOXES, Collective(name="all_gather", num_ranks=8))
    (gain,) = sensitivity(best)
    assert set(gain.binding) == set(best.cut)
    assert len(gain.alike) == 16  # all uplinks, both ways
    assert gain.binding_only == 0  # the other direction binds as well
    assert gain.every == bound(change_link(BOXES, "*<->core=51"), best.collective).algbw - best.algbw == 8


def test_sensitivity_of_a_lone_slow_link() -> None:
    fabric = change_link(STAR, "switch->0=100 Mbit/s")
    best = bound(fabric, Collective(name="all_gather", num_ranks=3))
    (gain,) = sensitivity(best)
    assert gain.binding == gain.alike == ((3, 0),)
    assert gain.binding_only == gain.every == Fraction(3, 2)


# -- commands ---------------------------------------------------------------------------------------------------


def test_whatif_in_words_and_json() -> None:
    arguments = (TWO_BOXES, "--collective", "all_gather", "--scale-nic", "2")
    shown = run(whatif, *arguments)
    assert shown.exit_code == 0
    assert "before: 400 Mbit/s" in shown.output
    assert "1.429 times as much" in shown.output
    record = json.loads(run(whatif, *arguments, "--json").stdout)
    assert record["before"]["bound_algbw"] == 400
    assert record["after"]["bound_algbw"] == pytest.approx(4000 / 7)
    assert record["ratio"] == pytest.approx(10 / 7)
    assert record["changes"] == ["network interfaces 2 times as fast"]


def test_whatif_applies_every_change() -> None:
    record = json.loads(
        run(
            whatif, "ring:ranks=4,bandwidth=2", "-c", "all_gather", "--json",
            "--add", "0<->2=2", "--remove", "0->1", "--change", "1->2=4", "--scale", "2->3=3",
        ).stdout
    )  # fmt: skip
    assert len(record["changes"]) == 4
    fabric = remove_link(add_link(load_topology("ring:ranks=4,bandwidth=2"), "0<->2=2"), "0->1")
    fabric = scale_link(change_link(fabric, "1->2=4"), "2->3=3")
    assert record["after"]["bound_algbw"] == float(bound(fabric, Collective(name="all_gather", num_ranks=4)).algbw)


def test_whatif_without_a_change_is_refused() -> None:
    assert isinstance(run(whatif, TWO_BOXES, "-c", "all_gather").exception, UsageError)


def test_bound_says_what_more_capacity_buys_and_what_was_assumed() -> None:
    shown = run(bound_command, TWO_BOXES, "-c", "all_gather")
    words = " ".join(shown.stdout.split())
    assert "buys 0 Mbit/s, on all 16 links like it 8 Mbit/s." in words
    cloud = run(bound_command, str(ROOT / "tests/data/formats/nccl_cloud.xml"), "-c", "all_gather", "--json")
    assert json.loads(cloud.stdout)["num_ranks"] == 4
    assert cloud.stderr.startswith("note: ") and "mycel show " in cloud.stderr and cloud.stderr.count("\n") == 1


@pytest.mark.parametrize("collective", [None, "all_gather", "reduce_scatter", "broadcast"])
def test_draw_dot_shows_cut_and_tree(tmp_path: Path, collective: str | None) -> None:
    file = tmp_path / "fabric.dot"
    arguments = () if collective is None else ("-c", collective, "--root", "3")
    assert run(draw, TWO_BOXES, "-o", str(file), *arguments).exit_code == 0
    text = file.read_text()
    assert text.count("shape=circle") == 8
    assert text.count("subgraph") == 2
    cut = () if collective is None else bound(BOXES, _collective(collective)).cut
    assert text.count("dashed") == len(cut)
    assert ("#1d7f55" in text) == (collective is not None)


def _collective(name: str) -> Collective:
    return Collective(name=name, num_ranks=8, root=3 if name == "broadcast" else None)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_the_tree_drawn_is_that_of_the_root(name: str) -> None:
    tree, root = draw.tree_from(synthesize(BOXES, _collective(name), "forest"), 5)
    senders, receivers = {t.src for t in tree}, {t.dst for t in tree}
    if name == "reduce_scatter":
        senders, receivers = receivers, senders
    assert senders - receivers == {5} == {root}
    assert senders | receivers == set(range(8))


def test_draw_pictures(tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    assert run(draw, TWO_BOXES, "-c", "all_gather", "-o", str(svg)).exit_code == 0
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert run(draw, "ring:ranks=4,bandwidth=2", "-o", str(png)).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-o", "a.jpg"), "must end in .svg, .png or .dot"),
        (("-o", "nowhere/at/all/a.dot"), "cannot be written"),
        (("-o", "a.dot", "--root", "1"), "needs --collective"),
        (("-o", "a.dot", "-c", "all_gather", "--root", "9"), "root 9 is not among ranks 0..7"),
    ],
)
def test_draw_refuses(arguments: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(draw, TWO_BOXES, *arguments)
    assert isinstance(result.exception, UsageError)
    assert expected in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_dot_quotes_names() -> None:
    graph = fabric_dot(change_link(STAR, "0->switch=100 Mbit/s"))
    assert 'v0 -> v3 [label="100 Mbit/s"];' in graph
    assert 'v3 -> v0 [label="400 Mbit/s"];' in graph
    assert 'v1 -> v3 [label="400 Mbit/s", dir=none];' in graph
