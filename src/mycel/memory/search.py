"""Every way to train a model within a budget, modelled: alone, sharded, or with shared sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mycel.comm.sharded import is_fully_sharded
from mycel.errors import UsageError
from mycel.memory.degrees import Degrees
from mycel.memory.needs import Needs, blocks_of, groups_of, innermost, needs_of
from mycel.memory.needs.trace import Batch, Loss
from mycel.memory.residency import Parts, parts_of, sharded_parts
from mycel.memory.tiers import Link
from mycel.memory.ways import Choice, Limits, Rates, activations, bytes_per_s, flops_per_s, near, residency
from mycel.planning.residency import Block

__all__ = ["LookedAt", "Search", "Subject", "subject_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedAt:
    """A choice.

    Attributes:
        choice: itself.
        plan: what carries it out: a schedule, or names, instance and plan of activations.
        needs: of a step as it is, by the choice's degree.
    """

    choice: Choice
    plan: Any
    needs: Needs


@dataclass(slots=True)
class Search:
    """What ways are modelled by.

    Attributes:
        subject: the model.
        batch, optimizer, loss, budget, micro_batches, slots: as ``fit`` got them.
        device: that computes.
        link: to far memory.
        rates: of this rank; the link's is 0 until something is to go over it.
    """

    subject: Subject
    batch: Batch
    optimizer: torch.optim.Optimizer
    loss: Loss
    budget: int
    micro_batches: int
    device: torch.device
    link: Link
    slots: int | None = None
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        dtype = next((p.dtype for p in self.subject.model.parameters()), torch.float32)
        rate = flops_per_s(self.device, dtype)
        self.rates = Rates(flops_per_s=rate, gbps=0.0, exchange_s=0.0, micro_batches=self.micro_batches)

    def alone(self) -> list[LookedAt]:
        """Ways of a rank that has its batch for itself, or a sharded model."""
        needs = self._needs(self.batch, recompute=False)
        looked_at = self._looked_at({"keep": (near("keep", needs, self.budget, self.rates), None)}, needs, 1)
        if self.subject.group is None and looked_at[0].choice.seconds is not None:
            return looked_at
        again = self._needs(self.batch, recompute=True)
        ways = self._ways(needs, again, self._with_link(self.rates), None)
        return looked_at + self._looked_at(ways, needs, 1)

    def shared(self, degrees: Degrees) -> list[LookedAt]:
        """Ways by rising degree, to the first by which everything is near: more ranks only exchange more.

        Blocks of queries and keys that see each other in part count as whole ones, and the fewer ranks, the more of
        those there are. So all degrees compute what the first does, in equal parts.

        Args:
            degrees: numbers of ranks that may share a sequence.
        """
        looked_at: list[LookedAt] = []
        whole: tuple[float, float] | None = None
        for degree in degrees.degrees:
            with degrees.traced(self.subject.model, self.batch, degree) as step:
                needs = self._needs(step.batch, recompute=False)
                exchange_s = step.exchange_s
                again = self._needs(step.batch, recompute=True)
                again_s = step.exchange_s
            counted = needs.flops * degree, again.flops * degree
            whole = whole or counted
            rates, slower = (
                replace(self._with_link(self.rates), flops_per_s=self.rates.flops_per_s * share, exchange_s=seconds)
                for share, seconds in (
                    (counted[0] / max(1, whole[0]), exchange_s),
                    (counted[1] / max(1, whole[1]), again_s),
                )
            )
            ways: dict[str, tuple[Choice, Any]] = {"keep": (near("keep", needs, self.budget, rates), None)}
            ways |= self._ways(needs, again, rates, slower)
            looked_at += self._looked_at(ways, needs, degree)
            if looked_at[-len(ways)].choice.seconds is not None:
                break
        return looked_at

    def _ways(self, needs: Needs, again: Needs, rates: Rates, slower: Rates | None) -> dict[str, tuple[Choice, Any]]:
        """All but keeping everything.

        Args:
            needs: of a step.
            again: of one that computes blocks again.
            rates: of the first.
            slower: of the second, if others.
        """
        subject, budget = self.subject, self.budget
        found: dict[str, tuple[Choice, Any]] = {}
        if subject.is_sharded:
            found["recomputed"] = near("recomputed", again, budget, slower or rates), None
        else:
            found["activations"] = activations(needs, budget, rates, self._same)
        for way, of, at in (("residency", needs, rates), ("residency, recomputed", again, slower or rates)):
            found[way] = residency(way, of, subject.parts, budget, at, self.slots)
        return found

    def _looked_at(self, ways: Mapping[str, tuple[Choice, Any]], needs: Needs, degree: int) -> list[LookedAt]:
        choices = _agreed(tuple(choice for choice, _ in ways.values()), self.subject.group)
        return [
            LookedAt(choice=replace(choice, degree=degree), plan=plan, needs=needs)
            for choice, (_, plan) in zip(choices, ways.values(), strict=True)
        ]

    def _needs(self, batch: Any, *, recompute: bool) -> Needs:
        return needs_of(
            self.subject.model,
            batch,
            optimizer=self.optimizer,
            loss=self.loss,
            rounding=512 if self.device.type == "cuda" else 1,
            recompute=recompute,
        )

    def _with_link(self, rates: Rates) -> Rates:
        if not self.rates.gbps:
            gbps = bytes_per_s(self.link, self.device, budget=self.budget) / 1e9
            self.rates = replace(self.rates, gbps=gbps)
        return replace(rates, gbps=self.rates.gbps)

    def _same(self, limits: Limits) -> Limits:
        """The tightest of all ranks: blocks that are computed again exchange again, and all have to join."""
        group = self.subject.group
        if group is None or group.size() == 1:
            return limits
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, limits, group=group)
        blocks = tuple(
            Block(**{name: max(getattr(block, name) for block in each) for name in _OF_BLOCK})
            for each in zip(*(of.blocks for of in found), strict=True)
        )
        return Limits(blocks=blocks, capacity=min(of.capacity for of in found), gbps=min(of.gbps for of in found))


_OF_BLOCK = ("forward_us", "backward_us", "saved", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model as ways see it.

    Attributes:
        model: itself.
        blocks: that the residency of parameters follows: modules, or FSDP2's groups.
        again: modules that are computed again.
        parts: units.
        group: of the ranks that have to choose alike; ``None`` where each chooses for itself.
        is_sharded: whether ``fully_shard`` was applied to it.
    """

    model: nn.Module
    blocks: Mapping[str, Any]
    again: dict[str, nn.Module]
    parts: Parts
    group: dist.ProcessGroup | None
    is_sharded: bool


