"""Programs as processes of their own that need not import torch: children of the launcher, and then of who asked.

What such a process has is what a fresh one would have: a session, a folder, an environment, output, a network
namespace and a table of hosts of its own, a ``__main__`` with nothing in it but the program, and its own end. What
reads the environment while it is imported has read the launcher's: who asks sees to it that this makes no difference
(``warm.py``).
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import runpy
import signal
import sys
import time
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

__all__ = ["Become", "Program", "fork_program"]

#: Seconds until the one who asked has become the parent.
ADOPTION_S = 10.0
_SET_DEATH_SIGNAL = 1
_NEW_NETWORK, _NEW_MOUNTS, _BIND, _SLAVE = 0x40000000, 0x20000, 0x1000, 0x84000


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a process is to become.

    Attributes:
        program: a file of Python, or the name of a module.
        arguments: behind it.
        environment: the whole of it.
        folder: where it runs.
        output, errors: what it writes to, as places of ``/proc``.
        network: the namespace, likewise.
        hosts: what it finds as ``/etc/hosts``; empty: what there is.
        quiet: it shows no warnings (``-W ignore``).
        parent: process that waits for it.
    """

    program: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    output: str
    errors: str
    network: str
    hosts: str
    quiet: bool
    parent: int

    def opened(self) -> tuple[int, int, int, int]:
        """What it reads and writes, and the namespace; whoever asks keeps its own ends until this is done."""
        places = ((os.devnull, os.O_RDONLY), (self.output, os.O_WRONLY), (self.errors, os.O_WRONLY))
        reads, writes, complains = (os.open(place, how) for place, how in places)
        return reads, writes, complains, os.open(self.network, os.O_RDONLY)

    def prepare(self, opened: tuple[int, int, int, int]) -> None:
        """Be a process of one's own, before anything of the program runs."""
        until = time.monotonic() + ADOPTION_S
        while os.getppid() != self.parent:
            if time.monotonic() > until:
                os._exit(1)
            time.sleep(0.001)
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != self.parent:
            os._exit(1)
        os.setsid()
        *streams, network = opened
        if library.setns(network, _NEW_NETWORK) != 0 and not _is_here(network):
            os._exit(1)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(3, 4096)
        has_own_mounts = bool(self.hosts) and library.unshare(_NEW_MOUNTS) == 0
        if has_own_mounts and library.mount(None, b"/", None, _SLAVE, None) == 0:
            library.mount(self.hosts.encode(), b"/etc/hosts", None, _BIND, None)
        os.chdir(self.folder)

    def run(self) -> None:
        """Run it as ``__main__``; returns or raises as it does."""
        os.environ.clear()
        os.environ.update(self.environment)
        sys.stdin = open(0)  # noqa: SIM115 (for as long as the process)
        sys.path[0] = str(Path(self.program).parent)
        sys.argv[:] = [self.program, *self.arguments]
        if self.quiet:
            warnings.resetwarnings()
            warnings.simplefilter("ignore")
        random.seed()
        np.random.seed()
        if not self.program.endswith(".py"):
            sys.path[0] = self.folder
            runpy.run_module(self.program, run_name="__main__", alter_sys=True)
            return
        main: Any = types.ModuleType("__main__")
        main.__file__ = self.program
        sys.modules["__main__"] = main
        exec(compile(Path(self.program).read_text(encoding="utf-8"), self.program, "exec"), main.__dict__)


class Become(BaseException):
    """Raised in a forked process, to be caught where nothing of the launcher's is left to do."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.program)
        self.program = program


def _is_here(network: int) -> bool:
    """Whether a namespace is this process's own, which it may lack the right to enter."""
    return os.path.samestat(os.fstat(network), Path("/proc/self/ns/net").stat())


def fork_program(request: dict[str, Any]) -> dict[str, Any]:
    """Have a program run in a child whose parent is, as soon as this returns, the process that asks for it.

    The child is a grandchild here, whose parent ends: the kernel gives it to the nearest ancestor that has said that
    it takes such children.

    Returns:
        Its number, and whether it has that parent; it is killed if not.

    Raises:
        Become: in the child.
    """
    program = Program(**request)
    gc.freeze()
    read, write = os.pipe()
    opened = program.opened()
    between = os.fork()
    if between == 0:
        _between(program, opened, read, write)
    for descriptor in (write, *opened):
        os.close(descriptor)
    with os.fdopen(read, "rb") as pipe:
        pid = int(pipe.read())
    os.waitpid(between, 0)
    is_adopted = _parent_of(pid) == program.parent
    if not is_adopted:
        os.kill(pid, signal.SIGKILL)
    return {"pid": pid, "adopted": is_adopted}


def _between(program: Program, opened: tuple[int, int, int, int], read: int, write: int) -> NoReturn:
    os.close(read)
    pid = os.fork()
    if pid:
        os.write(write, str(pid).encode())
        os._exit(0)
    gc.unfreeze()
    program.prepare(opened)
    raise Become(program)


def _parent_of(pid: int) -> int:
    """0 where the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return 0
