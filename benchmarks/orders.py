"""Search for pipeline orders: how long it takes, what it finds, and how far that is from the bounds.

    python benchmarks/orders.py [--limit 12] [--only M4_cap6,X4_cap4]     # nine minutes

For each of the 18 placements the least period with one micro-batch a repetend, the best with up to three, and the
makespans of 8 and 32 micro-batches, beside the bounds and beside what the repetend alone gives when it is unrolled.
Nothing runs: all times are units of the placements, and what is measured is the search.

The baseline is Tessel's enumeration as it was published: for ever more micro-batches in flight, every way to give
each block one of them is listed, and for each that keeps the caps a solver orders the blocks of one repetend, which
may not reach into the next. The published code asks Z3; here CP-SAT answers, in the same run.

References:
    Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search", HPCA 2024,
    algorithm 1 and section IV.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from mycel.bench.measurement import describe_hardware
from mycel.collectives.cp_sat import cp_sat
from mycel.pipeline.bounds import makespan_bound, period_bound
from mycel.pipeline.check import check
from mycel.pipeline.placement import Placement
from mycel.pipeline.search import find_batch, find_steady
from mycel.pipeline.search.modulo import find_repetend
from mycel.pipeline.search.solving import Clock
from mycel.pipeline.stages import order_of
from mycel.pipeline.timed import earliest
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "orders.jsonl"
PAGE = ROOT / "docs" / "concepts" / "order_search.md"
PLACEMENTS = ROOT / "tests" / "data" / "pipeline" / "placements.json"
COUNTS = (8, 32)


def enumerated(placement: Placement, most_flight: int, limit_s: float) -> dict[str, Any]:
    """Tessel's enumeration: the best period, and what it took."""
    began, until = time.process_time(), time.monotonic() + limit_s
    least = max(placement.work)
    best: int | None = None
    asked, is_complete = 0, True
    for flight in range(1, most_flight + 1):
        for lags in lags_of(placement, flight):
            if time.monotonic() > until:
                is_complete = False
                break
            asked += 1
            period = repetend_of(placement, lags, best)
            if period is not None:
                best = period
                if best <= least:
                    break
        if not is_complete or (best is not None and best <= least):
            break
    return {
        "enumerated": best,
        "enumerated_s": round(time.process_time() - began, 3),
        "asked": asked,
        "is_complete": is_complete,
    }


def lags_of(placement: Placement, flight: int) -> Iterator[tuple[int, ...]]:
    """For each block how many micro-batches it is behind the first; none before what it waits for, one at the end."""
    count = len(placement.blocks)
    chosen = [0] * count
    sequence = placement.sequence

    def fill(at: int) -> Iterator[tuple[int, ...]]:
        if at == count:
            if max(chosen) == flight - 1 and fits(placement, chosen):
                yield tuple(chosen)
            return
        block = sequence[at]
        least = max((chosen[before] for before, _ in placement.waits[block]), default=0)
        for lag in range(least, flight):
            chosen[block] = lag
            yield from fill(at + 1)

    yield from fill(0)


def fits(placement: Placement, lags: Sequence[int]) -> bool:
    """Whether what is in flight between two repetends is under the caps."""
    for device, cap in enumerate(placement.cap):
        held = sum(-lags[i] * placement.blocks[i].memory_on(device) for i in placement.on[device])
        if cap is not None and held > cap:
            return False
    return True


def repetend_of(placement: Placement, lags: Sequence[int], best: int | None) -> int | None:
    """The least period with these lags, if it is below the best so far."""
    model = cp_sat("the baseline").CpModel()
    blocks = placement.blocks
    horizon = sum(block.time for block in blocks) + sum(d.delay for d in placement.dependencies)
    most = horizon if best is None else best - 1
    if most < max(placement.work):
        return None
    period = model.new_int_var(max(placement.work), most, "")
    starts = [model.new_int_var(0, horizon, "") for _ in blocks]
    for d in placement.dependencies:
        turns = lags[d.after] - lags[d.before]
        model.add(starts[d.after] + turns * period >= starts[d.before] + blocks[d.before].time + d.delay)
    for device, mine in enumerate(placement.on):
        model.add_no_overlap(model.new_fixed_size_interval_var(starts[i], blocks[i].time, "") for i in mine)
        for i in mine:
            for j in mine:
                model.add(starts[i] + blocks[i].time - starts[j] <= period)
        cap = placement.cap[device]
        sizes = {i: blocks[i].memory_on(device) for i in mine if blocks[i].memory_on(device)}
        if cap is not None and sizes:
            held = sum(-lags[i] * size for i, size in sizes.items())
            events = [(starts[i], size) for i, size in sizes.items()] + [(model.new_constant(-1), held)]
            model.add_reservoir_constraint([at for at, _ in events], [size for _, size in events], 0, cap)
    model.minimize(period)
    answer, solver = Clock(60).solve(model)
    return solver.value(period) if answer == "optimal" else None


