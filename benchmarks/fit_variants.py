"""Other ways to fit steps over many boxes, left out by thirds as ``fit_costs`` does it: what was tried, measured.

    python benchmarks/fit_variants.py            # the table; about five minutes of one core
    python benchmarks/fit_variants.py --write    # ... and the one of docs/decisions/0151

vTrain's 72 runs over many boxes are the set that the model predicts worst. Every variant changes one thing: which
coefficients are fitted, how the loss weighs what is far off, a term more with a coefficient of its own from 0 on, how
many of a node's cards a ring uses, or what is learned from the errors of rows that are near. All see the same rows,
and are judged by those that they have not seen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

import fit_costs
import published
from fit_costs import Errors, Task
from mycel.planning.search.guide import posterior
from mycel.planning.step.coefficients import Coefficients, limits
from mycel.planning.step.links import Rates
from mycel.planning.step.points import Numbers, Points
from mycel.planning.step.times import Times, step_times
from record import ROOT, markdown, write_section

PAGE = ROOT / "docs" / "decisions" / "0151-what-many-boxes-do-not-say.md"
DRAWS = 3
#: Of a layer of Megatron's: parameters that are tensors of their own, each summed alone.
TENSORS = 12
#: A term: seconds for each unit of its coefficient, and the largest that this may be.
Term = tuple[Callable[[Times, Points], Numbers], float]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to fit.

    Attributes:
        name: in the table.
        own: coefficients that are fitted; those of ``fit_costs`` if none are given.
        robust: relative error from which on the loss grows linearly.
        terms: what is added to a step, each with a coefficient.
        rates: of the nodes.
        spread: of the errors of rows that are near, as far as they are alike; 0: nothing is learned from them.
    """

    name: str
    own: tuple[str, ...] = ()
    robust: float = fit_costs.ROBUST
    terms: tuple[Term, ...] = ()
    rates: Rates = published.VTRAIN
    spread: float = 0.0


