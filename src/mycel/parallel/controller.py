"""One process that holds the orders of several jobs and hands them to the ranks of one cluster, as Pathways does.

A *gang* is a step of a job on all of the job's ranks. The controller numbers gangs in one sequence, and every rank
carries out those it takes part in by that sequence: two jobs on the same ranks never have their messages and
collectives in opposite sequence on two of them, which is the only way in which jobs that are right by themselves can
wait for each other for ever. Gangs on different ranks run at the same time.

What goes to a rank is a whole list of actions, once a job, and then only names of jobs, many gangs at a time: a rank
begins what comes next without asking anybody. They talk through torch's store, which every job of torchrun has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mycel.brief import brief
from mycel.errors import CollectiveTimeoutError, CommunicationError, UsageError
from mycel.pipeline.check import check
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Order

__all__ = ["Controller", "Gang", "Job", "serve"]

_PREFIX = "mycel.controller"
#: Seconds between two looks at whether another rank than the awaited one has failed.
_LOOK_S = 10.0


class Job(Protocol):
    """What a rank does of a job.

    ::

        def job(order):
            pipeline = Pipeline(order, {order.stages_of(rank)[0]: module}, loss)
            return lambda step: pipeline.step(*batches[step])
    """

    def __call__(self, order: Order) -> Callable[[int], Any]:
        """Get ready.

        Args:
            order: with messages in it; the same on all ranks of the job.

        Returns:
            What carries out a step, given its number.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """A step of a job, in its place among all.

    Attributes:
        number: its place in the one sequence of all jobs.
        job: whose.
        step: of the job, from 0 on.
        ranks: that carry it out together.

    Examples:
        >>> Gang(number=4, job="large", step=2, ranks=(0, 1)).ranks
        (0, 1)
    """

    number: int
    job: str
    step: int
    ranks: tuple[int, ...]

    __repr__ = brief


class Controller:
    """Holds orders, and has ranks carry them out.

    Args:
        store: that the ranks see, too.
        num_ranks: of the cluster.
        timeout_s: longest wait for ranks.

    Examples:
        Ranks that have nothing to do but to count:

        >>> import threading
        >>> store = dist.HashStore()
        >>> done = []
        >>> def job(order):
        ...     return done.append
        >>> rank = threading.Thread(target=serve, args=(store, 0, {"job": job}))
        >>> rank.start()
        >>> controller = Controller(store, 1)
        >>> controller.load("job", Order.from_csv("0F0,0B0\\n"))
        >>> [gang.number for gang in controller.run(["job", "job"])]
        [0, 1]
        >>> controller.close()
        >>> rank.join()
        >>> done
        [0, 1]
    """

    def __init__(self, store: Store, num_ranks: int, *, timeout_s: float = 300.0) -> None:
        if num_ranks < 1:
            raise UsageError(f"a controller of {num_ranks} ranks; expected 1 or more")
        self._store, self._num_ranks, self._timeout_s = PrefixStore(_PREFIX, store), num_ranks, timeout_s
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._steps: dict[str, int] = {}
        self._sent = [0] * num_ranks
        self._gangs = 0

    def load(self, job: str, order: Order, *, ranks: Sequence[int] | None = None) -> None:
        """Prove an order right, compile it, and hand the lists to the ranks of a job. They begin to get ready.

        Args:
            job: its name.
            order: of the job.
            ranks: of the cluster, by the order's ranks; ``None``: the first ones.

        Raises:
            UsageError: a name that is taken, or ranks that the cluster does not have.
            VerificationError: the order is wrong.
        """
        chosen = tuple(range(len(order.rows))) if ranks is None else tuple(ranks)
        if job in self._ranks:
            raise UsageError(f"a job {job!r} has been loaded already")
        if len(chosen) != len(order.rows) or len(set(chosen)) < len(chosen):
            raise UsageError(f"job {job!r}: ranks {list(chosen)} for an order of {len(order.rows)}; each once")
        if wrong := [rank for rank in chosen if not 0 <= rank < self._num_ranks]:
            raise UsageError(f"job {job!r}: no rank {wrong[0]}; the cluster has {self._num_ranks}")
        check(order, executor="mycel")
        whole = order if order.has_communication else lower(order)
        self._store.set(f"order/{job}", json.dumps(whole.to_json()))
        self._ranks[job], self._steps[job] = chosen, 0
        for rank in chosen:
            self._hand(rank, {"load": job})

    def run(self, jobs: Sequence[str]) -> tuple[Gang, ...]:
        """Put gangs at the end of the one sequence, and hand each rank its part of it at once.

        Args:
            jobs: of which a step is to run, in this sequence; a job may stand there many times.

        Returns:
            The gangs.

        Raises:
            UsageError: a job that has not been loaded.
        """
        made: list[Gang] = []
        lists: list[list[tuple[str, int, int]]] = [[] for _ in range(self._num_ranks)]
        for job in jobs:
            if job not in self._ranks:
                raise UsageError(f"no job {job!r} has been loaded; there are {sorted(self._ranks) or 'none'}")
            gang = Gang(number=self._gangs, job=job, step=self._steps[job], ranks=self._ranks[job])
            self._gangs += 1
            self._steps[job] += 1
            made.append(gang)
            for rank in gang.ranks:
                lists[rank].append((job, gang.step, gang.number))
        for rank, gangs in enumerate(lists):
            if gangs:
                self._hand(rank, {"run": gangs})
        return tuple(made)

    def wait(self) -> None:
        """Return when everything that was handed out is done.

        Raises:
            CommunicationError: a rank has failed; the message says with what.
            CollectiveTimeoutError: time is over; the message names the rank and what it has not done.
        """
        deadline = time.monotonic() + self._timeout_s
        for rank, count in enumerate(self._sent):
            for number in range(count):
                self._await(rank, number, deadline)

    def close(self) -> None:
        """Wait, and send the ranks home."""
        self.wait()
        for rank in range(self._num_ranks):
            self._hand(rank, {"end": True})

    def _hand(self, rank: int, what: Mapping[str, Any]) -> None:
        self._store.set(f"to/{rank}/{self._sent[rank]}", json.dumps(what))
        self._sent[rank] += 1

    def _await(self, rank: int, number: int, deadline: float) -> None:
        key = f"done/{rank}/{number}"
        while True:
            left = deadline - time.monotonic()
            try:
                self._store.wait([key], timedelta(seconds=max(0.01, min(left, _LOOK_S))))
                if said := self._store.get(key).decode():
                    raise CommunicationError(said)
                return
            except CommunicationError:
                raise
            except (dist.DistStoreError, RuntimeError) as error:
                if self._store.check(["failed"]):
                    raise CommunicationError(self._store.get("failed").decode()) from None
                if left <= 0:
                    what = json.loads(self._store.get(f"to/{rank}/{number}"))
                    raise CollectiveTimeoutError(
                        f"rank {rank} has not done {what} after {self._timeout_s:g} s; is serve() running there?"
                    ) from error


