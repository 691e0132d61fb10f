"""How long a search may go on, and asking CP-SAT under that: in time, in turn, and ended by Ctrl-C without loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from mycel.arguments import real_number
from mycel.collectives.cp_sat import cp_sat, solve

__all__ = ["STATE_S", "Answer", "Clock"]

#: Work that making a model is counted for, and looking at one state.
_MODEL_S, STATE_S = 0.01, 1e-5

#: What a solver says: the best there is, something, that there is nothing, or that time ran out.
Answer = Literal["optimal", "found", "none", "late"]


class Clock:
    """The time of one search.

    Ctrl-C, while a solver works, stops it and ends the clock's time; ``interrupted`` says so, and whoever searches
    goes on with what there is. CP-SAT's own handler would end the solver and tell nobody.

    Args:
        time_limit_s: from now on.
        num_workers: threads of the solver. One takes turns between the solver's strategies in a fixed order.
        is_counted: what goes is not time but work, as the solver counts its steps in seconds: with one thread the
            same search ends at the same point on every machine. It takes some times as many seconds.

    Raises:
        UsageError: a limit that is not above 0.
    """

    def __init__(self, time_limit_s: float, *, num_workers: int = 1, is_counted: bool = False) -> None:
        self._done_s: list[float] | None = [0.0] if is_counted else None  # shared with parts of it
        self._began = self._now()
        self._deadline = self._began + real_number(time_limit_s, "time limit in seconds", above=0)
        self._num_workers = num_workers
        self._stopped = threading.Event()

    def within(self, seconds: float) -> Clock:
        """A clock for a part of the search, that ends with this one at the latest; an interruption ends both.

        Args:
            seconds: from now on.
        """
        left_s = max(min(seconds, self.left_s), 1e-9)
        inner = Clock(left_s, num_workers=self._num_workers)
        inner._stopped, inner._done_s = self._stopped, self._done_s
        inner._began = inner._now()
        inner._deadline = inner._began + left_s
        return inner

    def _now(self) -> float:
        return time.monotonic() if self._done_s is None else self._done_s[0]

    def count(self, seconds: float) -> None:
        """Work was done beside the solver; where time goes, it has gone.

        Args:
            seconds: that it took, about, where that was found out.
        """
        if self._done_s is not None:
            self._done_s[0] += seconds

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C has ended the search."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """End the search: no time is left from now on."""
        self._stopped.set()

    @property
    def left_s(self) -> float:
        """Seconds until it ends."""
        return 0.0 if self.interrupted else max(0.0, self._deadline - self._now())

    @property
    def gone_s(self) -> float:
        """Seconds since it began."""
        return self._now() - self._began

    def solve(
        self,
        model: Any,
        *,
        most_s: float = float("inf"),
        found: Callable[[Any], None] | None = None,
        is_linear: bool = True,
    ) -> tuple[Answer, Any]:
        """Ask CP-SAT.

        Args:
            model: a ``CpModel``.
            most_s: seconds for this one, within the clock's.
            found: called with the solution callback at each solution, in the solver's thread.
            is_linear: whether linear relaxations help to rule out; without, solutions are often found sooner.

        Returns:
            What it says, and the ``CpSolver``, which keeps solution and bound.
        """
        cp = cp_sat("the search for orders")
        solver = cp.CpSolver()
        seconds = min(self.left_s, most_s)
        if seconds <= 0:
            return "late", solver
        parameters = solver.parameters
        if self._done_s is None:
            parameters.max_time_in_seconds = seconds
        else:
            parameters.max_deterministic_time = seconds
        parameters.num_workers = self._num_workers
        parameters.random_seed = 1
        parameters.symmetry_level = 0  # 9.15 can end in an IndexError while it looks for symmetries
        parameters.use_strong_propagation_in_disjunctive = True  # proofs of whole batches take half the time
        if not is_linear:
            parameters.linearization_level = 0
        parameters.catch_sigint_signal = False
        watch = None if found is None else _watch(cp, found)
        status = self._watched(solver, model, watch)
        if self._done_s is not None:
            self.count(solver.response_proto.deterministic_time + _MODEL_S)
        if status == cp.OPTIMAL:
            return "optimal", solver
        if status == cp.FEASIBLE:
            return "found", solver
        return ("none" if status == cp.INFEASIBLE else "late"), solver

    def _watched(self, solver: Any, model: Any, watch: Any) -> Any:
        """The status; solved in another thread, so that this one hears Ctrl-C."""
        answers: list[Any] = []
        failures: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                answers.append(solver.solve(model, watch) if watch is not None else solve(solver, model))
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()

        thread = threading.Thread(target=work, name="mycel-cp-sat", daemon=True)
        thread.start()
        while not done.is_set():
            try:
                done.wait(0.2)  # a signal that another thread gets wakes nobody
            except KeyboardInterrupt:
                self.stop()
                solver.stop_search()
        thread.join()
        if failures:
            raise failures[0]
        return answers[0]


def _watch(cp: Any, found: Callable[[Any], None]) -> Any:
    """What the solver calls at each solution."""

    class Watch(cp.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            found(self)

    return Watch()
