"""How torch before 2.14 takes mycel: as a subclass of its process group, since no backend can be written in Python.

The methods are called directly, past torch's dispatcher, which costs a tenth of what it costs through it. Where
somebody is looking (a mode, a trace, a profiler), or where a tensor is more than memory (fake, meta, made of others),
the call goes through the dispatcher as with torch's own backends, and comes out beneath it in the same group: see
``mycel.runtime.dispatched``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from mycel.runtime.backend import MycelBackend
from mycel.runtime.communicator import Communicator
from mycel.runtime.dispatched import is_for_dispatcher, is_plain, remembered, route
from mycel.runtime.tensor_group import COLLECTIVES, TensorGroup
from mycel.runtime.work import know_over
from mycel.untraced import untraced

__all__ = ["MycelProcessGroup"]

#: Whose calls are a program's own: the functions of ``torch.distributed``.
_CALLER = distributed_c10d.__file__


class MycelProcessGroup(ProcessGroup):
    """A process group; made by ``torch.distributed.init_process_group("mycel")`` and ``new_group``.

    Args:
        group: what it shows to torch.
        name: of the process group, as torch gives it.
    """

    def __init__(self, group: TensorGroup, name: str = "") -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # the three-argument form throws
        self._backend = MycelBackend(group, name)
        self._name, self._description = name, ""
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        if group.devices is not None:
            # The group is a whole process group, and replaces what torch would have made for other devices.
            nccl = ProcessGroup.BackendType.NCCL
            self._register_backend(torch.device("cuda"), nccl, group.devices.backend)
        route()

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """``mycel``."""
        return "mycel"

    @property
    def tensor_group(self) -> TensorGroup:
        """The present group; ``reconfigure`` puts another one in its place."""
        return self._backend.tensor_group

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._backend.tensor_group.rank()

    def size(self) -> int:
        """How many ranks the group has."""
        return self._backend.tensor_group.size()

    # Names by which torch's C++ side asks for the same.
    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group can be formed anew of other members: it can."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Where this process is found by those who form a group with it."""
        return self._backend.get_reconfigure_handle()

    def reconfigure(self, opts: Any) -> Any:
        """Form the group anew of other members; see ``mycel.elastic.reconfigure``."""
        return self._backend.reconfigure(opts)

    # No backend is registered for CPUs, since none can be: what reaches torch's C++ side past the routes is refused.
    # Torch keeps a group's name and description in its backends.

    def getGroupName(self) -> str:  # noqa: N802 (torch's name)
        """What torch calls the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Let torch name the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What whoever made it says the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Let torch say what the group is for."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([] if self.tensor_group.devices is None else [torch.device("cuda")])]

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend if device.type == "cpu" else super()._get_backend(device)

    @property
    def communicator(self) -> Communicator | None:
        """The group's communicator; ``None`` in a group of one rank."""
        return self.tensor_group.communicator

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: collectives are counted from the first, and the count is compared in each."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives have been called so far; 0 in a group of one rank."""
        return self.tensor_group.number

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time-out of later collectives."""
        self._backend.set_timeout(timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; rank 0 names those that do not come. The group stays usable either way."""
        self.tensor_group.monitored_barrier(timeout, wait_all_ranks)

    def shutdown(self) -> None:
        """Finish what is under way, tell the others goodbye and close all connections."""
        self._backend.shutdown()

    def abort(self) -> None:
        """Fail what is under way on every rank."""
        self._backend.abort()


def _passed_on(name: str, spelling: str) -> Callable[..., Any]:
    base = getattr(ProcessGroup, spelling)

    is_all_reduce = name == "allreduce"

    def collective(self: MycelProcessGroup, *arguments: Any, **named: Any) -> Any:
        # To make a work takes as long as a small call, and ``dist.all_reduce`` needs none of a blocking one.
        if (
            is_all_reduce
            and len(arguments) == 2
            and is_plain(arguments[0])
            and sys._getframe(1).f_code.co_filename == _CALLER
        ):
            group = self._backend.tensor_group
            if group.has_reduced_again(*arguments):
                know_over(group.communicator)
                return None
        if is_for_dispatcher(arguments):
            with remembered((*arguments, *named.values())):
                return base(self, *arguments, **named)
        return getattr(self.tensor_group, name)(*arguments, **named)

    # Called from a method of the base class's name with the object itself, the base class does not call us again.
    collective.__code__ = collective.__code__.replace(co_name=spelling)
    collective.__name__ = spelling
    collective.__doc__ = getattr(TensorGroup, name).__doc__
    return collective


def _spellings(name: str) -> list[str]:
    """The names under which this torch calls a method.

    Where its C++ side asks for the newer name and then for the older one, only the newer may be there.
    """
    known = [spelling for spelling in (name, *COLLECTIVES[name]) if hasattr(ProcessGroup, spelling)]
    return known if name in ("all_gather_single", "reduce_scatter_single") else known[:1]


for _name in COLLECTIVES:
    for _spelling in _spellings(_name):
        setattr(MycelProcessGroup, _spelling, _passed_on(_name, _spelling))
untraced(MycelProcessGroup)
