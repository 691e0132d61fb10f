"""``steps``: plans are made while the step before runs, and agreed on before each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass
from functools import partial

from mycel.arguments import real_number, whole_number
from mycel.errors import UsageError
from mycel.planning.grouping import SequencePlan, SequencePlanner
from mycel.sequence.grouped.agreement import Brought, agree_on_step
from mycel.sequence.grouped.documents import Document, lengths_of
from mycel.sequence.grouped.step import SequenceStep, assembled, check_handle
from mycel.sequence.models import AppliedSequence

__all__ = ["steps"]

Plans = Callable[[tuple[int, ...]], SequencePlan]
#: Seconds for a plan of a function of the caller's.
_PATIENCE_S = 60.0


def steps(
    batches: Iterable[Sequence[Document]],
    planner: SequencePlanner | Plans,
    handle: AppliedSequence,
    *,
    load: Callable[[int, int], Document] | None = None,
    ahead: int = 1,
    patience_s: float | None = None,
    timeout_s: float | None = None,
) -> Generator[SequenceStep, None, None]:
    """Steps of a data set, each planned while the one before runs and agreed on by all ranks.

    All ranks call it and go through it together. The first rank plans, in a thread, and tells the others; what goes
    wrong on one rank, in its data or its plan, is said by all of them.

    Args:
        batches: documents of each step, the same on all ranks: tensors [tokens, ...], dicts of such as
            ``{"input_ids": ..., "labels": ...}``, or numbers of tokens.
        planner: of as many ranks as there are, or a function from lengths to a plan.
        handle: what ``mycel.sequence.apply`` gave for the model, over all ranks.
        load: gives a document of which only the number of tokens is said, of the numbers of its step and itself;
            each rank asks for those that it shares.
        ahead: steps that are planned before their turn.
        patience_s: to wait for a plan that is late. After it a ``SequencePlanner`` gives the greedy's, which takes
            milliseconds; a function has failed. If not given, as long as the search is allowed, and a minute.
        timeout_s: of exchanges of groups that are new; as torch has it if not given.

    Yields:
        Steps; ``step.run(model)`` has forward and backward passes done.

    Raises:
        UsageError: a document is longer than all ranks hold, the planner is of other ranks, or documents are none.
        MismatchError: ranks have other documents, or more steps than others; the message says which.
        CommunicationError: a rank cannot go on, or is lost.

    Examples:
        Three ways to spread a step over four ranks, chosen for each::

            planner = SequencePlanner(num_ranks=4, candidates=candidates_of(topology, bytes_per_token), ...)
            handle = mycel.sequence.apply(model)
            ddp = DistributedDataParallel(model)
            for step in mycel.sequence.steps(batches, planner, handle):
                loss = step.run(ddp)
                optimizer.step()
                optimizer.zero_grad()

    References:
        Y. Wang et al., "FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism",
        ASPLOS 2025, section 5 (solving ahead, and communicators that are kept).
    """
    check_handle(handle)
    whole_number(ahead, "ahead", least=1)
    if patience_s is not None:
        patience_s = real_number(patience_s, "patience_s", least=0)
    if isinstance(planner, SequencePlanner) and planner.num_ranks != handle.num_ranks:
        raise UsageError(
            f"the planner is of {planner.num_ranks} ranks, and sequences are divided over {handle.num_ranks}"
        )
    plans = _Planned(planner, patience_s)
    coming = _coming(batches, plans if handle.group is None or handle.group.rank() == 0 else None)
    return _agreed(coming, plans, handle, load, ahead, timeout_s)


@dataclass(slots=True, kw_only=True)
class _Coming:
    """A step to come, on this rank."""

    documents: Sequence[Document] = ()
    lengths: tuple[int, ...] = ()
    pending: Future[SequencePlan] | None = None
    error: Exception | None = None
    ended: bool = False

    @property
    def is_last(self) -> bool:
        return self.ended or self.error is not None


class _Planned:
    """Begins plans and waits for them."""

    def __init__(self, planner: SequencePlanner | Plans, patience_s: float | None) -> None:
        self._planner, self._patience_s = planner, patience_s
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, lengths: tuple[int, ...]) -> Future[SequencePlan]:
        if isinstance(self._planner, SequencePlanner):
            return self._planner.begin(lengths)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="mycel-sequences")
        return self._pool.submit(self._planner, lengths)

    def take(self, pending: Future[SequencePlan], lengths: tuple[int, ...]) -> SequencePlan:
        if isinstance(self._planner, SequencePlanner):
            most_s = self._planner.patience_s if self._patience_s is None else self._patience_s
            return self._planner.take(pending, lengths, most_s=most_s)
        most_s = _PATIENCE_S if self._patience_s is None else self._patience_s
        try:
            return pending.result(timeout=most_s)
        except LateError:
            if pending.done():  # the function's own
                raise
            raise UsageError(
                f"no plan of {len(lengths)} documents after {most_s:g} s: give a SequencePlanner"
            ) from None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _coming(batches: Iterable[Sequence[Document]], plans: _Planned | None) -> Iterator[_Coming]:
    """Steps to come, the last one of them an end or an error; planned where this rank plans."""
    iterator = iter(batches)
    while True:
        step = _Coming()
        try:
            step.documents = next(iterator)
            step.lengths = lengths_of(step.documents)
            if plans is not None:
                step.pending = plans.begin(step.lengths)
        except StopIteration:
            step.ended = True
        except Exception as error:  # said when its turn comes, by all ranks
            step.error = error
        yield step
        if step.is_last:
            return


def _agreed(
    coming: Iterator[_Coming],
    plans: _Planned,
    handle: AppliedSequence,
    load: Callable[[int, int], Document] | None,
    ahead: int,
    timeout_s: float | None,
) -> Generator[SequenceStep, None, None]:
    waiting: deque[_Coming] = deque()
    number = 0
    try:
        while True:
            while len(waiting) <= ahead and not (waiting and waiting[-1].is_last):
                waiting.append(next(coming))
            step = waiting.popleft()
            began = time.perf_counter()
            plan = _taken(step, plans)
            waited_s = time.perf_counter() - began
            brought = Brought(lengths=step.lengths, plan=plan, ended=step.ended, error=step.error)
            agreed = agree_on_step(number, brought, handle.group, handle.device)
            if agreed is None:
                return
            yield assembled(
                agreed,
                step.documents,
                step.lengths,
                handle,
                load=None if load is None else partial(load, number),
                number=number,
                timeout_s=timeout_s,
                waited_s=waited_s,
            )
            number += 1
    finally:  # also after Ctrl-C and where the caller leaves early
        for step in waiting:
            if step.pending is not None:
                step.pending.cancel()
        plans.close()


def _taken(step: _Coming, plans: _Planned) -> SequencePlan | None:
    if step.pending is None or step.error is not None:
        return None
    try:
        return plans.take(step.pending, step.lengths)
    except Exception as error:
        step.error = error
        return None
