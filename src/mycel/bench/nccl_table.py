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

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from statistics import fmean

from mycel.bench.case import DTYPES, IN_BLOCKS
from mycel.bench.measurement import Measurement
from mycel.units import RATE_UNITS, format_size

__all__ = ["NCCL_TYPES", "nccl_csv", "nccl_tables"]

#: What nccl-tests calls element types; others have torch's names there too.
NCCL_TYPES = {"float32": "float", "float64": "double", "float16": "half"}
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
    reference = _reference(rows, baseline)
    for collective, backend, mode in named:
        mine = [m for m in rows if (m.collective, m.backend, m.mode) == (collective, backend, mode)]
        lines += ["#", f"# {collective} over {backend}" + ("" if mode == "blocking" else f" ({mode})")]
        lines += [*_head(baseline), *_body(mine, reference, baseline)]
        wrong = [m for m in mine if not m.correct]
        state = f"{len(wrong)} FAILED" if wrong else "0 OK"
        if mine[0].wrong is None:
            state = "not checked"
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


#: What two measurements have in common that are of the same thing.
_Same = tuple[str, str, str, str | None, int | None, int]


def _same(m: Measurement) -> _Same:
    return m.collective, m.mode, m.dtype, m.op, m.root, m.bytes


def _reference(rows: Sequence[Measurement], baseline: str) -> dict[_Same, float]:
    found: dict[_Same, float] = {}
    for m in rows:
        if m.backend == baseline:
            found[_same(m)] = min(found.get(_same(m), m.median_s), m.median_s)
    return found


def _count(m: Measurement) -> int:
    return m.bytes // DTYPES[m.dtype] // (m.world_size if m.collective in IN_BLOCKS else 1)


def _type(m: Measurement) -> str:
    return NCCL_TYPES.get(m.dtype, m.dtype)


def _body(mine: Sequence[Measurement], reference: dict[_Same, float], baseline: str) -> Iterable[str]:
    for same in dict.fromkeys(map(_same, mine)):
        by_way = {bool(m.in_place): m for m in mine if _same(m) == same}
        best = min(by_way.values(), key=lambda m: m.median_s)
        root = -1 if best.root is None else best.root
        ways = "  ".join(_way(by_way.get(way)) for way in _WAYS)
        base = reference.get(same)
        bound = "" if best.fraction_of_bound is None else f"{best.fraction_of_bound:.2f}"
        cpu = "" if best.cpu_s_per_gb is None else f"{best.cpu_s_per_gb:.3g}"
        ratio = "" if base is None or best.backend == baseline else f"{base / best.median_s:.2f}x"
        plan = "" if best.method is None else f"{best.method}, {format_size(best.piece_bytes or 0)}"
        line = f"{best.bytes:>12}  {_count(best):>12}  {_type(best):>8}  {best.op or 'none':>6}  {root:>6}  {ways}"
        yield f"{line}  {bound:>5}  {cpu:>6}  {ratio:>8}  {plan}".rstrip()


#: Columns of the CSV form. Bandwidths are in GB/s, as in the tables.
_COLUMNS = (
    *("collective", "backend", "mode", "size_bytes", "count", "type", "redop", "root", "in_place", "ranks"),
    *("time_us", "time_p10_us", "time_p90_us", "algbw_gbps", "busbw_gbps", "wrong", "of_bound", "cpu_s_per_gb"),
    *("vs_baseline", "method", "piece_bytes", "topology", "emulated"),
)


def nccl_csv(rows: Sequence[Measurement], *, baseline: str) -> str:
    """A line a measurement, under a line of names; what is not known or does not apply is empty.

    Args:
        rows: in this order.
        baseline: backend whose time (of the better of both ways) is divided by this one's.
    """
    reference = _reference(rows, baseline)
    text = StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for m in rows:
        base = None if m.backend == baseline else reference.get(_same(m))
        table.writerow(
            [
                *(m.collective, m.backend, m.mode, m.bytes, _count(m), _type(m), m.op or "none"),
                *(-1 if m.root is None else m.root, int(bool(m.in_place)), m.world_size),
                *(f"{1e6 * seconds:.6g}" for seconds in (m.median_s, m.p10_s, m.p90_s)),
                *(f"{_gb_per_s(m, value):.6g}" for value in (m.algbw, m.busbw)),
                m.wrong,
                None if m.fraction_of_bound is None else f"{m.fraction_of_bound:.4f}",
                None if m.cpu_s_per_gb is None else f"{m.cpu_s_per_gb:.4g}",
                None if base is None else f"{base / m.median_s:.4g}",
                *(m.method, m.piece_bytes, m.topology, int(m.emulated)),
            ]
        )
    return text.getvalue()


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
