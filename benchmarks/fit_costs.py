"""Coefficients of steps' times, fitted to published runs, with the errors about rows that were left out.

    python benchmarks/fit_costs.py            # tables; about a minute of one core
    python benchmarks/fit_costs.py --write    # ... and the machines' files and the page's tables

Four sets, each of one way of running models. A handful of numbers is fitted to each, within what physics allows
(``mycel.planning.step.coefficients``); all others are counted from what kernels read and write, or assumed and named
so. The loss is the logarithm of predicted over measured, robust (soft L1), with a weak pull (0.02 of a coefficient's
range) to where it begins, so that what rows do not decide stays put.

Beside ours: what Calculon (Isaev et al., SC 2023) reaches on the same rows with its authors' coefficients.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

import published
from mycel.planning.machines.machine import Fit, Machine, to_json
from mycel.planning.step.coefficients import Coefficients, limits
from mycel.planning.step.times import step_times
from published import Rows
from record import ROOT, markdown, write_section

PAGE = ROOT / "docs" / "concepts" / "step_costs.md"
MACHINES = ROOT / "src" / "mycel" / "planning" / "machines"
#: Pull towards where a coefficient begins, and the relative error from which on the loss grows linearly.
PULL, ROBUST = 0.02, 0.05
#: Rounds of one search, and over which part of a coefficient slopes are taken in each.
ROUNDS = 10
STEPS = (0.03, 0.01, 1e-3)
Errors = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is fitted to what.

    Attributes:
        name: of the way of running models.
        blocks: rows, of one machine each.
        start: where coefficients begin and stay unless they are fitted.
        own: fitted for each family of machines.
        shared: fitted once.
        robust: see ``ROBUST``.
    """

    name: str
    blocks: tuple[Rows, ...]
    start: Coefficients
    own: tuple[str, ...]
    shared: tuple[str, ...] = ()
    robust: float = ROBUST

    @property
    def measured(self) -> Errors:
        return np.concatenate([block.seconds for block in self.blocks])

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(block.family for block in self.blocks))


def fit(task: Task, rows: NDArray[np.int_]) -> dict[str, Coefficients]:
    """Coefficients by family, fitted to some rows of a task."""
    names = [(name, family) for name in task.own for family in task.families] + [(name, "*") for name in task.shared]
    allowed = limits()
    low = np.array([allowed[name].low for name, _ in names])
    high = np.array([allowed[name].high for name, _ in names])
    span = high - low
    begin = (np.array([getattr(task.start, name) for name, _ in names]) - low) / span
    parts = _parts(task, rows)

    def build(at: Errors) -> dict[str, Coefficients]:
        values = np.clip(low + at * span, low, high)
        return {
            family: replace(
                task.start,
                **{name: float(v) for (name, of), v in zip(names, values, strict=True) if of in ("*", family)},
            )
            for family in task.families
        }

    def residuals(at: Errors) -> Errors:
        built = build(at)
        errors = [
            np.log(step_times(points, block.device, block.rates, built[block.family]).total / seconds)
            for block, points, seconds in parts
        ]
        return np.concatenate([*errors, PULL * (at - begin)])

    # Terms that are the longer of two make kinks, at which a search stops: it goes on from there with slopes over
    # wider and narrower steps, as long as that gains anything.
    best, cost = np.clip(begin, 1e-6, 1 - 1e-6), np.inf
    for _ in range(ROUNDS):
        before = cost
        for step in STEPS:
            found = least_squares(residuals, best, bounds=(0, 1), loss="soft_l1", f_scale=task.robust, diff_step=step)
            if found.cost < cost:
                best, cost = np.clip(found.x, 1e-6, 1 - 1e-6), found.cost
        if cost > before * (1 - 1e-4):
            break
    return build(best)


def predict(task: Task, fitted: dict[str, Coefficients]) -> Errors:
    """Seconds of all rows of a task."""
    return np.concatenate([step_times(b.points, b.device, b.rates, fitted[b.family]).total for b in task.blocks])


def left_out(task: Task, folds: NDArray[np.int_]) -> Errors:
    """Seconds of all rows, each predicted by a fit to the other folds."""
    predicted = np.zeros(len(folds))
    for fold in np.unique(folds):
        fitted = fit(task, np.flatnonzero(folds != fold))
        here = folds == fold
        predicted[here] = predict(task, fitted)[here]
    return predicted


