"""Optimizers whose groups say by which algorithm they move: Dion or Muon, DeMo or 1-bit Adam, AdamW for the rest.

A step has three parts. Ranks agree that it may be taken: all gradients are finite, and what every rank must do alike
is alike. Every update is found, by few collectives for all matrices together. Then everything is written; a step that
is not taken has written nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mycel.comm.handle import Handle
from mycel.data_parallel.feedback import is_finite
from mycel.data_parallel.optimizers import adamw_update, demo_update, dion_update, muon_update, one_bit_update
from mycel.data_parallel.optimizers.attach import Attached
from mycel.data_parallel.optimizers.check import ALGORITHMS, check_group, check_together
from mycel.data_parallel.optimizers.entries import Change, Entry, Ranks, local_part
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError

__all__ = ["Dion", "MatrixOptimizer", "Muon"]

logger = logging.getLogger(__name__)

#: What groups have that say nothing; each optimizer has its own beside it.
_DEFAULTS = {
    "rank": 0.25,
    "nesterov": True,
    "newton_schulz_steps": 5,
    "chunk": 64,
    "top_k": 32,
    "warm_up": 1000,
    "momentum": 0.95,
    "wire": None,
}
#: What each rank has for itself after ``attach``, by algorithm.
_OWN = {"dion": "momentum", "demo": "momentum", "one_bit_adam": "owed"}


class MatrixOptimizer(torch.optim.Optimizer):
    """What ``Dion``, ``Muon``, ``DeMo`` and ``OneBitAdam`` share: they differ in what groups are by default.

    Attributes:
        stats: steps, and bytes that this rank has sent: factors, updates and, after ``attach``, other gradients.
        skipped: steps that were not taken, since gradients were not finite.
        replicas: the ranks of the model that it is attached to.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], seed: int) -> None:
        self.stats, self.skipped, self.seed = CommStats(), 0, seed
        self.replicas: dist.ProcessGroup | None = None
        super().__init__(params, _DEFAULTS | defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, value in {"stats": CommStats(), "skipped": 0, "seed": 0, "replicas": None}.items():
            self.__dict__.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``.

        Raises:
            UsageError: an option or a parameter that its algorithm cannot do.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except UsageError:
            self.param_groups.pop()
            raise

    def attach(self, model: DistributedDataParallel) -> Handle:
        """Take gradients from DDP before they are averaged: see ``mycel.data_parallel.optimizers.attach``.

        Of Dion's matrices, factors travel instead; of DeMo's parameters, frequencies; of 1-bit Adam's, after their
        warm-up, signs; of all others, DDP's mean. Matrices of Muon are divided among the ranks. Every rank calls it,
        once, before the first backward pass.

        Returns:
            A handle; ``close()`` has DDP average all gradients again, and momenta with them.

        Raises:
            UsageError: the model's gradients are compressed or combined already, or its parameters are others.
        """
        return Attached(self, model)

    def stays(self, group: dict[str, Any], parameter: Tensor) -> bool:
        """Whether the next step, after ``attach``, takes this rank's gradient of a parameter and not the mean."""
        if group["algorithm"] == "one_bit_adam":
            return one_bit_update.is_warm(group, self.state.get(parameter, {}))
        return group["algorithm"] in _OWN

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move all parameters that have a gradient; where a gradient is not finite, on any rank, none.

        Raises:
            UsageError: after ``attach``, ranks have other gradients of parameters that all move alike, such as
                after clipping by norms of their own.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        entries = self._entries()
        ranks = Ranks(
            replicas=self.replicas, shards=check_together(e.parameter for es in entries.values() for e in es)
        )
        if not self._agree(entries, ranks):
            self._skip()
            return loss
        changes: list[Change] = []
        if entries["dion"]:
            changes += dion_update.changes(entries["dion"], ranks, self.stats, self.seed)
        if entries["muon"]:
            changes += muon_update.changes(entries["muon"], ranks, self.stats)
        if entries["demo"]:
            changes += demo_update.changes(entries["demo"], ranks, self.stats)
        by_warmth: dict[bool, list[Entry]] = {True: [], False: []}
        for entry in entries["one_bit_adam"]:
            by_warmth[one_bit_update.is_warm(entry.options, entry.state)].append(entry)
        if by_warmth[True]:
            changes += one_bit_update.changes(by_warmth[True], ranks, self.stats)
        if not all(is_finite(change.values) for change in changes):
            self._skip()
            return loss
        for change in changes:
            change.apply()
        adamw_update.apply(entries["adamw"])
        one_bit_update.warm_up(by_warmth[False])
        self.stats.steps += 1
        return loss

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make momenta the mean over the ranks of ``attach``, so that one rank's ``state_dict`` is everybody's.

        Of Dion and DeMo, each rank's momentum has its own gradients, and of 1-bit Adam what it owes. Their mean is
        what counts: training goes on with it, of Dion as before up to rounding, on any number of ranks. Bytes of one
        exact step. Every rank calls it, between steps; without it, each rank's own state makes its run go on bit for
        bit.
        """
        if self.replicas is None:
            return
        for group in self.param_groups:
            key = _OWN.get(group["algorithm"], "")
            for parameter in group["params"]:
                if key in self.state[parameter]:
                    own = self.state[parameter][key]
                    dist.all_reduce(own, group=self.replicas)
                    own.div_(self.replicas.size())

    def _skip(self) -> None:
        self.skipped += 1
        logger.warning("a step was not taken: gradients or updates are not finite (%d so far)", self.skipped)

    def _entries(self) -> dict[str, list[Entry]]:
        """By algorithm; in an order that is the same on all ranks."""
        found: dict[str, list[Entry]] = {name: [] for name in ALGORITHMS}
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise UsageError(
                        f"{_name(group, place)} has a sparse gradient, which {type(self).__name__} cannot do: "
                        "give it to torch.optim.SparseAdam, or make its embedding with sparse=False"
                    )
                found[group["algorithm"]].append(
                    Entry(
                        name=f"{number}.{place}",
                        parameter=parameter,
                        gradient=local_part(parameter.grad),
                        options=group,
                        state=self.state[parameter],
                    )
                )
        return found

    def _agree(self, entries: dict[str, list[Entry]], ranks: Ranks) -> bool:
        """Whether all gradients are finite on all ranks; in one collective of 24 bytes."""
        everything = [entry for members in entries.values() for entry in members]
        if not everything:
            return True
        is_bad = not all(is_finite(entry.gradient) for entry in everything)
        group = ranks.replicas or ranks.shards
        if group is None:
            return not is_bad
        alike = 0.0 if ranks.replicas is None or is_bad else self._fingerprint(entries)
        told = torch.tensor([float(is_bad), alike, -alike], dtype=torch.float64, device=everything[0].gradient.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        self.stats.sent(2 * (group.size() - 1) / group.size() * told.nbytes)
        any_bad, most, least = told.tolist()
        if any_bad:
            return False
        if most != -least:
            raise UsageError(
                "ranks have different gradients of parameters that all of them move alike (AdamW's and Muon's): "
                "clipping by a rank's own norm does that, since gradients of other groups are not averaged. Clip "
                "those of AdamW's groups alone: other updates are as long whatever the length of gradients"
            )
        return True

    def _fingerprint(self, entries: dict[str, list[Entry]]) -> float:
        """Tells apart, all but surely, gradients that should be the same, and sets of parameters that have any."""
        total = 0.0
        for members in entries.values():
            for place, entry in enumerate(members):
                number, where = (int(part) for part in entry.name.split("."))
                total += 1e3 * number + where + 1
                if not self.stays(entry.options, entry.parameter):
                    total += (place + 1) * float(torch.linalg.vector_norm(entry.gradient.double()))
        return total


def _name(group: dict[str, Any], place: int) -> str:
    names = group.get("param_names")
    return f"parameter {names[place]!r}" if names else f"parameter {place} of its group"


class Dion(MatrixOptimizer):
    """Dion for matrices, AdamW for groups that say ``algorithm="adamw"``; ``matrix_groups`` makes such groups.

    A rank-``r`` update of a matrix of ``m`` rows and ``n`` columns takes factors of ``r (m + n)`` numbers. After
    ``attach`` to a model in DDP they are all that travels of it. Of a model sharded by ``fully_shard``, FSDP2
    averages gradients as always; a step then takes a sum of ``r n`` and one of ``r r`` numbers a matrix, and no rank
    ever holds a whole one.

    Args:
        params: parameters, named parameters or groups; groups may say any of the options below, ``algorithm``
            (``"dion"``, ``"muon"``, ``"adamw"``), and the options of Muon and AdamW.
        lr: of the update ``sqrt(m / n) P Q^T``; for AdamW's groups, AdamW's.
        rank: of updates: a share of the shorter side, as in the paper, or a number of columns.
        momentum: share of what a step sends that stays for later ones (mu in the paper).
        weight_decay: times ``lr``, taken off the weights in each step.
        wire: type in which factors are added up, such as ``torch.bfloat16``; ``None``: the parameters'.
        betas: of AdamW.
        eps: of AdamW.
        seed: of first directions.

    Raises:
        UsageError: an option or a parameter that its algorithm cannot do.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(4, 8))
        >>> optimizer = Dion([weight], lr=0.1, rank=0.5)
        >>> weight.grad = torch.ones(4, 8)
        >>> optimizer.step()
        >>> int(torch.linalg.matrix_rank(weight.detach())), weight.norm().item()  # 0.1 sqrt(4 / 8)
        (1, 0.0707...)

    References:
        Ahn, Xu et al., "Dion: Distributed Orthonormalized Updates", 2025, arXiv 2504.05295.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        *,
        rank: float = 0.25,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        wire: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        seed: int = 0,
    ) -> None:
        given = {"lr": lr, "rank": rank, "momentum": momentum, "weight_decay": weight_decay, "wire": wire}
        super().__init__(params, {"algorithm": "dion", **given, "betas": betas, "eps": eps}, seed)


