"""Measurements as nccl-tests prints them, so that eyes and scripts used to it can read them.

The columns are those of nccl-tests, in its places and units: bandwidths are in GB/s (10^9 bytes), times in
microseconds, ``count`` is what one rank gives or gets where the array is one block a rank. Four more stand behind
them: the fraction of the bound (of the better of both ways), processor time of all ranks per GB, the time of the
baseline over this one (the better of both ways each), and the schedule. What torch does not offer (an all_reduce that
is not in place) is ``N/A``.

References:
    NVIDIA, nccl-tests (src/common.cu, doc/PERFORMANCE.md), for columns and definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from mycel.bench.case import ELEMENT_BYTES, FROM_OR_TO_ROOT, IN_BLOCKS
from mycel.bench.measurement import Measurement
from mycel.units import RATE_UNITS, format_size

__all__ = ["nccl_tables"]

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_WAYS = (False, True)
_NONE = ("N/A", "N/A", "N/A", "N/A")


def nccl_tables(rows: Sequence[Measurement], *, baseline: str) -> str:
    """A table for each collective and backend, in the order in which they were measured.

    Args:
        rows: at least one.
        baseline: backend that ratios are against.
    """
    first = rows[0]
    where = "emulated" if first.emulated else "not emulated"
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    lines = [f"# {first.topology}, {first.world_size} ranks ({where}); {first.hardware}", f"# {versions}"]
    named = dict.fromkeys((m.collective, m.backend, m.mode) for m in rows)
    reference: dict[tuple[str, int, str], float] = {}
    for m in rows:
        if m.backend == baseline:
            key = (m.collective, m.bytes, m.mode)
            reference[key] = min(reference.get(key, m.median_s), m.median_s)
    for collective, backend, mode in named:
        mine = [m for m in rows if (m.collective, m.backend, m.mode) == (collective, backend, mode)]
        lines += ["#", f"# {collective} over {backend}" + ("" if mode == "blocking" else f" ({mode})")]
        lines += [*_head(baseline), *_body(mine, reference, baseline)]
        wrong = [m for m in mine if not m.correct]
        state = f"{len(wrong)} FAILED" if wrong else "0 OK"
        lines.append(f"# Out of bounds values : {state}")
        lines.append(f"# Avg bus bandwidth    : {fmean(_gb_per_s(m, m.busbw) for m in mine):.6g}")
    return "\n".join(lines) + "\n"


def _head(baseline: str) -> list[str]:
    way = f"{'time':>7}  {'algbw':>6}  {'busbw':>6} {'#wrong':>6}"
    units = f"{'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6} {'':>6}"
    ratio = f"vs {baseline}"
    return [
        "#" + f"{'out-of-place':>74}{'in-place':>31}          ",
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}  {way}  {way}"
        f"  {'bound':>5}  {'cpu/GB':>6}  {ratio:>8}  schedule",
        f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}  {units}  {units}  {'':>5}  {'(s)':>6}",
    ]


def _body(mine: Sequence[Measurement], reference: dict[tuple[str, int, str], float], baseline: str) -> Iterable[str]:
    for size in dict.fromkeys(m.bytes for m in mine):
        by_way = {bool(m.in_place): m for m in mine if m.bytes == size}
        best = min(by_way.values(), key=lambda m: m.median_s)
        count = size // ELEMENT_BYTES // (best.world_size if best.collective in IN_BLOCKS else 1)
        redop = "sum" if best.collective in _REDUCING else "none"
        root = 0 if best.collective in FROM_OR_TO_ROOT else -1
        ways = "  ".join(_way(by_way.get(way)) for way in _WAYS)
        base = reference.get((best.collective, size, best.mode))
        bound = "" if best.fraction_of_bound is None else f"{best.fraction_of_bound:.2f}"
        cpu = "" if best.cpu_s_per_gb is None else f"{best.cpu_s_per_gb:.3g}"
        ratio = "" if base is None or best.backend == baseline else f"{base / best.median_s:.2f}x"
        plan = "" if best.method is None else f"{best.method}, {format_size(best.piece_bytes or 0)}"
        line = f"{size:>12}  {count:>12}  {'float':>8}  {redop:>6}  {root:>6}  {ways}"
        yield f"{line}  {bound:>5}  {cpu:>6}  {ratio:>8}  {plan}".rstrip()


def _way(m: Measurement | None) -> str:
    time, algbw, busbw, wrong = _NONE
    if m is not None:
        micro = m.median_s * 1e6
        time = f"{micro:.0f}" if micro >= 10_000 else f"{micro:.1f}" if micro >= 100 else f"{micro:.2f}"
        algbw, busbw = (_bandwidth(_gb_per_s(m, value)) for value in (m.algbw, m.busbw))
        wrong = "N/A" if m.wrong is None else str(m.wrong)
    return f"{time:>7}  {algbw:>6}  {busbw:>6}  {wrong:>5}"


def _gb_per_s(m: Measurement, value: float) -> float:
    return value * float(RATE_UNITS[m.unit] / RATE_UNITS["GB/s"])


def _bandwidth(value: float) -> str:
    """Two digits behind the point, as nccl-tests has them, or four below 1, where links are slow."""
    return f"{value:.2f}" if value >= 1 or value == 0 else f"{value:.4f}"
