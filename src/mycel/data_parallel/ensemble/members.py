"""Ensembles whose members live on ranks: two numbers an example travel, and no gradient ever does.

A member may be data-parallel itself: of a mesh ``("replica", "member")`` wrap each member's model in
``DistributedDataParallel`` over ``mesh["replica"]``, and give the ensemble ``mesh["member"].get_group()``.
"""

from __future__ import annotations

import hashlib

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
        group: the members, one a rank; by default all ranks.
        sharing: of feature sharing, the chance with which a number of another member's features is taken.
        seed: of drawn labels and of feature sharing; the same on all ranks.

    Attributes:
        member: this rank's number among the members, and
        size: how many there are.
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
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        choice: MultipleChoice | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        sharing: float = 0.7,
        seed: int = 0,
    ) -> None:
        self.choice = None if choice is None else the(MultipleChoice, choice, "how members share examples")
        self._group = group_or_all(group, "Ensemble")
        self.member, self.size = self._group.rank(), self._group.size()
        if choice is not None and choice.overlap > self.size:
            raise UsageError(f"overlap {choice.overlap} of {self.size} members: at most all of them learn an example")
        self.sharing = real_number(sharing, "sharing, the chance of another member's feature", least=0, most=1)
        self.seed = whole_number(seed, "seed", least=0)
        self.step = 0
        self.meter = ByteMeter()
        self._shared = 0

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """This member's part of the loss, a mean over examples. Every member calls it, with the same examples.

        Args:
            logits: of this member, ``[B, C]``.
            targets: right classes, ``[B]``, the same on all members.

        Returns:
            Call its ``backward``; gradients stay on this rank.

        Raises:
            UsageError: on every member, where they have different examples.
        """
        self._check(logits, targets)
        errors, divergences = measures(logits, targets)
        step, self.step, self._shared = self.step, self.step + 1, 0
        if self.choice is None:
            return errors.mean()
        self._check_same(targets)
        own = torch.stack([errors.detach(), divergences.detach()]).float()
        heard = self._gather(own, "choice").view(self.size, 2, -1)
        is_mine = choose(heard[:, 0], heard[:, 1], self.choice)[self.member]
        unknown = divergences
        if self.choice.labels == "stochastic":
            drawn = uniform(self._seed_of(step, 0), len(targets), targets.device) * logits.shape[1]
            unknown = functional.cross_entropy(logits, drawn.long(), reduction="none")
        return torch.where(is_mine, errors, self.choice.beta * unknown).mean()

    def share(self, features: Tensor, *, training: bool = True) -> Tensor:
        """Feature sharing: this member's features and, of each other's, numbers that are drawn.

        Call it at the same places of every member's forward pass, before ``loss``.

        Args:
            features: of an early layer, of the same shape on every member; examples first.
            training: draw; otherwise all of the others' features are taken, times the chance.

        Returns:
            ``h_m + sum_n mask_mn * h_n`` over the other members, of the same shape; gradients go back to whose
            features they are.
        """
        if self.size == 1:
            return features
        (all_of_them,) = all_gather_rows([features], self._group, self.meter, "features")
        each = all_of_them.view(self.size, *features.shape)
        total = each[self.member]
        for other in range(self.size):
            if other == self.member:
                continue
            if not training:
                total = total + self.sharing * each[other]
                continue
            seed = self._seed_of(self.step, 1 + self._shared * self.size + other)
            mask = uniform(seed, features.numel(), features.device) < self.sharing
            total = total + mask.view(features.shape) * each[other]
        self._shared += 1
        return total

    @torch.no_grad()
    def evaluate(self, logits: Tensor, targets: Tensor) -> EnsembleScores:
        """Scores of the whole ensemble, the same on all members. Every member calls it, with the same examples.

        Args:
            logits: of this member, ``[B, C]``.
            targets: right classes, ``[B]``.

        Raises:
            UsageError: on every member, where they have different examples.
        """
        self._check(logits, targets)
        self._check_same(targets)
        own = functional.softmax(logits.float(), dim=1)
        return score(self._gather(own, "evaluation").view(self.size, *own.shape), targets)

    def _check(self, logits: Tensor, targets: Tensor) -> None:
        if logits.dim() != 2 or targets.shape != logits.shape[:1]:
            raise UsageError(
                f"logits {list(logits.shape)} and targets {list(targets.shape)}: expected [B, C] and [B]"
            )

    def _check_same(self, targets: Tensor) -> None:
        """Members hear whether all have the same examples, before anything travels whose size depends on it."""
        if self.size == 1:
            return
        text = f"{len(targets)} ".encode() + targets.cpu().numpy().tobytes()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
        own = torch.tensor([len(targets), digest], dtype=torch.int64, device=targets.device)
        heard = self._gather(own, "check").view(self.size, 2)
        if bool((heard != heard[0]).any()):
            sizes = heard[:, 0].tolist()
            raise UsageError(
                f"members have different batches: {sizes} examples by member, or other targets (this is "
                f"member {self.member}); give every member the same examples in the same order"
            )

    def _gather(self, own: Tensor, name: str) -> Tensor:
        if self.size == 1:
            return own.reshape(-1)
        flat = own.contiguous().view(-1)
        heard = flat.new_empty(self.size * len(flat))
        all_gather_single(heard, flat, group=self._group)
        self.meter.add_even(name, flat.numel() * flat.element_size(), self._group)
        return heard

    def _seed_of(self, step: int, part: int) -> int:
        text = f"{self.seed}/{step}/{self.member}/{part}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
