"""The experts that the next block will need, while this block computes."""

from __future__ import annotations

from collections.abc import Sequence

from mycel.errors import UsageError
from mycel.moe.memory.policies.base import FetchPolicy
from mycel.moe.memory.store import ExpertStore

__all__ = ["PreGatedFetch"]


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
