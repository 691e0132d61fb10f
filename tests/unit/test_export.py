"""Exported schedules: golden files, every limit of the formats, and an interpreter that runs the XML on numbers.

``python tests/unit/test_export.py`` rewrites the golden files.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.cli.write import NAMES, form_of
from mycel.collectives.export import FORMATS, SUFFIXES, export, format_of, msccl_xml
from mycel.collectives.imports import READERS
from mycel.collectives.imports.msccl_xml import parse
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import synthesize
from mycel.collectives.verify.blocks import verify_blocks
from mycel.errors import ScheduleError, UsageError
from mycel.topology.builders import full_mesh, ring, star, torus, two_boxes
from mycel.topology.model import Topology

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def made(topology: Topology, name: CollectiveName, method: str = "forest") -> Schedule:
    root = 0 if name in ("broadcast", "reduce") else None
    return synthesize(topology, Collective(name=name, num_ranks=topology.num_ranks, root=root), method)


def golden_cases() -> dict[str, str]:
    gather, reduce = made(star(num_ranks=3), "all_gather", "ring"), made(two_boxes(num_ranks=4), "all_reduce", "tree")
    return {
        "ring_all_gather.xml": export(gather, "msccl_xml"),
        "tree_all_reduce.xml": export(reduce, "msccl_xml"),
        "ring_all_gather.plan.json": export(gather, "mscclpp_json"),
        "tree_all_reduce.plan.json": export(reduce, "mscclpp_json"),
        "ring_all_gather.dot": export(gather, "dot"),
        "tree_all_reduce.dot": export(reduce, "dot"),
        "ring_all_gather.trace.json": export(gather, "chrome_trace", num_bytes=30_000),
    }


@pytest.mark.parametrize("name", sorted(golden_cases()))
def test_golden(name: str) -> None:
    assert golden_cases()[name] == (GOLDEN / name).read_text(encoding="utf-8"), f"run: python {__file__}"


# -- MSCCL XML ------------------------------------------------------------------------------------------------

STEP = {"s", "type", "srcbuf", "srcoff", "dstbuf", "dstoff", "cnt", "depid", "deps", "hasdep"}
ALGO = {
    "name",
    "proto",
    "nchannels",
    "nchunksperloop",
    "ngpus",
    "coll",
    "inplace",
    "outofplace",
    "minBytes",
    "maxBytes",
}


def check_structure(text: str) -> ET.Element:
    """Every limit and required attribute that the runtimes' parsers have."""
    algo = ET.fromstring(text)
    assert algo.tag == "algo" and set(algo.attrib) == ALGO
    assert algo.get("coll") in ("allreduce", "allgather", "reducescatter")
    assert int(algo.attrib["maxBytes"]) > int(algo.attrib["minBytes"])
    assert [int(gpu.attrib["id"]) for gpu in algo] == list(range(int(algo.attrib["ngpus"])))
    for gpu in algo:
        assert set(gpu.attrib) == {"id", "i_chunks", "o_chunks", "s_chunks"}
        length = {key: int(gpu.attrib[f"{key}_chunks"]) for key in "ios"}
        assert sum(len(tb) for tb in gpu) <= 4096
        assert [int(tb.attrib["id"]) for tb in gpu] == list(range(len(gpu)))
        for side in ("send", "recv"):
            used = [(tb.get(side), tb.get("chan")) for tb in gpu if tb.get(side) != "-1"]
            assert len(used) == len(set(used))
        awaited = set()
        for tb in gpu:
            assert set(tb.attrib) == {"id", "send", "recv", "chan"} and 0 < len(tb) <= 256
            assert 0 <= int(tb.attrib["chan"]) < int(algo.attrib["nchannels"])
            for at, step in enumerate(tb):
                assert set(step.attrib) == STEP and step.get("s") == str(at)
                kind, count = step.get("type"), int(step.attrib["cnt"])
                assert kind in ("s", "r", "rrc", "cpy", "nop")
                assert (tb.get("send") != "-1") >= (kind == "s") and (tb.get("recv") != "-1") >= (
                    kind in ("r", "rrc")
                )
                if kind != "nop":
                    assert 0 < count < 72
                    for end in ("src", "dst"):
                        offset = int(step.attrib[f"{end}off"])
                        assert 0 <= offset <= length[step.attrib[f"{end}buf"]] - count
                if step.get("depid") != "-1":
                    assert step.get("depid") != tb.get("id")
                    awaited.add((int(step.attrib["depid"]), int(step.attrib["deps"])))
        for number, tb in enumerate(gpu):
            for at, step in enumerate(tb):
                assert (step.get("hasdep") == "1") == ((number, at) in awaited)
    return algo


