"""Nothing above the bound: every fabric of ``fabrics.py``, every collective, 64 KB to 64 MB.

    python benchmarks/above_the_bound.py                              # all, about 40 minutes on two quiet cores
    python benchmarks/above_the_bound.py --only star4 --sizes 64KB    # some

A fraction above 1 says that the measurement is wrong, not that the schedule is good: links that were ahead of their
rate when the clock began, or a bound that is none. The table has the greatest fraction of each fabric and size; the
exit code is 1 where one is above 1. On a busy machine fractions are lower
than on a quiet one, so that a pass there says less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.table import Table

from fabrics import FABRICS
from mycel.bench import BENCH_COLLECTIVES, bench_cases
from mycel.bench.run import make_cases
from mycel.cli.consoles import output
from mycel.emulate import acquire_privileges
from mycel.errors import MycelError
from mycel.topology import load_topology
from mycel.units import format_size, parse_size
from record import cluster_file

SIZES = "64KB,256KB,1MB,4MB,16MB,64MB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures; exit code 1 where a fraction is above 1 or a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FABRICS), help="names of fabrics")
    parser.add_argument("--collectives", default=",".join(BENCH_COLLECTIVES))
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    cases = make_cases(options.collectives.split(","), sizes, repeats=options.repeats)
    acquire_privileges()
    table = Table("fabric", *map(format_size, sizes), "greatest of", header_style="bold")
    above, right = 0, True
    for name in options.only.split(","):
        rows = bench_cases(load_topology(cluster_file(name)), cases, backends=["mycel"], timeout_s=7200)
        right = right and all(m.correct for m in rows)
        cells = []
        for size in sizes:
            found = [m.fraction_of_bound or 0.0 for m in rows if abs(m.bytes - size) <= 64]
            cells.append(f"{max(found):.3f}")
        worst = max(rows, key=lambda m: m.fraction_of_bound or 0.0)
        table.add_row(name, *cells, f"{worst.collective} of {format_size(worst.bytes)}")
        for m in rows:
            if (m.fraction_of_bound or 0.0) > 1:
                above += 1
                print(
                    f"{name}: {m.collective} of {m.bytes} bytes: {m.fraction_of_bound:.4f} in the median", flush=True
                )
        print(f"{name}: {len(rows)} rows, at most {worst.fraction_of_bound:.4f}", flush=True)
    output(wide=True).print(table)
    print(f"{above} of {len(cases) * len(options.only.split(','))} medians are above 1; links shaped, measured")
    return 1 if above or not right else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MycelError as error:
        sys.exit(f"above_the_bound: {error}")
