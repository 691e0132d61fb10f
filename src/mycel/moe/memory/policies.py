"""When experts are brought and when they may go: a class and a registry line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mycel.errors import UsageError
from mycel.memory.tiers import SectionRing
from mycel.moe.memory.store import ExpertStore
from mycel.names import spelled

__all__ = ["FETCH_POLICIES", "FetchPolicy", "OnDemand", "PreGatedFetch", "Resident", "Ring", "make_fetch_policy"]


class FetchPolicy:
    """What policies are told, in the order of a forward pass; does nothing.

    Whatever a layer needs that no policy brought, the store brings when the layer asks for it.
    """

    def begin(self, store: ExpertStore) -> None:
        """Once, before the first pass."""

    def routed(self, store: ExpertStore, layer: int, experts: Sequence[int]) -> None:
        """It is known which experts a layer will need: with pre-gated blocks, one block early."""

    def left(self, store: ExpertStore, layer: int) -> None:
        """A layer has computed."""


class Resident(FetchPolicy):
    """Brings everything once and keeps it."""

    def begin(self, store: ExpertStore) -> None:
        """See ``FetchPolicy``."""
        for layer in range(store.num_layers):
            store.take(layer, store.every(layer))


class OnDemand(FetchPolicy):
    """One layer's active experts are near."""

    def left(self, store: ExpertStore, layer: int) -> None:
        """See ``FetchPolicy``."""
        store.drop(layer)


class Ring(FetchPolicy):
    """Layer ``l`` is near together with the next ones; when it has computed, its slot takes layer ``l + slots``.

    After the last layer the first one follows, so that the next pass begins without a wait. The link is always busy;
    computation does not wait if a layer's experts come in the time that a layer computes. More slots than two only
    make up for times that vary. With two slots this is known as prefetching everything.

    Args:
        slots: whole layers that are near.

    Raises:
        UsageError: fewer than two slots.

    References:
        See ``mycel.memory.tiers.SectionRing``.
    """

    def __init__(self, *, slots: int) -> None:
        self.sections = SectionRing(slots)

    def begin(self, store: ExpertStore) -> None:
        """See ``FetchPolicy``."""
        for layer in self.sections.near(_in_turn(store), 0, again=True):
            store.start(layer, store.every(layer))

    def left(self, store: ExpertStore, layer: int) -> None:
        """See ``FetchPolicy``."""
        goes, comes = self.sections.turned(_in_turn(store), layer)
        for each in goes:
            store.drop(each)
        for each in comes:
            store.start(each, store.every(each))


def _in_turn(store: ExpertStore) -> list[tuple[int]]:
    return [(layer,) for layer in range(store.num_layers)]


class PreGatedFetch(FetchPolicy):
    """Brings experts as soon as they are known: near are the active experts of two blocks at most.

    Only in a model whose gates choose a block early (``mycel.moe.memory.pre_gate``) is there anything to overlap; in
    any other this is ``OnDemand``. Nothing chooses for the first block early: keep its experts near, where there is
    room, and no block waits.

    Args:
        keep: first layers all of whose experts are brought once and stay.

    Raises:
        UsageError: fewer than no layers.

    References:
        Hwang et al., "Pre-gated MoE: An Algorithm-System Co-Design for Fast and Scalable Mixture-of-Expert
        Inference", ISCA 2024 (arXiv 2308.12066).
    """

    def __init__(self, keep: int = 0) -> None:
        if keep < 0:
            raise UsageError(f"PreGatedFetch: {keep} layers kept near; none is the least")
        self.keep = keep

    def begin(self, store: ExpertStore) -> None:
        """See ``FetchPolicy``."""
        for layer in range(min(self.keep, store.num_layers)):
            store.take(layer, store.every(layer))

    def routed(self, store: ExpertStore, layer: int, experts: Sequence[int]) -> None:
        """See ``FetchPolicy``."""
        store.start(layer, experts)

    def left(self, store: ExpertStore, layer: int) -> None:
        """See ``FetchPolicy``."""
        if layer >= self.keep:
            store.drop(layer)


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
    return FETCH_POLICIES[spelled(name, sorted(FETCH_POLICIES), "fetch policy")]()
