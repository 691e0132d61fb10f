"""Synthesis: schedules for a collective on a fabric, one algorithm a file, each registered by one line here.

===========  ==================================================================================
``forest``   pipelined spanning trees that meet the throughput bound exactly (large messages)
``tree``     one shallow tree, or direct exchange: fewest steps one after the other (small ones)
``exchange`` all_reduce in log2 N rounds, as partners add each other's sums (the smallest)
``greedy``   message by message in time for one size: between the smallest and the largest
``flow``     all_to_all, gather and scatter along the paths of an optimal flow (large messages)
``direct``   the same three with one message a pair (small ones)
``permute``  all_to_all of one block a rank, for one other: rotations, transposes
``skewed``   all_to_all of uneven blocks over boxes that are alike, planned in milliseconds
``steps``    schedules with proven numbers of steps and rounds, by constraint search (small fabrics)
``sketch``   for one size, latencies included, inside a person's outline of the fabric (named only)
===========  ==================================================================================

The algorithms that libraries run (ring, recursive doubling and so on) are in ``classics``, with a registry of their
own: they are there to be compared with, and the runtime does not try them by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

from mycel.arguments import the
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, POINTED, Collective, CollectiveName, as_collective, check_ranks
from mycel.collectives.synth import direct, exchange, flow, forest, greedy, permute, sketch, skewed, steps, tree
from mycel.collectives.synth.classics import CLASSICS
from mycel.errors import UsageError
from mycel.names import spelled
from mycel.topology.model import Topology

__all__ = [
    "BY_SIZE",
    "NAMED_ONLY",
    "SYNTHESIZERS",
    "WHERE_THEY_FIT",
    "Synthesizer",
    "candidates_for",
    "methods_for",
    "synthesize",
]


#: ``(topology, collective, **its own options) -> Schedule``; raises ``SynthesisError`` where none of its kind exists.
Synthesizer = Callable[..., Schedule]

#: Algorithms by name.
SYNTHESIZERS: dict[str, Synthesizer] = {
    "forest": forest.synthesize,
    "tree": tree.synthesize,
    "exchange": exchange.synthesize,
    "greedy": greedy.synthesize,
    "flow": flow.synthesize,
    "direct": direct.synthesize,
    "permute": permute.synthesize,
    "skewed": skewed.synthesize,
    "steps": steps.synthesize,
    "sketch": sketch.synthesize,
}

#: Methods that serve all_to_all, gather and scatter on any fabric.
_POINTED_METHODS = ("flow", "direct")
#: Methods that serve every other collective on any fabric, the default first.
_OTHER_METHODS = ("forest", "tree")
#: Methods that take part only where somebody names them (long searches, or input of their own), and what they serve.
NAMED_ONLY: dict[str, tuple[CollectiveName, ...]] = {"steps": steps.SERVES, "sketch": COLLECTIVES}

#: Methods that plan for a size, their option ``num_bytes``, and what they serve; ``select`` asks them at every size.
BY_SIZE: dict[str, tuple[CollectiveName, ...]] = {"greedy": greedy.SERVES}


def _served(method: Synthesizer) -> tuple[CollectiveName, ...]:
    """What a method serves, by ``SERVES`` of its module; all collectives where its module does not say."""
    served: tuple[CollectiveName, ...] = getattr(sys.modules[method.__module__], "SERVES", COLLECTIVES)
    return served


#: All others, and what they serve: they may have schedules on some fabrics only, and take part where they fit.
WHERE_THEY_FIT: dict[str, tuple[CollectiveName, ...]] = {
    name: _served(method)
    for name, method in SYNTHESIZERS.items()
    if name not in {*_POINTED_METHODS, *_OTHER_METHODS, *NAMED_ONLY, *BY_SIZE}
}


def methods_for(name: CollectiveName) -> tuple[str, ...]:
    """Methods that serve a collective on any fabric; the first is for large messages and the default.

    Those in ``NAMED_ONLY``, ``WHERE_THEY_FIT`` and ``BY_SIZE`` are not among them.

    Examples:
        >>> methods_for("all_to_all")
        ('flow', 'direct')
    """
    return _POINTED_METHODS if name in POINTED else _OTHER_METHODS


def candidates_for(name: CollectiveName) -> tuple[str, ...]:
    """Our methods to try for a collective: those that serve it on any fabric, and then those that may fit.

    Examples:
        >>> candidates_for("all_reduce")[:3]
        ('forest', 'tree', 'exchange')
    """
    fitting = (method for method, served in WHERE_THEY_FIT.items() if name in served)
    return (*methods_for(name), *fitting)


def synthesize(
    topology: Topology, collective: Collective | CollectiveName, method: str | None = None, **options: Any
) -> Schedule:
    """A schedule by the named method.

    Args:
        topology: the fabric.
        collective: what to move, over all of the fabric's ranks; a name is enough where the root is rank 0 and all
            blocks are equal.
        method: a key of ``SYNTHESIZERS`` that serves the collective, or of ``CLASSICS``; if not given, the first
            of ours that does.
        options: passed on to the method, such as ``k`` for ``forest``.

    Returns:
        A well-formed schedule; ``verify_schedule`` says whether it is right.

    Raises:
        UsageError: unknown collective or method, one for other collectives or for equal blocks only, an option the
            method does not have, or a collective over another number of ranks than the fabric has.
        SynthesisError: no such schedule exists for this fabric, or a classic does not serve the collective.

    Examples:
        >>> from mycel.topology import load_topology
        >>> fabric = load_topology("ring:ranks=4,bandwidth=1 GB/s")
        >>> for method in ("forest", "ring"):  # both ways round, and one
        ...     print(synthesize(fabric, "all_gather", method).algbw)  # GB/s
        8/3
        4/3
        >>> synthesize(fabric, "all_to_all").method
        'flow'
    """
    topology = the(Topology, topology, "a topology", hint="mycel.load_topology reads one")
    collective = as_collective(collective, topology.num_ranks)
    serving = methods_for(collective.name)
    if method is None:
        method = serving[0]
    methods = SYNTHESIZERS | CLASSICS
    method = spelled(method, methods, "method")
    if method not in CLASSICS:
        serving = candidates_for(collective.name)
        named = NAMED_ONLY | BY_SIZE
        serving += tuple(method for method, served in named.items() if collective.name in served)
        if method not in serving:
            raise UsageError(
                f"method {method!r} does not serve {collective.name}; methods that do: {', '.join(serving)}"
            )
    if collective.weights is not None and method in NAMED_ONLY:
        able = ", ".join(methods_for(collective.name))
        raise UsageError(f"method {method!r} plans equal blocks only; methods for uneven ones: {able}")
    known = set(signature(methods[method]).parameters) - {"topology", "collective"}
    if unknown := sorted(set(options) - known):
        has = f"its options: {', '.join(sorted(known))}" if known else "it has none"
        raise UsageError(f"method {method!r} has no option {unknown[0]!r}; {has}")
    check_ranks(topology, collective)
    return methods[method](topology, collective, **options)
