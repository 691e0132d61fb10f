"""The scripts in benchmarks/: what they leave out, and that the tables in pages are those of the recorded lines."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from mycel.bench import Case
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.topology.load import load_topology

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> Any:
    """Imports a script of the folder by name, as it is when it runs."""
    return importlib.import_module


def test_a_sweep_goes_on_where_it_stopped(script: Any, tmp_path: Path) -> None:
    fabrics = script("fabrics")
    wanted = fabrics.cases(["all_reduce", "broadcast"], [1 << 20, 4 << 20], 5)
    assert [case.repeats for case in wanted] == [5, 3, 5, 3]
    file = tmp_path / "out" / "measured.jsonl"
    assert fabrics.missing(wanted, "f00", file) == wanted
    done = [
        {"collective": "all_reduce", "bytes": 1 << 20, "backend": backend, "fingerprint": "f00"}
        for backend in ("gloo", "mycel")
    ]
    half = {"collective": "broadcast", "bytes": 1 << 20, "backend": "gloo", "fingerprint": "f00"}
    elsewhere = [{**row, "collective": "broadcast", "fingerprint": "f11"} for row in done]
    script("record").append(file, [*done, half, *elsewhere])
    assert fabrics.missing(wanted, "f00", file) == wanted[1:]
    assert Case(collective="broadcast", num_bytes=1 << 20) not in fabrics.missing(wanted, "f11", file)


def test_a_fresh_sweep_forgets_only_its_fabrics(script: Any, tmp_path: Path) -> None:
    fabrics, record, file = script("fabrics"), script("record"), tmp_path / "measured.jsonl"
    record.append(file, [{"topology": name} for name in ("ring4", "ring8", "ring4", "star4")])
    fabrics.forget(["ring4"], file)
    assert record.read(file) == [{"topology": "ring8"}, {"topology": "star4"}]


def test_a_table_goes_between_its_marks_only(script: Any) -> None:
    record = script("record")
    table = record.markdown(["a", "b"], [(1, "x"), (2, "y")])
    page = "before <!-- t:begin -->\nold\n<!-- t:end --> after <!-- u:begin -->\nkept\n<!-- u:end -->"
    new = record.with_section(page, "t", table)
    assert new.startswith("before <!-- t:begin -->\n| a | b |\n|---|---|\n| 1 | x |\n| 2 | y |\n<!-- t:end --> after")
    assert "kept" in new and "old" not in new
    with pytest.raises(SystemExit, match="no place for a table: <!-- v:begin"):
        record.with_section(page, "v", table)


def test_lines_read_back(script: Any, tmp_path: Path) -> None:
    record = script("record")
    record.append(tmp_path / "a.jsonl", [{"a": 1}])
    record.append(tmp_path / "a.jsonl", [{"b": [2]}])
    assert record.read(tmp_path / "a.jsonl") == [{"a": 1}, {"b": [2]}]
    assert record.read(tmp_path / "b.jsonl") == []
    assert set(record.stamp()) == {"commit", "time"} and json.dumps(record.stamp())


def page_of(script: Any, name: str, text: str, page: Path) -> tuple[str, str]:
    written = page.read_text(encoding="utf-8")
    return written, script("record").with_section(written, name, text)


def test_the_table_of_methods_is_that_of_its_lines(script: Any) -> None:
    quality = script("quality")
    lines = script("record").read(quality.OUTPUT)
    written, made = page_of(script, "quality", quality.table(lines), quality.PAGE)
    assert written == made, "run: python benchmarks/quality.py"
    files = quality.fabrics()
    recorded = {line["fabric"]: line["fingerprint"] for line in lines}
    assert recorded == {name: load_topology(files[name]).fingerprint for name in recorded}
    assert set(recorded) >= {file.stem for file in quality.SUITE.glob("*.json")} - {"expected"}


def test_the_best_methods_meet_the_bound_and_no_figure_passes_it(script: Any) -> None:
    quality = script("quality")
    lines = script("record").read(quality.OUTPUT)
    for line in lines:
        assert 0 < line["simulated_of_bound"] <= line["modelled_of_bound"] * (1 + 1e-3)
        assert line["modelled_of_bound"] == 1 or line["method"] not in ("forest", "flow")
    flows = {m["fabric"]: m["simulated_of_bound"] for m in lines if m["method"] == "flow"}
    assert min(flows["torus_2x4"], flows["two_boxes"]) >= 0.95


def test_a_method_is_measured_as_it_is(script: Any) -> None:
    """Direct exchange on a ring of eight loads the links 1.25 times as much as the flow."""
    quality = script("quality")
    lines = quality.measure("ring8", load_topology(quality.fabrics()["ring8"]), "all_to_all")
    reached = {m["method"]: m["modelled_of_bound"] for m in lines}
    assert reached["flow"] == 1.0 and reached["direct"] == pytest.approx(0.8)
    assert all(m["simulated_algbw"] < m["modelled_algbw"] <= m["bound_algbw"] for m in lines)
    recorded = [m for m in script("record").read(quality.OUTPUT) if m["fabric"] == "ring8"]
    before = {m["method"]: m["modelled_of_bound"] for m in recorded if m["collective"] == "all_to_all"}
    assert all(before[method] == reached[method] for method in ("flow", "direct"))


# -- ForestColl's claims ------------------------------------------------------------------------------------------


def test_the_tables_of_claims_are_those_of_their_lines(script: Any) -> None:
    claims = script("forestcoll")
    lines = script("record").read(claims.OUTPUT)
    written, made = page_of(script, "forestcoll", claims.tables(lines), claims.PAGE)
    assert written == made, "run: python benchmarks/claims/forestcoll.py --tables"
    assert all(line["equal"] for line in claims.of_kind(lines, "optimum"))


@pytest.mark.parametrize("fabric", ["a100_x1", "eth4_asym_bal", "random12", "dgx1_v100"])
def test_the_baseline_finds_the_optimum_and_a_forest(script: Any, fabric: str) -> None:
    pairwise = script("pairwise")
    expected = json.loads((ROOT / "tests" / "data" / "topologies" / "expected.json").read_text(encoding="utf-8"))
    topology = load_topology(ROOT / "tests" / "data" / "topologies" / f"{fabric}.json")
    found = pairwise.grow(topology, 60.0)
    assert found.inverse_x == Fraction(expected[fabric]["allgather_inverse_x"])
    assert found.num_trees >= topology.num_ranks


def test_the_baseline_gives_up_in_time(script: Any) -> None:
    pairwise = script("pairwise")
    with pytest.raises(pairwise.OutOfTimeError):
        pairwise.grow(load_topology("torus:dims=4x4"), 0.0)


@pytest.mark.parametrize(
    ("fabric", "algbw"),
    [("dgx_a100:nodes=2", Fraction(640, 3)), ("two_boxes:ranks=8,inside=400,between=10", Fraction(320, 7))],
)
def test_rings_enter_every_node(script: Any, fabric: str, algbw: Fraction) -> None:
    """Two DGX A100: 16/15 of eight interfaces of 25 GB/s; two nodes of four: 8/7 of four of 10."""
    claims, topology = script("forestcoll"), load_topology(fabric)
    assert claims.rings_at_best(topology) == algbw
    ring = synthesize(topology, Collective(name="all_gather", num_ranks=topology.num_ranks), "ring")
    assert ring.algbw <= algbw


# -- simulation beside measurements --------------------------------------------------------------------------------


def test_the_table_of_simulated_times_is_that_of_its_lines(script: Any) -> None:
    simulation = script("simulation")
    lines = script("record").read(simulation.OUTPUT)
    written, made = page_of(script, "simulated", simulation.table(lines), simulation.PAGE)
    assert written == made, "run: python benchmarks/simulation.py --write"
    measured = {
        (m["topology"], m["collective"], m["bytes"]): m["median_s"] for m in simulation.cases(simulation.MEASURED)
    }
    assert {(x["fabric"], x["collective"], x["bytes"]): x["measured_s"] for x in lines} == measured


def test_simulated_times_are_near_measured_ones(script: Any) -> None:
    """The recorded pairs, and one of each fabric simulated anew."""
    simulation = script("simulation")
    lines = script("record").read(simulation.OUTPUT)
    assert len({line["fabric"] for line in lines}) >= 6 and len({line["bytes"] for line in lines}) >= 3
    assert simulation.typical(lines) < 0.10
    large = [
        m for m in simulation.cases(simulation.MEASURED) if m["bytes"] == 4 << 20 and m["collective"] == "all_reduce"
    ]
    again = [simulation.compare(m) for m in large]
    assert len(again) >= 6 and simulation.typical(again) < 0.10


def test_the_last_line_of_a_case_is_compared(script: Any, tmp_path: Path) -> None:
    simulation, record = script("simulation"), script("record")
    row = {"topology": "star4", "collective": "broadcast", "bytes": 8, "emulated": True, "mode": "blocking"}
    lines = [{**row, "backend": "mycel", "median_s": s} for s in (3.0, 2.0)]
    lines += [{**row, "backend": "gloo", "median_s": 9.0}, {**lines[0], "emulated": False}]
    record.append(tmp_path / "a.jsonl", lines)
    assert simulation.cases([tmp_path / "a.jsonl"]) == [lines[1]]


def test_typical_errors_are_medians_without_signs(script: Any) -> None:
    simulation = script("simulation")
    pairs = [
        {
            "fabric": "x",
            "collective": "broadcast",
            "bytes": 1 << 20,
            "measured_s": 2.0,
            "simulated_s": 2.0,
            "simulated_on_machine_s": s,
        }
        for s in (1.0, 2.2, 2.0)
    ]
    assert simulation.typical(pairs) == pytest.approx(0.1)
    assert "| `x` | 1MB | 2 s | 2 s | 1 s | -50.0% | 0.0% | 10.0% | 3 |" in simulation.table(pairs)


# -- plans against size and kind of fabric ---------------------------------------------------------------------------


def test_the_table_of_plans_is_that_of_its_lines(script: Any) -> None:
    plans = script("scale_plans")
    lines = script("record").read(plans.OUTPUT)
    written, made = page_of(script, "scale_plans", plans.table(lines), plans.PAGE)
    assert written == made, "run: python benchmarks/scale_plans.py --table"
    for line in lines:
        assert "failure" in line or line["algbw"] <= line["bound_algbw"] * (1 + 1e-9)


def test_orders_of_a_fabric_differ_in_numbers_only(script: Any) -> None:
    fabrics = script("large_fabrics")
    for name, (_, ranks) in fabrics.FABRICS.items():
        if ranks > 64:
            continue
        whole, failed = fabrics.fabric(name, 1), [fabrics.fabric(name + "+", seed) for seed in (1, 2)]
        assert whole.num_ranks == ranks and whole.links != failed[0].links
        assert 0 < len(whole.links) - len(failed[0].links) <= max(2, len(whole.links) // 50)
        degrees = [sorted(Counter((k.src, k.capacity) for k in one.links).values()) for one in failed]
        assert degrees[0] == degrees[1] and failed[0].links != failed[1].links


def test_a_line_takes_the_place_of_the_one_before(script: Any, tmp_path: Path) -> None:
    plans, file = script("scale_plans"), tmp_path / "lines.jsonl"
    line = {"fabric": "h100_64", "ranks": 64, "collective": "all_gather", "seed": 1, "cpu_s": 1.0}
    plans.keep(file, {**line, "failure": "more than 1 s"})
    plans.keep(file, {**line, "seed": 2, "algbw": 9.0, "bound_algbw": 10.0, "optimal": False, "k": 1, "depth": 4})
    assert "more than 1 s" in plans.table(script("record").read(file))
    plans.keep(file, {**line, "algbw": 10.0, "bound_algbw": 10.0, "optimal": True, "k": 1, "depth": 3})
    lines = script("record").read(file)
    assert [one["seed"] for one in lines] == [1, 2]
    assert "| `h100_64` | 64 | 10: 0.9000, k=1, 3 to 4 deep, 1.0 s | not run | not run |" in plans.table(lines)


# -- synthesis against size -----------------------------------------------------------------------------------------


def test_the_table_of_schedules_is_that_of_its_lines(script: Any) -> None:
    synthesis = script("synthesis")
    lines = script("record").read(synthesis.RECORDED_SCHEDULES)
    written, made = page_of(script, "schedules", synthesis.table(lines), synthesis.PAGE)
    assert written == made, "run: python benchmarks/synthesis.py --draw"
    assert all(line["of_bound"] == 1.0 for line in lines if line["method"] == "forest")
    assert min(line["of_bound"] for line in lines) >= 0.9999  # a flow's amounts are rounded to whole units


def test_flows_between_all_pairs_are_left_out_on_large_fabrics(script: Any) -> None:
    cases = script("synthesis").schedule_arguments()
    large = [case[-1] for case in cases if case[0] == "dgx_a100:nodes=16"]
    assert large == ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    assert ["torus:dims=8x8", "--schedules", "--collective", "all_to_all"] in cases


def test_a_schedule_is_timed_in_parts(script: Any) -> None:
    line = script("synthesis").measure_schedule("torus:dims=2x4", "all_to_all")
    assert (line["ranks"], line["method"], line["of_bound"]) == (8, "flow", 1.0)
    assert all(line[key] > 0 for key in ("compile_s", "bound_s", "synthesis_s", "verify_s", "transfers"))


def test_pictures_are_drawn_from_lines(script: Any, tmp_path: Path) -> None:
    quality, record = script("quality"), script("record")
    quality.draw(record.read(quality.OUTPUT), tmp_path / "quality.png")
    script("synthesis").draw(tmp_path / "synthesis.png")
    for name in ("quality.png", "synthesis.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_page_of_steps_has_the_recorded_fronts(script: Any) -> None:
    claims = script("sccl")
    recorded = script("record").read(claims.OUTPUT)
    reported = {
        (line["steps"], line["rounds"], line["chunks"]) for line in recorded if line["reported_s"] is not None
    }
    assert reported == set(claims.REPORTED["all_gather"])
    written, made = page_of(script, "sccl", claims.table(recorded), claims.PAGE)
    assert written == made, "run: python benchmarks/claims/sccl.py"


def test_all_ranks_of_a_group_in_one_process_hear_each_other_over_few_connections(script: Any) -> None:
    control = script("scale_control")
    graph, mesh = (control.measure(24, 4, is_graph=is_graph, has_inquiry=is_graph) for is_graph in (True, False))
    assert (graph["control"], mesh["control"]) == ("graph", "mesh")
    assert graph["open"] < mesh["open"] == 23 + 2 + 3, "connections, two to wait, and processes of the machine"
    assert graph["ways"] > mesh["ways"] == 1


def test_what_a_rank_does_before_its_first_call_is_measured(script: Any) -> None:
    scale = script("scale")
    fabric = scale.default_fabric(12, 4, uneven=False)
    for name in ("all_reduce", "broadcast"):
        found = scale.first_call(fabric, name, 11)
        assert found["method"] in found["depth"] and set(found["cpu_s"]) == set(scale.PARTS)
        assert found["total_s"] >= found["cpu_s"]["program"] > 0
