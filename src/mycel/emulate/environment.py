"""What a rank finds in its environment: the variables torchrun sets, and where its fabric is described."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from mycel.emulate.fabric import RANK_INTERFACE, management_address, rank_address
from mycel.topology.model import Topology

__all__ = ["MASTER_PORT", "hosts_text", "loopback_environment", "rank_environment"]

#: Port of the store. Rank 0 has a network namespace to itself, so that it is always free.
MASTER_PORT = 29500


def rank_environment(
    topology: Topology,
    rank: int,
    *,
    topology_file: Path,
    wiring_file: Path,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of one rank.

    ``LOCAL_RANK`` counts within the node of the rank; a rank that belongs to no node has one of its own, as it has
    its own network. Gloo and the tensor pipe are told to use the shaped fabric, the store uses the management
    network.

    Args:
        topology: the emulated fabric.
        rank: whose environment.
        topology_file: where the topology was written.
        wiring_file: where the wiring was written.
        extra: added to this process's own environment; the variables of the launcher come last and win.
    """
    nodes = [topology.vertices[v].node or f"\0{number}" for number, v in enumerate(topology.ranks)]
    return {
        **_as_torchrun(rank, nodes, (management_address(0), MASTER_PORT), RANK_INTERFACE, extra),
        "MYCEL_TOPOLOGY": str(topology_file),
        "MYCEL_WIRING": str(wiring_file),
    }


def loopback_environment(
    rank: int, num_ranks: int, *, port: int, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of one of several ranks on 127.0.0.1; ``port`` is the store's, ``extra`` as above."""
    return _as_torchrun(rank, ["here"] * num_ranks, ("127.0.0.1", port), "lo", extra)


def _as_torchrun(
    rank: int, nodes: Sequence[str], store: tuple[str, int], interface: str, extra: Mapping[str, str] | None
) -> dict[str, str]:
    order = list(dict.fromkeys(nodes))
    node = nodes[rank]
    world_size = str(len(nodes))
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        **(extra or {}),
        "RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(nodes[:rank].count(node)),
        "LOCAL_WORLD_SIZE": str(nodes.count(node)),
        "GROUP_RANK": str(order.index(node)),
        "GROUP_WORLD_SIZE": str(len(order)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_RUN_ID": "mycel-emulate",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Rank 0 hosts the store itself; there is no agent that does.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }


def hosts_text(num_ranks: int) -> str:
    """A hosts file in which every rank has a name: ``rank0`` on the fabric, ``rank0.mgmt`` beside it.

    Each address is there a second time in its IPv6-mapped form, in which the store of torch looks it up.

    Examples:
        >>> hosts_text(1).splitlines()[2:4]
        ['10.96.0.1 rank0', '::ffff:10.96.0.1 rank0']
    """
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {socket.gethostname()}"]
    for rank in range(num_ranks):
        for address, name in ((rank_address(rank), f"rank{rank}"), (management_address(rank), f"rank{rank}.mgmt")):
            lines += [f"{address} {name}", f"::ffff:{address} {name}"]
    return "\n".join(lines) + "\n"
