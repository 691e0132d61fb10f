"""Synthesis: schedules for a collective on a fabric, one algorithm a file, each registered by one line here.

===========  ==================================================================================
``forest``   pipelined spanning trees that meet the throughput bound exactly (large messages)
``tree``     one shallow tree, or direct exchange: fewest steps one after the other (small ones)
===========  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective
from mycel.collectives.synth import forest, tree
from mycel.errors import UsageError
from mycel.topology.model import Topology

__all__ = ["SYNTHESIZERS", "Synthesizer", "synthesize"]


#: ``(topology, collective, **its own options) -> Schedule``; raises ``SynthesisError`` where none of its kind exists.
Synthesizer = Callable[..., Schedule]

#: Algorithms by name.
SYNTHESIZERS: dict[str, Synthesizer] = {
    "forest": forest.synthesize,
    "tree": tree.synthesize,
}


def synthesize(topology: Topology, collective: Collective, method: str = "forest", **options: Any) -> Schedule:
    """A schedule by the named method.

    Args:
        topology: the fabric.
        collective: what to move, over all of the fabric's ranks.
        method: a key of ``SYNTHESIZERS``.
        options: passed on to the method, such as ``k`` for ``forest``.

    Raises:
        UsageError: unknown method, an option the method does not have, or a collective over another number of
            ranks than the fabric has.
        SynthesisError: no such schedule exists for this fabric.
    """
    if method not in SYNTHESIZERS:
        raise UsageError(f"unknown method {method!r}; known: {', '.join(SYNTHESIZERS)}")
    known = set(signature(SYNTHESIZERS[method]).parameters) - {"topology", "collective"}
    if unknown := sorted(set(options) - known):
        has = f"its options: {', '.join(sorted(known))}" if known else "it has none"
        raise UsageError(f"method {method!r} has no option {unknown[0]!r}; {has}")
    return SYNTHESIZERS[method](topology, collective, **options)