class Muon(MatrixOptimizer):
    """Muon for matrices, AdamW for groups that say ``algorithm="adamw"``; ``matrix_groups`` makes such groups.

    Newton and Schulz's iteration is divided: each rank does its share of the matrices. After ``attach`` to a model in
    DDP, the updates are gathered; of a model sharded by ``fully_shard``, the owner of a matrix gets its rows, and
    sends back theirs.

    Args:
        params: parameters, named parameters or groups; as of ``Dion``.
        lr: of the update ``sqrt(m / n) U``, the scale of ``Dion``, so that a rate serves both.
        momentum: share of the momentum that stays.
        nesterov: look ahead by one step of momentum.
        newton_schulz_steps: of the iteration.
        weight_decay: times ``lr``, taken off the weights in each step.
        wire: type in which updates (and rows) travel; ``None``: the parameters'.
        betas: of AdamW.
        eps: of AdamW.

    Raises:
        UsageError: an option or a parameter that its algorithm cannot do.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Muon([weight], lr=0.1)
        >>> weight.grad = torch.tensor([[3.0, 0.0], [0.0, 0.5]])
        >>> optimizer.step()
        >>> [round(x / -0.1) for x in weight.diagonal().tolist()]  # both singular values of the update are near 1
        [1, 1]

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        newton_schulz_steps: int = 5,
        weight_decay: float = 0.0,
        wire: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        given: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "wire": wire}
        given |= {"nesterov": nesterov, "newton_schulz_steps": newton_schulz_steps, "betas": betas, "eps": eps}
        super().__init__(params, {"algorithm": "muon", **given}, 0)
