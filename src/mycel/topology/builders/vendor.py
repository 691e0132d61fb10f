"""GPU machines one can buy, alone or several on one InfiniBand network.

Bandwidths are a direction's, as vendors' data sheets give them for the links; ranks are GPUs. A network of one node
has no interfaces: nothing would pass through them.
"""

from __future__ import annotations

from mycel.topology.builders.assembly import Assembly, Bandwidth, Latency, positive
from mycel.topology.hardware import DGX1_NVLINKS
from mycel.topology.model import Topology

__all__ = ["dgx1_v100", "dgx_a100", "dgx_h100", "mi250"]

#: MI250: xGMI links between the 16 dies of 8 cards; dies 2i and 2i+1 share a card.
_MI250_XGMI = {
    (0, 1): 4, (0, 4): 2, (0, 8): 1, (1, 5): 1, (1, 9): 1, (1, 10): 1, (2, 3): 4, (2, 6): 1, (2, 9): 1, (2, 10): 1,
    (3, 7): 2, (3, 11): 1, (4, 5): 4, (4, 6): 1, (5, 6): 1, (5, 7): 1, (6, 7): 4, (8, 9): 4, (8, 12): 2, (9, 13): 1,
    (10, 11): 4, (10, 14): 1, (11, 15): 2, (12, 13): 4, (12, 14): 1, (13, 14): 1, (13, 15): 1, (14, 15): 4,
}  # fmt: skip


def dgx_a100(
    *,
    num_nodes: int = 1,
    nvswitch: Bandwidth = "300 GB/s",
    nic: Bandwidth = "25 GB/s",
    latency: Latency = 0.0,
    nic_latency: Latency = 0.0,
) -> Topology:
    """DGX A100: 8 GPUs on NVSwitch, an interface a GPU, even and odd interfaces on two InfiniBand switches.

    Args:
        num_nodes: at least 1.
        nvswitch: of each GPU inside the node.
        nic: of each GPU's network interface.
        latency: of the links inside, in seconds or as text.
        nic_latency: of the links to and from an interface.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> dgx_a100(num_nodes=2).num_ranks, len(dgx_a100(num_nodes=2).switches)
        (16, 20)
    """
    fabric = Assembly(f"dgx_a100_x{positive(num_nodes, 'dgx_a100: num_nodes')}")
    planes = [fabric.switch(f"ib{number}") for number in range(2)] if num_nodes > 1 else []
    for node in _nodes(num_nodes):
        gpus = _nvswitch_node(fabric, node, nvswitch, latency)
        for number, gpu in enumerate(gpus if planes else []):
            interface = fabric.switch(f"{node}/nic{number}", node)
            fabric.connect(gpu, interface, nic, nic_latency)
            fabric.connect(interface, planes[number % 2], nic, nic_latency)
    return fabric.topology()


def dgx_h100(
    *,
    num_nodes: int = 1,
    nvswitch: Bandwidth = "450 GB/s",
    nic: Bandwidth = "50 GB/s",
    latency: Latency = 0.0,
    nic_latency: Latency = 0.0,
    nvls: bool = False,
    sharp: bool = False,
) -> Topology:
    """DGX H100: 8 GPUs on NVSwitch, an interface a GPU, all on one non-blocking InfiniBand network.

    Args:
        num_nodes: at least 1.
        nvswitch: of each GPU inside the node.
        nic: of each GPU's network interface.
        latency: of the links inside, in seconds or as text.
        nic_latency: of the links to and from the network.
        nvls: NVSwitches copy and add (NVLink SHARP).
        sharp: the network copies and adds (InfiniBand SHARP); as if one switch, which a fat tree of them is.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> dgx_h100(num_nodes=2).num_ranks, len(dgx_h100(num_nodes=2).links)
        (16, 64)
        >>> len(dgx_h100(num_nodes=2, nvls=True).compute_vertices)
        18
    """
    fabric = Assembly(f"dgx_h100_x{positive(num_nodes, 'dgx_h100: num_nodes')}")
    network = [fabric.switch("ib", computes=sharp)] if num_nodes > 1 else []
    for node in _nodes(num_nodes):
        gpus = _nvswitch_node(fabric, node, nvswitch, latency, nvls=nvls)
        for gpu in gpus if network else []:
            fabric.connect(gpu, network[0], nic, nic_latency)
    return fabric.topology()


