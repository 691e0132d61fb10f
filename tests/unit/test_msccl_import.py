"""MSCCL XML of others: what is read, what is refused and where, and the schedules that other checkers let pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.collectives.imports import check_file
from mycel.collectives.imports.msccl_xml import parse
from mycel.collectives.verify import order
from mycel.collectives.verify.blocks import verify_blocks
from mycel.errors import ScheduleError, VerificationError

RING = Path(__file__).resolve().parents[1] / "data" / "msccl" / "ring_allgather_3.xml"
#: ``(type, source, target, count, wait)`` of a step; places as ``"s3"``.
Row = tuple[str, str, str, int, tuple[int, int] | None]


def written(
    coll: str, ranks: Sequence[Sequence[tuple[int, int, int, list[Row]]]], chunks: int, scratch: int = 0, **more: str
) -> str:
    """A file from rows, with ``hasdep`` where something waits."""
    n = len(ranks)
    algo = ET.Element(
        "algo",
        {"name": "x", "proto": "Simple", "nchannels": "4", "nchunksperloop": str(chunks), "ngpus": str(n)}
        | {"coll": coll, "inplace": "1", "outofplace": "0", "minBytes": "0", "maxBytes": "0"}
        | more,
    )
    for rank, blocks in enumerate(ranks):
        lengths = {"i": chunks // n if coll == "allgather" else chunks, "s": scratch}
        lengths["o"] = chunks // n if coll == "reducescatter" else chunks
        gpu = ET.SubElement(algo, "gpu", {"id": str(rank)} | {f"{key}_chunks": str(v) for key, v in lengths.items()})
        awaited = {row[4] for block in blocks for row in block[3]}
        for number, (send, recv, chan, rows) in enumerate(blocks):
            ids = {"id": number, "send": send, "recv": recv, "chan": chan}
            tb = ET.SubElement(gpu, "tb", {key: str(value) for key, value in ids.items()})
            for at, (kind, source, target, count, wait) in enumerate(rows):
                depid, deps = wait or (-1, -1)
                step = {"s": at, "type": kind, "srcbuf": source[0], "srcoff": source[1:], "dstbuf": target[0]}
                step |= {"dstoff": target[1:], "cnt": count, "depid": depid, "deps": deps}
                step |= {"hasdep": int((number, at) in awaited)}
                ET.SubElement(tb, "step", {key: str(value) for key, value in step.items()})
    ET.indent(algo)
    return ET.tostring(algo, encoding="unicode")


def all_pairs(n: int) -> str:
    """all_reduce: each sends each its part, adds what came in scratch (``re`` after empty steps), sends the sum."""
    ranks = []
    for rank in range(n):
        others = [other for other in range(n) if other != rank]
        blocks: list[tuple[int, int, int, list[Row]]] = []
        adding = len(others)
        for slot, other in enumerate(others):
            blocks.append(
                (
                    other,
                    other,
                    0,
                    [
                        ("s", f"i{other}", "s0", 1, None),
                        ("r", "i0", f"s{slot}", 1, None),
                        ("s", f"i{rank}", "i0", 1, (adding, 2 * (n - 1) - 2)),
                        ("r", "i0", f"i{other}", 1, None),
                    ],
                )
            )
        rows: list[Row] = [("nop", "i-1", "o-1", 0, (slot, 1)) for slot in range(n - 2)]
        rows += [("re", f"s{slot}", f"i{rank}", 1, (n - 2, 1) if not slot else None) for slot in range(n - 1)]
        blocks.append((-1, -1, 1, rows))
        ranks.append(blocks)
    return written("allreduce", ranks, n, n - 1, proto="LL")


def ring_all_reduce(n: int, *, fused: bool = True) -> str:
    """In place, one block a rank: send, add and pass on (rrs), add and keep and pass on (rrcs), pass on (rcs), r."""
    ranks = []
    for rank in range(n):
        at = [f"i{(rank - step) % n}" for step in range(2 * n)]
        rows: list[Row] = [("s", at[0], "i0", 1, None)]
        rows += [("rrs", at[step], "i0", 1, None) for step in range(1, n - 1)]
        rows.append(("rrcs", at[n - 1], at[n - 1], 1, None))
        rows += [("rcs", "i0", at[step], 1, None) for step in range(n, 2 * n - 2)]
        rows.append(("r", "i0", at[2 * n - 2], 1, None))
        if not fused:
            rows[1:2] = [("rrc", at[1], at[1], 1, None), ("s", at[1], "i0", 1, None)]
        ranks.append([((rank + 1) % n, (rank - 1) % n, 0, rows)])
    return written("allreduce", ranks, n)


def direct_all_to_all(n: int) -> str:
    ranks = []
    for rank in range(n):
        blocks: list[tuple[int, int, int, list[Row]]] = [
            (other, other, 0, [("s", f"i{other}", "o0", 1, None), ("r", "i0", f"o{other}", 1, None)])
            for other in range(n)
            if other != rank
        ]
        ranks.append([*blocks, (-1, -1, 0, [("cpy", f"i{rank}", f"o{rank}", 1, None)])])
    return written("alltoall", ranks, n, inplace="0", outofplace="1")


def pair_reduce_scatter() -> str:
    one = [(1, 1, 0, [("s", "i1", "o0", 1, None), ("rrc", "i0", "o0", 1, None)])]
    two = [(0, 0, 0, [("s", "i0", "o0", 1, None), ("rrc", "i1", "o0", 1, None)])]
    return written("reducescatter", [one, two], 2, inplace="1", outofplace="1")  # type: ignore[list-item]


RIGHT = {
    "ring": RING.read_text(encoding="utf-8"),
    "all_pairs": all_pairs(4),
    "ring_all_reduce": ring_all_reduce(4),
    "ring_all_reduce_apart": ring_all_reduce(3, fused=False),
    "all_to_all": direct_all_to_all(3),
    "reduce_scatter": pair_reduce_scatter(),
}


@pytest.mark.parametrize("name", RIGHT)
def test_every_kind_of_step_is_read_and_right(name: str) -> None:
    # Round a ring of blocks that receive and send in one step, all would wait for all if one message were the most.
    assert verify_blocks(parse(RIGHT[name])) == (2 if "ring" in name else 1)


def changed(text: str, old: str, new: str, count: int = 1) -> str:
    assert old in text
    return text.replace(old, new, count)


def test_order_is_checked_in_pieces_where_there_is_too_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_MAX_BITS", 1)
    for text in RIGHT.values():
        verify_blocks(parse(text))
    hasty = changed(RIGHT["all_pairs"], 'depid="3" deps="4"', 'depid="-1" deps="-1"')
    with pytest.raises(VerificationError, match="in no fixed order"):
        verify_blocks(parse(hasty))


def test_what_other_checkers_let_pass() -> None:
    # A wait forgotten: the sum is sent before it is made.
    hasty = changed(RIGHT["all_pairs"], 'depid="3" deps="4"', 'depid="-1" deps="-1"')
    with pytest.raises(VerificationError, match="in no fixed order") as caught:
        verify_blocks(parse(hasty))
    assert "]!" in caught.value.grid and "re s0 to i0" in caught.value.grid
    # An index out of range.
    with pytest.raises(ScheduleError, match=r"line \d+: dst s\[3 \.\. 3\] is out of range: the buffer has 3 chunks"):
        parse(changed(RIGHT["all_pairs"], 'dstbuf="s" dstoff="2"', 'dstbuf="s" dstoff="3"'))


def test_a_term_summed_twice_is_seen() -> None:
    """Where a checker keeps flags, they stay set; counts do not."""
    rows: list[Row] = [("s", "i0", "i0", 1, None), ("r", "i0", "s0", 1, None), ("re", "s0", "i0", 1, None)]
    right = written("allreduce", [[(1, 1, 0, rows)], [(0, 0, 0, rows)]], 1, 1)
    verify_blocks(parse(right))
    rows.append(("re", "s0", "i0", 1, None))
    with pytest.raises(VerificationError, match=r"o\[0\] ends with rank 0's chunk 0 \+ 2 x rank 1's chunk 0"):
        verify_blocks(parse(written("allreduce", [[(1, 1, 0, rows)], [(0, 0, 0, rows[:3])]], 1, 1)))


def test_a_full_connection_and_a_circle_of_waits() -> None:
    def exchange(number: int, proto: str) -> str:
        ranks = []
        for rank in range(2):
            sends: list[Row] = [("s", f"i{2 * k + 1 - rank}", "o0", 1, None) for k in range(number)]
            receives: list[Row] = [("r", "i0", f"s{k}", 1, None) for k in range(number)]
            adds: list[Row] = [("re", f"s{k}", f"i{2 * k + rank}", 1, None) for k in range(number)]
            back: list[Row] = []
            for k in range(number):
                back += [("s", f"i{2 * k + rank}", "i0", 1, None), ("r", "i0", f"i{2 * k + 1 - rank}", 1, None)]
            ranks.append([(1 - rank, 1 - rank, 0, [*sends, *receives, *adds, *back])])
        return written("allreduce", ranks, 2 * number, number, proto=proto)

    assert verify_blocks(parse(exchange(2, "Simple"))) == 2
    assert verify_blocks(parse(exchange(3, "LL"))) == 3
    with pytest.raises(VerificationError, match=r"waits for itself, where a connection holds 2 messages: rank \d"):
        verify_blocks(parse(exchange(3, "Simple")))
    circle: list[Row] = [("s", "i0", "i0", 1, (1, 0)), ("r", "i0", "s0", 1, None)]
    other: list[Row] = [("re", "s0", "i0", 1, (0, 1))]
    answer: list[Row] = [("r", "i0", "s0", 1, None), ("s", "i0", "i0", 1, None)]
    with pytest.raises(VerificationError, match=r"rank 0 block 0 step 0 waits for rank 0 block 1 step 0 waits for"):
        text = written("allreduce", [[(1, 1, 0, circle), (-1, -1, 1, other)], [(0, 0, 0, answer)]], 1, 1)
        verify_blocks(parse(text))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("<algo", "<graph", "mismatched tag"),
        ('coll="allgather"', 'coll="all_gather"', "coll 'all_gather'; the runtimes know it as 'allgather'"),
        ('coll="allgather"', 'coll="broadcast"', "does not name its root"),
        ('coll="allgather"', 'coll="custom"', "coll 'custom'; can be verified: allreduce, allgather"),
        (' proto="Simple"', "", "<algo> lacks 'proto'"),
        ('proto="Simple"', 'proto="Fast"', "proto 'Fast'; the runtimes know Simple"),
        ('ngpus="3"', 'ngpus="4"', "nchunksperloop 3 does not divide among 4 ranks"),
        ('nchunksperloop="3" ngpus="3"', 'nchunksperloop="4" ngpus="4"', "3 <gpu> for ngpus 4: 3 is missing"),
        ('inplace="0"', 'inplace="0" outofplace="0"', "neither in place nor out of place"),
        ('i_chunks="1"', 'i_chunks="2"', "line 4: i_chunks 2; the buffer has 1 chunks"),
        ('i_chunks="1"', 'i_chunks="one"', "line 4: i_chunks='one' is not a whole number"),
        ('<gpu id="1"', '<gpu id="0"', "line 14: <gpu> 0 again, after line 4"),
        ('<tb id="1"', '<tb id="2"', "thread block 1 is missing"),
        ('send="1" recv="2"', 'send="0" recv="2"', "line 5: rank 0 exchanges with itself"),
        ('recv="2" chan="0"', 'recv="2" chan="1"', "line 5: chan 1 is not in 0 .. 0"),
        ('s="1" type="rcs"', 's="2" type="rcs"', "line 7: step 2 where step 1 was expected"),
        ('type="rcs"', 'type="rsc"', "line 7: step type 'rsc'; known: s, r, rcs"),
        ('type="cpy"', 'type="s"', "line 11: 's' in a block that sends to nobody"),
        ('type="cpy"', 'type="r"', "line 11: 'r' in a block that receives from nobody"),
        ('srcbuf="i"', 'srcbuf="x"', "line 6: srcbuf 'x'; known: i, o, s"),
        ('srcoff="0"', 'srcoff="1"', r"line 6: src i\[1 .. 1\] is out of range: the buffer has 1 chunks"),
        ('srcoff="0"', 'srcoff="-1"', r"line 6: src i\[-1 .. -1\] is out of range"),
        ('cnt="1"', 'cnt="72"', "line 6: cnt 72; the runtimes take at most 71"),
        ('cnt="1"', 'cnt="0"', "line 6: cnt 0 in a step that moves data"),
        ('cnt="1"', 'cnt="2"', r"line 6: src i\[0 .. 1\] is out of range"),
        ('depid="-1"', 'depid="1"', "line 6: depid 1 and deps -1: both name a step, or neither"),
        ('depid="-1" deps="-1"', 'depid="1" deps="0"', 'line 11: hasdep must be "1": line 6 waits for this step'),
        ('depid="-1" deps="-1"', 'depid="1" deps="1"', "line 6: waits for step 1 of block 1, which does not exist"),
        ('hasdep="0"', 'hasdep="2"', "line 6: hasdep 2 is not in 0 .. 1"),
        ('type="cpy"', 'type="nop"', "an empty step that waits for nothing"),
        ("<step", "<op", "<op> where <step> was expected"),
        ("<algo ", "<!DOCTYPE x [<!ENTITY a 'b'>]><algo ", "a document type is not accepted"),
    ],
)
def test_malformed_files(old: str, new: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        parse(changed(RIGHT["ring"], old, new))


def test_limits_of_the_runtimes() -> None:
    def sends(number: int) -> str:
        rows: list[Row] = [("s", "i0", "o0", 1, None)] * number
        receives: list[Row] = [("r", "i0", "s0", 1, None)] * number
        return written("allreduce", [[(1, -1, 0, rows)], [(-1, 0, 0, receives)]], 1, 1)

    parse(sends(256))
    with pytest.raises(ScheduleError, match="257 steps in a thread block; at most 256"):
        parse(sends(257))
    copies: list[Row] = [("cpy", "i0", "s0", 1, None)] * 256
    many = written("allreduce", [[(-1, -1, 0, copies)] * 16, []], 1, 1)
    with pytest.raises(ScheduleError, match="4115 elements are read for rank 0; at most 4095"):
        parse(many)
    parse(written("allreduce", [[(-1, -1, 0, copies)] * 15, []], 1, 1))
    crowd = [[(other, -1, 0, copies[:0]) for other in range(1, 34)], *([] for _ in range(33))]
    with pytest.raises(ScheduleError, match="33 blocks send on channel 0; at most 32"):
        parse(written("allreduce", crowd, 1, 1))  # type: ignore[arg-type]
    re_rows: list[Row] = [("r", "i0", "s0", 2, None), ("re", "s0", "i0", 2, None), ("re", "s2", "i0", 1, None)]
    with pytest.raises(ScheduleError, match="additions to one place in a row become one"):
        parse(written("allreduce", [[(1, 1, 0, re_rows)], []], 4, 4))
    nops: list[Row] = [("r", "i0", "s0", 1, None), ("nop", "i0", "i0", 0, (0, 0)), ("cpy", "i0", "s0", 1, None)]
    with pytest.raises(ScheduleError, match="after an empty step comes one that waits too"):
        parse(written("allreduce", [[(1, 1, 0, nops)], []], 1, 1))
    with pytest.raises(ScheduleError, match="an empty step at the end of a block"):
        parse(written("allreduce", [[(1, 1, 0, nops[:2])], []], 1, 1))
    nops[2] = ("cpy", "i0", "s0", 1, (0, 1))
    with pytest.raises(ScheduleError, match="waits for step 1 of block 0, which is empty"):
        parse(written("allreduce", [[(1, 1, 0, nops)], []], 1, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("ring", 'send="2" recv="0"', 'send="-1" recv="0"', "'s' in a block that sends to nobody"),
        ("ring", 'type="rcs"', 'type="r"', "messages are sent and"),
        ("ring", 'type="cpy"', 'type="re"', r"reads o\[0\], which nothing has been written to"),
        ("ring", 'dstoff="2"', 'dstoff="1"', "ends with"),
        ("all_to_all", 'recv="1" chan="0"', 'recv="1" chan="1"', "1 messages are sent and 0 received"),
        ("all_to_all", '<tb id="1" send="2"', '<tb id="1" send="1"', "blocks 0 and 1 both send to rank 1"),
        ("all_to_all", 'type="cpy" srcbuf="i" srcoff="0"', 'type="cpy" srcbuf="i" srcoff="1"', "expected rank 0's"),
        ("all_to_all", 'srcoff="0" dstbuf="o"', 'srcoff="0" dstbuf="i"', r"writes i\[1\], which is the caller's"),
    ],
)
def test_wrong_schedules(name: str, old: str, new: str, complaint: str) -> None:
    text = changed(RIGHT[name], old, new)
    with pytest.raises(ScheduleError, match=complaint):
        verify_blocks(parse(text))


def test_the_command(tmp_path: Path) -> None:
    runner, app = CliRunner(), build_app()
    human = runner.invoke(app, ["verify", str(RING)])
    assert human.exit_code == 0
    assert human.output.splitlines() == [
        "right: all_gather over 3 ranks out of place, 12 steps in 6 thread blocks",
        "no runtime loads it as it is: <algo> lacks outofplace, minBytes, maxBytes",
    ]
    facts = json.loads(runner.invoke(app, ["verify", str(RING), "--json"]).output)
    assert facts["ok"] and facts["format"] == "msccl_xml" and facts["messages_in_flight"] == 2
    assert facts["loads_in"] == {"msccl": False, "rccl": False}
    long = tmp_path / "long.xml"
    rows: list[Row] = [("s", f"i{k}", "o0", 1, None) for k in range(65)]
    keep: list[Row] = [("r", "i0", f"s{k}", 1, None) for k in range(65)]
    add: list[Row] = [("re", f"s{k}", f"i{k}", 1, (0, k)) for k in range(65)]
    back: list[Row] = [("s", f"i{k}", "o0", 1, (2, k)) for k in range(65)]
    home: list[Row] = [("r", "i0", f"i{k}", 1, (1, k)) for k in range(65)]
    one = [(-1, 1, 0, keep), (1, -1, 1, back), (-1, -1, 0, add)]
    two = [(0, -1, 0, rows), (-1, 0, 1, [(*row[:4], (0, k)) for k, row in enumerate(home)])]
    long.write_text(written("allreduce", [one, two], 65, 65))  # type: ignore[arg-type]
    assert check_file(long)["loads_in"] == {"msccl": True, "rccl": False}
    output = runner.invoke(app, ["verify", str(long)]).output
    assert "within the limits of MSCCL" in output
    assert "RCCL does not load it: a block has 65 steps, 64 are allowed" in output
    broken = tmp_path / "broken.xml"
    broken.write_text(RING.read_text().replace('dstoff="2" cnt', 'dstoff="1" cnt', 1))
    result = runner.invoke(app, ["verify", str(broken)])
    assert result.exit_code == 1
    assert result.output.startswith("wrong: all_gather over 3 ranks is wrong at rank 0")
    assert "]!" in result.output
    answer = json.loads(runner.invoke(app, ["verify", str(broken), "--json"]).output)
    assert answer["ok"] is False and answer["error"] in result.output
