"""Survivors that tell each other their handles, while another thread takes messages as well."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mycel.errors import CollectiveTimeoutError, PeerLostError
from mycel.runtime.elastic.control_handles import exchange_handles


class Heard:
    """Control connections on which a thread hears everything right after somebody has looked at the handles."""

    def __init__(self, handles: dict[int, str], *, left: set[int], dead: set[int]) -> None:
        self.coming, self.heard = (handles, left, dead), False

    @property
    def handles(self) -> dict[int, str]:
        known = self.coming[0] if self.heard else {}
        self.heard = True
        return known

    @property
    def left(self) -> set[int]:
        return self.coming[1] if self.heard else set()

    @property
    def dead(self) -> set[int]:
        return self.coming[2] if self.heard else set()

    @property
    def cut(self) -> set[int]:
        return set()

    def tell(self, peers: object, message: object) -> None:
        pass

    def wait(self, patience_s: float) -> None:
        pass

    def take(self) -> None:
        pass

    def flush(self) -> None:
        pass


def exchanged(control: Heard, peers: set[int], timeout_s: float = 60.0) -> dict[int, str]:
    return exchange_handles(cast(Any, control), "own", peers, timeout_s)


def test_who_says_where_it_is_and_leaves_at_once_has_come() -> None:
    assert exchanged(Heard({1: "one", 2: "two"}, left={1, 2}, dead=set()), {1, 2}) == {1: "one", 2: "two"}


@pytest.mark.parametrize("how", ["left", "dead"])
def test_who_is_gone_without_a_word_is_named(how: str) -> None:
    gone = {"left": set[int](), "dead": set[int]()} | {how: {2}}
    with pytest.raises(PeerLostError, match="rank 2 is gone as well"):
        exchanged(Heard({1: "one"}, **gone), {1, 2})


def test_who_is_silent_is_named_in_time() -> None:
    with pytest.raises(CollectiveTimeoutError, match="rank 2 did not come"):
        exchanged(Heard({1: "one"}, left=set(), dead=set()), {1, 2}, timeout_s=0.0)
