"""Figures of a forest without a schedule: what ``mycel synth --summary`` prints for fabrics of a thousand ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction
from math import gcd
from typing import Any

from mycel.cli.bound import bound_record
from mycel.cli.figures import count_trees, trees_a_root
from mycel.collectives.bound import Bound, bound, root_weights
from mycel.collectives.spec import Collective
from mycel.collectives.synth.forest import by_construction, share_of, synthesize
from mycel.collectives.synth.plan import both_ways, plan_all_reduce, plan_forest
from mycel.collectives.verify import verify_schedule
from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["show_plan", "summarise"]

_PLANNED = ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_reduce")


def summarise(
    topology: Topology,
    collective: Collective,
    progress: Callable[[str, int, int], None],
    *,
    k: int | None = None,
    within: float | None = None,
) -> tuple[Bound, dict[str, Any]]:
    """Plan a forest, or the two of all_reduce, check them, and give the bound beside them, and the figures as JSON.

    What is planned is what ``synthesize`` makes a schedule of.

    Args:
        topology: the fabric.
        collective: one of forests, over all of the fabric's ranks.
        progress: called with what is being done, how much of it is done, and how much there is.
        k: trees a root, if asked for.
        within: share of the bound that is enough, if asked for.

    Raises:
        UsageError: the collective is not one of forests, or options that do not go together.
    """
    if collective.name not in _PLANNED:
        raise UsageError(f"--summary is for {', '.join(_PLANNED)}, which are forests; not {collective.name}")
    if k is not None and (within is not None or k < 1):
        raise UsageError(f"-k {k}: give at least 1, and one of -k and --within")
    if k is not None and collective.name == "all_reduce":
        raise UsageError("--summary of all_reduce takes no -k: its units go up one forest and down another")
    started = time.perf_counter()
    best = bound(topology, collective)
    figures = None if k is not None else _scheduled(topology, collective, within)
    if figures is None:
        figures = _grown(topology, collective, progress, k, share_of(within))
    algbw = figures.pop("algbw")
    best = best.beside(algbw)
    record = bound_record(best, time.perf_counter() - started) | {
        "method": "forest",
        "algbw": float(algbw),
        "optimal": algbw >= best.algbw,
        **figures,
        "verified": True,
    }
    return best, record


def _scheduled(topology: Topology, collective: Collective, within: float | None) -> dict[str, Any] | None:
    """Figures of a schedule: one that needs no search, or goes through switches that add; ``None`` elsewhere."""
    schedule = by_construction(topology, collective)
    adds = len(topology.compute_vertices) > topology.num_ranks
    if schedule is None and adds and collective.name == "all_reduce":
        schedule = synthesize(topology, collective, within=within)
    if schedule is None:
        return None
    verify_schedule(schedule)
    return {
        "algbw": schedule.algbw,
        "k": trees_a_root(schedule),
        "num_trees": count_trees(schedule),
        "depth": schedule.depth,
        "symmetry": 1 if schedule.orbit is None else topology.num_ranks,
    }


def _grown(
    topology: Topology,
    collective: Collective,
    progress: Callable[[str, int, int], None],
    k: int | None,
    share: Fraction,
) -> dict[str, Any]:
    """Figures of forests that are searched for, every tree and link checked."""
    if collective.name == "all_reduce":
        down, up, algbw = plan_all_reduce(topology, within=share, progress=progress)
        forests, (depth, units) = [down, up], both_ways(down, up)
    else:
        weights = root_weights(collective)
        forest = plan_forest(topology, weights, is_reversed=collective.reduces, k=k, within=share, progress=progress)
        inverse_x, depth = forest.check()
        forests, algbw = [forest], sum(weights) / inverse_x
        units = int(forest.multiplicities.sum()) // gcd(*forest.multiplicities.tolist()) // sum(weights) or 1
    return {
        "algbw": algbw,
        "k": units,
        "num_trees": sum(forest.num_trees for forest in forests),
        "depth": depth,
        "symmetry": min(forest.order for forest in forests),
    }


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
