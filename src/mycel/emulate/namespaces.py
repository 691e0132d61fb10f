"""Network namespaces without names: each is held by a file descriptor and vanishes with the process that made it.

Linux keeps a network namespace per thread. One thread of ours therefore makes the namespaces, enters them and starts
processes in them, while the rest of the program stays where it is. Nothing is registered under ``/run/netns``, so
that even after ``kill -9`` the kernel cleans up: descriptors close, the last process goes, the namespace goes, and
its ends of veth pairs take the other ends along.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mycel.errors import EmulationError

__all__ = ["CLONE_NEWNET", "CLONE_NEWUSER", "NamespaceThread", "unshare", "write_sysctl"]

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

Result = TypeVar("Result")


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces (``os.unshare`` exists from Python 3.12 on).

    Raises:
        OSError: the kernel refuses.
    """
    _system_call("unshare", flags)


def write_sysctl(name: str, value: str) -> bool:
    """Set a network parameter of the namespace that the calling thread is in.

    Args:
        name: as in ``net/ipv4/ip_forward``.
        value: the text to write.

    Returns:
        Whether the kernel has the parameter and took the value.
    """
    try:
        Path("/proc/sys", name).write_text(value, encoding="ascii")
    except OSError:
        return False
    return True


class NamespaceThread:
    """A thread that makes and enters network namespaces on behalf of the rest of the program.

    Use as a context manager; leaving it closes the namespaces. Processes started by ``run`` are children of this
    thread, so it must outlive those that asked to die with their parent.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._descriptors: list[int] = []
        self._current: int | None = None
        self._farewells: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._work, name="mycel-namespaces", daemon=True)
        self._thread.start()

    def __enter__(self) -> NamespaceThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def create(self) -> int:
        """Make a namespace; returns the descriptor that holds it.

        Raises:
            EmulationError: the kernel refuses.
        """
        return self.call(self._create)

    def run(self, namespace: int, work: Callable[[], Result]) -> Result:
        """The result of ``work()``, called by the thread inside the namespace."""

        def inside() -> Result:
            if self._current != namespace:
                _system_call("setns", namespace, CLONE_NEWNET)
                self._current = namespace
            return work()

        return self.call(inside)

    def call(self, work: Callable[[], Result]) -> Result:
        """The result of ``work()``, called by the thread in whichever namespace it is; may be nested.

        Raises:
            EmulationError: the thread has ended.
        """
        if threading.current_thread() is self._thread:
            return work()
        if not self._thread.is_alive():
            raise EmulationError("this emulated cluster is closed")
        future: Future[Result] = Future()
        self._tasks.put((work, future))
        return future.result()

    def at_end(self, work: Callable[[], object]) -> None:
        """Have the thread call ``work()`` before it ends; later registrations first."""
        self._farewells.append(work)

    def close(self) -> None:
        """End the thread and let go of the namespaces. May be called twice."""
        if self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _create(self) -> int:
        try:
            unshare(CLONE_NEWNET)
            descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EmulationError(f"cannot make a network namespace: {error.strerror}") from None
        self._descriptors.append(descriptor)
        self._current = descriptor
        return descriptor

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            work, future = task
            try:
                future.set_result(work())
            except BaseException as error:  # handed to the caller
                future.set_exception(error)
        while self._farewells:
            self._farewells.pop()()


def _system_call(name: str, *arguments: int) -> None:
    if sys.platform != "linux":
        raise OSError(f"{name} exists on Linux only")
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
