"""Measurements: the arithmetic of nccl-tests, the JSON form, and the check that every worker makes."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mycel.bench.case import (
    BENCH_COLLECTIVES,
    DTYPES,
    OPERATIONS,
    WHOLE_NUMBERS,
    Case,
    cases_from_text,
    cases_to_text,
)
from mycel.bench.measurement import Measurement, describe_hardware, describe_versions, summarize
from mycel.bench.nccl_table import nccl_csv, nccl_tables
from mycel.bench.numbers import contribution, num_wrong, reduced
from mycel.bench.operands import prepare
from mycel.bench.run import bench_cases, bound_algbw, limits, make_cases
from mycel.cli.bench import bench_table
from mycel.emulate.fabric import CREDIT_BYTES
from mycel.errors import UsageError
from mycel.topology.builders import two_boxes
from mycel.units import RATE_UNITS


def _measure(times_s: list[float], **changes: object) -> Measurement:
    fields: dict[str, object] = {
        "collective": "all_reduce",
        "num_bytes": 16 << 20,
        "backend": "gloo",
        "unit": "Mbit/s",
        "bound_algbw": Fraction(200),
        "correct": True,
        "world_size": 8,
        "topology": "two_boxes",
        "fingerprint": "0123456789ab",
        "emulated": True,
    }
    return summarize(times_s, **{**fields, **changes})  # type: ignore[arg-type]


def test_bandwidths_follow_nccl_tests() -> None:
    m = _measure([1.0, 2.0, 3.0])
    assert m.median_s == 2.0
    assert m.p10_s == pytest.approx(1.2)
    assert m.p90_s == pytest.approx(2.8)
    assert m.algbw == pytest.approx((16 << 20) * 8 / 2.0 / 1e6)
    assert m.busbw == pytest.approx(m.algbw * 2 * 7 / 8)
    assert m.fraction_of_bound == pytest.approx(m.algbw / 200)
    assert m.repeats == 3


def test_all_gather_has_its_own_bus_factor() -> None:
    m = _measure([1.0], collective="all_gather")
    assert m.busbw == pytest.approx(m.algbw * 7 / 8)


@given(
    times=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9),
    bound=st.none() | st.fractions(min_value=Fraction(1, 10), max_value=10**6),
    correct=st.booleans(),
    collective=st.sampled_from(BENCH_COLLECTIVES),
)
def test_json_round_trip(times: list[float], bound: Fraction | None, correct: bool, collective: str) -> None:
    m = _measure(times, bound_algbw=bound, correct=correct, collective=collective)
    assert Measurement.from_json(json.loads(json.dumps(m.to_json()))) == m
    assert m.p10_s <= m.median_s <= m.p90_s
    assert (m.fraction_of_bound is None) == (bound is None)


def test_from_json_names_what_is_wrong() -> None:
    data = _measure([1.0]).to_json()
    del data["unit"]
    data["speed"] = 3
    with pytest.raises(UsageError, match=r"missing keys \['unit'\], unknown keys \['speed'\]"):
        Measurement.from_json(data)


@pytest.mark.parametrize(
    ("times", "changes", "message"),
    [([], {}, "no repeats"), ([1.0], {"unit": "link"}, "'link' is not a rate")],
)
def test_summarize_refuses(times: list[float], changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _measure(times, **changes)


def test_hardware_and_versions_are_named() -> None:
    assert "cores" in describe_hardware()
    assert {"mycel", "torch", "python", "kernel"} <= set(describe_versions())


def test_cases_travel_as_text() -> None:
    cases = (Case(collective="broadcast", num_bytes=100, calls=7), Case(collective="all_reduce", num_bytes=4))
    assert cases_from_text(cases_to_text(cases)) == cases


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"collective": "all_to_some"}, "unknown collective to bench 'all_to_some'"),
        ({"mode": "lazy"}, "unknown mode 'lazy'"),
        ({"num_bytes": 0}, "num_bytes is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"dtype": "float8"}, "unknown element type 'float8'"),
        ({"op": "mean"}, "unknown operation 'mean'"),
        ({"op": "avg", "dtype": "int32"}, "avg has no exact answer in int32"),
        ({"collective": "broadcast", "op": "max"}, "broadcast adds nothing up"),
        ({"root": 1}, "all_reduce has no root"),
        ({"warm_up": -1}, "counted from 0"),
    ],
)
def test_impossible_cases(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Case(**{"collective": "all_reduce", "num_bytes": 4, **fields})  # type: ignore[arg-type]


def test_nothing_to_bench_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        bench_cases(2, [])
    with pytest.raises(UsageError, match="named twice"):
        bench_cases(2, [Case(collective="broadcast", num_bytes=4)], backends=("gloo", "gloo"))


@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 8, 16, 40])
def test_sums_of_contributions_are_exact_and_tell_ranks_apart(world_size: int) -> None:
    parts = [contribution(0, 20000, rank, world_size) for rank in range(world_size)]
    exact = sum(part.to(torch.float64) for part in parts)
    assert isinstance(exact, torch.Tensor)
    assert exact.max() < 1 << 24
    assert torch.equal(sum(parts[1:], parts[0]).to(torch.float64), exact)
    neighbours = [torch.equal(parts[r], parts[r + 1]) for r in range(world_size - 1)]
    assert not any(neighbours)


@pytest.mark.parametrize("world_size", [2, 3, 8, 40])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(dtype, op) for dtype in DTYPES for op in OPERATIONS if op != "avg" or dtype not in WHOLE_NUMBERS],
)
def test_reductions_are_exact_in_every_type_and_every_missing_part_shows(
    dtype: str, op: str, world_size: int
) -> None:
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = {
        "sum": torch.add,
        "avg": torch.add,
        "prod": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }[op]
    parts = [contribution(0, 5000, rank, world_size, dtype=dtype, op=op) for rank in range(world_size)]
    whole = reduced(0, 5000, world_size, dtype=dtype, op=op)

    def joined(some: list[torch.Tensor]) -> torch.Tensor:
        made = functools.reduce(join, some)
        assert made.dtype == getattr(torch, dtype)
        return made / world_size if op == "avg" else made

    assert num_wrong(joined(parts), whole) == num_wrong(joined(parts[::-1]), whole) == 0
    if op == "avg" and dtype == "bfloat16" and world_size == 40:
        return  # one part of eighty is less than this type can tell
    for rank in range(world_size):
        assert num_wrong(joined(parts[:rank] + parts[rank + 1 :]), whole) > 0
        if op not in ("min", "max"):
            assert num_wrong(joined([*parts, parts[rank]]), whole) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("collective", BENCH_COLLECTIVES)
def test_what_ranks_give_and_expect_is_of_the_type(collective: str, dtype: str) -> None:
    case = Case(collective=collective, num_bytes=4096, dtype=dtype)
    for tensor in prepare(case, rank=1, world_size=4).tensors:
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.numel() * tensor.element_size() in (4096, 1024)


@pytest.mark.parametrize("collective", BENCH_COLLECTIVES)
def test_rubbish_is_never_called_right(collective: str) -> None:
    at = 0 if collective in ("reduce", "gather") else 1  # only the root has a result
    operands = prepare(Case(collective=collective, num_bytes=4096), rank=at, world_size=4)
    operands.reset()
    assert operands.num_wrong() > 0


def test_odd_sizes_are_rounded_up_to_equal_blocks() -> None:
    assert Case(collective="all_gather", num_bytes=1000).num_elements(3) == 252
    assert Case(collective="all_reduce", num_bytes=1001).num_elements(3) == 251


def test_cases_are_of_every_type_operation_and_root_they_have() -> None:
    made = make_cases(
        ["all_reduce", "broadcast", "sendrecv"],
        [4, 8],
        repeats=1,
        dtypes=["float32", "int8"],
        ops=["sum", "avg"],
        roots=[0, 1, 2],
    )
    assert [(c.op, c.dtype) for c in made if c.collective == "all_reduce" and c.num_bytes == 4] == [
        ("sum", "float32"),
        ("avg", "float32"),
        ("sum", "int8"),
    ]
    assert [c.root for c in made if c.collective == "broadcast" and c.num_bytes == 4] == [0, 1, 2, 0, 1, 2]
    assert len([c for c in made if c.collective == "sendrecv"]) == 2 * 2


def test_csv_has_a_line_a_measurement() -> None:
    rows = [
        _measure([2.0], wrong=0, dtype="float16", op="sum"),
        _measure([1.0], backend="mycel", method="ring", piece_bytes=4096, wrong=0, dtype="float16", op="sum"),
        _measure([1.0], collective="broadcast", backend="mycel", root=3, bound_algbw=None),
    ]
    lines = list(csv.DictReader(io.StringIO(nccl_csv(rows, baseline="gloo"))))
    assert [line["backend"] for line in lines] == ["gloo", "mycel", "mycel"]
    assert [line["type"] for line in lines] == ["half", "half", "float"]
    assert [line["count"] for line in lines] == [str(8 << 20), str(8 << 20), str(4 << 20)]
    assert [line["vs_baseline"] for line in lines] == ["", "2", ""]
    assert (lines[2]["root"], lines[2]["redop"], lines[2]["wrong"], lines[2]["of_bound"]) == ("3", "none", "", "")
    assert float(lines[1]["algbw_gbps"]) == pytest.approx((16 << 20) / 1e9, rel=1e-5)


def test_bound_of_a_shift_and_of_another_root() -> None:
    """In a shift between two nodes one rank's array crosses each way; from another root a broadcast is alike."""
    topology = two_boxes()
    assert bound_algbw(topology, "sendrecv") == 200
    assert limits(topology, "broadcast", 5) == limits(topology, "broadcast")
    with pytest.raises(UsageError, match="root"):
        limits(topology, "broadcast", 8)


