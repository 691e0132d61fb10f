"""Trials until the best configuration is nearly found, on published runs as a stand-in for runs.

vTrain's authors measured many configurations of the same job. A trial looks one of them up. Counted are trials until
one within 3 % of the group's best has been tried: ours, led by the model's predictions (of fits that had not seen the
group), random search, and Bayesian search without a model (a Gaussian process over the logarithm of seconds, with the
same features; the next trial is that of the largest expected improvement).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

import fit_costs
import published
from mycel.planning.search.guide import Guide, posterior

__all__ = ["GOAL", "SEEDS", "Group", "bayesian", "groups_of", "guided", "random_order", "trials_to"]

GOAL, SEEDS, LEAST = 0.97, 20, 5
Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Configurations of one job.

    Attributes:
        name: of the set and the job.
        features: degrees and micro-batch in powers of two.
        seconds: measured.
        predicted: by fits that had not seen them.
        error: mean of the set's, left out.
    """

    name: str
    features: Numbers
    seconds: Numbers
    predicted: Numbers
    error: float


def groups_of(*, seed: int = 0) -> list[Group]:
    """All of vTrain's groups of five configurations and more.

    Args:
        seed: which third of the groups each fit has not seen.
    """
    found = []
    one_node = fit_costs.one_node()
    (node,) = fit_costs.fit(one_node, np.arange(len(one_node.blocks[0].seconds))).values()
    for task in (one_node, fit_costs.many_nodes(node)):
        rows = task.blocks[0]
        units = published.groups(rows.published)
        folds = fit_costs.thirds(len(rows.seconds), seed=seed, units=units)
        predicted = fit_costs.left_out(task, folds)
        error = float(np.mean(np.abs(predicted / rows.seconds - 1.0)))
        for unit in units:
            if len(unit) < LEAST:
                continue
            jobs = [rows.jobs[i][1] for i in unit]
            sizes = [(j.mesh.pp, j.mesh.dp, j.mesh.tp, j.micro_batch) for j in jobs]
            row = rows.published[unit[0]]
            found.append(
                Group(
                    name=f"{task.name}: hidden {row['hidden']}, {row['gpus']} GPUs, batch {row['global_batch']}",
                    features=np.log2(np.array(sizes, dtype=float)),
                    seconds=rows.seconds[unit],
                    predicted=predicted[unit],
                    error=error,
                )
            )
    return found


def trials_to(group: Group, order: Callable[[Group], list[int]]) -> int:
    """Trials of an order until one is within 3 % of the best; all and one more where none is."""
    is_good = group.seconds <= group.seconds.min() / GOAL
    for number, row in enumerate(order(group), start=1):
        if is_good[row]:
            return number
    return len(group.seconds) + 1


def guided(group: Group, *, is_endless: bool = True) -> list[int]:
    """Ours: all configurations, or until it stops by itself."""
    guide = Guide(features=group.features, predicted=group.predicted, error=group.error)
    order: list[int] = []
    while (row := guide.next(is_endless=is_endless)) is not None:
        order.append(row)
        guide.measured(row, float(group.seconds[row]))
    return order


def random_order(seed: int) -> Callable[[Group], list[int]]:
    """All configurations by chance."""
    return lambda group: [int(i) for i in np.random.default_rng(seed).permutation(len(group.seconds))]


def bayesian(seed: int) -> Callable[[Group], list[int]]:
    """A first one by chance, then the largest expected improvement.

    References:
        Jones et al., "Efficient Global Optimization of Expensive Black-Box Functions", 1998, equation 15.
    """

    def order(group: Group) -> list[int]:
        chance = np.random.default_rng(seed)
        tried = [int(chance.integers(len(group.seconds)))]
        while len(tried) < len(group.seconds):
            values = np.log(group.seconds[tried])
            scale = max(0.1, float(np.std(values)))
            mean, spread = posterior(group.features, np.array(tried), values - values.mean(), scale)
            gain = (values.min() - values.mean()) - mean
            spread = np.maximum(spread, 1e-9)
            hope = gain * norm.cdf(gain / spread) + spread * norm.pdf(gain / spread)
            hope[tried] = -1.0
            best = np.flatnonzero(hope >= hope.max() - 1e-15)
            tried.append(int(chance.choice(best)))
        return tried

    return order
