"""A part of a model that meets as one: what all ranks share of it, and a meeting of it that is under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mycel.comm.bundle import Packed
from mycel.comm.pending import Pending
from mycel.data_parallel.feedback import is_finite
from mycel.data_parallel.local.carriers import Carrier
from mycel.data_parallel.local.outer import MakeOuter

__all__ = ["Meeting", "Part", "Said"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What ranks tell each other with a meeting, each number the largest of all ranks'.

    Attributes:
        trains: somebody still has batches.
        changed: somebody has trained since the part's last meeting.
        last: the training ends with this meeting.
        wanted: somebody wants to come in.
    """

    trains: int = 1
    changed: int = 1
    last: int = 0
    wanted: int = 0


@dataclass(slots=True, kw_only=True)
class Meeting:
    """One meeting of a part, from measuring to using.

    Attributes:
        part: whose.
        number: of all parts' meetings so far, from 1.
        changes, means: what this rank has brought, and what comes of all; the same place where nobody may be lost.
        lands_at: step after which it is used.
        pending: what was said, when the means are there.
        mixing: share of the rank's own parameters that it then keeps.
        since: the rank's own parameters when they were measured, where it keeps what it has learned since.
        is_held: the means are there, though not necessarily on every rank.
        is_used: they have been used.
    """

    part: Part
    changes: Packed
    means: Packed
    number: int = 0
    lands_at: int = 0
    mixing: float = 0.0
    since: list[Tensor] | None = None
    pending: Pending[Said] = field(default_factory=lambda: Pending.done(Said()))
    is_held: bool = False
    is_used: bool = False


class Part:
    """Some parameters that meet together.

    Args:
        names, parameters: in the model's order.
        targets: this rank's parts of the parameters.
        make_outer: makes the optimizer of the shared parameters.
        carrier: makes one change of all ranks' changes.
        num_buffers: of changes, as many as may be under way at once.
        keeps_changes: means are put elsewhere.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        targets: Sequence[Tensor],
        make_outer: MakeOuter,
        carrier: Carrier,
        *,
        num_buffers: int,
        keeps_changes: bool,
    ) -> None:
        self.names, self.parameters, self.targets = list(names), list(parameters), list(targets)
        self.carrier = carrier
        self.shared = Packed(self.targets)
        self.shared.copy_from(self.targets)
        self._outer_parameters = [nn.Parameter(part) for part in self.shared.parts]
        self.outer = make_outer(self._outer_parameters)
        self._buffers = [Packed(self.targets) for _ in range(num_buffers)]
        self._means = Packed(self.targets) if keeps_changes else None
        #: Meetings that have begun, and the rank's own steps when the last one did.
        self.meetings = self.trained = 0

    def measure(self) -> Meeting:
        """Where this rank has gone since the parameters were shared: that minus where it is."""
        changes = self._buffers[0]
        self._buffers.append(self._buffers.pop(0))
        changes.copy_from(self.targets)
        for bundle, shared in zip(changes.bundles, self.shared.bundles, strict=True):
            bundle.flat.neg_().add_(shared.flat)
        return Meeting(part=self, changes=changes, means=self._means or changes)

    def apply(self, means: Packed, rate: float) -> None:
        """One step of the outer optimizer.

        Args:
            means: of all ranks' changes.
            rate: learning rate of the local steps, for outer optimizers that ask for it.
        """
        for group in self.outer.param_groups:
            if "local_lr" in group:
                group["local_lr"] = rate
        for parameter, change in zip(self._outer_parameters, means.parts, strict=True):
            parameter.grad = change
        self.outer.step()
        for parameter in self._outer_parameters:
            parameter.grad = None

    @torch.no_grad()
    def give(self, mixing: float = 0.0, since: Sequence[Tensor] | None = None) -> None:
        """Go on from the shared parameters, and so much of the rank's own, or what they have changed since."""
        if since is not None:
            for target, shared, before in zip(self.targets, self.shared.parts, since, strict=True):
                target.copy_(shared + (target - before).to(shared.dtype))
        elif not mixing:
            self.shared.copy_to(self.targets)
        else:
            for target, shared in zip(self.targets, self.shared.parts, strict=True):
                target.copy_(shared + mixing * (target.to(shared.dtype) - shared))

    @property
    def is_sound(self) -> bool:
        """Whether this rank's parameters are all finite."""
        return all(is_finite(target) for target in self.targets)
