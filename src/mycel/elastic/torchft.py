"""A process group for torchft's Manager: its lighthouse decides who is in, this group moves the bytes."""

from __future__ import annotations

import functools
import secrets
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mycel.errors import UsageError
from mycel.extras import needs
from mycel.runtime.registration import over_tensor_group
from mycel.runtime.tensor_group import TensorGroup, tensor_group
from mycel.settings import read_settings
from mycel.topology.load import load_topology

__all__ = ["torchft_process_group"]


def torchft_process_group(timeout: timedelta = timedelta(seconds=60)) -> Any:
    """A ``torchft.process_group.ProcessGroup`` for ``torchft.Manager``, in place of torchft's own for Gloo.

    The Manager makes it anew for every quorum, over schedules for the fabric between the replicas that are there.
    With ``MYCEL_TOPOLOGY`` a rank's place in the fabric is what torchft calls its global rank: the number at the end
    of its ``replica_id`` times the ranks of a replica, plus its rank in the replica.

    Args:
        timeout: for meeting the other replicas, and of every collective.

    Raises:
        UsageError: torchft is not installed.

    Examples:
        In every replica::

            manager = torchft.Manager(pg=torchft_process_group(timedelta(seconds=30)), ...)
            model = torchft.DistributedDataParallel(manager, model)
    """
    needs("torchft_process_group", "torchft")
    return _process_group_class()(timeout)


@functools.cache
def _process_group_class() -> Any:
    """The class, made when torchft is first needed: importing it takes a second."""
    from torchft.process_group import ProcessGroupWrapper

    class TorchFTProcessGroup(ProcessGroupWrapper):  # type: ignore[misc]  # torchft ships no types
        """Backend ``mycel``, made anew for every quorum."""

        def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
            places, num_places = _places(list(self._global_ranks or ()), world_size, str(self._replica_id))
            name = f"torchft-{self._quorum_id}-{self._group_rank}"
            # In the next quorum the same rank may be another replica, which is not lost because this one was.
            known_as = [secrets.randbits(64) for _ in range(world_size)]
            group = TensorGroup(store, rank, world_size, self._timeout, places, num_places, name, None, known_as)
            return over_tensor_group(group, store, name)

        def abort(self, errored: bool = True) -> None:
            """Fail what is under way and close all connections."""
            group = self._pg
            super().abort(errored)
            _close(group)

        def shutdown(self) -> None:
            """Close all connections."""
            group = self._pg
            super().shutdown()
            _close(group)

        def errored(self) -> Exception | None:
            """What the group has failed with, so that the Manager discards the step and forms it anew."""
            communicator = None if self._pg is None else tensor_group(self._pg).communicator
            return None if communicator is None else communicator.cause

        def set_timeout(self, timeout: timedelta) -> None:
            """Set the time-out of later collectives, and for meeting the other replicas."""
            super().set_timeout(timeout)
            if self._pg is not None:
                tensor_group(self._pg).set_timeout(timeout)

        def getBackendName(self) -> str:  # noqa: N802 (torch's name)
            """``mycel``."""
            return "mycel"

    return TorchFTProcessGroup


def _close(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        tensor_group(group).shutdown()


def _places(given: list[int], size: int, replica: str) -> tuple[list[int], int]:
    """The members' ranks in the described fabric, and how many it has; without one, their ranks in the group."""
    topology = read_settings().topology
    if topology is None:
        return list(range(size)), size
    num_places = load_topology(topology).num_ranks
    if len(set(given)) != size or len(given) != size or not all(0 <= place < num_places for place in given):
        raise UsageError(
            f"{topology} describes {num_places} ranks, and the replicas' ids ({replica!r} here) place this group's "
            f"{size} ranks at {given}; end each replica_id with the replica's number, or unset MYCEL_TOPOLOGY"
        )
    return given, num_places
