"""Benches collectives on an emulated cluster, or on loopback: every backend in the same run, beside the bound."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from mycel.bench.case import EITHER_WAY, FROM_OR_TO_ROOT, REDUCING, WHOLE_NUMBERS, Case, cases_to_text
from mycel.bench.measurement import Measurement, summarize
from mycel.bench.ranks import run_ranks
from mycel.collectives.spec import Collective, CollectiveName
from mycel.emulate.fabric import CREDIT_BYTES
from mycel.errors import UsageError
from mycel.topology.model import Topology
from mycel.units import RATE_UNITS

__all__ = [
    "LOOPBACK_NAME",
    "LOOPBACK_UNIT",
    "SMALL_BYTES",
    "bench_cases",
    "bound_algbw",
    "limits",
    "make_cases",
    "measurement_of",
    "run_bench",
    "warm_up",
]

#: Unit of bandwidths where no topology gives one.
LOOPBACK_UNIT = "GB/s"

#: Up to this size a barrier takes longer to let all ranks go than the collective that follows it.
SMALL_BYTES = 64 << 10

#: What stands in the place of a topology's name there.
LOOPBACK_NAME = "loopback"


def run_bench(
    topology: Topology | int,
    collectives: Sequence[str],
    sizes: Sequence[int],
    *,
    backends: Sequence[str] = ("gloo", "mycel"),
    repeats: int = 5,
    timeout_s: float = 1800.0,
    progress: Callable[[Measurement], None] | None = None,
) -> list[Measurement]:
    """Times every collective at every size over every backend.

    Args:
        topology: fabric to emulate, or a number of ranks to run on loopback instead.
        collectives: names from ``mycel.bench.case.BENCH_COLLECTIVES``.
        sizes: bytes of the whole array.
        backends: rounds alternate between them; the first is the baseline.
        repeats: timed rounds, after warm-up.
        timeout_s: for the whole run.
        progress: receives each measurement as it arrives.

    Returns:
        Measurements by collective, size and backend, in the order asked for.

    Raises:
        UsageError: nothing to measure, or an unknown collective.
        EmulationError: this machine cannot emulate the cluster.
        CommunicationError: a rank failed.

    Examples:
        On an emulated fabric, beside its bound::

            fabric = mycel.load_topology("star:ranks=4,bandwidth=200 Mbit/s")
            for m in run_bench(fabric, ["all_reduce"], [1 << 20, 1 << 24]):
                print(m.backend, m.bytes, m.algbw, m.unit, m.fraction_of_bound)
    """
    cases = make_cases(collectives, sizes, repeats=repeats)
    return bench_cases(topology, cases, backends=backends, timeout_s=timeout_s, progress=progress)


def make_cases(
    collectives: Sequence[str],
    sizes: Sequence[int],
    *,
    repeats: int,
    both_ways: bool = False,
    small_calls: int = 1,
    dtypes: Sequence[str] = ("float32",),
    ops: Sequence[str] = ("sum",),
    roots: Sequence[int] = (0,),
    check: bool = True,
    warm_up: int | None = None,
) -> list[Case]:
    """Every collective of every type, operation and root it has, at every size.

    Args:
        repeats: timed rounds.
        both_ways: also in place, where torch offers that as well as not.
        small_calls: calls in a round of up to ``SMALL_BYTES``.
        dtypes: element types; averages are made of floating-point ones only.
        ops: operations of the collectives that reduce.
        roots: of the collectives that have one.
        check: compare results.
        warm_up: calls before the timed ones, as in ``Case``.
    """
    return [
        Case(
            collective=c,
            num_bytes=size,
            repeats=repeats,
            calls=small_calls if size <= SMALL_BYTES else 1,
            in_place=in_place,
            dtype=dtype,
            op=op,
            root=root,
            check=check,
            warm_up=warm_up,
        )
        for c in collectives
        for dtype in dtypes
        for op in (ops if c in REDUCING else ("sum",))
        if op != "avg" or dtype not in WHOLE_NUMBERS
        for root in (roots if c in FROM_OR_TO_ROOT else (0,))
        for size in sizes
        for in_place in ((False, True) if both_ways and c in EITHER_WAY else (False,))
    ]


def bench_cases(
    topology: Topology | int,
    cases: Sequence[Case],
    *,
    backends: Sequence[str] = ("gloo", "mycel"),
    timeout_s: float = 1800.0,
    progress: Callable[[Measurement], None] | None = None,
    schedules: Sequence[str] = (),
) -> list[Measurement]:
    """As ``run_bench``, from explicit cases.

    Args:
        topology: fabric to emulate, or a number of ranks to run on loopback instead.
        cases: what to time, in this order.
        backends: rounds alternate between them; the first is the baseline.
        timeout_s: for the whole run.
        progress: receives each measurement as it arrives.
        schedules: files of schedules, or ``FILE.py:name`` of written ones, that serve mycel's calls.

    Returns:
        Measurements by case and backend, in the order asked for.

    Raises:
        UsageError: nothing to measure, or a backend named twice.
        EmulationError: this machine cannot emulate the cluster.
        CommunicationError: a rank failed.

    Examples:
        The latency of many calls in a row, over loopback::

            bench_cases(2, [Case(collective="all_reduce", num_bytes=4, calls=100)])[1].median_s  # of mycel
    """
    if not cases or not backends:
        raise UsageError("nothing to measure: give at least one collective, one size and one backend")
    if len(set(backends)) != len(backends):
        raise UsageError(f"backends {', '.join(backends)}: one is named twice")
    found: list[Measurement] = []

    def take(rank: int, record: dict[str, Any]) -> None:
        if "times_s" in record:
            measurement = measurement_of(topology, record)
            found.append(measurement)
            if progress is not None:
                progress(measurement)

    command = [sys.executable, "-m", "mycel.bench.worker"]
    command += ["--cases", cases_to_text(cases), "--backends", ",".join(backends)]
    command += ["--timeout", str(max(300.0, timeout_s / 6))]  # of one collective: a longer run has longer ones
    for one in schedules:
        command += ["--schedule", str(Path(one).absolute())]
    run_ranks(topology, command, sink=take, timeout_s=timeout_s, warm=warm_up if "mycel" in backends else None)
    return found


def warm_up() -> None:
    """Compile the engine once, so that the ranks find it in the cache instead of all compiling at once."""
    import mycel.runtime

    mycel.runtime.warm()


def measurement_of(topology: Topology | int, record: dict[str, Any], *, emulated: bool | None = None) -> Measurement:
    """The measurement that a worker's record holds.

    Args:
        topology: the fabric, or a number of ranks on an unknown one.
        record: what ``mycel.bench.worker.run_case`` gave.
        emulated: whether links were shaped; by default where there is a topology.
    """
    case = Case(**record["case"])
    emulated = isinstance(topology, Topology) if emulated is None else emulated
    world_size = topology.num_ranks if isinstance(topology, Topology) else topology
    root = case.root if case.collective in FROM_OR_TO_ROOT else None
    limit, credit_s = limits(topology, case.collective, case.root) if isinstance(topology, Topology) else (None, 0.0)
    return summarize(
        record["times_s"],
        collective=case.collective,
        num_bytes=case.num_elements(world_size) * case.element_bytes,
        backend=record["backend"],
        unit=topology.unit if isinstance(topology, Topology) else LOOPBACK_UNIT,
        bound_algbw=limit,
        credit_s=credit_s if emulated else 0.0,
        correct=record["wrong"] == 0,
        world_size=world_size,
        topology=topology.name if isinstance(topology, Topology) else LOOPBACK_NAME,
        fingerprint=topology.fingerprint if isinstance(topology, Topology) else None,
        emulated=emulated,
        mode=case.mode,
        method=record["method"],
        piece_bytes=record["piece_bytes"],
        in_place=case.is_in_place,
        wrong=record["wrong"] if case.check else None,
        cpu_s=record["cpu_s"],
        dtype=case.dtype,
        op=case.op if case.collective in REDUCING else None,
        root=root,
    )


def bound_algbw(topology: Topology, collective: str) -> Fraction:
    """The best algorithm bandwidth any schedule can reach, in the topology's unit (from or to rank 0)."""
    return limits(topology, collective)[0]


