"""What things take: links by bytes, processors by messages, copies and sums, anything by a line through measurements.

The models that choose and check stand elsewhere, since they answer different questions: ``collectives.cost`` ranks
schedules, ``collectives.simulate`` plays messages out, ``collectives.replay`` plays whole transfers, ``moe.flex``
weighs plans of experts. Here is what they must agree about. No torch.
"""

from mycel.cost.line import Line
from mycel.cost.links import LINK_CLASSES, LinkClass, LinkCosts, bytes_per_second, link_class, link_costs
from mycel.cost.overlap import makespan
from mycel.cost.processors import Costs
from mycel.topology.device import Device

__all__ = [
    "LINK_CLASSES",
    "Costs",
    "Device",
    "Line",
    "LinkClass",
    "LinkCosts",
    "bytes_per_second",
    "link_class",
    "link_costs",
    "makespan",
]
