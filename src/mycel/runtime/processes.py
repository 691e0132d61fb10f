"""Noticing that a process of this machine has ended, whoever else still holds its connections.

A process that is killed while a child of its lives on says nothing to those it was connected with: the child keeps
the sockets open. The kernel tells of its end through a descriptor (``pidfd_open``), on the same machine.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from mycel.runtime.messages import Identity

__all__ = ["follow", "own_identity"]

_PROC = Path("/proc")


@cache
def _boot() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> int:
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _started(pid: int) -> int | None:
    """The kernel's tick at which a process began; ``None`` where there is none, or nothing is known."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])  # field 22; names may hold blanks and brackets
    except (OSError, ValueError, IndexError):
        return None


def own_identity() -> Identity | None:
    """Which process this is; ``None`` where the system does not tell."""
    started = _started(os.getpid())
    if not _boot() or started is None:
        return None
    return Identity(pid=os.getpid(), started=started, boot=_boot(), namespace=_namespace())


def follow(identity: Identity) -> int | None:
    """A descriptor that becomes readable when the process ends; -1 if it has; ``None`` where it cannot be followed.

    Args:
        identity: of a process, on this machine or another one.
    """
    if identity.boot != _boot() or identity.namespace != _namespace() or not hasattr(os, "pidfd_open"):
        return None
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return -1
    except OSError:
        return None
    if _started(identity.pid) != identity.started:  # its number has been given to another one
        os.close(descriptor)
        return -1
    return descriptor
