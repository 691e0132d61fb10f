"""Figures of a forest without a schedule: what ``mycel synth --summary`` prints for fabrics of a thousand ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mycel.cli.bound import bound_record
from mycel.collectives.bound import Bound, bound, root_weights
from mycel.collectives.spec import Collective
from mycel.collectives.synth.plan import plan_all_reduce, plan_forest
from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["show_plan", "summarise"]

_PLANNED = ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_reduce")


def summarise(
    topology: Topology, collective: Collective, progress: Callable[[str, int, int], None]
) -> tuple[Bound, dict[str, Any]]:
    """Plan a forest, or the two of all_reduce, check them, and give the bound and the JSON object of the figures.

    Raises:
        UsageError: the collective is not one of forests.
    """
    if collective.name not in _PLANNED:
        raise UsageError(f"--summary is for {', '.join(_PLANNED)}, which are forests; not {collective.name}")
    started = time.perf_counter()
    best = bound(topology, collective)
    if collective.name == "all_reduce":
        down, up, algbw = plan_all_reduce(topology, progress=progress)
        forests, depth = [down, up], down.depth() + up.depth()
        k = down.units if len(set(down.weights)) == 1 and down.units == up.units else None
    else:
        weights = root_weights(collective)
        forest = plan_forest(topology, weights, is_reversed=collective.reduces, progress=progress)
        inverse_x, depth = forest.check()
        forests, algbw, k = [forest], sum(weights) / inverse_x, forest.units
    record = bound_record(best, time.perf_counter() - started) | {
        "method": "forest",
        "algbw": float(algbw),
        "optimal": algbw >= best.algbw,
        "k": k,
        "num_trees": sum(forest.num_trees for forest in forests),
        "depth": depth,
        "verified": True,
        "symmetry": min(forest.order for forest in forests),
    }
    return best, record


def show_plan(best: Bound, record: dict[str, Any]) -> str:
    """The figures in words."""
    verdict = "optimal" if record["optimal"] else f"{record['algbw'] / float(best.algbw):.1%} of the bound"
    share = "uneven shares" if record["k"] is None else f"k={record['k']}"
    symmetry = f"a symmetry of order {record['symmetry']}" if record["symmetry"] > 1 else "no symmetry used"
    return (
        f"{record['algbw']:.6g} {best.topology.unit}, {verdict}: {record['collective']} over {record['num_ranks']} "
        f"ranks of {best.topology.name} by forest, every tree and link checked\n"
        f"{record['num_trees']} trees ({share}), {record['depth']} deep, {symmetry}, "
        f"{record['seconds']:.2f} s\n{best.explain()}"
    )