def thirds(count: int, *, seed: int, units: Sequence[NDArray[np.int_]] | None = None) -> NDArray[np.int_]:
    """Rows, or whole groups of them, shuffled into three folds."""
    units = units if units is not None else [np.array([i]) for i in range(count)]
    order = np.random.default_rng(seed).permutation(len(units)) % 3
    folds = np.zeros(count, dtype=int)
    for unit, fold in zip(units, order, strict=True):
        folds[unit] = fold
    return folds


def _parts(task: Task, rows: NDArray[np.int_]) -> list[tuple[Rows, published.Points, Errors]]:
    parts, first = [], 0
    for block in task.blocks:
        own = rows[(rows >= first) & (rows < first + len(block.seconds))] - first
        if len(own):
            parts.append((block, block.points.take(own), block.seconds[own]))
        first += len(block.seconds)
    return parts


# -- tasks ------------------------------------------------------------------------------------------------------


def megatron() -> Task:
    """Megatron-LM on Selene: four coefficients for twelve rows."""
    start = Coefficients(
        matmul_efficiency=0.75,
        memory_efficiency=0.8,
        optimizer_bytes=70,  # unscale, check, norm, clip, Adam and copies, each a pass of its own in 2021
        link_efficiency=0.75,
        boundary_efficiency=0.3,
        gradient_efficiency=0.7,
        replica_wait=0.02,
    )
    own = ("matmul_efficiency", "link_efficiency", "boundary_efficiency", "replica_wait")
    return Task(name="megatron", blocks=(published.selene(),), start=start, own=own)


def one_node() -> Task:
    """Megatron-DeepSpeed in one box, small models: most of it is the host's time."""
    start = Coefficients(
        matmul_efficiency=0.89,
        matmul_rows=600,
        memory_efficiency=0.8,
        launch_s=1e-3,
        backward_launch=0.7,
        unfused_launch=0.45,
        link_efficiency=0.82,
        exchange_s=9e-5,
        optimizer_bytes=20,
        unsplit_head=1.7,
        step_s=4e-3,
        network_efficiency=0.95,
        boundary_efficiency=0.95,
    )
    own = (
        "matmul_efficiency",
        "matmul_rows",
        "memory_efficiency",
        "launch_s",
        "backward_launch",
        "unfused_launch",
        "link_efficiency",
        "exchange_s",
        "optimizer_bytes",
        "unsplit_head",
        "step_s",
    )
    return Task(
        name="megatron_deepspeed_node",
        blocks=(published.vtrain("vtrain_single_a100"),),
        start=start,
        own=own,
        robust=0.2,
    )


def many_nodes(node: Coefficients) -> Task:
    """The same over many boxes: what one box decided stays."""
    own = ("matmul_efficiency", "matmul_rows", "memory_efficiency", "layer_elements", "gradient_efficiency")
    return Task(
        name="megatron_deepspeed",
        blocks=(published.vtrain("vtrain_multi_a100"),),
        start=replace(node, gradient_efficiency=0.3),
        own=own,
    )


def fsdp() -> Task:
    """llm-foundry's FSDP on A100 and H100."""
    start = Coefficients(
        matmul_efficiency=0.75,
        attention_efficiency=0.25,
        layer_elements=40,
        optimizer_bytes=28,  # fp32 parameter, gradient and two moments read, three written
        exchange_s=2e-5,
        step_s=4e-3,
        unhidden=1.0,
        link_efficiency=0.8,
        network_efficiency=0.85,
        gradient_efficiency=0.85,
    )
    own, shared = ("matmul_efficiency", "attention_efficiency"), ("layer_elements", "gradient_efficiency")
    return Task(name="fsdp", blocks=tuple(published.mosaic()), start=start, own=own, shared=shared)


def titan() -> Task:
    """torchtitan on H100 of 500 W."""
    start = Coefficients(
        matmul_efficiency=0.69,
        attention_efficiency=0.4,
        layer_elements=43,
        optimizer_bytes=28,
        exchange_s=2e-5,
        step_s=4e-3,
        unhidden=0.3,
        link_efficiency=0.75,
        network_efficiency=0.85,
        gradient_efficiency=0.4,
        async_unhidden=0.4,
    )
    own = ("matmul_efficiency", "attention_efficiency", "float8_speedup", "compiled_elements")
    return Task(name="torchtitan", blocks=(published.torchtitan(),), start=start, own=own, robust=0.1)


# -- what is said about them ------------------------------------------------------------------------------------


