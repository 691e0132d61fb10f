"""Direct: all_to_all, gather and scatter with one message a pair (small messages).

Every block goes whole along the one route with the least latency and the fewest relays; nothing waits but for its
own block. That is the fewest messages and the fewest steps, but on fabrics with several ways between ranks not the
most bandwidth: see ``flow``.
"""

from __future__ import annotations

from mycel.collectives.routes import Routes
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, check_ranks
from mycel.collectives.synth.flow import ends_of_blocks, schedule_of_parts
from mycel.collectives.synth.nodes import exchange
from mycel.topology.model import Topology

__all__ = ["synthesize"]


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A schedule with one message a pair of ranks, more only where ranks must relay.

    Args:
        topology: the fabric.
        collective: an all_to_all, gather or scatter over all of its ranks.

    Raises:
        UsageError: the collective is over another number of ranks.
    """
    check_ranks(topology, collective)
    routes = Routes(topology)
    if collective.name == "all_to_all":
        alike = exchange(topology, collective, "direct", routes)
        if alike is not None:
            return alike
    parts = {
        (src, dst): [(weight, routes.vertices(src, dst))]
        for weight, (src, dst) in zip(collective.block_weights, ends_of_blocks(collective), strict=True)
        if weight and src != dst
    }
    return schedule_of_parts(topology, collective, "direct", parts, 1)