def test_bound_of_two_boxes() -> None:
    topology = two_boxes()
    assert bound_algbw(topology, "all_gather") == bound_algbw(topology, "reduce_scatter") == 400
    assert bound_algbw(topology, "all_reduce") == 200
    assert bound_algbw(topology, "broadcast") == 200


def test_what_a_shaped_link_lets_through_at_once_is_no_merit() -> None:
    """The credit of the links that bind, here of 50 Mbit/s, counts as time; no fraction is above 1."""
    topology = two_boxes()
    limit, credit_s = limits(topology, "all_gather")
    assert credit_s == pytest.approx(CREDIT_BYTES * 8 / 50e6)
    moved = 1 << 20
    least_s = moved / float(limit * RATE_UNITS["Mbit/s"])
    lucky = summarize(
        [least_s - credit_s],
        collective="all_gather",
        num_bytes=moved,
        backend="mycel",
        unit="Mbit/s",
        bound_algbw=limit,
        credit_s=credit_s,
        correct=True,
        world_size=8,
        topology=topology.name,
        fingerprint=None,
        emulated=True,
    )
    assert lucky.fraction_of_bound == pytest.approx(1.0)
    assert lucky.algbw > float(limit)  # what was measured stays what was measured


def test_table_says_ratio_and_wrong_results() -> None:
    from rich.console import Console

    rows = [_measure([6.0]), _measure([1.5], backend="mycel", correct=False)]
    console = Console(width=160, file=io.StringIO())
    console.print(bench_table(rows, baseline="gloo"))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "4.00x" in text
    assert "NO" in text
    assert "16MB" in text


