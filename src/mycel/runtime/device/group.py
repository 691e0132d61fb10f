"""A process group's side for devices: NCCL as the transport, an engine a device, and what is left to NCCL itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.runtime.calls import Call
from mycel.runtime.communicator import Communicator
from mycel.runtime.device.choice import choose_for_steps, with_classics
from mycel.runtime.device.engine import DeviceEngine
from mycel.runtime.device.lane import lane_of
from mycel.runtime.device.steps import Prepared
from mycel.runtime.device.transport import BackendTransport
from mycel.runtime.device.work import DeviceWork
from mycel.runtime.planner import Planner

__all__ = ["DeviceGroup", "make_nccl"]


def make_nccl(store: Store, rank: int, size: int, timeout: timedelta, members: Sequence[int], name: str) -> Any:
    """An NCCL backend, which connects at its first use; ``None`` where torch has no NCCL or sees no GPU.

    Args:
        store: the group's own key-value store.
        rank, size: in the group.
        timeout: after which NCCL's watchdog gives up on an operation.
        members: the group's global ranks.
        name: of the group, for NCCL's logs.
    """
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    nccl: Any = dist.ProcessGroupNCCL  # absent from builds without NCCL
    options = nccl.Options()
    options.is_high_priority_stream = False
    options._timeout = timeout
    options.global_ranks_in_group = list(members)
    options.group_name = name
    backend = nccl(PrefixStore("nccl/", store), rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


class DeviceGroup:
    """Runs collectives of tensors on devices over schedules, where that is likely to pay.

    Args:
        backend: of torch's; its sends and receives carry the bytes.
        communicator: whose schedules are run; ``None`` in a group of one rank.
        described: whether somebody has said what the fabric looks like. Of a fabric that is merely assumed, NCCL
            knows more than we do.
        least_bytes: calls whose largest tensor is smaller are the backend's own.
        piece_bytes: a piece size to use instead of the model's.
    """

    def __init__(
        self,
        backend: Any,
        communicator: Communicator | None,
        *,
        described: bool,
        least_bytes: int,
        piece_bytes: int | None = None,
    ) -> None:
        self.backend = backend
        self._communicator = communicator if described else None
        self._least_bytes = least_bytes
        self._piece_bytes = piece_bytes
        self._engines: dict[torch.device, DeviceEngine] = {}

    def takes(self, tensors: Sequence[torch.Tensor], *, exchange: bool) -> bool:
        """Whether a call runs over schedules. All ranks come to the same answer.

        Args:
            tensors: of the call. The largest has the same size on every rank in all but an exchange.
            exchange: an all_to_all whose parts may differ in length. Where ranks send their parts themselves, the
                backend does the same.
        """
        if self._communicator is None or any(t.layout != torch.strided for t in tensors):
            return False
        if len({t.device for t in tensors}) != 1:
            return False
        if exchange:
            return not self._communicator.exchanges_directly
        return max(t.numel() * t.element_size() for t in tensors) >= self._least_bytes

    def start(
        self, call: Call, device: torch.device, result: list[torch.Tensor], settle: Callable[[], None] | None
    ) -> DeviceWork:
        """Queue a collective; see ``DeviceEngine.start``."""
        return self.engine(device).start(call, result, settle)

    def engine(self, device: torch.device) -> DeviceEngine:
        """The engine of a device; made at first use, when every rank must come here."""
        if device not in self._engines:
            if device.type != "cpu":
                # NCCL connects all ranks of a group at its first operation. Made here, where every rank is, that
                # does not depend on which ranks have something to do in the first step.
                self.backend.eager_connect_single_device(device)
            self._engines[device] = DeviceEngine(
                size=self._with_schedules().size,
                planner=self.planner,
                transport=BackendTransport(self.backend),
                lane=lane_of(device),
            )
        return self._engines[device]

    @cached_property
    def planner(self) -> Planner[Prepared]:
        """Chooses between the communicator's schedules and the classics, by the time of steps."""
        choose = partial(choose_for_steps, piece_bytes=self._piece_bytes)
        communicator = self._with_schedules()
        return Planner(communicator.rank, self._make_schedules, choose, communicator.proofs.require)

    def close(self) -> None:
        """Forget what was prepared."""
        if "planner" in self.__dict__:
            self.planner.forget()

    def _make_schedules(self, name: CollectiveName, root: int | None) -> Mapping[str, Schedule]:
        communicator = self._with_schedules()
        ours = communicator.planner.schedules(name, root)
        collective = Collective(name=name, num_ranks=communicator.size, root=root)
        return with_classics(ours, communicator.topology, collective)

    def _with_schedules(self) -> Communicator:
        if self._communicator is None:
            raise RuntimeError("no schedules are run on devices in this group")
        return self._communicator