def spread(errors: Errors) -> str:
    """Mean, median and largest error in per cent."""
    size = np.abs(errors) * 100
    return f"{size.mean():.2f} | {np.median(size):.2f} | {size.max():.1f}"


def report(task: Task, folds: Sequence[NDArray[np.int_]]) -> tuple[dict[str, Coefficients], Errors, list[Errors]]:
    """Fit to all rows, and predictions of rows left out, one array for each way to divide them."""
    fitted = fit(task, np.arange(len(task.measured)))
    held = [left_out(task, one) for one in folds]
    for family, values in fitted.items():
        numbers = ", ".join(f"{n} {getattr(values, n):.4g}" for n in (*task.own, *task.shared))
        print(f"{task.name}{f' {family}' if family else ''}: {numbers}")
    return fitted, predict(task, fitted), held


def row_of(task: Task, predicted: Errors, held: list[Errors], how: str, beside: str) -> list[str]:
    """A row of the table of errors."""
    y = task.measured
    size = np.concatenate([np.abs(one / y - 1) for one in held]) * 100
    seen = np.abs(predicted / y - 1) * 100
    return [
        task.name,
        str(len(y)),
        str(len(task.own) * len(task.families) + len(task.shared)),
        f"{seen.mean():.2f}, {seen.max():.1f}",
        how,
        f"{size.mean():.2f}, {np.median(size):.2f}, {size.max():.1f}",
        beside,
    ]


def made(task: Task, coefficients: Coefficients, held: list[Errors], rows: NDArray[np.bool_] | None = None) -> Fit:
    """A fit as machines' files keep it."""
    y = task.measured
    size = np.concatenate([np.abs(one / y - 1)[rows if rows is not None else slice(None)] for one in held])
    count = int(rows.sum()) if rows is not None else len(y)
    sources = {
        "megatron": ("megatron_sc21_a100", "korthikanti_a100"),
        "megatron_deepspeed_node": ("vtrain_single_a100",),
        "megatron_deepspeed": ("vtrain_multi_a100",),
        "fsdp": ("mosaic_fsdp",),
        "torchtitan": ("torchtitan_h100",),
    }[task.name]
    return Fit(
        name=task.name,
        coefficients=coefficients,
        fitted=(*task.own, *task.shared),
        mean_error=float(size.mean()),
        median_error=float(np.median(size)),
        max_error=float(size.max()),
        num_rows=count,
        source="; ".join(published.source(name) for name in sources),
    )


def assumed(one: Fit, source: str) -> Fit:
    """A fit carried over to a machine that no row is of: nothing was seen, so its error is said to be 30 %."""
    return replace(one, fitted=(), mean_error=0.3, median_error=0.3, max_error=0.6, num_rows=0, source=source)


def machines(fits: dict[str, Fit]) -> list[Machine]:
    """All machines' files."""
    gib = 1 << 30
    h200 = replace(published.H100, name="H200 SXM 141GB", memory_bytes=141 * 10**9, memory_gbps=4800)
    mi250x = published.Device(
        name="MI250X, one of its two dies",
        flops=191.5e12,
        memory_bytes=64 * gib,
        memory_gbps=1638,
        source="AMD Instinct MI250X data sheet, 2021: half of a card",
    )
    generic = published.Device(
        name="an accelerator", flops=100e12, memory_bytes=32 * gib, memory_gbps=1000, source="assumed: say your own"
    )
    frontier = published.Rates(ranks_per_node=8, link_gbps=50, network_gbps=12.5)
    ethernet = published.Rates(ranks_per_node=8, link_gbps=25, network_gbps=3.125)
    titan_fit, fsdp_fit = fits["torchtitan"], fits["fsdp h100"]
    carried = "carried over from {}; no published run decided it"
    return [
        Machine(
            name="a100",
            device=published.A100,
            rates=published.SELENE,
            fits=(fits["megatron"], fits["fsdp a100"], fits["megatron_deepspeed"], fits["megatron_deepspeed_node"]),
        ),
        Machine(name="h100", device=published.H100, rates=published.H100_NODES, fits=(titan_fit, fsdp_fit)),
        Machine(
            name="h200",
            device=h200,
            rates=published.H100_NODES,
            fits=(assumed(titan_fit, carried.format("h100")), assumed(fsdp_fit, carried.format("h100"))),
        ),
        Machine(
            name="mi250x",
            device=mi250x,
            rates=frontier,
            fits=(
                assumed(
                    replace(
                        fits["megatron"],
                        coefficients=fits["megatron"].coefficients.with_values({"matmul_efficiency": 0.55}),
                    ),
                    carried.format("a100")
                    + ", at 0.55 of the peak; Dash et al., ISC 2024, reach 32 to 38 % of it in all",
                ),
            ),
        ),
        Machine(
            name="generic",
            device=generic,
            rates=ethernet,
            fits=(assumed(replace(fsdp_fit, name="generic"), carried.format("h100")),),
        ),
    ]


