"""Known schedules: the rows that were measured of torch's, bubble and memory by formula, torch's own orders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.pipeline_numbers import verdict

from mycel.errors import UsageError
from mycel.pipeline.check import check
from mycel.pipeline.known import KNOWN, known_order
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Order
from mycel.pipeline.replay import Replay, peaks, replay, unit_times

DATA = Path(__file__).parents[1] / "data" / "pipeline" / "known_schedules.json"
ROWS = json.loads(DATA.read_text())["rows"]
NAMES = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "zb_h1",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
}
HALF = Fraction(1, 2)
WHOLE = Fraction(0)  # what the input gradient frees: nothing

#: Forward, input gradient, weight gradient.
UNIT, BACKWARD_HEAVY, FORWARD_HEAVY = (1, 1, 1), (2, 3, 1), (3, 3, 2)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row[:4])))
def test_rows_of_the_table(row: list[Any]) -> None:
    order = known_order(NAMES[row[0]], *row[1:4])
    timed = replay(order)
    half, whole = peaks(order), peaks(order, input_frees=WHOLE)
    got = [timed.makespan, timed.bubble, round(float(timed.bubble / timed.makespan), 4)]
    assert [*got, max(half), list(half), max(whole), list(whole)] == row[4:]


# -- formulas -----------------------------------------------------------------------------------------------


def timed(order: Order, times: tuple[int, int, int] = UNIT, *, overlaps: bool = False) -> Replay:
    forward, input_gradient, weight = times
    known = unit_times(order, forward=forward, input_gradient=input_gradient, weight=weight)
    return replay(order, known, overlaps=overlaps)


def most(order: Order) -> Fraction:
    return max(peaks(order, input_frees=WHOLE))


def gpipe(p: int, m: int, times: tuple[int, int, int]) -> None:
    order = known_order("gpipe", p, m)
    assert timed(order, times).bubble == (p - 1) * sum(times)
    assert peaks(order) == (m,) * p


def one_f_one_b(p: int, m: int, times: tuple[int, int, int]) -> None:
    order = known_order("1f1b", p, m)
    assert timed(order, times).bubble == (p - 1) * sum(times)
    assert peaks(order) == tuple(min(p - r, m) for r in range(p))


def interleaved(p: int, m: int, times: tuple[int, int, int], v: int = 2) -> None:
    if m > p and m % (m // p):
        with pytest.raises(UsageError, match="do not divide"):
            known_order("interleaved", p, m, v)
        return
    order = known_order("interleaved", p, m, v)
    # With fewer micro-batches than ranks, every further chunk waits for the round to come back.
    late = Fraction(max(0, p - m) * (v - 1) * sum(times), v)
    assert timed(order, times).bubble == Fraction((p - 1) * sum(times), v) + late
    length = m // max(1, m // p)
    assert peaks(order) == tuple(
        min(Fraction(m), Fraction((v - 1) * length + 2 * (p - 1 - r) + 1, v)) for r in range(p)
    )
    if m % p == 0 and m > p:
        assert max(peaks(order)) == p + Fraction(p - 1, v)


def looped_bfs(p: int, m: int, times: tuple[int, int, int], v: int = 2) -> None:
    order = known_order("looped_bfs", p, m, v)
    late = Fraction(max(0, p - m) * (v - 1) * sum(times), v)
    assert timed(order, times).bubble == Fraction((p - 1) * sum(times), v) + late
    assert peaks(order) == (m,) * p


def zb_h1(p: int, m: int, times: tuple[int, int, int]) -> None:
    if m > p and m % (m // p):
        return
    order, (f, i, w) = known_order("zb_h1", p, m), times
    # Micro-batches that are missing are weight gradients that are missing in the cool-down.
    assert timed(order, times).bubble == (p - 1) * (f + i - w) + max(0, p - m) * w
    assert most(order) == min(p, m)


def zb_h1_of_chunks(p: int, m: int, times: tuple[int, int, int], v: int = 2) -> None:
    if m < p or m % (m // p):
        return
    order, (f, i, w) = known_order("zb_h1", p, m, v), times
    assert timed(order, times).bubble == Fraction((p - 1) * (f + i - w), v)
    if m % p == 0:
        assert most(order) == p


def zb_h2(p: int, m: int, times: tuple[int, int, int]) -> None:
    order, (f, i, w) = known_order("zb_h2", p, m), times
    if m >= 2 * p - 1:
        assert timed(order, times).span_bubble == (p - 1) * (f + i - 2 * w)
        assert timed(order).bubble == timed(known_order("1f1b", p, 1)).bubble / 3 == p - 1
    assert most(order) == min(2 * p - 1, m)


def zb_v(p: int, m: int, times: tuple[int, int, int]) -> None:
    order = known_order("zb_v", p, m)
    if m >= 2 * p - 1:
        assert timed(order).span_bubble == 0
        assert timed(order).bubble == Fraction(p - 1, 2)
    assert most(order) == min(p, m)


def v_min(p: int, m: int, times: tuple[int, int, int]) -> None:
    order = known_order("v_min", p, m)
    if m >= 2:
        assert timed(order).bubble == 2 * (p - 1) + (HALF if p % 3 == 0 else -HALF)
    assert most(order) <= (p + 4) // 3
    if m >= p:
        assert most(order) == (p + 4) // 3


def v_half(p: int, m: int, times: tuple[int, int, int]) -> None:
    order = known_order("v_half", p, m)
    if m >= p:
        assert timed(order).bubble == Fraction(3 * (p - 1) - (p > 2), 2)
        assert most(order) == (p + 2) // 2
    assert most(order) <= (p + 2) // 2


def dualpipe(p: int, m: int, times: tuple[int, int, int]) -> None:
    if p % 2 or m % 2 or m < 2 * p:
        with pytest.raises(UsageError, match="expected even counts"):
            known_order("dualpipe", p, m)
        return
    order, (f, i, w) = known_order("dualpipe", p, m), times
    if i <= f:
        pair, backward = f + i + w, i + w
        assert timed(order, times, overlaps=True).bubble == (p // 2 - 1) * (pair + backward - 3 * w)
    assert timed(order).bubble == p // 2 - 1
    assert most(order) == p + 1


def dualpipe_v(p: int, m: int, times: tuple[int, int, int]) -> None:
    if m < 2 * p:
        with pytest.raises(UsageError, match="at least as many as stages"):
            known_order("dualpipe_v", p, m)
        return
    order, (f, i, w) = known_order("dualpipe_v", p, m), times
    if i <= f:
        assert timed(order, times, overlaps=True).bubble == Fraction((p - 1) * (f + 2 * (i + w) - 3 * w), 2)
    assert timed(order).bubble == Fraction(p - 1, 2)
    assert most(order) == p + HALF


def chimera(p: int, m: int, times: tuple[int, int, int]) -> None:
    if p % 2 or m % p:
        with pytest.raises(UsageError, match="expected an even number of ranks"):
            known_order("chimera", p, m)
        return
    order, (f, i, w) = known_order("chimera", p, m), times
    assert timed(order, (2, 1, 1)).bubble == 2 * (p - 2)  # F = B = 2: (p/2-1)(F+B)
    if m == p and i + w >= f:
        assert timed(order, times).bubble == (p - 2) * (i + w)
    assert peaks(order) == tuple(p // 2 + 1 + min(r, p - 1 - r) for r in range(p))


FORMULAS: list[Callable[[int, int, tuple[int, int, int]], None]] = [
    gpipe, one_f_one_b, interleaved, looped_bfs, zb_h1, zb_h1_of_chunks, zb_h2, zb_v, v_min, v_half, dualpipe,
    dualpipe_v, chimera,
]  # fmt: skip


def few() -> Iterator[tuple[int, int]]:
    """Ranks and micro-batches around every condition of a formula."""
    for p in (2, 3, 4, 5, 6):
        for m in sorted({1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p}):
            yield p, m
    yield from ((8, 16), (8, 24), (16, 48))


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
@pytest.mark.parametrize("times", [UNIT, BACKWARD_HEAVY, FORWARD_HEAVY], ids=str)
def test_formulas(formula: Callable[..., None], times: tuple[int, int, int]) -> None:
    for p, m in few():
        formula(p, m, times)


@pytest.mark.long
@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
@pytest.mark.parametrize("p", range(2, 17))
def test_formulas_everywhere(formula: Callable[..., None], p: int) -> None:
    for m in range(1, 65):
        formula(p, m, FORWARD_HEAVY if m % 2 else UNIT)


# -- orders -------------------------------------------------------------------------------------------------

COUNTS = {"dualpipe": [(2, 4), (4, 8)], "dualpipe_v": [(2, 4), (3, 6)], "chimera": [(2, 4), (4, 4)]}
OTHERS = [(1, 2), (2, 1), (2, 4), (3, 5), (4, 3), (4, 8)]


@pytest.mark.parametrize("name", KNOWN)
def test_all_are_right_plain_and_with_communication(name: str) -> None:
    for p, m in COUNTS.get(name, OTHERS):
        plain = known_order(name, p, m)
        for order in (plain, lower(plain)):
            check(order)
            rows = [[str(action) for action in row] for row in order.rows]
            routes = None if order.routes is None else [list(route) for route in order.routes]
            wrong = verdict(
                rows,
                num_stages=order.num_stages,
                num_micro_batches=m,
                routes=routes,
                keeps_losses_apart=routes is not None,
            )
            assert wrong == "", (name, p, m, wrong)
        assert replay(lower(plain)).makespan == replay(plain).makespan


@pytest.mark.parametrize("name", KNOWN)
def test_counts_that_make_no_sense_are_refused(name: str) -> None:
    for counts in ((0, 4), (4, 0), (-1, 4), (4, 8, 0), (4, 8, 7 if name not in SEVERAL_CHUNKS else -2)):
        with pytest.raises(UsageError):
            known_order(name, *counts)


SEVERAL_CHUNKS = ("interleaved", "looped_bfs", "zb_h1")


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no schedule is called '2F2B'; known are gpipe, 1f1b, "):
        known_order("2F2B", 2, 2)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("counts", [(4, 10**20), (10**20, 8), (1 << 11, 1 << 10)])
def test_orders_that_nobody_could_write_down(name: str, counts: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="forwards are written down"):
        known_order(name, *counts)
