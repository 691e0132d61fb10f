"""What the ranks of a group tell each other through the group's store.

Rank 0 begins each life of a group with a fresh token, under which everything else of that life stands: a store that
outlives a group, as torchrun's does, still holds what the last one said, and nobody must read that.

Anybody who reaches the store can read and write there. Where the job has a secret, every text therefore carries a
proof of it, and one without is passed over, by name, until the right one is there.

One process serves the store for all ranks of a job, so requests are few: what a rank has to say goes there in one,
and what all have said is asked for in one, whatever the number of ranks, where the store can do that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError, UsageError
from mycel.runtime.transport.hello import TOKEN_BYTES
from mycel.runtime.transport.secret import Secret

__all__ = ["Board", "Store"]

_log = logging.getLogger(__name__)

#: How often whoever waits asks: from the first to the second, a little later each time. With many ranks
#: the store must not drown in questions.
_SOON_S, _LATER_S = 2e-4, 0.05
_MANY_RANKS = 64
#: How often a wait is interrupted to see whether another rank has failed, and how often what cannot be trusted, or
#: is over, is read again.
_LOOK_S = 1.0
_AGAIN_S, _STALE_S = 0.2, 0.005
#: Errors that say themselves which rank is to blame.
_KINDS: dict[str, type[CommunicationError]] = {
    "CollectiveTimeoutError": CollectiveTimeoutError,
    "PeerLostError": PeerLostError,
}


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is needed.

    ``delete_key`` is used where there is one; ``multi_get`` and ``multi_set`` where ``has_extended_api()`` says so.
    """

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key that exists."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys exist."""


