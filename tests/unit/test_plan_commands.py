"""``mycel plan search``, ``explain``, ``export`` and ``check`` of plans: what they print, write and refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.plans_by_hand import by_hand, described, five_plans, job
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.errors import MycelError
from mycel.planning.cluster import load_cluster
from mycel.planning.models import load_model
from mycel.planning.plan import Plan, plan_of, read_plan
from mycel.planning.plan.explain import explain_plan
from mycel.planning.plan.orders import plan_with_orders, with_searched_order
from mycel.planning.search import Limits, search
from mycel.report.plan import render_plan

TINY = ("--model", "tiny", "--batch", "16", "--seq", "128")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    with pytest.raises(MycelError) as caught:
        CliRunner().invoke(build_app(), ["plan", *arguments], catch_exceptions=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    said = run("search", "a100:nodes=2,ranks_per_node=2", *TINY, "--limit", "pp=2", "-o", str(file))
    assert f"{file}: written" in said
    return file


def test_search_writes_a_plan_that_is_right(written: Path) -> None:
    plan = read_plan(written)
    plan.validate(load_model("tiny"), cluster=load_cluster("a100:nodes=2,ranks_per_node=2"))
    assert plan.job.mesh.pp == 2
    assert plan.limits == ("pp=2",)
    assert Plan.from_json(written.read_text()) == plan


def test_search_in_json_has_the_plan_and_why_others_lost() -> None:
    record = json.loads(run("search", "a100:nodes=1,ranks_per_node=2", *TINY, "--json"))
    plan = Plan.from_json(record["plan"])
    plan.validate()
    assert record["seconds"] == plan.predicted.seconds
    assert record["bound_s"] <= record["seconds"]
    assert all(refusals for refusals in record["refused"].values())


def test_a_page_is_whole_and_refers_to_nothing_else(written: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    run("search", "a100:nodes=2,ranks_per_node=2", *TINY, "--limit", "pp=2", "--page", str(file))
    text = file.read_text()
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append(tag)
            assert not {"src", "href"} & {name for name, _ in attrs}

    Reader().feed(text)
    assert "script" not in seen
    assert seen.count("svg") == 1
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    for word in ("Cluster", "Memory", "Timeline", "Stages", "Runners-up", "modelled"):
        assert word in text
    assert not list(tmp_path.glob(".*"))


def test_the_page_marks_what_is_idle_and_escapes_names() -> None:
    plan = five_plans()["even"]
    odd = replace(plan.cluster, name="<b>&", rank_names=tuple(f"<{n}>" for n in plan.cluster.rank_names))
    text = render_plan(replace(plan, cluster=odd))
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text
    eight = load_cluster("h100:nodes=1")
    part = by_hand(eight, described(), job(dp=4, zero=3, recompute="full"), (32,))
    assert render_plan(part).count("idle") >= 4


def test_explain_says_what_binds_and_what_more_would_buy(written: Path) -> None:
    lines = run("explain", str(written)).splitlines()
    assert lines[0].startswith("A step takes")
    assert lines[1].startswith("What binds is")
    assert any(line.startswith("10 GiB more") for line in lines)
    assert any(line.startswith("One more node") for line in lines)
    assert any(re.match(r"dp=\d+: ", line) for line in lines)


def test_what_binds_is_what_a_fresh_search_gains_most_from() -> None:
    cluster, model = load_cluster("a100:nodes=1,ranks_per_node=4"), described()
    limits = Limits.from_text("tp=4", "recompute=full")
    found = search(cluster, model.shape, batch=16, seq=4096, limits=limits)
    plan = plan_of(found, model=model, cluster=cluster, limits=limits.texts)
    told = explain_plan(plan, cluster)
    assert told.is_best
    gains = [change.gain for change in told.relaxed]
    assert gains == sorted(gains, reverse=True)
    assert all(gain > 0.999 for gain in gains)
    freed = search(cluster, model.shape, batch=16, seq=4096, limits=limits.without("tp=4"))
    mine = next(change for change in told.relaxed if change.name == "tp=4")
    assert mine.seconds == pytest.approx(freed.best.seconds.seconds, rel=1e-9)
    assert {"memory", "inside", "compute", "tp=4", "recompute=full"} == {change.name for change in told.relaxed}
    more = next(change for change in told.what_ifs if change.name == "10 GiB")
    there = load_cluster("a100:nodes=1,ranks_per_node=4", memory_bytes=90 << 30)
    fresh = search(there, model.shape, batch=16, seq=4096, limits=limits)
    assert more.seconds == pytest.approx(fresh.best.seconds.seconds, rel=1e-9)


@pytest.mark.parametrize("texts", [("pp=2",), ("pp=4",), ("pp=2", "chunks=2"), ("pp=2", "tp=2")])
def test_a_plan_in_simulation_takes_what_was_predicted(texts: tuple[str, ...]) -> None:
    cluster, model = load_cluster("a100:nodes=2,ranks_per_node=2"), described()
    found = search(cluster, model.shape, batch=16, seq=2048, limits=Limits.from_text(*texts))
    plan = plan_of(found, model=model, cluster=cluster, limits=texts)
    parts = plan.predicted.parts or {}
    pipeline = sum(parts[name] for name in ("compute", "head", "tensor", "bubble", "boundary"))
    assert plan.simulate(cluster).makespan == pytest.approx(pipeline, rel=0.01)
    assert plan.simulate().makespan < pipeline


UNLIKE = """
boxes:
  - {name: fast, ranks: 2, device: {name: quick, flops: 60e12, memory: 24GiB, memory_gbps: 900},
     inside: {bandwidth: 20 GB/s}, uplink: {to: core, bandwidth: 1 GB/s, per: box}}
  - {name: slow, ranks: 2, device: {name: lame, flops: 20e12, memory: 24GiB, memory_gbps: 400},
     inside: {bandwidth: 20 GB/s}, uplink: {to: core, bandwidth: 1 GB/s, per: box}}
