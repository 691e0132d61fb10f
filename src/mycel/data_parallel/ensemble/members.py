"""Ensembles whose members live on ranks: two numbers an example travel, and no gradient ever does.

A rank may have several members, all ranks as many. Whatever ranks they are on, they learn the same, bit for bit where
no features are shared. A member may be data-parallel itself: of a mesh ``("replica", "member")`` wrap each member's
model in ``DistributedDataParallel`` over ``mesh["replica"]``, and give the ensemble ``mesh["member"].get_group()``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mycel.arguments import real_number, the, whole_number
from mycel.comm.exchange import all_gather_rows
from mycel.comm.messages import all_gather_single
from mycel.comm.meter import ByteMeter
from mycel.comm.start import group_or_all
from mycel.data_parallel.ensemble.choice import MultipleChoice, choose, measures
from mycel.data_parallel.ensemble.scores import EnsembleScores, score
from mycel.errors import UsageError
from mycel.wire.noise import uniform

__all__ = ["Ensemble"]


class Ensemble:
    """This rank's place in an ensemble. All members see the same examples in the same order.

    Args:
        choice: how members share examples; ``None`` for independent ones, which exchange nothing in training.
        group: the members' ranks; by default all.
        per_rank: members that each rank has; where these are several, give lists of logits and of features.
        sharing: of feature sharing, the chance with which a number of another member's features is taken.
        seed: of drawn labels and of feature sharing; the same on all ranks.

    Attributes:
        member: number among the members of this rank's one, or of the first of several, and
        size: how many there are, over all ranks.
        step: losses so far.
        meter: bytes that this rank has sent.

    Raises:
        UsageError: more members are to learn an example than there are, or out of range.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> ensemble = Ensemble(MultipleChoice(overlap=1))
        >>> logits, targets = torch.tensor([[2.0, 0.0], [0.0, 0.0]], requires_grad=True), torch.tensor([0, 1])
        >>> ensemble.loss(logits, targets).backward()
        >>> ensemble.evaluate(logits, targets).top1_error
        0.5
        >>> ensemble.predict(logits)[1].tolist()  # does not know
        [0.5, 0.5]
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        choice: MultipleChoice | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        per_rank: int = 1,
        sharing: float = 0.7,
        seed: int = 0,
    ) -> None:
        self.choice = None if choice is None else the(MultipleChoice, choice, "how members share examples")
        self._group = group_or_all(group, "Ensemble")
        self.per_rank = whole_number(per_rank, "per_rank, members that each rank has", least=1)
        self.member, self.size = self._group.rank() * self.per_rank, self._group.size() * self.per_rank
        if choice is not None and choice.overlap > self.size:
            raise UsageError(f"overlap {choice.overlap} of {self.size} members: at most all of them learn an example")
        self.sharing = real_number(sharing, "sharing, the chance of another member's feature", least=0, most=1)
        self.seed = whole_number(seed, "seed", least=0)
        self.step = 0
        self.meter = ByteMeter()
        self._shared = 0

    def loss(self, logits: Tensor | Sequence[Tensor], targets: Tensor) -> Tensor:
        """This member's part of the loss, a mean over examples. Every rank calls it, with the same examples.

        Args:
            logits: of this member, ``[B, C]``, or of each of this rank's.
            targets: right classes, ``[B]``, the same on all members.

        Returns:
            Call its ``backward``; gradients stay on this rank. Of several members the sum of their parts, so that
            each has the gradient that it would have alone.

        Raises:
            UsageError: on every rank, where they have different examples.
        """
        of_members = self._checked(logits, targets)
        told = [measures(own, targets) for own in of_members]
        step, self.step, self._shared = self.step, self.step + 1, 0
        if self.choice is None:
            return _added([errors.mean() for errors, _ in told])
        self._check_same(targets)
        own = torch.stack([torch.stack([errors.detach(), unsure.detach()]) for errors, unsure in told]).float()
        heard = self._gather(own, "choice").view(self.size, 2, -1)
        chosen = choose(heard[:, 0], heard[:, 1], self.choice)[self.member :]
        losses = []
        for here, (errors, unknown) in enumerate(told):
            if self.choice.labels == "stochastic":
                seed = self._seed_of(step, 0, self.member + here)
                drawn = uniform(seed, len(targets), targets.device) * of_members[here].shape[1]
                unknown = functional.cross_entropy(of_members[here], drawn.long(), reduction="none")
            losses.append(torch.where(chosen[here], errors, self.choice.beta * unknown).mean())
        return _added(losses)

    @overload
    def share(self, features: Tensor, *, training: bool = True) -> Tensor: ...

    @overload
    def share(self, features: Sequence[Tensor], *, training: bool = True) -> list[Tensor]: ...

    def share(self, features: Tensor | Sequence[Tensor], *, training: bool = True) -> Tensor | list[Tensor]:
        """Feature sharing: this member's features and, of each other's, numbers that are drawn.

        Call it at the same places of every member's forward pass, before ``loss``.

        Args:
            features: of an early layer, of the same shape on every member, examples first; or of each of this
                rank's members.
            training: draw; otherwise all of the others' features are taken, times the chance.

        Returns:
            ``h_m + sum_n mask_mn * h_n`` over the other members, of the same shape, or one for each of this rank's;
            gradients go back to whose features they are.
        """
        given = [features] if isinstance(features, Tensor) else list(features)
        self._check_count(len(given), "features")
        (all_of_them,) = all_gather_rows([torch.stack(given)], self._group, self.meter, "features")
        found = [self._mixed(all_of_them, self.member + here, training=training) for here in range(self.per_rank)]
        self._shared += 1
        return found[0] if isinstance(features, Tensor) else found

    def _mixed(self, each: Tensor, member: int, *, training: bool) -> Tensor:
        total = each[member]
        for other in range(self.size):
            if other == member:
                continue
            if not training:
                total = total + self.sharing * each[other]
                continue
            seed = self._seed_of(self.step, 1 + self._shared * self.size + other, member)
            mask = uniform(seed, total.numel(), total.device) < self.sharing
            total = total + mask.view(total.shape) * each[other]
        return total

    @torch.no_grad()
    def predict(self, logits: Tensor | Sequence[Tensor]) -> Tensor:
        """What the ensemble answers: the mean of its members' probabilities. Every rank calls it.

        Args:
            logits: of this member, ``[B, C]``, or of each of this rank's, for the same examples.

        Returns:
            ``[B, C]`` in float64, the same bits on all ranks.

        Raises:
            UsageError: on every rank, where they have different numbers of examples.
        """
        first = logits if isinstance(logits, Tensor) else logits[0]
        return self._probabilities(logits, torch.zeros(len(first), dtype=torch.int64, device=first.device)).mean(0)

    @torch.no_grad()
    def evaluate(self, logits: Tensor | Sequence[Tensor], targets: Tensor) -> EnsembleScores:
        """Scores of the whole ensemble, the same on all ranks. Every rank calls it, with the same examples.

        Args:
            logits: of this member, ``[B, C]``, or of each of this rank's.
            targets: right classes, ``[B]``.

        Raises:
            UsageError: on every rank, where they have different examples.
        """
        return score(self._probabilities(logits, targets), targets)

    def _probabilities(self, logits: Tensor | Sequence[Tensor], targets: Tensor) -> Tensor:
        """Of all members, ``[M, B, C]``, in float64; they travel as float32."""
        of_members = self._checked(logits, targets)
        self._check_same(targets)
        own = torch.stack([functional.softmax(some.float(), dim=1) for some in of_members])
        return self._gather(own, "evaluation").view(self.size, *own.shape[1:]).double()

    def _checked(self, logits: Tensor | Sequence[Tensor], targets: Tensor) -> list[Tensor]:
        """Logits of each of this rank's members."""
        given = [logits] if isinstance(logits, Tensor) else list(logits)
        self._check_count(len(given), "logits")
        for own in given:
            if own.dim() != 2 or own.shape[1:] != given[0].shape[1:] or targets.shape != own.shape[:1]:
                raise UsageError(
                    f"logits {list(own.shape)} and targets {list(targets.shape)}: expected [B, C] and [B]"
                )
        return given

    def _check_count(self, count: int, what: str) -> None:
        if count != self.per_rank:
            raise UsageError(
                f"{what} of {count} member(s), and this rank has {self.per_rank}: give one tensor for each, "
                "or Ensemble(per_rank=...) their number"
            )

    def _check_same(self, targets: Tensor) -> None:
        """Members hear whether all have the same examples, before anything travels whose size depends on it."""
        if self._group.size() == 1:
            return
        text = f"{len(targets)} ".encode() + targets.cpu().numpy().tobytes()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        # How many members a rank has decides what travels next, so it goes with the number of examples, in one word.
        counts = (self.per_rank << 40) + len(targets)
        own = torch.tensor([counts, digest], dtype=torch.int64, device=targets.device)
        heard = self._gather(own, "check").view(-1, 2)
        if not bool((heard != heard[0]).any()):
            return
        members, sizes = (heard[:, 0] >> 40).tolist(), (heard[:, 0] & ((1 << 40) - 1)).tolist()
        if len(set(members)) > 1:
            raise UsageError(
                f"ranks have {members} members: all of them have as many, Ensemble(per_rank=...); here, rank "
                f"{self._group.rank()}, {self.per_rank}"
            )
        raise UsageError(
            f"members have different batches: {sizes} examples by {'member' if self.per_rank == 1 else 'rank'}, or "
            f"other targets (this is member {self.member}); give every member the same examples in the same order"
        )

    def _gather(self, own: Tensor, name: str) -> Tensor:
        if self._group.size() == 1:
            return own.reshape(-1)
        flat = own.contiguous().view(-1)
        heard = flat.new_empty(self._group.size() * len(flat))
        all_gather_single(heard, flat, group=self._group)
        self.meter.add_even(name, flat.numel() * flat.element_size(), self._group)
        return heard

    def _seed_of(self, step: int, part: int, member: int) -> int:
        text = f"{self.seed}/{step}/{member}/{part}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _added(losses: Sequence[Tensor]) -> Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(list(losses)).sum()
