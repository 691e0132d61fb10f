"""Prepared programs of all groups of a process have one bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mycel.runtime.prepared import PreparedCache


@dataclass(frozen=True)
class Sized:
    """As much of a preparation as the cache looks at."""

    num_bytes: int


def kept(cache: PreparedCache, owner: int, keys: str) -> str:
    return "".join(key for key in keys if cache.get(owner, key) is not None)


def filled(limit: int, owner_and_keys: list[tuple[int, str]], num_bytes: int = 10) -> tuple[PreparedCache, Any]:
    cache = PreparedCache(limit)
    for owner, key in owner_and_keys:
        cache.put(owner, key, Sized(num_bytes))  # type: ignore[arg-type]
    return cache, cache.num_bytes


def test_the_least_recently_used_goes_first_whoever_owns_it() -> None:
    cache, _ = filled(30, [(0, "a"), (1, "a"), (0, "b")])
    assert cache.get(0, "a") is not None
    cache.put(1, "b", Sized(10))  # type: ignore[arg-type]
    assert (kept(cache, 0, "ab"), kept(cache, 1, "ab")) == ("ab", "b")
    assert (cache.num_bytes, len(cache)) == (30, 3)


def test_the_last_one_stays_however_large() -> None:
    cache, num_bytes = filled(30, [(0, "a"), (0, "b")], num_bytes=100)
    assert (kept(cache, 0, "ab"), num_bytes, len(cache)) == ("b", 100, 1)


def test_many_small_ones_are_bounded_by_their_number() -> None:
    cache = PreparedCache(1000, limit=3)
    for key in "abcde":
        cache.put(0, key, Sized(1))  # type: ignore[arg-type]
    assert (kept(cache, 0, "abcde"), cache.num_bytes, len(cache)) == ("cde", 3, 3)


def test_an_owner_forgets_its_own_only() -> None:
    cache, _ = filled(100, [(0, "a"), (1, "a"), (0, "b")])
    cache.forget(0)
    assert (kept(cache, 0, "ab"), kept(cache, 1, "ab")) == ("", "a")
    assert (cache.num_bytes, len(cache)) == (10, 1)
    cache.forget(1)
    assert (cache.num_bytes, len(cache)) == (0, 0)


def test_no_two_owners_are_alike() -> None:
    cache = PreparedCache(1)
    first = cache.new_owner()
    cache.forget(first)
    assert cache.new_owner() != first