def interpret(algo: ET.Element) -> list[dict[str, list[int]]]:
    """Buffers after a run in which every channel holds one message at most; -1 stands in every empty place."""
    n, coll, inplace = int(algo.attrib["ngpus"]), algo.get("coll"), algo.get("inplace") == "1"
    buffers: list[dict[str, list[int]]] = []
    for rank, gpu in enumerate(algo):
        mine = {key: [-1] * int(gpu.attrib[f"{key}_chunks"]) for key in "ios"}
        mine["i"] = [10**rank] * len(mine["i"])
        if coll == "allreduce":
            assert inplace
            mine["o"] = mine["i"]
        buffers.append(mine)
    wires: dict[tuple[int, int, str], deque[list[int]]] = {}
    done = [[0] * len(gpu) for gpu in algo]
    progress = True
    while progress:
        progress = False
        for rank, gpu in enumerate(algo):
            for number, tb in enumerate(gpu):
                at = done[rank][number]
                if at == len(tb):
                    continue
                step = tb[at].attrib
                if step["depid"] != "-1" and done[rank][int(step["depid"])] <= int(step["deps"]):
                    continue
                source, target, count = int(step["srcoff"]), int(step["dstoff"]), int(step["cnt"])
                data = buffers[rank][step["srcbuf"]][source : source + count] if step["type"] != "nop" else []
                wire = wires.setdefault((rank, int(tb.attrib["send"]), tb.attrib["chan"]), deque())
                inward = wires.setdefault((int(tb.attrib["recv"]), rank, tb.attrib["chan"]), deque())
                if step["type"] == "s":
                    if wire:
                        continue
                    assert -1 not in data
                    wire.append(data)
                elif step["type"] in ("r", "rrc"):
                    if not inward:
                        continue
                    came = inward.popleft()
                    assert len(came) == count
                    if step["type"] == "rrc":
                        came = [a + b for a, b in zip(came, data, strict=True)]
                    buffers[rank][step["dstbuf"]][target : target + count] = came
                elif step["type"] == "cpy":
                    buffers[rank][step["dstbuf"]][target : target + count] = data
                done[rank][number] += 1
                progress = True
    assert [len(tb) for gpu in algo for tb in gpu] == [d for mine in done for d in mine], "blocks wait for ever"
    assert not any(wires.values()) and n == len(buffers)
    return buffers


FABRICS = (star(num_ranks=5), two_boxes(num_ranks=4), ring(num_ranks=4), torus(dims=(2, 3)), full_mesh(num_ranks=3))


@pytest.mark.parametrize("topology", FABRICS, ids=[t.name for t in FABRICS])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("method", ["forest", "tree", "ring"])
def test_xml_is_within_limits_and_computes_the_collective(
    topology: Topology, name: CollectiveName, method: str
) -> None:
    text = export(made(topology, name, method), "msccl_xml")
    verify_blocks(parse(text))
    algo = check_structure(text)
    n, everyone = topology.num_ranks, sum(10**rank for rank in range(topology.num_ranks))
    for mine in interpret(algo):
        share = len(mine["o"]) // n
        if name == "all_gather":
            assert mine["o"] == [10**rank for rank in range(n) for _ in range(share)]
        else:
            assert set(mine["o"]) == {everyone}


def test_the_checkers_reject_a_file_that_does_not_wait() -> None:
    algo = ET.fromstring(export(made(star(num_ranks=3), "all_gather", "ring"), "msccl_xml"))
    for step in algo.iter("step"):
        step.set("depid", "-1")
    with pytest.raises(AssertionError):
        interpret(algo)
    with pytest.raises(AssertionError):
        check_structure(ET.tostring(algo, encoding="unicode"))


def in_chunks(number: int) -> Schedule:
    """Two ranks that send each other their blocks in so many chunks."""
    topology = full_mesh(num_ranks=2)
    return Schedule(
        collective=Collective(name="all_gather", num_ranks=2),
        topology=topology,
        method="direct",
        num_units=2 * number,
        chunks=tuple(Chunk(start=i, stop=i + 1) for i in range(2 * number)),
        transfers=tuple(
            Transfer(chunk=i, src=i // number, dst=1 - i // number, reduce=False, path=(i // number, 1 - i // number))
            for i in range(2 * number)
        ),
    )


def to_everybody(n: int) -> Schedule:
    """Every rank sends its block to every other."""
    return Schedule(
        collective=Collective(name="all_gather", num_ranks=n),
        topology=full_mesh(num_ranks=n),
        method="direct",
        num_units=n,
        chunks=tuple(Chunk(start=i, stop=i + 1) for i in range(n)),
        transfers=tuple(
            Transfer(chunk=a, src=a, dst=b, reduce=False, path=(a, b)) for a in range(n) for b in range(n) if a != b
        ),
    )


def test_what_xml_cannot_express_is_refused() -> None:
    with pytest.raises(ScheduleError, match="cannot express broadcast; it can: all_reduce"):
        export(made(star(num_ranks=3), "broadcast"), "msccl_xml")
    with pytest.raises(ScheduleError, match=r"needs \d+ steps in one thread block; at most 256"):
        export(in_chunks(257), "msccl_xml")
    check_structure(export(in_chunks(256), "msccl_xml"))
    with pytest.raises(ScheduleError, match="33 thread blocks of rank 0 send on one channel; at most 32"):
        export(to_everybody(34), "msccl_xml")
    export(to_everybody(33), "msccl_xml")


def test_limits_of_a_rank_and_of_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msccl_xml, "MAX_ELEMENTS", 16)
    with pytest.raises(ScheduleError, match=r"rank 0 has 17 elements \(blocks, steps and ranks\); at most 16"):
        export(in_chunks(5), "msccl_xml")
    export(in_chunks(4), "msccl_xml")
    monkeypatch.setattr(msccl_xml, "MAX_CHUNKS", 8)
    with pytest.raises(ScheduleError, match="a buffer has 8 chunks; fewer than 8 are allowed"):
        export(in_chunks(4), "msccl_xml")


