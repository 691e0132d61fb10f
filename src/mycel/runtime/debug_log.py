"""``MYCEL_DEBUG=info``: what the backend does, on standard error, as ``NCCL_DEBUG`` has it for NCCL."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from functools import cache

from mycel.runtime.transport.address import Address
from mycel.settings import misspelled_variables
from mycel.topology.model import Topology

__all__ = ["say_group", "show_log", "warn_of_slips"]

_log = logging.getLogger(__name__)


class _ToStandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Ours, to be found again: groups come and go, the line is written once."""


def show_log(level: str | None, rank: int) -> None:
    """Write the log of the backend to standard error, from a level on; nothing where no level is asked for.

    Args:
        level: ``info`` or ``warning``.
        rank: of this process in the job, said in every line.
    """
    if level is None:
        return
    logger = logging.getLogger("mycel.runtime")
    for handler in [h for h in logger.handlers if isinstance(h, _ToStandardError)]:
        logger.removeHandler(handler)
    handler = _ToStandardError(sys.stderr)
    handler.setFormatter(logging.Formatter(f"mycel: rank {rank}: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


@cache
def warn_of_slips() -> None:
    """Say once which variables are nearly one of ours: a slip there would change nothing without a word."""
    if strange := misspelled_variables():
        warnings.warn(f"mycel reads no variable {', '.join(strange)}", RuntimeWarning, stacklevel=2)


def say_group(name: str, rank: int, addresses: Sequence[Address], topology: Topology, *, described: bool) -> None:
    """Which fabric a group has, and where this rank is reached.

    Args:
        name: of the group.
        rank: of this process in it.
        addresses: of all its ranks.
        topology: between them.
        described: a topology was given, not assumed.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    own = addresses[rank]
    source = (
        "MYCEL_TOPOLOGY" if described else "assumed from the hosts of the ranks; MYCEL_TOPOLOGY describes another"
    )
    _log.info("group %r: rank %d of %d, at %s port %d of %s", name, rank, len(addresses), own.ip, own.port, own.name)
    if rank == 0:
        hosts = len({address.host for address in addresses})
        _log.info(
            "group %r: fabric %s (%s): %d ranks on %d host%s, %d switches, %d links",
            *(name, topology.name, source, topology.num_ranks, hosts, "" if hosts == 1 else "s"),
            *(len(topology.switches), len(topology.links)),
        )
