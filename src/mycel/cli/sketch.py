"""Figures of a schedule made inside a sketch: what ``mycel synth --sketch FILE`` prints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mycel.cli import consoles
from mycel.collectives.spec import Collective
from mycel.collectives.synth.sketch import TIME_LIMIT_S, SketchPlan, plan_sketch, read_sketch
from mycel.collectives.verify import verify_schedule
from mycel.topology.model import Topology
from mycel.units import format_seconds, format_size, parse_size

__all__ = ["plan_by_sketch", "show_sketched"]


def plan_by_sketch(
    topology: Topology, collective: Collective, file: Path, size: str | None, time_limit_s: float | None
) -> tuple[SketchPlan, dict[str, Any]]:
    """Plan inside a sketch, verify, and give the plan with the JSON object of its figures.

    Raises:
        UsageError: a malformed sketch or size, or one that does not fit the fabric.
        SynthesisError: no routing satisfies the sketch.
    """
    started = time.perf_counter()
    limit_s = TIME_LIMIT_S if time_limit_s is None else time_limit_s
    sketch = read_sketch(file)
    with consoles.doing(f"searching inside {file.name}, for {limit_s:g} s at most"):
        plan = plan_sketch(
            topology,
            collective,
            sketch,
            num_bytes=None if size is None else parse_size(size),
            time_limit_s=limit_s,
        )
        verify_schedule(plan.schedule)
    record = {
        "collective": collective.name,
        "num_ranks": collective.num_ranks,
        "method": "sketch",
        "sketch": str(file),
        "num_bytes": plan.num_bytes,
        "bound_s": plan.bound_s,
        "routed_s": plan.routed_s,
        "routing_optimal": plan.routing_is_optimal,
        "final_s": plan.seconds,
        "gap": plan.gap,
        "num_variables": plan.num_variables,
        "num_transfers": len(plan.schedule.transfers),
        "num_messages": plan.num_messages,
        "depth": plan.schedule.depth,
        "routing_seconds": plan.routing_seconds,
        "ordering_seconds": plan.ordering_seconds,
        "seconds": time.perf_counter() - started,
        "verified": True,
    }
    return plan, record


def show_sketched(plan: SketchPlan, record: dict[str, Any]) -> str:
    """The figures in words."""
    collective, fabric = plan.schedule.collective, plan.schedule.topology
    proof = "proven optimal" if plan.routing_is_optimal else f"routes of {format_seconds(plan.routed_s)} found"
    bound = format_seconds(plan.bound_s)
    if collective.name == "all_reduce":
        against = f"reduce-scatter and then all-gather have a bound of {bound}"
        if plan.seconds > plan.bound_s:
            against = f"{plan.gap:.1%} above the bound of reduce-scatter and then all-gather, {bound}"
    else:
        against = f"{plan.gap:.1%} above the routing bound of {bound}"
    return (
        f"{format_seconds(plan.seconds)} for {format_size(plan.num_bytes)}, {against} ({proof}): {collective.name} "
        f"over {collective.num_ranks} ranks of {fabric.name} by sketch, verified\n"
        f"{len(plan.schedule.transfers)} transfers in {plan.num_messages} messages, {plan.schedule.depth} deep; "
        f"routing {plan.routing_seconds:.1f} s ({plan.num_variables} variables), "
        f"ordering {plan.ordering_seconds:.1f} s; times of the alpha-beta model"
    )
