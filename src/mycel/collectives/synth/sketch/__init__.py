"""Sketch: schedules inside a person's outline of the fabric, for one size, where latencies count.

A sketch (``reader``) and a fabric make logical links (``network``); the collective asks for chunks (``demands``);
``routing`` finds along which links they go, and proves how good that is; ``ordering`` finds when; ``plan`` joins the
two. The method is for people who name it and have a sketch: the runtime and the selector do not try it.

References:
    A. Shah et al., "TACCL: Guiding Collective Algorithm Synthesis using Communication Sketches", NSDI 2023.
"""

from __future__ import annotations

from pathlib import Path

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, check_ranks
from mycel.collectives.synth.sketch.plan import TIME_LIMIT_S, SketchPlan, plan_sketch
from mycel.collectives.synth.sketch.reader import Sketch, parse_sketch, read_sketch
from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["TIME_LIMIT_S", "Sketch", "SketchPlan", "parse_sketch", "plan_sketch", "read_sketch", "synthesize"]


def synthesize(
    topology: Topology,
    collective: Collective,
    *,
    sketch: Path | None = None,
    num_bytes: int | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
) -> Schedule:
    """A schedule inside a sketch; ``plan_sketch`` gives its times and bound as well.

    Args:
        topology: the fabric.
        collective: what to move, over all of its ranks.
        sketch: file of the sketch; there is no default.
        num_bytes: size to optimise for; by default chunks are of a million bytes.
        time_limit_s: seconds to search.
        seed: of the searches.

    Raises:
        UsageError: no sketch, or one that is malformed or does not fit.
        SynthesisError: no routing satisfies the sketch, or none was found in time.
    """
    check_ranks(topology, collective)
    if sketch is None:
        raise UsageError("method 'sketch' needs a sketch; give one, such as --sketch examples/sketches/ndv2_x1.json")
    outline = read_sketch(sketch)
    plan = plan_sketch(topology, collective, outline, num_bytes=num_bytes, time_limit_s=time_limit_s, seed=seed)
    return plan.schedule
