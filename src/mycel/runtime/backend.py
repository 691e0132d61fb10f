"""How torch from 2.14 on takes mycel: as a backend, under a process group of torch's own.

Every collective comes through torch's dispatcher there, so that modes, traces, profiles and tensors of every kind are
torch's affair. Before 2.14 torch's C++ side knows no backends written in Python; this one then only stands for the
group where Python code asks a process group for its backend.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

from mycel.errors import UsageError
from mycel.runtime.arena import arena, empty
from mycel.runtime.called_by_python import route
from mycel.runtime.communicator import Communicator
from mycel.runtime.elastic.reconfigurable import Reconfigurable, nothing
from mycel.runtime.tensor_group import COLLECTIVES, TensorGroup
from mycel.untraced import untraced

__all__ = ["MycelBackend", "is_called_by_torch"]


def is_called_by_torch() -> bool:
    """Whether this torch calls backends that are written in Python: from 2.14 on."""
    return hasattr(Backend, "supports_reconfigure")


_Options: Any = Backend.Options
_Base: Any = Backend if is_called_by_torch() else object


class MycelBackend(Reconfigurable, _Base):  # type: ignore[misc]
    """A group of mycel's under torch's ``ProcessGroup``.

    Args:
        group: what it shows to torch.
        name: of the process group, as torch gives it.
        is_elastic: its members may change; see ``mycel.runtime.elastic``.
    """

    def __init__(self, group: TensorGroup, name: str = "", *, is_elastic: bool = False) -> None:
        if is_called_by_torch():
            super().__init__(group.rank(), group.size())
            route()
        self.tensor_group = group
        self._options = _Options("mycel", group.timeout)
        self._options.group_name = name
        self._is_shut_down = False
        self._is_elastic = is_elastic or not is_called_by_torch()

    def rank(self) -> int:
        """This process's rank in the group."""
        return self.tensor_group.rank()

    def size(self) -> int:
        """How many ranks the group has."""
        return self.tensor_group.size()

    def name(self) -> str:
        """``mycel``."""
        return "mycel"

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """``mycel``."""
        return "mycel"

    @property
    def options(self) -> Any:
        """Torch's description of a backend: its name and time-out."""
        return self._options

    @property
    def communicator(self) -> Communicator | None:
        """The group's communicator; ``None`` in a group of one rank."""
        return self.tensor_group.communicator

    # Torch 2.15 reads these of a backend's class; one that is not there would ask itself without end.
    supports_splitting = property(lambda self: False)
    supports_coalescing = property(lambda self: False)
    supports_time_estimate = property(lambda self: False)
    supports_shrinking = property(lambda self: is_called_by_torch())
    supports_reconfigure = property(lambda self: self._is_elastic)
    supports_abort_hooks = property(lambda self: False)
    supports_window = property(lambda self: False)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether torch may ask for buffers here, as FSDP2 does when it is told to: it may, of CPU memory."""
        return torch.device(device).type == "cpu" and arena() is not None

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A vector in memory that the ranks of a node share: see ``mycel.empty``."""
        if not self.supports_tensor_alloc(device):
            raise UsageError(f"tensors on {device} are not allocated here")
        return empty(size, dtype=dtype)

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: collectives are counted from the first, and the count is compared in each."""

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were called here."""
        return self.tensor_group.number

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time-out of later collectives."""
        self._options._timeout = timeout
        self.tensor_group.set_timeout(timeout)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; rank 0 names those that do not come. The group stays usable either way."""
        timeout = opts if isinstance(opts, timedelta) else opts.timeout
        self.tensor_group.monitored_barrier(timeout if timeout > timedelta(0) else None, wait_all_ranks)

    @property
    def is_shut_down(self) -> bool:
        """Whether the group has been left, or failed on purpose."""
        return self._is_shut_down

    def shutdown(self) -> None:
        """Finish what is under way, tell the others goodbye and close all connections."""
        self._is_shut_down = True
        self.tensor_group.shutdown()
        self._close_formation()

    @property
    def is_elastic(self) -> bool:
        """Whether the group behind this object can be another one."""
        return self._is_elastic

    def reconfigure(self, opts: Any, leave_others: Callable[[], None] = nothing) -> Any:
        """Form the group anew of other members; see ``mycel.elastic.reconfigure``."""
        if not self._is_elastic:
            raise UsageError("this group's members cannot change; make it with enable_reconfigure=True")
        return super().reconfigure(opts, leave_others)

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> MycelBackend:
        """The group without some ranks, for ``torch.distributed.shrink_group``; this one has no members then."""
        made = MycelBackend(self.without(ranks_to_exclude, abort=bool(shrink_flags & 1)), self._options.group_name)
        made._formation, self._formation = self._formation, None
        return made

    def _show(self, group: TensorGroup) -> None:
        super()._show(group)
        self._is_shut_down = False

    def abort(self) -> None:
        """Fail what is under way on every rank."""
        self._is_shut_down = True
        self.tensor_group.abort()


def _passed_on(name: str) -> Callable[..., Any]:
    def collective(self: MycelBackend, *arguments: Any, **named: Any) -> Any:
        return getattr(self.tensor_group, name)(*arguments, **named)

    collective.__name__ = name
    collective.__doc__ = getattr(TensorGroup, name).__doc__
    return collective


for _name, _others in COLLECTIVES.items():
    for _spelling in (_name, *_others):
        setattr(MycelBackend, _spelling, _passed_on(_name))
untraced(MycelBackend)
