"""Some of the cluster's ranks, which programs are called on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from mycel.controller.credits import Credits
from mycel.controller.messages import Held, replace
from mycel.controller.reference import Outcome, Reference
from mycel.controller.transfer import arrive, set_out
from mycel.errors import CommunicationError, UsageError

__all__ = ["Issuer", "Mesh"]


class Issuer(Protocol):
    """What a mesh needs of the controller."""

    def issue(
        self, ranks: tuple[int, ...], program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Reference:
        """Put a call at the end of the one order."""

    def issue_both(
        self,
        first: tuple[tuple[int, ...], Callable[..., Any], tuple[Any, ...]],
        second: tuple[tuple[int, ...], Callable[..., Any], tuple[Any, ...]],
    ) -> tuple[Reference, Reference]:
        """Put two calls there, with nothing between them."""

    @property
    def ahead(self) -> int:
        """Calls of a mesh that may be unfinished."""

    @property
    def timeout_s(self) -> float:
        """Longest wait."""


class Mesh:
    """Ranks of a controller, in an order.

    ``mesh[0:2]`` and ``mesh[3]`` are meshes of some of them; ``mesh[0::2]`` of every second.
    """

    def __init__(self, ranks: tuple[int, ...], issuer: Issuer) -> None:
        self.ranks = ranks
        self._issuer = issuer
        self._unfinished: deque[tuple[Outcome, ref[Reference]]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self) > 8 else "")
        return f"<mesh of ranks {shown}>"

    def __getitem__(self, which: int | slice) -> Mesh:
        """Some of its ranks.

        Raises:
            UsageError: none, or one that it does not have.
        """
        if isinstance(which, slice):
            ranks = self.ranks[which]
        elif isinstance(which, int) and not isinstance(which, bool) and -len(self) <= which < len(self):
            ranks = (self.ranks[which],)
        else:
            raise UsageError(f"no rank {which!r} in a mesh of {len(self)}; they are 0 to {len(self) - 1}")
        if not ranks:
            raise UsageError(f"{which} takes no rank of a mesh of {len(self)}")
        return Mesh(ranks, self._issuer)

    def call(
        self,
        program: Callable[..., Any],
        *args: Any,
        takes: Credits | None = None,
        gives: Credits | None = None,
        **kwargs: Any,
    ) -> Reference:
        """Call a function on every rank, at the end of the one order of all calls; nobody waits for it.

        Args:
            program: that the ranks can import, or that pickles by value. It runs as any program of torchrun would:
                the default process group is that of all ranks, ``mycel.controller.current()`` says its own.
            args, kwargs: for it. References of this mesh stand for what lies on each rank.
            takes: wait for one of these first.
            gives: free one of these when the call is done.

        Returns:
            A reference to what it returns.

        Raises:
            UsageError: a reference of another mesh; ``put`` moves it.
            PeerLostError: a rank has ended.
            CommunicationError: an earlier call failed, and nobody holds its reference.
            CollectiveTimeoutError: no credit became free.
        """
        if not callable(program):
            raise UsageError(f"call({program!r}): expected a function")

        def held(reference: Reference) -> Held:
            if missing := [rank for rank in self.ranks if rank not in reference.ranks]:
                raise UsageError(
                    f"{reference!r} is not on rank {missing[0]} of {self!r}; put() moves it: mesh.put(reference)"
                )
            return Held(reference.number)

        sent = replace(args, Reference, held), replace(kwargs, Reference, held)
        self._make_room()
        if takes is not None:
            takes.take(self._issuer.timeout_s)
        made = self._issuer.issue(self.ranks, program, *sent)
        if gives is not None:
            gives.give_when_done(made)
        self._follow(made)
        return made

    def put(self, value: Any) -> Reference:
        """Bring a value to these ranks.

        Args:
            value: a reference of another mesh of as many ranks, whose values go from rank to rank in the same places,
                over the wires between them; or anything that pickles, which every rank gets.

        Raises:
            UsageError: the other mesh has another number of ranks.
            PeerLostError: a rank has ended.
        """
        if not isinstance(value, Reference):
            return self.call(_itself, value)
        if value.ranks == self.ranks:
            return value
        if len(value.ranks) != len(self):
            raise UsageError(
                f"{value!r} goes rank by rank: to a mesh of {len(value.ranks)} ranks, not of {len(self)}"
            )
        self._make_room()
        sent, made = self._issuer.issue_both(
            (value.ranks, set_out, (Held(value.number), self.ranks, 2 * self._issuer.ahead)),
            (self.ranks, arrive, (value.ranks,)),
        )
        self._follow(sent)
        self._follow(made)
        return made

    def _follow(self, made: Reference) -> None:
        self._unfinished.append((made.outcome, ref(made)))

    def _make_room(self) -> None:
        """Run ahead of the ranks so far and no further.

        What failed meanwhile is for whoever holds its reference to ask for; where nobody does, it is raised here.
        """
        with self._lock:
            while self._unfinished:
                oldest, held = self._unfinished[0]
                if len(self._unfinished) < self._issuer.ahead and not oldest.done():
                    return
                self._unfinished.popleft()
                try:
                    oldest.wait(self._issuer.timeout_s)
                except CommunicationError:
                    if held() is None or not oldest.done():
                        raise


def _itself(value: Any) -> Any:
    return value
