"""How ranks find rank 0: the port that the launcher names, or one said in torchrun's store."""

from __future__ import annotations

import socket
from typing import Any

from mycel.errors import CommunicationError, UsageError
from mycel.settings import Launched, Settings
from mycel.topology.addresses import own_ip, route_to

__all__ = ["listen", "own_address", "rendezvous_place"]

#: Seconds that torchrun's store has for an answer to rank 0.
_STORE_S = 60.0


def own_address(launched: Launched, settings: Settings, *, name: str = "probe") -> str:
    """The address at which others reach this rank.

    Args:
        launched: what the launcher said.
        settings: what the environment asks for.
        name: of what is done, for messages.

    Raises:
        UsageError: there is no route to where rank 0 is.
    """
    try:
        return own_ip(settings, launched.rank) or route_to(launched.master_address)
    except OSError as error:
        raise UsageError(
            f"{name}: no route to MASTER_ADDR={launched.master_address!r}: {error.strerror or error}"
        ) from None


def listen(launched: Launched, address: str, *, name: str = "probe") -> socket.socket:
    """Where ranks come to: the master's port, or, where torchrun's store has it, any, said in that store.

    Args:
        launched: what the launcher said.
        address: at which others reach this rank, which is rank 0.
        name: of what is done, for messages and in the store.

    Raises:
        UsageError: the port is taken.
        CommunicationError: torchrun's store does not answer.
    """
    try:
        if not launched.agent_store:
            return socket.create_server(("", launched.master_port), backlog=launched.world_size)
        listener = socket.create_server(("", 0), backlog=launched.world_size)
    except OSError as error:
        raise UsageError(
            f"{name}: rank 0 cannot listen on port {launched.master_port}: {error.strerror}; set another MASTER_PORT"
        ) from None
    try:
        _store(launched, _STORE_S).set(_store_key(launched, name), f"{address} {listener.getsockname()[1]}")
    except RuntimeError as error:
        listener.close()
        raise _no_store(launched, error, name) from None
    return listener


def rendezvous_place(launched: Launched, timeout_s: float, *, name: str = "probe") -> tuple[str, int]:
    """Where rank 0 listens.

    Args:
        launched: what the launcher said.
        timeout_s: seconds that torchrun's store has for an answer.
        name: of what is done, for messages and in the store.

    Raises:
        CommunicationError: torchrun's store does not say.
    """
    if not launched.agent_store:
        return launched.master_address, launched.master_port
    try:
        address, port = _store(launched, timeout_s).get(_store_key(launched, name)).decode().split()
    except RuntimeError as error:
        raise _no_store(launched, error, name) from None
    return address, int(port)


def _no_store(launched: Launched, error: RuntimeError, name: str) -> CommunicationError:
    return CommunicationError(
        f"{name}: rank {launched.rank} cannot use torchrun's store at {launched.master_address}:"
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


def _store_key(launched: Launched, name: str) -> str:
    """Differs after a restart, so that nobody goes to where the first attempt listened."""
    return f"mycel/{name}/{launched.restarts}"