def serve(store: Store, rank: int, jobs: Mapping[str, Job], *, timeout_s: float = 300.0) -> None:
    """The life of a rank under a controller: gets ready and runs what it is handed, until it is sent home.

    Args:
        store: that the controller sees, too.
        rank: this one's, in the cluster.
        jobs: what this rank does of each job that it may get.
        timeout_s: longest wait for the controller.

    Raises:
        UsageError: the controller has handed out a job that is not among ``jobs``.
        CollectiveTimeoutError: nothing has come for so long.
        Exception: what a job has raised; the controller is told.

    Examples:
        >>> store = dist.HashStore()
        >>> Controller(store, 1).run([])
        ()
        >>> import threading
        >>> rank = threading.Thread(target=serve, args=(store, 0, {}))
        >>> rank.start()
        >>> Controller(store, 1).close()
        >>> rank.join()
    """
    control = PrefixStore(_PREFIX, store)
    ready: dict[str, Callable[[int], Any]] = {}
    number = 0
    while True:
        try:
            control.wait([f"to/{rank}/{number}"], timedelta(seconds=timeout_s))
        except (dist.DistStoreError, RuntimeError) as error:
            raise CollectiveTimeoutError(f"rank {rank}: the controller was silent for {timeout_s:g} s") from error
        what = json.loads(control.get(f"to/{rank}/{number}"))
        if "end" in what:
            return
        doing = ""
        try:
            if "load" in what:
                doing = job = what["load"]
                if job not in jobs:
                    raise UsageError(f"a job {job!r} was handed to rank {rank}, which knows {sorted(jobs) or 'none'}")
                ready[job] = jobs[job](Order.from_json(control.get(f"order/{job}").decode()))
            for job, step, gang in what.get("run", ()):
                doing = f"{job}, step {step} (gang {gang})"
                ready[job](step)
        except Exception as error:
            said = f"rank {rank} failed in {doing}: {type(error).__name__}: {error}"
            control.set("failed", said)
            control.set(f"done/{rank}/{number}", said)
            raise
        control.set(f"done/{rank}/{number}", "")
        number += 1
