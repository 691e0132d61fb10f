"""Measurement: what a collective took, beside the bound, with everything needed to compare it later.

Conventions are those of nccl-tests: the size is that of the whole array (all_gather: the output, reduce_scatter:
the input; all_to_all: what one rank gives), ``algbw`` is size over time, ``busbw`` is ``algbw`` times a factor of the
collective. Bandwidths are in the topology's own unit, which every row names, so that they stand beside link
capacities without conversion.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.units import RATE_UNITS, bus_bandwidth_factor

__all__ = ["Measurement", "describe_hardware", "describe_versions", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Timings of one collective of one size over one backend.

    Attributes:
        collective: canonical name, for example ``all_reduce``.
        bytes: size of the whole array.
        backend: ``torch.distributed`` backend.
        median_s, p10_s, p90_s: of the repeats; each repeat counts the slowest rank.
        algbw, busbw: in ``unit``, from the median.
        unit: a key of ``mycel.units.RATE_UNITS``.
        fraction_of_bound: ``algbw`` over the best any schedule can reach, without the credit of shaped links;
            ``None`` where the fabric is unknown.
        correct: whether every element on every rank was exactly right in every repeat; true where nobody looked,
            and then ``wrong`` is ``None``.
        repeats: timings behind the quantiles.
        mode: how it was called, one of ``mycel.bench.case.MODES``.
        world_size: number of ranks.
        topology: name of the fabric.
        fingerprint: of the topology; ``None`` on loopback.
        emulated: whether links were shaped; if not, the figures are of this machine's loopback.
        hardware: processor and cores.
        versions: of mycel, torch, python and the kernel.
        method, piece_bytes: the schedule that mycel chose and the longest message it was cut into; ``None`` for
            other backends.
        in_place: whether output and input shared memory.
        wrong: elements that were not exactly right, of all ranks, in the worst repeat; ``None``: not checked.
        cpu_s_per_gb: seconds of processor time of all ranks together, median, over ``bytes`` in 10^9.
        dtype: of the elements, as torch calls it.
        op: the reduction; ``None`` where nothing is reduced.
        root: the rank from or to which it went; ``None`` where there is none.

    Examples:
        From a run over loopback::

            for m in run_bench(2, ["all_reduce"], [1 << 20]):
                print(f"{m.backend}: {1e3 * m.median_s:.2f} ms, busbw {m.busbw:.2f} {m.unit}, right: {m.correct}")
    """

    collective: str
    bytes: int
    backend: str
    median_s: float
    p10_s: float
    p90_s: float
    algbw: float
    busbw: float
    unit: str
    fraction_of_bound: float | None
    correct: bool
    repeats: int
    mode: str
    world_size: int
    topology: str
    fingerprint: str | None
    emulated: bool
    hardware: str
    versions: Mapping[str, str]
    method: str | None = None
    piece_bytes: int | None = None
    in_place: bool | None = None
    wrong: int | None = None
    cpu_s_per_gb: float | None = None
    dtype: str = "float32"
    op: str | None = None
    root: int | None = None

    __repr__ = brief

    def to_json(self) -> dict[str, Any]:
        """A flat JSON object; ``from_json`` reads it back to an equal measurement."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """The measurement that ``to_json`` wrote.

        Raises:
            UsageError: a key is missing (one with a default may be) or unknown.
        """
        known = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        missing, unknown = sorted(needed - set(data)), sorted(set(data) - known)
        if missing or unknown:
            raise UsageError(f"not a measurement: missing keys {missing}, unknown keys {unknown}")
        return cls(**data)


def summarize(
    times_s: Sequence[float],
    *,
    collective: str,
    num_bytes: int,
    backend: str,
    unit: str,
    bound_algbw: Fraction | None,
    credit_s: float = 0.0,
    correct: bool,
    world_size: int,
    topology: str,
    fingerprint: str | None,
    emulated: bool,
    mode: str = "blocking",
    method: str | None = None,
    piece_bytes: int | None = None,
    in_place: bool | None = None,
    wrong: int | None = None,
    cpu_s: Sequence[float] = (),
    dtype: str = "float32",
    op: str | None = None,
    root: int | None = None,
) -> Measurement:
    """A measurement from the times of its repeats.

    Args:
        times_s: seconds of each repeat on its slowest rank; at least one.
        bound_algbw: in ``unit``, or ``None``.
        credit_s: seconds that shaped links were ahead of their rate when the array began to move, which are no
            merit of a schedule: added to the time that is compared with the bound, and to no other.
        cpu_s: seconds of processor time of all ranks in each repeat; none: not measured.

    Raises:
        UsageError: no times, or a unit that is no rate.

    Examples:
        >>> m = summarize([0.5, 1.0, 1.5], collective="all_reduce", num_bytes=10**6, backend="gloo", unit="MB/s",
        ...     bound_algbw=Fraction(2), correct=True, world_size=4, topology="star", fingerprint=None, emulated=True)
        >>> m.median_s, m.algbw, m.busbw, m.fraction_of_bound
        (1.0, 1.0, 1.5, 0.5)
    """
    if not times_s:
        raise UsageError(f"{collective}, {num_bytes} bytes: no repeats were timed")
    if unit not in RATE_UNITS:
        raise UsageError(f"{unit!r} is not a rate; known: {', '.join(RATE_UNITS)}")
    p10, median, p90 = (float(q) for q in np.quantile(np.asarray(times_s, dtype=np.float64), [0.1, 0.5, 0.9]))
    algbw = num_bytes / median / float(RATE_UNITS[unit])
    return Measurement(
        collective=collective,
        bytes=num_bytes,
        backend=backend,
        median_s=median,
        p10_s=p10,
        p90_s=p90,
        algbw=algbw,
        busbw=algbw * float(bus_bandwidth_factor(collective, world_size)),
        unit=unit,
        fraction_of_bound=None if bound_algbw is None else algbw / float(bound_algbw) * median / (median + credit_s),
        correct=correct,
        repeats=len(times_s),
        mode=mode,
        world_size=world_size,
        topology=topology,
        fingerprint=fingerprint,
        emulated=emulated,
        hardware=describe_hardware(),
        versions=describe_versions(),
        method=method,
        piece_bytes=piece_bytes,
        in_place=in_place,
        wrong=wrong,
        cpu_s_per_gb=float(np.median(cpu_s)) / (num_bytes / 1e9) if len(cpu_s) else None,
        dtype=dtype,
        op=op,
        root=root,
    )


def describe_hardware() -> str:
    """Processor and usable cores, for example ``Xeon Platinum 8375C, 2 cores``."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


def describe_versions() -> dict[str, str]:
    """Versions of what the figures depend on; a package that is not installed is left out."""
    found = {}
    for package in ("mycel", "torch", "numba", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version(), "kernel": platform.release()}
