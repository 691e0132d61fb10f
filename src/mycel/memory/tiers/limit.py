"""A limit on near memory that the allocator of a processor enforces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mycel.errors import UsageError
from mycel.planning.residency import load_loops

__all__ = ["allocator_limit"]

_STATUS = Path("/proc/self/status")


@contextmanager
def allocator_limit(num_bytes: int) -> Iterator[None]:
    """Let this process allocate so much more, and not a page beyond; torch raises ``RuntimeError`` there.

    What ``fit`` and plans need of libraries, once, is loaded before, and does not count. What is freed counts back.
    Buffers of ``FarMemory`` in the host or in files are mapped as shared and do not count.
    Threads that start inside need a stack each, 8 MiB, which counts.

    Args:
        num_bytes: beyond what is allocated now.

    Raises:
        UsageError: a negative size, or a system that does not say what is allocated (other than Linux).

    Examples:
        >>> import torch
        >>> with allocator_limit(50 << 20):
        ...     try:
        ...         torch.empty(100 << 20, dtype=torch.uint8)
        ...     except RuntimeError:
        ...         print("too much")
        too much
    """
    if num_bytes < 0:
        raise UsageError(f"a limit of {num_bytes} bytes: at least 0")
    load_loops()
    try:
        import resource

        found = re.search(r"^VmData:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    except (ImportError, OSError) as error:
        raise UsageError(f"a limit on what the allocator gives needs Linux: {error}") from None
    if found is None:
        raise UsageError(f"a limit on what the allocator gives: {_STATUS} has no VmData")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(found.group(1)) * 1024 + num_bytes
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
