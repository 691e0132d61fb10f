"""When experts are brought and when they may go: one policy a file, made by name."""

from __future__ import annotations

from collections.abc import Callable

from mycel.errors import UsageError
from mycel.moe.memory.policies.base import FetchPolicy
from mycel.moe.memory.policies.on_demand import OnDemand
from mycel.moe.memory.policies.pre_gated import PreGatedFetch
from mycel.moe.memory.policies.resident import Resident
from mycel.moe.memory.policies.ring import Ring

__all__ = ["FETCH_POLICIES", "FetchPolicy", "OnDemand", "PreGatedFetch", "Resident", "Ring", "make_fetch_policy"]

#: Policies by name, with their usual settings.
FETCH_POLICIES: dict[str, Callable[[], FetchPolicy]] = {
    "resident": Resident,
    "on_demand": OnDemand,
    "prefetch_all": lambda: Ring(slots=2),
    "ring": lambda: Ring(slots=3),
    "pre_gated": PreGatedFetch,
    "pre_gated_keep_first": lambda: PreGatedFetch(keep=1),
}


def make_fetch_policy(name: str) -> FetchPolicy:
    """A policy.

    Raises:
        UsageError: no policy has that name.
    """
    if name not in FETCH_POLICIES:
        raise UsageError(f"no fetch policy is called {name!r}; known: {', '.join(sorted(FETCH_POLICIES))}")
    return FETCH_POLICIES[name]()
