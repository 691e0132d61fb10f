"""How fast links are."""

from __future__ import annotations

from mycel.topology.model import Topology

__all__ = ["bytes_per_second"]

#: Bytes a second that capacity 1 stands for where a topology gives only relative capacities.
_ASSUMED_RATE = 1e9


def bytes_per_second(topology: Topology) -> float:
    """What capacity 1 stands for: the unit's rate, or 10^9 where capacities are only relative.

    Times made of an assumed rate can be compared with each other, and with nothing else.

    Examples:
        >>> from mycel.topology.builders import ring
        >>> bytes_per_second(ring(num_ranks=4, bandwidth="8 Mbit/s"))
        125000.0
    """
    return float(topology.bytes_per_second_per_unit or _ASSUMED_RATE)