def dgx1_v100(
    *,
    num_nodes: int = 1,
    nvlink: Bandwidth = "25 GB/s",
    nic: Bandwidth = "12 GB/s",
    latency: Latency = 0.0,
    nic_latency: Latency = 0.0,
) -> Topology:
    """DGX-1 with V100: 8 GPUs in a hybrid cube mesh of 24 NVLinks, an interface for every two GPUs.

    Args:
        num_nodes: at least 1.
        nvlink: of one NVLink; pairs of GPUs have one or two.
        nic: of one interface, and of each GPU's way to it; by default what PCIe 3 x16 lets a 100 Gbit/s one do.
        latency: of the NVLinks, in seconds or as text.
        nic_latency: of the links to and from an interface.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> sorted({link.capacity for link in dgx1_v100().links})
        [25, 50]
    """
    fabric = Assembly(f"dgx1_v100_x{positive(num_nodes, 'dgx1_v100: num_nodes')}")
    network = [fabric.switch("ib")] if num_nodes > 1 else []
    for node in _nodes(num_nodes):
        gpus = _meshed_node(fabric, node, 8, DGX1_NVLINKS, nvlink, latency)
        for number in range(4 if network else 0):
            interface = fabric.switch(f"{node}/nic{number}", node)
            for gpu in gpus[2 * number : 2 * number + 2]:
                fabric.connect(gpu, interface, nic, nic_latency)
            fabric.connect(interface, network[0], nic, nic_latency)
    return fabric.topology()


def mi250(
    *,
    num_nodes: int = 1,
    xgmi: Bandwidth = "50 GB/s",
    nic: Bandwidth = "16 GB/s",
    latency: Latency = 0.0,
    nic_latency: Latency = 0.0,
) -> Topology:
    """Eight MI250 cards, 16 GPU dies with 1 to 4 xGMI links between some of them, an interface's share a die.

    Args:
        num_nodes: at least 1.
        xgmi: of one xGMI link.
        nic: of each die to the network.
        latency: of the xGMI links, in seconds or as text.
        nic_latency: of the links to and from the network.

    Raises:
        TopologyError: an argument makes no sense.

    Examples:
        >>> mi250(num_nodes=2).num_ranks, len(mi250(num_nodes=2).links)
        (32, 176)
    """
    fabric = Assembly(f"mi250_x{positive(num_nodes, 'mi250: num_nodes')}")
    network = [fabric.switch("ib")] if num_nodes > 1 else []
    for node in _nodes(num_nodes):
        gpus = _meshed_node(fabric, node, 16, _MI250_XGMI, xgmi, latency)
        for gpu in gpus if network else []:
            fabric.connect(gpu, network[0], nic, nic_latency)
    return fabric.topology()


def _nodes(num_nodes: int) -> list[str]:
    return [f"node{number}" for number in range(num_nodes)]


def _nvswitch_node(
    fabric: Assembly, node: str, nvswitch: Bandwidth, latency: Latency, *, nvls: bool = False
) -> list[str]:
    gpus = [fabric.rank(f"{node}/{number}", node) for number in range(8)]
    switch = fabric.switch(f"{node}/nvswitch", node, computes=nvls)
    for gpu in gpus:
        fabric.connect(gpu, switch, nvswitch, latency)
    return gpus


def _meshed_node(
    fabric: Assembly, node: str, size: int, cables: dict[tuple[int, int], int], bandwidth: Bandwidth, latency: Latency
) -> list[str]:
    gpus = [fabric.rank(f"{node}/{number}", node) for number in range(size)]
    for (a, b), count in cables.items():
        for _ in range(count):
            fabric.connect(gpus[a], gpus[b], bandwidth, latency)
    return gpus
