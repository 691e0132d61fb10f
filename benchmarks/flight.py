"""What the flight recorder costs: a record, and a dump.

python benchmarks/flight.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from mycel.bench.measurement import describe_hardware
from mycel.collectives.program import Channel
from mycel.runtime import job_fields as j
from mycel.runtime.flight import FlightLog, FlightRecorder
from mycel.runtime.prepared import Origin, Traffic
from mycel.settings import FLIGHT_RECORDS
from mycel.topology.builders import star


def main() -> None:
    """Prints microseconds a record, and milliseconds and bytes of a dump."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50_000)
    calls = parser.parse_args().calls
    recorder = FlightRecorder(FLIGHT_RECORDS, rank=0, world_size=8)
    log = FlightLog(
        recorder,
        identity="f00",
        name="0",
        ranks=tuple(range(8)),
        topology=star(num_ranks=8),
        described=True,
        dtype_name=str,
        folder=None,
    )
    channel = Channel(src=0, dst=1, path=(0, 8, 1))
    origin = Origin(collective="all_reduce", root=None, method="forest", piece_bytes=1 << 14, even=True)
    traffic = Traffic(origin=origin, channels=(channel,), moved=(64, 1))

    def loop(*, noting: bool) -> float:
        """Seconds of calls that each make a job, as a communicator does; the job before it is let go, or kept."""
        begin = time.perf_counter()
        for _ in range(calls):
            fields = np.zeros(j.JOB_FIELDS, dtype=np.int64)
            if noting:
                log.note(traffic, time.monotonic_ns(), fields)
        return time.perf_counter() - begin

    costs = sorted((loop(noting=True) - loop(noting=False)) / calls * 1e6 for _ in range(9))
    print(f"{describe_hardware()}: {costs[4]:.2f} us a record, median of 9 ({costs[0]:.2f} to {costs[-1]:.2f})")
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        file = recorder.dump(Path(folder), "benchmark")
        took = time.perf_counter() - begin
        print(f"{took * 1e3:.0f} ms and {file.stat().st_size / 1e6:.2f} MB for a dump of {FLIGHT_RECORDS} records")


if __name__ == "__main__":
    main()
