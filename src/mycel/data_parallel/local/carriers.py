"""How the ranks' changes become one change: by a combiner, or through a compressor with error feedback."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.bundle import Packed
from mycel.data_parallel.combine.base import Combiner
from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.compress.cast import Cast
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import Item
from mycel.data_parallel.exchange import exchange
from mycel.data_parallel.feedback import ErrorFeedback
from mycel.data_parallel.open_step import OpenStep
from mycel.data_parallel.policy import CompressionPolicy, compressor_of
from mycel.data_parallel.state import mean_residuals
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError

__all__ = ["Carrier", "Carriers", "Combined", "Compressed", "as_policy", "take_change"]


class Carrier(Protocol):
    """Carries the changes of some parameters, one meeting after the other."""

    def carry(self, changes: Packed, means: Packed, group: dist.ProcessGroup, meeting: int) -> None:
        """Put what all ranks' changes make together into ``means``, which may be ``changes``; waits for it."""

    def settle(self, *, keep: bool) -> None:
        """The meeting is over, and what came of it is applied, or not."""

    def state_dict(self, group: dist.ProcessGroup, *, own: bool) -> dict[str, Any]:
        """What is remembered, by parameter name."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; names of other parameters are passed over."""


class Combined:
    """By a combiner, in float32 at least.

    Args:
        combiner: of whole vectors.
        stats: counts what is sent as that of an all_reduce.
    """

    def __init__(self, combiner: Combiner, stats: CommStats) -> None:
        self._combiner, self._stats = combiner, stats

    def carry(self, changes: Packed, means: Packed, group: dist.ProcessGroup, meeting: int) -> None:
        """See ``Carrier``."""
        if means is not changes:
            means.copy_from(changes.parts)
        sent = 2 * (group.size() - 1) / group.size() * means.num_bytes
        self._stats.exact_bytes += sent
        self._stats.sent(sent, collectives=len(means.bundles))
        for pending in [self._combiner.start(bundle, group) for bundle in means.bundles]:
            pending.wait()

    def settle(self, *, keep: bool) -> None:
        """See ``Carrier``: nothing is remembered."""

    def state_dict(self, group: dist.ProcessGroup, *, own: bool) -> dict[str, Any]:
        """See ``Carrier``."""
        return {"residuals": {}, "compressors": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Carrier``."""
        if state["residuals"]:
            raise UsageError("the saved local updates were compressed: pass the same compressor")


class Compressed:
    """Through compressors, with the residual of each parameter added to its next change.

    Args:
        likes: changes by parameter name, in their order: this rank's shapes.
        policy: which compressor for which; of these parameters alone.
        feedback: whether residuals are kept; ``None``: as each compressor wants it.
        seed: of everything random.
        stats: counts bytes.
    """

    def __init__(
        self,
        likes: Mapping[str, Tensor],
        policy: CompressionPolicy,
        *,
        feedback: bool | None,
        seed: int,
        stats: CommStats,
    ) -> None:
        self._policy, self._seed, self._stats = policy, seed, stats
        self._names = tuple(likes)
        self._shapes = {name: like.shape for name, like in likes.items() if like.numel()}
        self._wants_feedback = feedback
        self.feedback = ErrorFeedback()
        self._open = OpenStep(policy, self.feedback)
        self._exact = {dtype: Cast(dtype) for dtype in (torch.float32, torch.float64)}

    def carry(self, changes: Packed, means: Packed, group: dist.ProcessGroup, meeting: int) -> None:
        """See ``Carrier``."""
        self._open.settle(keep=False)  # what is left of a meeting that failed
        entries = [(n, c, m) for n, c, m in zip(self._names, changes.parts, means.parts, strict=True) if c.numel()]
        together: dict[int, tuple[Compressor, list[tuple[str, Tensor, Tensor]]]] = {}
        for name, change, mean in entries:
            chosen = self._policy.choose(name, change.shape, meeting) or self._exact[change.dtype]
            together.setdefault(id(chosen), (chosen, []))[1].append((name, change, mean))
            rounds = 2 * (group.size() - 1) / group.size()
            self._stats.exact_bytes += rounds * change.numel() * change.element_size()
        work = list(together.values())
        keeps = [self._keeps(compressor) for compressor, _ in work]
        conversations = [
            compressor.converse([self._item(n, c, keep, group, meeting) for n, c, _ in own], keep_residual=keep)
            for (compressor, own), keep in zip(work, keeps, strict=True)
        ]
        for (_, own), outcomes in zip(work, exchange(conversations, group, self._stats), strict=True):
            for (name, _, mean), outcome in zip(own, outcomes, strict=True):
                mean.copy_(outcome.mean)
                self._open.add(mean, {name: mean}, meeting)
                if outcome.residual is not None:
                    self.feedback.remember(name, outcome.residual)

    def settle(self, *, keep: bool) -> None:
        """See ``Carrier``."""
        self._open.settle(keep=keep)

    def state_dict(self, group: dist.ProcessGroup, *, own: bool) -> dict[str, Any]:
        """See ``Carrier``: this rank's own residuals, or their means over the group, which is a collective call."""
        residuals = self.feedback.memory if own else mean_residuals(self.feedback, self._shapes, group)
        held: dict[str, dict[str, Tensor]] = {}
        for compressor in self._policy.compressors():
            held.setdefault(compressor.name, {}).update({k: v.clone() for k, v in compressor.state_dict().items()})
        return {"residuals": {n: kept.clone() for n, kept in residuals.items()}, "compressors": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Carrier``."""
        self.feedback.load_state_dict({n: kept for n, kept in state["residuals"].items() if n in self._names})
        for compressor in self._policy.compressors():
            found = state["compressors"].get(compressor.name, {})
            compressor.load_state_dict({name: kept for name, kept in found.items() if name in self._names})

    def _keeps(self, compressor: Compressor) -> bool:
        if any(compressor is exact for exact in self._exact.values()):
            return False
        return compressor.wants_feedback if self._wants_feedback is None else self._wants_feedback

    def _item(self, name: str, change: Tensor, keep: bool, group: dist.ProcessGroup, meeting: int) -> Item:
        if keep or name in self.feedback.memory:
            tensor = self.feedback.compensate(name, change)
            if not keep:  # compressed so far, exact from now on: the residual goes out at once
                self.feedback.release(name)
        else:  # a copy: collectives overwrite what they are given, and a meeting that fails is held again
            tensor = change.clone()
        context = Context(name=name, step=meeting, rank=group.rank(), world_size=group.size(), seed=self._seed)
        return Item(tensor=tensor.contiguous(), context=context)


class Carriers:
    """Makes one for each part.

    Args:
        combiner: of changes that are not compressed.
        compressor: of the others; ``None``: none is.
        feedback, seed: as ``Compressed`` takes them.
        stats: where bytes are counted.
    """

    def __init__(
        self,
        combiner: Combiner,
        compressor: Compressor | CompressionPolicy | None,
        *,
        feedback: bool | None,
        seed: int,
        stats: CommStats,
    ) -> None:
        self._combiner, self._compressor = combiner, compressor
        self._feedback, self._seed, self._stats = feedback, seed, stats

    def make(self, likes: dict[str, Tensor]) -> Carrier:
        """For changes of these names and shapes."""
        if self._compressor is None:
            return Combined(self._combiner, self._stats)
        policy = as_policy(self._compressor)
        return Compressed(likes, policy, feedback=self._feedback, seed=self._seed, stats=self._stats)


def as_policy(method: Compressor | CompressionPolicy) -> CompressionPolicy:
    """A policy of one's own for a fragment.

    Compressors that take tensors joined have all parameters: their bytes do not depend on shapes, and changes of many
    steps are not as few bytes beside the rest as vectors of one gradient. Others have matrices.
    """
    if isinstance(method, CompressionPolicy):
        return copy.deepcopy(method)
    own = copy.deepcopy(compressor_of(method))
    return CompressionPolicy(own, rules={"*": own} if own.is_elementwise else None)


def take_change(parameters: Any) -> torch.optim.Optimizer:
    """The outer optimizer that just takes the change."""
    return torch.optim.SGD(parameters, lr=1.0)