def subject_of(model: nn.Module, degrees: Degrees | None) -> Subject:
    """A model, whole or sharded, as ways see it.

    Args:
        model: any.
        degrees: numbers of ranks that may share a sequence.

    Raises:
        UsageError: it is sharded in part, or over a mesh of two dimensions, or there are degrees besides.
    """
    if not any(is_fully_sharded(module) for module in model.modules()):
        blocks = blocks_of(model)
        group = None if degrees is None else degrees.group
        parts = parts_of(model, blocks)
        return Subject(model=model, blocks=blocks, again=blocks, parts=parts, group=group, is_sharded=False)
    if degrees is not None:
        raise UsageError(
            f"{type(model).__name__} is sharded, and sequences are divided before that: call mycel.sequence.apply, "
            "then fully_shard, then fit without degrees"
        )
    groups = groups_of(model)
    modules = {name: group.modules[0] for name, group in groups.items()}
    again = {name: modules[name] for name in innermost(modules)}
    group = next(iter(groups.values()))._all_gather_process_group
    parts = sharded_parts(model, groups)
    return Subject(model=model, blocks=groups, again=again, parts=parts, group=group, is_sharded=True)


def _agreed(choices: tuple[Choice, ...], group: dist.ProcessGroup | None) -> tuple[Choice, ...]:
    """What fits on every rank takes as long as on the slowest; what does not, lacks what the worst one lacks."""
    if group is None or group.size() == 1:
        return choices
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, [(choice.peak, choice.seconds) for choice in choices], group=group)
    made = []
    for place, choice in enumerate(choices):
        peak = max(each[place][0] for each in found)
        times = [each[place][1] for each in found]
        missing = None in times
        says = "another rank has too little" if missing and choice.seconds is not None else choice.says
        made.append(replace(choice, peak=peak, seconds=None if missing else max(times), says=says))
    return tuple(made)
