"""Classics: the algorithms that libraries run, with the signature of our own; one a file, one line each here.

They know ranks, not links: who sends to whom is fixed by rank numbers, and each message takes the best path that
passes no other rank. Where two partners have none, and where a rank count does not fit, ``SynthesisError`` says so.

======================  =======================================  ================================================
method                  serves                                   needs
======================  =======================================  ================================================
``ring``                all but the pointed collectives          a cycle through all ranks
``bidirectional_ring``  all but the pointed collectives          a cycle whose neighbours reach each other
``recursive_doubling``  all_gather, reduce_scatter, all_reduce
``rabenseifner``        all_reduce
``swing``               all_gather, reduce_scatter, all_reduce   an even number of ranks
``swing_latency``       all_reduce                               a power of two of ranks
``trivance``            all_gather, reduce_scatter, all_reduce   a power of three of ranks
``trivance_latency``    all_reduce                               a power of three of ranks
``binomial_tree``       all_reduce, broadcast, reduce, gather,
                        scatter
``bine``                broadcast, reduce, gather, scatter       a power of two of ranks
``double_binary_tree``  all_reduce, broadcast, reduce
``hierarchical``        all_gather, reduce_scatter, all_reduce   nodes with equally many ranks
``bruck``               all_gather, all_to_all
``two_step``            all_to_all                               nodes with equally many ranks
======================  =======================================  ================================================
"""

from __future__ import annotations

from collections.abc import Callable

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import CollectiveName
from mycel.collectives.synth.classics import (
    bine,
    binomial_tree,
    bruck,
    double_binary_tree,
    hierarchical,
    rabenseifner,
    recursive_doubling,
    ring,
    swing,
    trivance,
    two_step,
)

__all__ = ["CLASSICS", "SERVES", "classics_for"]

#: Classic algorithms by name.
CLASSICS: dict[str, Callable[..., Schedule]] = {
    "ring": ring.synthesize,
    "bidirectional_ring": ring.synthesize_bidirectional,
    "recursive_doubling": recursive_doubling.synthesize,
    "rabenseifner": rabenseifner.synthesize,
    "swing": swing.synthesize,
    "swing_latency": swing.synthesize_latency,
    "trivance": trivance.synthesize,
    "trivance_latency": trivance.synthesize_latency,
    "binomial_tree": binomial_tree.synthesize,
    "bine": bine.synthesize,
    "double_binary_tree": double_binary_tree.synthesize,
    "hierarchical": hierarchical.synthesize,
    "bruck": bruck.synthesize,
    "two_step": two_step.synthesize,
}

#: Collectives that each of them serves.
SERVES: dict[str, tuple[CollectiveName, ...]] = {
    "ring": ring.SERVES,
    "bidirectional_ring": ring.SERVES,
    "recursive_doubling": recursive_doubling.SERVES,
    "rabenseifner": rabenseifner.SERVES,
    "swing": swing.SERVES,
    "swing_latency": swing.SERVES_LATENCY,
    "trivance": trivance.SERVES,
    "trivance_latency": trivance.SERVES_LATENCY,
    "binomial_tree": binomial_tree.SERVES,
    "bine": bine.SERVES,
    "double_binary_tree": double_binary_tree.SERVES,
    "hierarchical": hierarchical.SERVES,
    "bruck": bruck.SERVES,
    "two_step": two_step.SERVES,
}


def classics_for(name: str) -> tuple[str, ...]:
    """Classic methods that serve a collective.

    Examples:
        >>> classics_for("broadcast")
        ('ring', 'bidirectional_ring', 'binomial_tree', 'bine', 'double_binary_tree')
        >>> classics_for("all_to_all")
        ('bruck', 'two_step')
    """
    return tuple(method for method, served in SERVES.items() if name in served)
