"""Whether products by tables take less time, as they take fewer operations.

    python benchmarks/claims/msgemm.py           # three shapes of experts, one vector and more; about two minutes
    python benchmarks/claims/msgemm.py --quick

All ways run in turns, one thread, medians; beside them torch with the same matrix in float32, which needs eight times
the memory. Rows replace those of the last run in ``benchmarks/recorded/claims/msgemm.jsonl``, and the table in
docs/guides/elastic_experts.md.

References:
    S. Maleki, "msGeMM: Look-Up-Table GeMM", 2023, arXiv 2310.06178.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from mycel.moe.memory import CodedProducts, code_matrix, table_operations
from mycel.moe.memory.lookup import METHODS
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "msgemm.jsonl"
PAGE = ROOT / "docs" / "guides" / "elastic_experts.md"
SHAPES = ((2048, 1024), (4096, 4096), (14_336, 4096))


def measure(shape: tuple[int, int], rows: int, repeats: int) -> dict[str, Any]:
    """Median seconds of every way, in turns."""
    made = torch.Generator().manual_seed(0)
    coded = code_matrix(torch.randn(shape, generator=made))
    plain, x = coded.dequantised(), torch.randn(rows, shape[1], generator=made)
    exact = x.double() @ plain.double().T
    ways: dict[str, Any] = {way: lambda way=way: coded.product(x, way) for way in METHODS}
    ways["torch"] = lambda: torch.nn.functional.linear(x, plain)
    times: dict[str, list[float]] = {way: [] for way in ways}
    away: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for way, product in ways.items():
            begin = time.perf_counter()
            found = product()
            taken = time.perf_counter() - begin
            if repeat:
                times[way].append(taken)
            away[way] = float((found - exact).abs().max() / exact.abs().max())
    by_tables, operations = table_operations(*shape)
    seconds = {way: statistics.median(some) for way, some in times.items()}
    own = {way: seconds[way] for way in METHODS}
    chosen = CodedProducts(seconds={shape: {rows: own}}).choose(shape, rows)
    return {
        "shape": shape,
        "rows": rows,
        "fewer_operations": operations / by_tables,
        "seconds": seconds,
        "away": away,
        "chosen": chosen,
        "bytes": coded.num_bytes,
        "plain_bytes": plain.nbytes,
    }


def table(lines: list[dict[str, Any]]) -> str:
    """A row a shape and number of vectors."""
    heads = ("matrix", "vectors", "operations", "tables", "dequantise", "expand", "torch, float32", "taken")
    rows = []
    for line in lines:
        times = [f"{1e3 * line['seconds'][way]:.2f} ms" for way in (*METHODS, "torch")]
        shape = " x ".join(map(str, line["shape"]))
        rows.append((shape, line["rows"], f"{line['fewer_operations']:.2f} times fewer", *times, line["chosen"]))
    return markdown(heads, rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small shape; records nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes, repeats = (((512, 256),), 3) if options.quick else (SHAPES, 9)
    lines = []
    for shape in shapes:
        for rows in (1, 4, 32):
            lines.append(measure(shape, rows, repeats))
            print(table(lines[-1:]).splitlines()[-1], flush=True)
    if not options.quick:
        conclude(OUTPUT, PAGE, "msgemm", lines, table)


if __name__ == "__main__":
    main()
