"""A probe from start to end on one rank: finding rank 0, taking part, and on rank 0 leading."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mycel.errors import MycelError, UsageError
from mycel.probe.agent import Agent
from mycel.probe.control import Hub, join
from mycel.probe.found import Found
from mycel.probe.meeting import listen, own_address, rendezvous_place
from mycel.probe.survey import Limits, Survey
from mycel.settings import Launched, Settings

__all__ = ["probe"]

#: Seconds beyond its own time that a probe may take on a rank that hears nothing more.
_PATIENCE_S = 40.0


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
    address = own_address(launched, settings)
    began = time.monotonic()
    last = began + limits.join_s + limits.seconds + _PATIENCE_S
    agent = Agent(launched.rank, address)
    if launched.rank != 0:
        try:
            member = join(
                rendezvous_place(launched, limits.join_s), launched.rank, launched.world_size, began + limits.join_s
            )
        except BaseException:
            agent.close()
            raise
        agent.serve(member, last)
        return None
    try:
        listener = listen(launched, address)
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
