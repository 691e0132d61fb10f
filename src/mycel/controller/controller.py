"""Starts ranks, numbers every call in one order, and says who is gone.

Every rank carries out its calls in the order of their numbers, whichever client they are of: programs whose
collectives would meet in opposite orders cannot, as under the scheduler of Pathways (gang scheduling). Calls are sent
before those before them are done, since a rank's next one needs nothing of the controller.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mycel.controller.mesh import Mesh
from mycel.controller.messages import Item
from mycel.controller.reference import Outcome, Reference
from mycel.controller.watch import Watch
from mycel.errors import CommunicationError, PeerLostError, UsageError
from mycel.extras import needs

__all__ = ["Controller"]

#: What Monarch calls when nobody else answers for a mesh that failed; unless it is ours, which we answer for.
_MONARCHS: list[Callable[[Any], None]] = []
#: By the name of a controller's mesh: whether its ranks may end, since it is closed or has said that one is lost.
_MAY_END: dict[str, bool] = {}


class Controller:
    """Ranks on this machine, driven by this process.

    Any thread may call programs; calls of all threads make one order.

    Args:
        ranks: how many.
        backend: of their process group.
        ahead: calls of a mesh that may be unfinished before the next one waits.
        timeout_s: longest wait: of a collective, for a call, for a credit.

    Raises:
        UsageError: no ranks, or a limit that is not positive.
        MissingExtraError: Monarch is not installed.
        CommunicationError: the ranks did not come together.

    References:
        Barham et al., "Pathways: Asynchronous Distributed Dataflow for ML" (MLSys 2022), sections 4.2 to 4.5.

    Examples:
        >>> with Controller(2) as cluster:  # doctest: +SKIP
        ...     cluster.mesh.call(os.getpid).result()
        (4711, 4712)
    """

    def __init__(self, ranks: int, *, backend: str = "mycel", ahead: int = 64, timeout_s: float = 300.0) -> None:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise UsageError(f"a controller of {ranks!r} ranks; expected a whole number from 1")
        if ahead < 1 or not timeout_s > 0:
            raise UsageError(f"ahead={ahead}, timeout_s={timeout_s}: both must be above 0")
        needs("mycel.controller.Controller", "monarch")
        from monarch.actor import this_host  # takes a second

        from mycel.controller.rank import Rank

        self._ahead, self._timeout_s = ahead, timeout_s
        self._lock = threading.Lock()
        self._number = 0
        self._sent = [0] * ranks  # calls, by rank
        self._frees: deque[int] = deque()
        self._lost: PeerLostError | None = None
        self._closed = False
        self._slices: dict[tuple[int, ...], Any] = {}
        self._watch: Watch | None = None
        self._name = f"mycel{len(_MAY_END)}"
        _answer_for(self._name)
        try:
            self._processes = this_host().spawn_procs(per_host={"ranks": ranks}, name="mycel")
            self._actors = self._processes.spawn(self._name, Rank, ranks, timeout_s, backend, _paths())
            self._pids = self._values(self._actors.process.call())
            self._watch = Watch(self._pids, self._ended)
            port = self._values(self._actors.slice(ranks=slice(0, 1)).serve.call())[0]
            self._values(self._actors.join.call(list(range(ranks)), port))
        except BaseException:
            self.close()
            raise
        self.mesh = Mesh(tuple(range(ranks)), self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"lost: {self._lost}" if self._lost else f"{self._number} calls"
        return f"<controller of {len(self._pids)} ranks, {state}>"

    @property
    def ahead(self) -> int:
        """Calls of a mesh that may be unfinished."""
        return self._ahead

    @property
    def timeout_s(self) -> float:
        """Longest wait."""
        return self._timeout_s

    def issue(
        self, ranks: tuple[int, ...], program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Reference:
        """Put a call at the end of the one order. ``Mesh.call`` is what people want.

        Raises:
            PeerLostError: a rank has ended.
            UsageError: the controller is closed, or an argument does not pickle.
        """
        with self._lock:
            return self._send(ranks, program, args, kwargs)

    def issue_both(
        self,
        first: tuple[tuple[int, ...], Callable[..., Any], tuple[Any, ...]],
        second: tuple[tuple[int, ...], Callable[..., Any], tuple[Any, ...]],
    ) -> tuple[Reference, Reference]:
        """Put two calls there with nothing between them: a value that sets out, and one that arrives.

        Raises:
            PeerLostError: a rank has ended.
            UsageError: the controller is closed.
        """
        with self._lock:
            return self._send(*first, {}), self._send(*second, {})

    def fetch(self, number: int, ranks: tuple[int, ...]) -> Any:
        """Ask ranks for the value of a call."""
        with self._lock:
            self.check()
            return self._of(ranks).fetch.call(number)

    def forget(self, number: int) -> None:
        """Have ranks let go of a value, with the next call."""
        self._frees.append(number)  # from any thread, a finaliser's too: no lock

    def check(self) -> None:
        """Raise what has ended the cluster.

        Raises:
            PeerLostError: a rank has ended; the message names it.
            UsageError: the controller is closed.
        """
        if self._lost is not None:
            raise PeerLostError(str(self._lost))
        if self._closed:
            raise UsageError("this controller is closed; its ranks and what they held are gone")

    def close(self) -> None:
        """End the ranks. What they hold is gone. Calls that are not done are done first, unless a rank is lost."""
        if self._closed:
            return
        try:
            if self._lost is None and hasattr(self, "mesh"):
                self._values(self._actors.leave.call())
        except CommunicationError:
            pass  # a rank that ended meanwhile: the others end as well
        finally:
            self._closed = _MAY_END[self._name] = True
            if self._watch is not None:
                self._watch.close()
            if hasattr(self, "_processes"):
                self._processes.stop().get(timeout=30)

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(
        self, ranks: tuple[int, ...], program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Reference:
        import cloudpickle

        self.check()
        number = self._number
        name = getattr(program, "__qualname__", type(program).__name__)
        try:
            call = cloudpickle.dumps((program, args, kwargs))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise UsageError(f"{name}: it or an argument of it cannot be sent to ranks: {error}") from error
        places = tuple(self._sent[rank] for rank in ranks)
        frees = tuple(self._frees.popleft() for _ in range(len(self._frees)))
        item = Item(number=number, ranks=ranks, places=places, call=call, frees=frees)
        future = self._of(ranks).run.call(item)
        self._number += 1
        for rank in ranks:
            self._sent[rank] += 1
        return Reference(Outcome(number=number, name=name, ranks=ranks, future=future, replies=self))

    def _of(self, ranks: tuple[int, ...]) -> Any:
        """The actors of some ranks."""
        if ranks not in self._slices:
            step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            if step < 1 or ranks != tuple(range(ranks[0], ranks[-1] + 1, step)):
                raise UsageError(f"ranks {list(ranks)} of a mesh must be at equal distances, in increasing order")
            self._slices[ranks] = self._actors.slice(ranks=slice(ranks[0], ranks[-1] + 1, step))
        return self._slices[ranks]

    def _values(self, future: Any) -> Sequence[Any]:
        """What all answer."""
        try:
            return [value for _, value in future.get(timeout=self._timeout_s).items()]
        except Exception as error:  # of Monarch's Rust part, or its ActorError
            self.check()
            raise CommunicationError(f"ranks did not come together: {error}") from error

    def _ended(self, rank: int) -> None:
        if not self._closed:
            _MAY_END[self._name] = True
            self._lost = PeerLostError(
                f"rank {rank} (process {self._pids[rank]}) has ended; what ranks held is lost with it, and this "
                "controller can only be closed"
            )


def _answer_for(name: str) -> None:
    """Keep Monarch from ending this process when a rank of this mesh ends: those who wait are told."""
    import monarch.actor

    _MAY_END[name] = False
    if not _MONARCHS:
        _MONARCHS.append(monarch.actor.unhandled_fault_hook)

        def heard(failure: Any) -> None:
            mesh = failure.mesh_name.partition("-")[0]
            # Monarch's own logger beside the ranks, which fails with them, has no name that says whose it is.
            if not (any(_MAY_END.values()) if mesh == "logger" else _MAY_END.get(mesh)):
                _MONARCHS[0](failure)

        monarch.actor.unhandled_fault_hook = heard


def _paths() -> list[str]:
    """Where this script finds modules, in words that mean the same elsewhere."""
    return [str(Path(path).resolve()) for path in sys.path]
