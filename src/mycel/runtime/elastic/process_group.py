"""The process group over a backend whose members change, from torch 2.14 on.

There torch's own ``ProcessGroup`` asks its backend for rank and size, in C++; a backend written in Python cannot
change what it said when it was made. So this one says so itself, and leaves all else to torch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed import ProcessGroup

__all__ = ["ElasticProcessGroup"]


class _Backend(Protocol):
    def rank(self) -> int: ...

    def size(self) -> int: ...


class ElasticProcessGroup(ProcessGroup):
    """Made by ``init_process_group("mycel", enable_reconfigure=True)``.

    Args:
        backend: the one that is formed anew.
    """

    def __init__(self, backend: _Backend) -> None:
        super().__init__(backend.rank(), backend.size())  # type: ignore[call-arg]  # the three-argument form throws
        self._formed = backend
        custom = ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(custom)
        self._register_backend(torch.device("cpu"), custom, backend)  # type: ignore[arg-type]  # a Backend

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """``mycel``."""
        return "mycel"

    def rank(self) -> int:
        """This process's rank in the present group."""
        return self._formed.rank()

    def size(self) -> int:
        """How many ranks the present group has."""
        return self._formed.size()

    # Names by which torch's C++ side asks for the same.
    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815