class Board:
    """A group's part of its store.

    Args:
        store: the group's key-value store.
        rank, size: in the group.
        secret: the job's, if it has one.
        observe: called about once a second while waiting; what it raises ends the wait.

    Attributes:
        token: of this life of the group; empty until it is known.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        secret: Secret | None = None,
        observe: Callable[[], None] | None = None,
    ) -> None:
        self._store: Store | None = store
        self._rank, self._size, self._secret = rank, size, secret
        self._observe = observe
        self._doubted: set[str] = set()
        self._has_heard = False
        self._look = 0.0
        self._has_begun = False
        has_extended: Any = getattr(store, "has_extended_api", None)
        self._is_extended = has_extended is not None and bool(has_extended())
        self.token = secrets.token_hex(TOKEN_BYTES) if rank == 0 else ""

    def join(self, texts: Mapping[str, str], deadline: float) -> None:
        """Begin, or enter, the present life of the group.

        Args:
            texts: what others need to know of this rank, by key. Written again should the life turn out to be that
                of somebody who does not know the job's secret: whoever does will want to know it too.
            deadline: until when to wait.
        """
        if self._rank == 0:
            self._has_begun = True
            self.put_all({"life": self.token, **texts})
            return
        while True:
            text = self._raw("life", 0, deadline)
            token, is_right = self._opened(text, "life", 0)
            if _is_over(self._rank, token):
                self._pause(0, deadline, _STALE_S)
                continue
            if token != self.token and _is_token(token):
                self.token = token
                self.put_all(texts)
            if is_right and _is_token(token):
                _enter(self._rank, token)
                return
            self._doubt("life", 0)
            self._pause(0, deadline)

    def put(self, key: str, text: str) -> None:
        """Write a text of this rank's."""
        self.put_all({key: text})

    def put_all(self, texts: Mapping[str, str]) -> None:
        """Write texts of this rank's, by key."""
        store: Any = self._store
        if store is None:
            return
        sealed = {self._place(key): self._sealed(text, key) for key, text in texts.items()}
        if self._is_extended and len(sealed) > 1:
            store.multi_set(list(sealed), list(sealed.values()))
            return
        for place, text in sealed.items():
            store.set(place, text)

    def get(self, key: str, owner: int, deadline: float) -> str:
        """A text that a rank has written, or writes in time.

        Raises:
            CollectiveTimeoutError: it does not; the message names it.
            CommunicationError: another rank has failed, or the store is gone.
            UsageError: the text carries a proof of a secret, and this rank has none.
        """
        while True:
            text, is_right = self._opened(self._raw(key, owner, deadline), key, owner)
            if is_right:
                return text
            self._doubt(key, owner)
            self._pause(owner, deadline)

    def get_all(self, owners: Mapping[str, int], deadline: float) -> dict[str, str]:
        """Texts of several ranks by key; raises what ``get`` raises.

        Args:
            owners: which rank writes which.
            deadline: until when to wait.
        """
        self._await(owners, deadline)
        found: dict[str, str] = {}
        for (key, owner), sealed in zip(owners.items(), self._read(list(owners)), strict=True):
            text, is_right = self._opened(sealed, key, owner)
            found[key] = text if is_right else self.get(key, owner, deadline)
        return found

    def fail(self, error: Exception) -> None:
        """Tell those who still wait that this rank will not come, and why."""
        if not self.token or self._has_heard:
            return
        kind = type(error).__name__
        message = str(error) if kind in _KINDS else f"rank {self._rank}: {error}"
        said = {"failed": json.dumps({"kind": kind, "message": message})}
        if self._rank == 0 and not self._has_begun:  # the others would wait for a life to begin
            said["life"] = self.token
        with contextlib.suppress(RuntimeError):  # the store may be what has failed
            self.put_all(said)

    def look(self) -> None:
        """Raise what another rank, which will not come, has said of the reason."""
        if self._observe is not None:
            self._observe()
        store = self._store
        if store is None:
            return
        try:
            if not store.check([self._place("failed")]):
                return
            sealed = store.get(self._place("failed"))
        except RuntimeError:
            return
        text, is_right = self._opened(sealed, "failed", None)
        if not is_right:
            return
        said = json.loads(text)
        self._has_heard = True
        kind = _KINDS.get(str(said["kind"]), CommunicationError)
        raise kind(f"the group of {self._size} ranks cannot start: {said['message']}")

    def leave(self) -> None:
        """End the group's life, if this is rank 0, and let go of the store."""
        store, self._store = self._store, None
        delete: Any = getattr(store, "delete_key", None)
        if self._rank == 0 and delete is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone already
                delete(self._place("life"))

    # -- reading ------------------------------------------------------------------------------------------

    def _place(self, key: str) -> str:
        return f"mycel/{key}" if key == "life" else f"mycel/{self.token}/{key}"

    def _raw(self, key: str, owner: int, deadline: float) -> bytes:
        self._await({key: owner}, deadline)
        return self._read([key])[0]

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        """What stands under keys that are there."""
        store: Any = self._store
        if store is None:
            raise CommunicationError("the process group has been destroyed")
        places = [self._place(key) for key in keys]
        if self._is_extended and len(places) > 1:
            return [bytes(each) for each in store.multi_get(places)]
        return [store.get(place) for place in places]

    def _await(self, owners: Mapping[str, int], deadline: float) -> None:
        """Wait until texts are there, by key which rank writes it.

        By asking, not with the store's own waiting: torch's would write a warning each time that it is interrupted.
        """
        places = [self._place(key) for key in owners]
        pause, look = _SOON_S, time.monotonic() + _LOOK_S
        while not self._has(places):
            now = time.monotonic()
            if now >= deadline:
                missing = next((owner for key, owner in owners.items() if not self._has([self._place(key)])), 0)
                raise CollectiveTimeoutError(
                    f"rank {missing} has not joined the group of {self._size} ranks (rank {self._rank} waited for "
                    "what it writes into the store)"
                )
            if now >= look:
                self._heed()
                look = now + _LOOK_S
            time.sleep(min(pause, max(0.0, deadline - now)))
            pause = min(1.5 * pause, _LATER_S * max(1.0, self._size / _MANY_RANKS))

    def _has(self, places: list[str]) -> bool:
        if self._store is None:
            raise CommunicationError("the process group has been destroyed")
        try:
            return self._store.check(places)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._rank} cannot use the group's store: {str(error).splitlines()[0]}"
            ) from None

    def _heed(self) -> None:
        if self.token:
            self.look()
        elif self._observe is not None:
            self._observe()

    def _pause(self, owner: int, deadline: float, pause_s: float = _AGAIN_S) -> None:
        """Let some time pass before what cannot be used is read again."""
        now = time.monotonic()
        if now >= deadline:
            why = "was not made with this job's secret" if self._doubted else "is of a group that has been destroyed"
            raise CollectiveTimeoutError(
                f"rank {owner} has not joined the group of {self._size} ranks: what stands in the store for it {why}"
            )
        if now >= self._look:
            self._heed()
            self._look = now + _LOOK_S
        time.sleep(pause_s)

    # -- proofs -------------------------------------------------------------------------------------------

    def _sealed(self, text: str, key: str) -> str:
        proof = "" if self._secret is None else self._proof(text, key, self._rank)
        return json.dumps({"by": self._rank, "text": text, "proof": proof})

    def _opened(self, sealed: bytes, key: str, owner: int | None) -> tuple[str, bool]:
        """A text, and whether it may be trusted."""
        try:
            data = json.loads(sealed)
            by, text, proof = data["by"], data["text"], data["proof"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return "", False
        if not (isinstance(by, int) and isinstance(text, str) and isinstance(proof, str)):
            return "", False
        if owner is not None and by != owner:
            return text, False
        if self._secret is None:
            if proof:
                raise UsageError(
                    f"rank {by} has a secret and rank {self._rank} has none: give every rank the job's secret "
                    "(MYCEL_SECRET_FILE or MYCEL_SECRET), or none"
                )
            return text, True
        return text, proof.isascii() and self._proves(proof, text, key, by)

    def _proof(self, text: str, key: str, by: int) -> str:
        if self._secret is None:
            return ""
        return self._secret.proof("store", self._place(key).encode(), str(by).encode(), text.encode()).hex()

    def _proves(self, proof: str, text: str, key: str, by: int) -> bool:
        return secrets.compare_digest(proof, self._proof(text, key, by))

    def _doubt(self, key: str, owner: int) -> None:
        """Say, once, that a text is passed over."""
        if key not in self._doubted:
            self._doubted.add(key)
            _log.warning(
                "rank %d refused what stands in the store for rank %d: it was not made with this job's secret; "
                "waiting for the right one",
                self._rank,
                owner,
            )


#: Lives that ranks of this process have entered. A rank that destroys its group and makes a new one over the same
#: store may be quicker than rank 0, and find what is over.
_lives: dict[tuple[int, str], None] = {}
_MOST_LIVES = 4096


def _enter(rank: int, token: str) -> None:
    _lives[rank, token] = None
    while len(_lives) > _MOST_LIVES:
        del _lives[next(iter(_lives))]


def _is_over(rank: int, token: str) -> bool:
    return (rank, token) in _lives


def _is_token(text: str) -> bool:
    return len(text) == 2 * TOKEN_BYTES and all(each in "0123456789abcdef" for each in text)
