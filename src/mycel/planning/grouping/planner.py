"""Plans of coming steps, made while the step before runs.

One thread plans; the main thread asks for a plan when it needs it and waits at most as long as it says. What the
search has not ended by then it has at least begun with the greedy plan, which takes milliseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field, replace

from mycel.arguments import real_number
from mycel.errors import UsageError
from mycel.planning.grouping.greedy import ready
from mycel.planning.grouping.instance import Candidate, SequenceInstance
from mycel.planning.grouping.plan import SequencePlan
from mycel.planning.grouping.search import greedy_plan, plan_sequences

__all__ = ["SequencePlanner"]


@dataclass(kw_only=True)
class SequencePlanner:
    """Plans steps of one job ahead of them.

    Attributes:
        num_ranks: of the job. capacity_tokens: that a rank holds. us_per_token2, us_per_token, us_per_step: costs,
        as in ``SequenceInstance``. candidates: groups to choose from; of a topology those of ``candidates_of``.
        max_micro_batches: into which a step may be cut. limit_s: seconds of search for each plan. 0 takes the
        greedy's, which is the same on every rank that asks; with
            more the clock has a say, so one rank plans and tells the others.

    Examples:
        >>> planner = SequencePlanner(
        ...     num_ranks=2, capacity_tokens=100, us_per_token2=0.0, us_per_token=1.0, us_per_step=10.0,
        ...     candidates=tuple(Candidate(size=n, comm_us_per_token=n - 1.0) for n in (1, 2)), limit_s=0,
        ... )
        >>> with planner:
        ...     [plan.total_us for _, plan in planner.ahead([(60, 50), (150,)])]
        [70.0, 235.0]
    """

    num_ranks: int
    capacity_tokens: int
    us_per_token2: float
    us_per_token: float
    us_per_step: float
    candidates: tuple[Candidate, ...]
    max_micro_batches: int = 1
    limit_s: float = 1.0
    _pool: ThreadPoolExecutor | None = field(default=None, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.limit_s = real_number(self.limit_s, "limit_s", least=0)
        self._instance([1])  # what is wrong of the job is said now, and not by a step

    def plan(self, lengths: Sequence[int]) -> SequencePlan:
        """The plan of a step, made now.

        Args:
            lengths: tokens of each sequence.

        Raises:
            UsageError: a sequence or all of them are more than the ranks hold.
            SynthesisError: no plan was found.
        """
        return plan_sequences(self._instance(lengths), limit_s=self.limit_s)

    def begin(self, lengths: Sequence[int]) -> Future[SequencePlan]:
        """The plan of a step, to be made beside what goes on.

        Args:
            lengths: tokens of each sequence.

        Raises:
            UsageError: a sequence or all of them are more than the ranks hold.
        """
        instance = self._instance(lengths)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="mycel-sequences")
                self._pool.submit(ready)
            return self._pool.submit(plan_sequences, instance, limit_s=self.limit_s)

    def take(self, pending: Future[SequencePlan], lengths: Sequence[int], *, most_s: float) -> SequencePlan:
        """The plan that was begun, or the greedy's where it is late.

        Args:
            pending: from ``begin``.
            lengths: that it is of.
            most_s: seconds to wait.
        """
        try:
            return pending.result(timeout=most_s)
        except LateError:
            pending.cancel()
            late = greedy_plan(self._instance(lengths))
            return replace(late, source=f"{late.source}, as the search was late")

    def ahead(self, steps: Iterable[Sequence[int]]) -> Iterator[tuple[Sequence[int], SequencePlan]]:
        """Each step's lengths with its plan; the next is planned while the caller is busy with this one.

        Args:
            steps: lengths of the sequences of each.
        """
        waiting: tuple[Sequence[int], Future[SequencePlan]] | None = None
        for lengths in steps:
            following = (lengths, self.begin(lengths))
            if waiting is not None:
                yield waiting[0], self.take(waiting[1], waiting[0], most_s=self.patience_s)
            waiting = following
        if waiting is not None:
            yield waiting[0], self.take(waiting[1], waiting[0], most_s=self.patience_s)

    @property
    def patience_s(self) -> float:
        """Seconds to wait for a plan: its own search, one before it, and code that is compiled once on a machine."""
        return 2 * self.limit_s + 60.0

    def close(self) -> None:
        """End the thread; what it has not begun is not planned."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def __enter__(self) -> SequencePlanner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _instance(self, lengths: Sequence[int]) -> SequenceInstance:
        if isinstance(lengths, str):
            raise UsageError("lengths are whole numbers of tokens")
        return SequenceInstance(
            num_ranks=self.num_ranks,
            capacity_tokens=self.capacity_tokens,
            us_per_token2=self.us_per_token2,
            us_per_token=self.us_per_token,
            us_per_step=self.us_per_step,
            lengths=tuple(int(length) for length in lengths),
            candidates=self.candidates,
            max_micro_batches=self.max_micro_batches,
        )