# -- other formats --------------------------------------------------------------------------------------------


def test_dot_has_every_pair_once_and_quotes_names() -> None:
    schedule = made(two_boxes(num_ranks=4), "all_reduce", "forest")
    text = export(schedule, "dot")
    pairs = {(t.src, t.dst, t.reduce) for t in schedule.transfers}
    assert text.count(" -> ") == len(pairs)
    assert text.count("subgraph") == 2 and text.count("{") == text.count("}") == 3


def test_a_timeline_has_every_message() -> None:
    schedule = made(two_boxes(num_ranks=4), "all_reduce")
    run = simulate(schedule, 1 << 18)
    trace = json.loads(export(schedule, "chrome_trace", num_bytes=1 << 18))
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(run.events)
    assert max(e["args"]["complete_us"] for e in spans) == pytest.approx(run.seconds * 1e6, abs=1e-3)
    threads = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in spans} == threads
    assert "simulated" in trace["otherData"]


def test_registry() -> None:
    assert set(SUFFIXES.values()) == set(FORMATS)
    assert format_of("a.b.gv") == "dot"
    with pytest.raises(UsageError, match="unknown format 'pdf'"):
        export(made(star(num_ranks=3), "all_gather", "ring"), "pdf")


def test_the_command_writes_by_name_or_format(tmp_path: Path) -> None:
    source = tmp_path / "ring.json"
    source.write_text(json.dumps(made(star(num_ranks=3), "all_gather", "ring").to_json()))
    runner, app = CliRunner(), build_app()
    for target, options in ((tmp_path / "out.xml", []), (tmp_path / "out", ["--format", "msccl_xml"])):
        assert runner.invoke(app, ["export", str(source), "-o", str(target), *options]).exit_code == 0
        assert target.read_text() == (GOLDEN / "ring_all_gather.xml").read_text()
        result = runner.invoke(app, ["export", str(source), "-o", str(target), *options])
        assert f"written to {target}\nverified as written: all_gather over 3 ranks" in result.output
        assert "within the limits of MSCCL and RCCL" in result.output
    unclear = runner.invoke(app, ["export", str(source), "-o", str(tmp_path / "out.bin")])
    assert isinstance(unclear.exception, UsageError)
    assert "its name says no form; let it end in .json, .txt, .dot" in str(unclear.exception)
    unknown = runner.invoke(app, ["export", str(source), "-o", str(tmp_path / "out"), "--format", "pdf"])
    assert isinstance(unknown.exception, UsageError) and "unknown form 'pdf'" in str(unknown.exception)


def test_synth_and_export_write_every_form_alike(tmp_path: Path) -> None:
    runner, app = CliRunner(), build_app()
    fabric = ["synth", "two_boxes:ranks=4,inside=8 GB/s,between=1 GB/s", "-c", "all_gather"]
    first = tmp_path / "first.json"
    assert runner.invoke(app, [*fabric, "-o", str(first)]).exit_code == 0
    for end in NAMES:
        made, again = tmp_path / f"made{end}", tmp_path / f"again{end}"
        result = runner.invoke(app, [*fabric, "-o", str(made)])
        assert result.exit_code == 0, (end, result.output, result.exception)
        assert runner.invoke(app, ["export", str(first), "-o", str(again)]).exit_code == 0
        ours = sorted(file.name.removeprefix("made") for file in tmp_path.glob(f"made*{made.suffix}"))
        for name in ours:
            assert (tmp_path / f"made{name}").read_bytes() == (tmp_path / f"again{name}").read_bytes() != b""
        if form_of(made) in (*READERS, "json", "text"):
            assert runner.invoke(app, ["verify", str(made)]).output.startswith("right: all_gather over 4 ranks")
    odd = runner.invoke(app, [*fabric, "-o", str(tmp_path / "x.xlm")])
    assert isinstance(odd.exception, UsageError) and "its name says no form" in str(odd.exception)


if __name__ == "__main__":
    for file, contents in golden_cases().items():
        (GOLDEN / file).write_text(contents, encoding="utf-8")
