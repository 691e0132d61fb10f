"""Measures collectives, beside the bound and a baseline of the same run."""

from __future__ import annotations

from mycel.bench.case import BENCH_COLLECTIVES, Case
from mycel.bench.measurement import Measurement
from mycel.bench.run import bench_cases, run_bench

__all__ = ["BENCH_COLLECTIVES", "Case", "Measurement", "bench_cases", "run_bench"]
