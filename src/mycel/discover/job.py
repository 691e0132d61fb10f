"""Asking all machines of a job: every rank tells rank 0 where it runs, one rank a machine also what is there."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from mycel.discover.cluster import Seat, cluster_of
from mycel.discover.facts import Node, machine_id, read_node
from mycel.errors import CommunicationError, MycelError
from mycel.probe.control import Hub, Member, join
from mycel.probe.meeting import listen, own_address, rendezvous_place
from mycel.settings import Launched, Settings, read_gpu
from mycel.topology.formats.description import Reading

__all__ = ["discover"]

_NAME = "discover"
#: Seconds beyond its own time that a rank waits for rank 0 to be done.
_PATIENCE_S = 10.0


def discover(
    launched: Launched | None, settings: Settings, *, timeout_s: float = 60.0, name: str = "cluster"
) -> Reading | None:
    """Take part in a discovery; the topology on rank 0, ``None`` on the others.

    Args:
        launched: what the launcher said; ``None`` for this machine alone, each of whose GPUs is then a rank.
        settings: for the address at which others reach us.
        timeout_s: seconds by which all ranks must have come, and again by which they must have told.
        name: of the topology.

    Raises:
        CollectiveTimeoutError: a rank did not come or did not tell in time; the message names it.
        CommunicationError: something failed on a rank; all ranks raise it.
        TopologyError: what the machines say makes no topology.

    Examples:
        On every rank, as ``torchrun`` or ``mpirun`` starts them::

            found = discover(read_launched(), read_settings())  # both of mycel.settings
            if found is not None:
                print(to_yaml(found.topology))
    """
    if launched is None:
        node = read_node()
        indices = range(len(_gpu_rows(node)))
        return cluster_of(name, {node.machine: node}, [(node.machine, index) for index in indices])
    address = own_address(launched, settings, name=_NAME)
    deadline = time.monotonic() + timeout_s
    if launched.rank != 0:
        place = rendezvous_place(launched, timeout_s, name=_NAME)
        _tell(join(place, launched.rank, launched.world_size, deadline, name=_NAME), deadline + timeout_s)
        return None
    listener = listen(launched, address, name=_NAME)
    place = (address if launched.agent_store else "127.0.0.1", listener.getsockname()[1])
    own = threading.Thread(target=_tell_quietly, args=(place, launched.world_size, deadline, timeout_s), daemon=True)
    own.start()
    hub = Hub(listener, launched.world_size, deadline, name=_NAME)
    try:
        found = _ask(hub, launched.world_size, timeout_s, name)
    except BaseException as error:
        hub.dismiss(str(error) if isinstance(error, MycelError) else f"discover: rank 0 failed: {error!r}")
        raise
    hub.dismiss()
    own.join(_PATIENCE_S)
    return found


def _gpu_rows(node: Node) -> list[str]:
    """Rows of a machine's own matrix, of which each is a GPU."""
    rows = {line.split()[0] for line in node.matrix.splitlines() if line.split() and "GPU" in line.split()[0]}
    return sorted(row for row in rows if row.removeprefix("GPU").isdecimal())


def _ask(hub: Hub, size: int, timeout_s: float, name: str) -> Reading:
    """Who is where; then what is there, once a machine."""
    who = hub.ask({rank: {"do": "where"} for rank in range(size)}, timeout_s, "asking where ranks run")
    machines: dict[str, int] = {}
    for rank in range(size):
        machines.setdefault(str(who[rank].get("machine")), rank)
    told = hub.ask({rank: {"do": "what"} for rank in machines.values()}, timeout_s, "asking what machines have")
    nodes = {machine: Node.from_json(told[rank]) for machine, rank in machines.items()}
    seats: list[Seat] = []
    counted = dict.fromkeys(machines, 0)
    for rank in range(size):
        machine, gpu = str(who[rank].get("machine")), who[rank].get("gpu")
        own = gpu if nodes[machine].matrix and isinstance(gpu, int) else counted[machine]
        counted[machine] += 1
        seats.append((machine, own))
    return cluster_of(name, nodes, seats)


def _tell_quietly(place: tuple[str, int], size: int, deadline: float, timeout_s: float) -> None:
    """Rank 0's own part, in a thread; what goes wrong there, the asking part sees and says."""
    with suppress(MycelError):
        _tell(join(place, 0, size, deadline, name=_NAME), deadline + timeout_s)


def _tell(member: Member, deadline: float) -> None:
    """Answer until told that it is over.

    Raises:
        CommunicationError: rank 0 says that it failed.
    """
    try:
        while (command := member.next(deadline + _PATIENCE_S)).get("do") != "end":
            member.answer(_where() if command.get("do") == "where" else read_node().to_json(), deadline)
        if command.get("error"):
            raise CommunicationError(str(command["error"]))
    finally:
        member.close()


def _where() -> dict[str, Any]:
    return {"machine": machine_id(), "gpu": read_gpu()}