switches: [core]
"""


def test_replicas_of_unlike_speed_from_the_search_to_the_page(tmp_path: Path) -> None:
    (tmp_path / "unlike.yaml").write_text(UNLIKE)
    file, wanted = tmp_path / "plan.json", ("--limit", "shares=unequal", "--limit", "pp=2", "--limit", "tp=1")
    said = run("search", str(tmp_path / "unlike.yaml"), *TINY, *wanted, "-o", str(file))
    plan, cluster = read_plan(file), load_cluster(str(tmp_path / "unlike.yaml"))
    first, second = plan.job.shares
    assert f"shares {first} + {second}" in said and first != second
    assert (first + second) * plan.job.micro_batch == 16
    assert "right" in run("check", str(file), "--cluster", str(tmp_path / "unlike.yaml"))
    # Each replica is in one box, the fast one does more, and both are simulated: the later one is the step's.
    assert {plan.replica_of(rank) for rank in (0, 1)} != {plan.replica_of(rank) for rank in (2, 3)}
    assert plan.job.batches_of(plan.replica_of(0) or 0) > plan.job.batches_of(plan.replica_of(2) or 0)
    parts = plan.predicted.parts or {}
    pipeline = sum(parts[name] for name in ("compute", "head", "tensor", "bubble", "boundary"))
    assert plan.simulate(cluster).makespan == pytest.approx(pipeline, rel=0.01)
    swapped = replace(plan, replica_seconds=plan.replica_seconds[::-1], job=replace(plan.job, shares=(second, first)))
    assert swapped.simulate().makespan == pytest.approx(plan.simulate().makespan)
    page = render_plan(plan, run=plan.simulate(cluster))
    assert f"of which replicas do {first}, {second}" in page and f"{max(first, second)} mb" in page
    equal = run("search", str(tmp_path / "unlike.yaml"), *TINY, *wanted[2:], "--limit", "shares=equal", "--json")
    assert "shares" not in json.loads(equal)["plan"]["job"]


SLOW = """
device: {name: fast, flops: 2e9, memory: 8GiB, memory_gbps: 8}
boxes:
  - {name: node, count: 4, ranks: 1, uplink: {to: core, bandwidth: 6 Mbit/s, latency: 50us, per: rank}}