class OneCard(Rates):
    """A ring over nodes uses one card of each, however many of its ranks are there."""

    def ring(self, size: Numbers, stride: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``."""
        near = np.clip(np.floor(self.ranks_per_node / stride), 1.0, size)
        across = np.full_like(near, self.network_gbps * 1e9 * network)
        rate: Numbers = np.where(near >= size, self.link_gbps * 1e9 * link, across)
        return rate


def _unlike_stages(times: Times, p: Points) -> Numbers:
    """Stages that differ by chance: a pipeline goes at the pace of the slowest."""
    whole: Numbers = (times.compute + times.head + times.tensor) * np.sqrt(2.0 * np.log(p.pp))
    return whole


def _unlike_replicas(times: Times, p: Points) -> Numbers:
    """Replicas that differ by chance: the step ends with the slowest."""
    busy = times.compute + times.head + times.tensor + times.bubble + times.boundary
    whole: Numbers = busy * np.sqrt(2.0 * np.log(p.dp * p.cp))
    return whole


def _tensor_by_tensor(times: Times, p: Points) -> Numbers:
    """Gradients are summed one tensor after the other: a ring starts ``2 (d - 1)`` messages for each."""
    whole: Numbers = TENSORS * p.stage_layers * 2.0 * (p.dp - 1.0)
    return whole


def _narrow_products(times: Times, p: Points) -> Numbers:
    """Products with few columns are slower: a matrix of ``hidden / tp`` columns fills the chip less."""
    whole: Numbers = times.compute * p.tp / p.hidden
    return whole


def _each_micro_batch(times: Times, p: Points) -> Numbers:
    """A micro-batch on a stage costs something whatever it holds, and the pipeline fills with it too."""
    whole: Numbers = p.micro_batches + p.pp - 1.0
    return whole


def _waiting_messages(times: Times, p: Points) -> Numbers:
    """Messages of a stage's tensor-parallel ranks share a node's cards and start one after the other."""
    whole: Numbers = np.where(p.pp > 1, (2.0 * p.micro_batches + 2.0 * (p.pp - 1.0)) * p.tp, 0.0)
    return whole


VARIANTS = (
    Variant(name="as it is: five coefficients"),
    Variant(name="squares instead of a robust loss", robust=10.0),
    Variant(name="a more robust loss, from 2 % on", robust=0.02),
    Variant(
        name="ten coefficients",
        own=(
            *("matmul_efficiency", "matmul_rows", "memory_efficiency", "layer_elements", "gradient_efficiency"),
            *("boundary_efficiency", "link_efficiency", "network_efficiency", "exchange_s", "launch_s"),
        ),
    ),
    Variant(name="stages that differ by chance", terms=((_unlike_stages, 0.2),)),
    Variant(name="replicas that differ by chance", terms=((_unlike_replicas, 0.2),)),
    Variant(name="gradients tensor by tensor", terms=((_tensor_by_tensor, 1e-3),)),
    Variant(name="narrow products are slower", terms=((_narrow_products, 2000.0),)),
    Variant(name="a fixed time for each micro-batch", terms=((_each_micro_batch, 0.1),)),
    Variant(name="messages one after the other", terms=((_waiting_messages, 0.02),)),
    Variant(name="rings over one card a node", rates=OneCard(ranks_per_node=8, link_gbps=300, network_gbps=12.5)),
    Variant(name="errors of rows that are near", spread=0.1),
)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Attributes: coefficients, those of terms, and errors of the rows that were seen."""

    coefficients: Coefficients
    more: tuple[float, ...]
    rows: NDArray[np.int_] = field(default_factory=lambda: np.zeros(0, dtype=int))


def seconds_of(variant: Variant, task: Task, points: Points, fitted: Fitted) -> Errors:
    """Of all rows."""
    block = task.blocks[0]
    times = step_times(points, block.device, variant.rates, fitted.coefficients)
    total = times.total
    for (term, _), size in zip(variant.terms, fitted.more, strict=True):
        total = total + size * term(times, points)
    if variant.spread and len(fitted.rows):
        off = np.log(task.measured / total)
        learned, _ = posterior(features_of(task), fitted.rows, off[fitted.rows], variant.spread)
        total = total * np.exp(learned)
    return total


def features_of(task: Task) -> Numbers:
    """Degrees, micro-batch and width in powers of two."""
    columns = ("tp", "pp", "dp", "micro_batch", "hidden")
    return np.log2([[float(row[name]) for name in columns] for row in task.blocks[0].published])


def fit(variant: Variant, task: Task, points: Points, rows: NDArray[np.int_]) -> Fitted:
    """To some rows: as ``fit_costs.fit``, with terms."""
    names, allowed = variant.own or task.own, limits()
    low = np.array([allowed[name].low for name in names] + [0.0 for _ in variant.terms])
    high = np.array([allowed[name].high for name in names] + [most for _, most in variant.terms])
    begin = (np.array([getattr(task.start, n) for n in names] + [0.0 for _ in variant.terms]) - low) / (high - low)

    def build(at: Errors) -> Fitted:
        values = np.clip(low + at * (high - low), low, high)
        chosen: Mapping[str, float] = {name: float(v) for name, v in zip(names, values[: len(names)], strict=True)}
        return Fitted(coefficients=replace(task.start, **chosen), more=tuple(map(float, values[len(names) :])))

    def residuals(at: Errors) -> Errors:
        off = np.log(seconds_of(variant, task, points, build(at)) / task.measured)[rows]
        return np.concatenate([off, fit_costs.PULL * (at - begin)])

    # A search that begins at a bound hardly leaves it: terms begin inside, and are pulled to 0 all the same.
    first = np.where(np.arange(len(begin)) < len(names), begin, 0.1)
    best, cost = np.clip(first, 1e-6, 1 - 1e-6), np.inf
    for _ in range(fit_costs.ROUNDS):
        before = cost
        for step in fit_costs.STEPS:
            found = least_squares(
                residuals, best, bounds=(0, 1), loss="soft_l1", f_scale=variant.robust, diff_step=step
            )
            if found.cost < cost:
                best, cost = np.clip(found.x, 1e-6, 1 - 1e-6), found.cost
        if cost > before * (1 - 1e-4):
            break
    return replace(build(best), rows=rows)


def row_of(variant: Variant, task: Task, points: Points) -> list[str]:
    """Errors and picks of rows left out, in three draws."""
    y, block = task.measured, task.blocks[0]
    held = []
    for seed in range(DRAWS):
        folds = fit_costs.thirds(len(y), seed=seed)
        predicted = np.zeros(len(y))
        for fold in np.unique(folds):
            here = folds == fold
            fitted = fit(variant, task, points, np.flatnonzero(~here))
            predicted[here] = seconds_of(variant, task, points, fitted)[here]
        held.append(predicted)
    off = np.concatenate([np.abs(one / y - 1) for one in held]) * 100
    lost = np.array([published.regrets(block, one) for one in held]) * 100
    whole = fit(variant, task, points, np.arange(len(y)))
    seen = np.abs(seconds_of(variant, task, points, replace(whole, rows=whole.rows[:0])) / y - 1) * 100
    return [
        variant.name,
        str(len(variant.own or task.own) + len(variant.terms)),
        f"{seen.mean():.2f}",
        f"{off.mean():.2f}",
        f"{np.median(off):.2f}",
        f"{lost.mean():.1f}",
        f"{lost.max():.1f}",
        ", ".join(f"{size:.3g}" for size in whole.more) or "-",
    ]


def main() -> None:
    """Fit all, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the decision's table")
    options = parser.parse_args()
    one = fit_costs.one_node()
    (node,) = fit_costs.fit(one, np.arange(len(one.measured))).values()
    task = fit_costs.many_nodes(node)
    points = task.blocks[0].points
    rows = []
    for variant in VARIANTS:
        rows.append(row_of(variant, task, points))
        print(" | ".join(rows[-1]), flush=True)
    heads = [
        *("variant", "fitted", "seen: mean, %", "left out: mean, %", "median, %"),
        *("pick loses: mean, %", "at worst, %", "the term's coefficient"),
    ]
    if options.write:
        write_section(PAGE, "variants", markdown(heads, rows))


if __name__ == "__main__":
    main()