def selene_table(task: Task, predicted: Errors, held: Errors) -> str:
    """Row by row: how wrong the fit is, and how wrong one is that has not seen the row."""
    y = task.measured
    rows = []
    for i, row in enumerate(task.blocks[0].published):
        way = f"{row['tp']}, {row['pp']}, {row['dp']}" + (
            f", {row['chunks_per_rank']} chunks" * (row["chunks_per_rank"] > 1)
        )
        rows.append(
            [
                f"{row['params_billion']:g} B",
                row["gpus"],
                way,
                row["recompute"],
                f"{y[i]:.4g}",
                f"{predicted[i]:.4g}",
                f"{(predicted[i] / y[i] - 1) * 100:+.1f}",
                f"{(held[i] / y[i] - 1) * 100:+.1f}",
            ]
        )
    heads = ["model", "GPUs", "tp, pp, dp", "recomputed", "measured, s", "modelled, s", "error, %", "left out, %"]
    return markdown(heads, rows)


def main() -> None:
    """Fit, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the machines' files and the page's tables")
    parser.add_argument("--draws", type=int, default=3, help="ways to divide rows into thirds")
    options = parser.parse_args()
    table: list[list[str]] = []
    picks: list[list[str]] = []
    fits: dict[str, Fit] = {}

    task = megatron()
    fitted, seen, held = report(task, [np.arange(len(task.measured))])
    table.append(row_of(task, seen, held, "one row", "Calculon: 7.3, max 17.8"))
    fits["megatron"] = made(task, fitted[""], held)
    by_row = selene_table(task, seen, held[0])

    node: Coefficients | None = None
    steps: tuple[Callable[[], Task], ...] = (one_node, lambda: many_nodes(node or Coefficients()))
    for step in steps:
        task = step()
        rows = task.blocks[0]
        units = published.groups(rows.published) if node is None else None
        folds = [thirds(len(task.measured), seed=seed, units=units) for seed in range(options.draws)]
        fitted, seen, held = report(task, folds)
        what = "thirds, whole groups" if node is None else "thirds"
        table.append(row_of(task, seen, held, what, "-"))
        fits[task.name] = made(task, fitted[""], held)
        for name, all_of in (("all rows seen", [seen]), ("left out", held)):
            lost = np.array([published.regrets(rows, one) for one in all_of]) * 100
            picks.append([task.name, name, str(lost.shape[1]), f"{lost.mean():.1f}", f"{lost.max():.1f}"])
        node = fitted[""] if node is None else node

    task = fsdp()
    fitted, seen, held = report(task, [thirds(len(task.measured), seed=s) for s in range(options.draws)])
    table.append(row_of(task, seen, held, "thirds", "-"))
    family = np.concatenate([np.full(len(b.seconds), b.family) for b in task.blocks])
    for name in task.families:
        fits[f"fsdp {name}"] = made(task, fitted[name], held, family == name)

    task = titan()
    fitted, seen, held = report(task, [np.arange(len(task.measured))])
    table.append(row_of(task, seen, held, "one row", "-"))
    fits["torchtitan"] = made(task, fitted[""], held)
    for name, one in (("all rows seen", seen), ("left out", held[0])):
        wrong = published.misordered(task.blocks[0], one)
        print(f"torchtitan, pairs of throughputs in the wrong order, {name}: {wrong or 'none'}")

    heads = ["way", "rows", "fitted", "seen: mean, max %", "left out", "mean, median, max %", "beside"]
    errors = markdown(heads, table)
    chosen = markdown(["way", "rows", "groups", "mean loss, %", "worst, %"], picks)
    print(f"\n{errors}\n{by_row}\n{chosen}")
    if options.write:
        for machine in machines(fits):
            text = json.dumps(to_json(machine), indent=2) + "\n"
            (MACHINES / f"{machine.name}.json").write_text(text, encoding="utf-8")
        for name, part in (("errors", errors), ("selene", by_row), ("picks", chosen)):
            write_section(PAGE, name, part)


if __name__ == "__main__":
    main()