switches: [core]
"""


def test_orders_of_their_own_are_kept_where_they_are_faster(tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    (tmp_path / "slow.yaml").write_text(SLOW)
    cluster, model = load_cluster(str(tmp_path / "slow.yaml")), load_model("tiny")
    limits = ("pp=4", "chunks=1", "recompute=none")
    found = search(cluster, model.shape, batch=8, seq=64, limits=Limits.from_text(*limits))
    known = plan_of(found, model=model, cluster=cluster, limits=limits)
    plan = plan_with_orders(found, model, cluster, count=1, limits=limits)
    plan.validate(model, cluster=cluster)
    # By the simulator, on the cluster's links; all else is as it was.
    assert plan.simulate(cluster).makespan < 0.95 * known.simulate(cluster).makespan
    assert plan.predicted.seconds < 0.95 * known.predicted.seconds
    assert sum((plan.predicted.parts or {}).values()) == pytest.approx(plan.predicted.seconds)
    assert (plan.cut, plan.ranks, plan.job) == (known.cut, known.ranks, known.job)
    assert Plan.from_json(plan.to_text()) == plan and plan.order.name == "searched"
    # Work is counted, not time: the same again.
    assert with_searched_order(known, cluster).order == plan.order
    # Without room for more micro-batches than 1F1B holds nothing that holds more is taken.
    most = max(known.memory)
    tight = replace(known, limits=(*limits, f"memory<={most}"))
    assert max(with_searched_order(tight, cluster).memory) <= most
    said = run(
        *("search", str(tmp_path / "slow.yaml"), "--model", "tiny", "--batch", "8", "--seq", "64", "--orders", "1"),
        *(part for limit in limits for part in ("--limit", limit)),
    )
    assert "order: searched; by known orders the best takes" in said


def test_equal_stages_with_fast_links_keep_their_order() -> None:
    pytest.importorskip("ortools")
    cluster = load_cluster("h100:nodes=1,ranks_per_node=4")
    plan = by_hand(cluster, described(), job(pp=4, global_batch=8, recompute="full"), (8, 8, 8, 8))
    assert with_searched_order(plan, cluster) is plan
    alone = by_hand(cluster, described(), job(dp=4, zero=3, recompute="full"), (32,))
    assert with_searched_order(alone, cluster) is alone


def test_rewrites_send_less_and_hold_less() -> None:
    cluster = load_cluster("h100:nodes=2")
    plan = by_hand(cluster, described(), job(pp=2, dp=2, tp=4, recompute="full"), (16, 16))
    found = {rewrite.name: rewrite for rewrite in plan.rewrites(cluster)}
    boundary = found["scatter_boundaries"]
    assert boundary.after.wire_bytes * 4 == boundary.before.wire_bytes
    assert boundary.after.part_s < boundary.before.part_s
    assert not boundary.is_done
    state = found["shard_optimizer"]
    assert state.after.memory_bytes < state.before.memory_bytes
    assert state.after.part_s < state.before.part_s
    assert state.job.zero == 1
    assert not by_hand(cluster, described(), job(dp=8, zero=3, recompute="full"), (32,)).rewrites(cluster)


def test_export_prints_or_writes_files(written: Path, tmp_path: Path) -> None:
    said = run("export", str(written), "--to", "csv")
    assert said.startswith("0F0")
    folder = tmp_path / "out"
    run("export", str(written), "--to", "mesh", "-o", str(folder))
    assert (folder / "mesh.py").read_text().startswith("import torch")
    assert set(json.loads(run("export", str(written), "--to", "csv", "--json"))) >= {"schedule.csv"}


def test_check_takes_plans_and_says_what_is_wrong(written: Path, tmp_path: Path) -> None:
    assert run("check", str(written)).startswith("right: tiny on a100_x2")
    broken = json.loads(written.read_text())
    broken["cut"][0].pop()
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(broken))
    result = CliRunner().invoke(build_app(), ["plan", "check", str(file)])
    assert result.exit_code == 2
    assert "is on no stage" in result.output
    result = CliRunner().invoke(build_app(), ["plan", "check", str(written), "--cluster", "a100:nodes=3"])
    assert result.exit_code == 2
    assert "search for a plan of this cluster" in result.output


def test_wrong_calls_write_nothing(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert "did you mean 'llama3-8b'" in refused(
        "search", "h100", "--model", "llama3-8", "--batch", "8", "--seq", "64"
    )
    assert "must be above 0" in refused("search", "h100", *TINY, "--time", "0")
    assert "let its name end in .json" in refused("search", "h100", *TINY, "-o", str(tmp_path / "plan.txt"))
    assert "nothing keeps the limit" in refused("search", "h100", *TINY, "--limit", "pp=3", "-o", str(file))
    assert "nothing that can be limited" in refused("search", "h100", *TINY, "--limit", "tpp<=3", "-o", str(file))
    assert "are known" in refused("search", "h100", *TINY, "--executor", "torhc")
    big = ("--model", "llama3-405b", "--batch", "8", "--seq", "8192")
    text = refused("search", "h100", *big, "-o", str(file))
    assert "does not fit" in text
    assert "saves" in text
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_is_stopped_keeps_the_best_so_far_and_its_distance(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ("search", "h100:nodes=2", "--model", "llama3-8b", "--batch", "64", "--seq", "8192", "--time", "1e-9")
    said = run(*words, "-o", str(file))
    assert re.search(r"stopped; the best so far, at most \d+\.\d% above the least that is possible", said)
    read_plan(file).validate()
    record = json.loads(run(*words, "--json"))
    assert record["interrupted"]
    assert not record["is_proved"]
    assert record["gap"] == pytest.approx(record["seconds"] / record["bound_s"] - 1.0)


def test_a_plan_of_no_preset_needs_its_cluster(tmp_path: Path) -> None:
    plan = five_plans()["even"]
    file = tmp_path / "plan.json"
    file.write_text(replace(plan, cluster=replace(plan.cluster, name="ours")).to_text())
    assert "give its file" in refused("explain", str(file))
