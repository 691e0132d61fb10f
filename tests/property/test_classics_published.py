"""The classics against their papers' formulas: communication steps, and bytes that a rank sends, at 2 to 64 ranks."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import examples

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import ROOTED, Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import sums_agree, verify_schedule
from mycel.topology.builders import star


def made(ranks: int, name: str, method: str, root: int = 0) -> Schedule:
    collective = Collective(name=name, num_ranks=ranks, root=root if name in ROOTED else None)  # type: ignore[arg-type]
    schedule = synthesize(star(num_ranks=ranks), collective, method)
    verify_schedule(schedule)
    return schedule


def sent(schedule: Schedule) -> list[Fraction]:
    """What each rank sends, in arrays."""
    units: Counter[int] = Counter()
    for t in schedule.transfers:
        units[t.src] += schedule.chunks[t.chunk].num_units
    return [Fraction(units[rank], schedule.num_units) for rank in range(schedule.collective.num_ranks)]


def one_port_steps(schedule: Schedule, root: int) -> int:
    """Steps of a tree in which a rank sends one message at a time, to the rank with the most behind it first."""
    children: dict[int, list[int]] = {}
    for t in schedule.transfers:
        children.setdefault(t.src, []).append(t.dst)

    def below(rank: int) -> int:
        longest = sorted(map(below, children.get(rank, ())), reverse=True)
        return max((turn + steps for turn, steps in enumerate(longest, 1)), default=0)

    return below(root)


def logarithm(ranks: int, base: int) -> int:
    exponent = 0
    while base**exponent < ranks:
        exponent += 1
    return exponent


ANY = st.integers(2, 64)
TWOS = st.integers(1, 6).map(lambda k: 2**k)
THREES = st.integers(1, 3).map(lambda k: 3**k)
EVEN = st.integers(1, 32).map(lambda k: 2 * k)


@examples(6, 60)
@given(ANY)
def test_ring(ranks: int) -> None:
    """Patarasuk and Yuan 2009: 2 (p - 1) steps of 1 / p."""
    schedule = made(ranks, "all_reduce", "ring")
    assert schedule.depth == 2 * (ranks - 1)
    assert sent(schedule) == [Fraction(2 * (ranks - 1), ranks)] * ranks


@examples(6, 60)
@given(ANY)
def test_recursive_doubling(ranks: int) -> None:
    """Thakur et al. 2005: log2 p exchanges of everything, and two more for ranks beyond a power of two."""
    schedule = made(ranks, "all_reduce", "recursive_doubling")
    bits, beyond = ranks.bit_length() - 1, ranks - (1 << ranks.bit_length() - 1)
    assert schedule.depth == bits if not beyond else bits < schedule.depth <= bits + 2
    alone = ranks - 2 * beyond
    assert sorted(sent(schedule)) == sorted([1] * beyond + [bits + 1] * beyond + [bits] * alone)
    assert sums_agree(schedule)


@examples(6, 60)
@given(TWOS)
def test_rabenseifner(ranks: int) -> None:
    """Rabenseifner 2004: 2 log2 p steps, and as many bytes as a ring."""
    schedule = made(ranks, "all_reduce", "rabenseifner")
    assert schedule.depth == 2 * log2(ranks)
    assert sent(schedule) == [Fraction(2 * (ranks - 1), ranks)] * ranks


@examples(6, 60)
@given(ANY)
def test_bruck(ranks: int) -> None:
    """Bruck et al. 1997: ceil(log2 p) steps, and only what is needed."""
    schedule = made(ranks, "all_gather", "bruck")
    assert {(t.src - t.dst) % ranks for t in schedule.transfers} == {1 << i for i in range(logarithm(ranks, 2))}
    assert schedule.depth <= logarithm(ranks, 2)
    assert sent(schedule) == [Fraction(ranks - 1, ranks)] * ranks


@examples(6, 60)
@given(EVEN)
def test_swing(ranks: int) -> None:
    """De Sensi et al. 2024: 2 ceil(log2 p) steps, and as many bytes as a ring; nearest partners get the most."""
    schedule = made(ranks, "all_reduce", "swing")
    assert schedule.depth <= 2 * ceil(log2(ranks))
    assert sent(schedule) == [Fraction(2 * (ranks - 1), ranks)] * ranks
    if ranks & (ranks - 1) == 0:
        assert schedule.depth == 2 * log2(ranks)
        away: Counter[int] = Counter()
        for t in schedule.transfers:
            away[min((t.dst - t.src) % ranks, (t.src - t.dst) % ranks)] += 1
        distances = Counter(
            min(abs((1 - (-2) ** (s + 1)) // 3), ranks - abs((1 - (-2) ** (s + 1)) // 3))
            for s in range(int(log2(ranks)))
        )
        assert away.keys() == distances.keys()
        assert away[1] == max(away.values())


@examples(6, 60)
@given(TWOS)
def test_swing_of_whole_arrays(ranks: int) -> None:
    """De Sensi et al. 2024: log2 p exchanges of everything."""
    schedule = made(ranks, "all_reduce", "swing_latency")
    assert schedule.depth == log2(ranks)
    assert sent(schedule) == [log2(ranks)] * ranks
    assert sums_agree(schedule) == (ranks <= 4)


@examples(3, 10)
@given(THREES)
def test_trivance(ranks: int) -> None:
    """Jürß et al. 2026: log3 p steps with both neighbours; for many bytes as many as a ring."""
    steps = logarithm(ranks, 3)
    whole = made(ranks, "all_reduce", "trivance_latency")
    assert whole.depth == steps
    assert sent(whole) == [2 * steps] * ranks
    assert not sums_agree(whole)
    parts = made(ranks, "all_reduce", "trivance")
    assert parts.depth == 2 * steps
    assert sent(parts) == [Fraction(2 * (ranks - 1), ranks)] * ranks


@examples(6, 60)
@given(TWOS, st.data())
def test_bine(ranks: int, data: st.DataObject) -> None:
    """De Sensi et al. 2025: log2 p steps, every edge at most two thirds as long as a binomial tree's longest."""
    root = data.draw(st.integers(0, ranks - 1))
    schedule = made(ranks, "broadcast", "bine", root)
    assert one_port_steps(schedule, root) == log2(ranks)
    assert sum(sent(schedule)) == ranks - 1
    lengths = [min((t.dst - t.src) % ranks, (t.src - t.dst) % ranks) for t in schedule.transfers]
    assert max(lengths) <= -(-ranks // 3)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13, 21, 33, 64])
def test_exchange(ranks: int) -> None:
    """Ours: ceil(log2 p) rounds for any number of ranks, the same bits on all of them."""
    schedule = made(ranks, "all_reduce", "exchange")
    assert max(max(t.places) for t in schedule.transfers) == ceil(log2(ranks))
    assert schedule.depth <= ceil(log2(ranks))
    assert sums_agree(schedule)