@lru_cache(maxsize=256)
def limits(topology: Topology, collective: str, root: int = 0) -> tuple[Fraction, float]:
    """What a measurement is held against.

    Args:
        topology: the fabric.
        collective: its name.
        root: from or to which it goes, if it does.

    Returns:
        The best algorithm bandwidth any schedule can reach, in the topology's unit; and the seconds that emulated
        links which bind may be ahead of their rate, as a shaper lets some bytes through at once.

    Raises:
        UsageError: the fabric has no such rank.
    """
    from mycel.collectives.bound import bound

    best = bound(topology.without_computing(), _wanted(collective, topology.num_ranks, root))
    slowest = min(topology.capacity[hop] for hop in best.cut or topology.capacity)
    if topology.unit == "link":
        return best.algbw, 0.0
    return best.algbw, CREDIT_BYTES / float(slowest * RATE_UNITS[topology.unit])


def _wanted(collective: str, num_ranks: int, root: int) -> Collective:
    if collective == "sendrecv":  # an all_to_all in which each rank has something for the next one only
        weights = [int(dst == (src + 1) % num_ranks) for src in range(num_ranks) for dst in range(num_ranks)]
        return Collective(name="all_to_all", num_ranks=num_ranks, weights=tuple(weights))
    name = cast(CollectiveName, collective)
    return Collective(name=name, num_ranks=num_ranks, root=root if collective in FROM_OR_TO_ROOT else None)
