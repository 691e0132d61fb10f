"""A thread for combiners that need several exchanges one after the other."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

from mycel.comm.bundle import Bundle
from mycel.comm.pending import Pending
from mycel.runtime.ending import at_work

__all__ = ["InBackground"]

_Job = tuple[Callable[[], None], "Future[None]"]


class InBackground:
    """Runs jobs one after the other, in the order in which they were given, on a thread that starts with the first.

    All ranks give their jobs in the same order, so that the messages of different jobs never meet. On a GPU the jobs
    have a stream of their own: what the device computes meanwhile does not wait for them.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, job: Callable[[], None], bundle: Bundle) -> Pending[None]:
        """Have the job done.

        Args:
            job: works on the bundle.
            bundle: what the caller will read when the job is finished.

        Returns:
            The job, which raises what it raised. Its deadlines are those of the groups that it uses.
        """
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_run, args=(self._jobs,), name="mycel-combine", daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)
        done: Future[None] = Future()
        device = bundle.flat.device
        if device.type != "cuda":
            self._jobs.put((job, done))
            return Pending(done.result)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))

        def on_stream() -> None:
            with torch.cuda.stream(stream):
                job()

        def finish() -> None:
            done.result()
            torch.cuda.current_stream(device).wait_stream(stream)

        self._jobs.put((on_stream, done))
        return Pending(finish)


def _run(jobs: queue.SimpleQueue[_Job | None]) -> None:
    with torch.no_grad():
        while (entry := jobs.get()) is not None:
            job, done = entry
            with at_work:
                try:
                    job()
                except BaseException as error:  # raised where the result is awaited
                    done.set_exception(error)
                else:
                    done.set_result(None)
                del job, done, entry
