"""Two shots: every rank adds up its own part of the array from all others at once, and sends the sum to all at once.

Two steps, whatever the number of ranks, and no byte more than a ring sends; but N - 1 messages at each rank in either
step. That is the quickest way for arrays of middle size behind a switch, where links to all others are there anyway:
NVLink and NVSwitch, and the ``direct`` collective of simulators.

References:
    E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, "Collective communication: theory, practice, and
    experience", Concurrency and Computation 19(13), 2007, section 5 (reduce-scatter, then all-gather). NVIDIA,
    TensorRT-LLM, ``customAllReduceKernels`` (two-shot).
"""

from __future__ import annotations

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import Strand, check_served, from_strands
from mycel.topology.model import Topology

__all__ = ["SERVES", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_reduce",)


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A direct reduce-scatter, and after it a direct all-gather.

    Args:
        topology: the fabric.
        collective: all_reduce, over all of the fabric's ranks.

    Raises:
        UsageError: the collective is over another number of ranks.
        SynthesisError: it is another collective, or two ranks reach each other through a rank only.
    """
    check_served(topology, collective, "two_shot", SERVES)
    n = collective.num_ranks
    strands = []
    for owner in range(n):
        others = [(owner + shift) % n for shift in range(1, n)]
        strands.append(
            Strand(block=0, up=tuple((rank, owner) for rank in others), down=tuple((owner, rank) for rank in others))
        )
    return from_strands(topology, collective, "two_shot", strands)