def test_columns_are_those_of_nccl_tests() -> None:
    """Widths and places as a line of nccl-tests has them; scripts cut lines there."""
    above = "#" + 62 * " " + "out-of-place" + 23 * " " + "in-place" + 10 * " "
    theirs = "#       size         count      type   redop    root" + 2 * "     time   algbw   busbw #wrong"
    line = "     1048576        262144     float     sum      -1" + 2 * "    105.9    9.90   17.33      0"
    changes: dict[str, object] = {"collective": "reduce_scatter", "num_bytes": 1 << 20, "world_size": 4}
    changes |= {"wrong": 0, "op": "sum"}
    rows = [
        _measure([seconds], backend=backend, in_place=in_place, **changes)
        for backend, seconds in (("gloo", 105.9e-6), ("mycel", 0.25))
        for in_place in (False, True)
    ]
    text = nccl_tables(rows, baseline="gloo").splitlines()
    head = next(index for index, row in enumerate(text) if row.startswith("#       size"))
    assert text[head - 1] == above
    assert text[head].startswith(theirs)
    first = text[head + 2]

    ends = [m.end() for m in re.finditer(r"\S+", line)]
    assert [m.end() for m in re.finditer(r"\S+", first)][: len(ends)] == ends
    assert first.split()[:9] == ["1048576", "65536", "float", "sum", "-1", "105.9", "9.90", "7.43", "0"]
    ours = next(row for row in text[head + 3 :] if row.lstrip().startswith("1048576"))
    assert ours.split()[5:9] == ["250000", "0.0042", "0.0031", "0"]


def test_what_torch_does_not_offer_is_not_available_and_wrong_elements_are_counted() -> None:
    rows = [_measure([0.5], in_place=True, wrong=7, correct=False), _measure([0.25], backend="mycel", in_place=True)]
    text = nccl_tables(rows, baseline="gloo")
    gloo, ours = (row.split() for row in text.splitlines() if not row.startswith("#"))
    assert gloo[5:9] == ["N/A"] * 4
    assert gloo[12] == "7" and "1 FAILED" in text
    assert "2.00x" in ours