def point(shape: dict[str, Any], limit_s: float, enumerate_s: float | None) -> dict[str, Any]:
    """All figures of a placement."""
    placement = Placement.from_json(shape)
    line: dict[str, Any] = {"placement": placement.name, "bound": str(period_bound(placement).value)}
    began = time.process_time()
    alone = find_steady(placement, most_micro_batches=1)
    line |= {"alone": str(alone.repetend.period), "alone_s": round(time.process_time() - began, 3)}
    began = time.process_time()
    best = find_steady(placement, time_limit_s=limit_s)
    line |= {
        "period": str(best.repetend.period),
        "proof": best.proof,
        "together": best.repetend.num_micro_batches,
        "best_s": round(time.process_time() - began, 3),
        "known": shape["best_known_period"],
    }
    for count in COUNTS:
        began = time.process_time()
        found = find_batch(placement, count, time_limit_s=limit_s)
        check(order_of(found.timed))
        line[f"makespan_{count}"] = found.timed.makespan
        line[f"bound_{count}"] = found.bound
        line[f"seconds_{count}"] = round(time.process_time() - began, 3)
        tight = find_repetend(placement, 1, alone.repetend.time, clock=Clock(10), tighten_s=0.5)
        if not isinstance(tight, str):
            line[f"unrolled_{count}"] = earliest(placement, tight.rows(count)).makespan
        line[f"least_{count}"] = str(makespan_bound(placement, count).value)
    if enumerate_s is not None:
        most = max((cap for cap in placement.cap if cap is not None), default=placement.num_devices)
        line |= enumerated(replace(placement), most, enumerate_s)
    return line


def table(lines: list[dict[str, Any]]) -> str:
    heads = [
        "placement", "period, bound", "alone", "processor time", "several", "what is proved",
        *(f"M = {count}: found, unrolled, bound" for count in COUNTS), "enumerated", "processor time",
    ]  # fmt: skip
    rows = []
    for line in lines:
        row = [
            f"`{line['placement']}`", line["bound"], line["alone"], f"{line['alone_s']:.2f} s", line["period"],
            line["proof"],
            *(
                f"{line[f'makespan_{count}']}, {line.get(f'unrolled_{count}', '-')}, {line[f'bound_{count}']}"
                for count in COUNTS
            ),
        ]  # fmt: skip
        if "enumerated" in line:
            times = line["enumerated_s"] / max(line["alone_s"], 1e-3)
            row.append(f"{line['enumerated']}" if line["is_complete"] else f"{line['enumerated']}, not finished")
            row.append(f"{line['enumerated_s']:.1f} s, {line['asked']} asked, {times:.0f} times")
        else:
            row += ["", ""]
        rows.append(row)
    return markdown(heads, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=12, help="seconds a search")
    parser.add_argument("--enumerate", default="V4_cap4,M4_cap6,X4_cap4", help="placements of the baseline")
    parser.add_argument("--enumerate-limit", type=float, default=60, help="seconds of the baseline, each")
    parser.add_argument("--only", help="placements; lines of others stay as they are")
    options = parser.parse_args(arguments)
    cp_sat("the search for orders")  # importing is no part of a search
    shapes = json.loads(Path(PLACEMENTS).read_text(encoding="utf-8"))["shapes"]
    baseline = options.enumerate.split(",")
    lines = []
    for shape in shapes:
        name = shape["name"]
        if options.only and name not in options.only.split(","):
            continue
        lines.append(point(shape, options.limit, options.enumerate_limit if name in baseline else None))
        if Fraction(lines[-1]["period"]) > Fraction(shape["best_known_period"]):
            print(f"{name}: {lines[-1]['period']} is above the best known", file=sys.stderr)
    measured = {line["placement"] for line in lines}
    shared = {"hardware": describe_hardware(), **stamp()}
    kept = [line for line in read(OUTPUT) if line["placement"] not in measured]
    order = [shape["name"] for shape in shapes]
    every = sorted([*kept, *({**line, **shared} for line in lines)], key=lambda line: order.index(line["placement"]))
    OUTPUT.unlink(missing_ok=True)
    append(OUTPUT, every)
    print(table(every))
    write_section(PAGE, "orders", table(every))


if __name__ == "__main__":
    main()
