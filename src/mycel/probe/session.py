"""A probe from start to end on one rank: finding rank 0, taking part, and on rank 0 leading."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mycel.errors import CommunicationError, MycelError, UsageError
from mycel.probe.agent import Agent
from mycel.probe.control import Hub, join
from mycel.probe.found import Found
from mycel.probe.survey import Limits, Survey
from mycel.settings import Launched, Settings
from mycel.topology.addresses import own_ip, route_to

__all__ = ["probe"]

#: Seconds beyond its own time that a probe may take on a rank that hears nothing more.
_PATIENCE_S = 40.0
#: Seconds that torchrun's store has for an answer to rank 0.
_STORE_S = 60.0


def probe(
    launched: Launched,
    settings: Settings,
    limits: Limits,
    *,
    name: str = "found",
    progress: Callable[[str], None] = lambda text: None,
) -> Found | None:
    """Take part in a probe; the result on rank 0, ``None`` on the others.

    Args:
        launched: what the launcher said: who we are, and where rank 0 is.
        settings: for the address at which others reach us.
        limits: the same on all ranks.
        name: of the topology.
        progress: told what is being done, on rank 0.

    Returns:
        What was found, on rank 0; ``None`` on the others.

    Raises:
        CollectiveTimeoutError: a rank did not come or did not answer in time; the message names it.
        PeerLostError: a rank has gone in the middle.
        CommunicationError: something failed on a rank; all ranks raise it.
        UsageError: fewer than two ranks.

    Examples:
        On every rank, as ``torchrun`` or ``mpirun`` starts them::

            found = probe(read_launched(), read_settings(), Limits(seconds=30))  # both of mycel.settings
            if found is not None:
                Path("found.yaml").write_text(found_yaml(found))
    """
    if launched.world_size < 2:
        raise UsageError("probe: needs at least 2 ranks; start it with torchrun, mpirun or mycel emulate")
    address = _own_address(launched, settings)
    began = time.monotonic()
    last = began + limits.join_s + limits.seconds + _PATIENCE_S
    agent = Agent(launched.rank, address)
    if launched.rank != 0:
        try:
            member = join(
                _rendezvous_place(launched, limits.join_s), launched.rank, launched.world_size, began + limits.join_s
            )
        except BaseException:
            agent.close()
            raise
        agent.serve(member, last)
        return None
    try:
        listener = _listen(launched, address)
    except BaseException:
        agent.close()
        raise
    place = (address if launched.agent_store else "127.0.0.1", listener.getsockname()[1])
    own = threading.Thread(target=_serve, args=(agent, place, launched.world_size, last), daemon=True)
    own.start()
    hub = Hub(listener, launched.world_size, began + limits.join_s)
    try:
        found = Survey(hub, launched.world_size, limits, progress).run(name)
    except BaseException as error:
        hub.dismiss(str(error) if isinstance(error, MycelError) else f"probe: rank 0 failed: {error!r}")
        raise
    hub.dismiss()
    own.join(_PATIENCE_S)
    return found


def _serve(agent: Agent, place: tuple[str, int], size: int, last: float) -> None:
    """Rank 0's own part, in a thread; what goes wrong there, the leading part sees and says."""
    with suppress(MycelError):
        agent.serve(join(place, 0, size, last), last)


def _own_address(launched: Launched, settings: Settings) -> str:
    try:
        return own_ip(settings, launched.rank) or route_to(launched.master_address)
    except OSError as error:
        raise UsageError(
            f"probe: no route to MASTER_ADDR={launched.master_address!r}: {error.strerror or error}"
        ) from None


def _listen(launched: Launched, address: str) -> socket.socket:
    """Where ranks come to: the master's port, or, where torchrun's store has it, any, said in that store."""
    try:
        if not launched.agent_store:
            return socket.create_server(("", launched.master_port), backlog=launched.world_size)
        listener = socket.create_server(("", 0), backlog=launched.world_size)
    except OSError as error:
        raise UsageError(
            f"probe: rank 0 cannot listen on port {launched.master_port}: {error.strerror}; set another MASTER_PORT"
        ) from None
    try:
        _store(launched, _STORE_S).set(_store_key(launched), f"{address} {listener.getsockname()[1]}")
    except RuntimeError as error:
        listener.close()
        raise _no_store(launched, error) from None
    return listener


def _rendezvous_place(launched: Launched, timeout_s: float) -> tuple[str, int]:
    if not launched.agent_store:
        return launched.master_address, launched.master_port
    try:
        address, port = _store(launched, timeout_s).get(_store_key(launched)).decode().split()
    except RuntimeError as error:
        raise _no_store(launched, error) from None
    return address, int(port)


def _no_store(launched: Launched, error: RuntimeError) -> CommunicationError:
    return CommunicationError(
        f"probe: rank {launched.rank} cannot use torchrun's store at {launched.master_address}:"
        f"{launched.master_port} to find rank 0: {str(error).splitlines()[0]}"
    )


def _store(launched: Launched, timeout_s: float) -> Any:
    """A client of the store that torchrun's agent holds."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        launched.master_address,
        launched.master_port,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def _store_key(launched: Launched) -> str:
    """Differs after a restart, so that nobody goes to where the first attempt listened."""
    return f"mycel/probe/{launched.restarts}"
