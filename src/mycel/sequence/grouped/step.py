"""One step on groups of unequal degree: every rank its micro-batches, one pass of the model in each, also if idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mycel.comm import SomeRanks
from mycel.errors import UsageError
from mycel.planning.grouping import PlannedGroup, SequencePlan, check_groups
from mycel.planning.sequence import Layout
from mycel.sequence.context import SequenceContext
from mycel.sequence.grouped.agreement import agree_on_plan, all_went_well
from mycel.sequence.grouped.documents import Document, lengths_of, loaded, num_labels_of, packed
from mycel.sequence.grouped.sync import averaging
from mycel.sequence.models import AppliedSequence
from mycel.units import format_seconds

__all__ = ["MicroBatch", "SequenceStep", "assembled", "planned_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What a rank computes in one of a step's micro-batches.

    Attributes:
        index: of the step's.
        ranks: that share the sequences, ascending; this one alone where it is idle.
        sequences: indices in the step, one after the other in the batch; none: this rank is idle, and computes on a
            token that counts for nothing, so that it joins whatever all ranks exchange.
        context: of the tokens here.
        batch: what the model is called with: a dict, or a tensor if documents are.
        num_labels: that count in the whole step, on all ranks.
        num_averaged: ranks over whose losses gradients are averaged.
    """

    index: int
    ranks: tuple[int, ...]
    sequences: tuple[int, ...]
    context: SequenceContext
    batch: Any
    num_labels: int
    num_averaged: int

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no sequence."""
        return not self.sequences

    def mean(self, losses: Tensor, count: float | None = None) -> Tensor:
        """The loss whose sum over micro-batches and mean over ranks is that of the whole step.

        Args:
            losses: of tokens here, 0 for those that do not count; of a token that stands in they do not.
            count: that count in the whole step, on all ranks; ``num_labels`` if not given.
        """
        there = losses if self.context.num_tokens else losses * 0.0
        return there.sum() * (self.num_averaged / (self.num_labels if count is None else count))


def _loss_of_model(model: nn.Module, part: MicroBatch) -> Tensor:
    output = model(**part.batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"{type(model).__name__} gave no loss: documents need labels, or run(model, loss) a function of the "
            "model and the micro-batch"
        )
    return loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceStep:
    """A step that all ranks have agreed on.

    Attributes:
        number: counted from 0.
        plan: its groups.
        lengths: tokens of each document.
        num_labels: that count, of all documents.
        waited_s: seconds that this rank has waited for the plan, at the rank that plans.
        new_groups: process groups that had to be made for it.
    """

    number: int
    plan: SequencePlan
    lengths: tuple[int, ...]
    num_labels: int
    waited_s: float
    new_groups: int
    _handle: AppliedSequence = field(repr=False)
    _groups: SomeRanks | None = field(repr=False)
    _documents: dict[int, Any] = field(repr=False)

    @property
    def rank(self) -> int:
        """This one, as plans count."""
        group = self._handle.group
        return 0 if group is None else group.rank()

    def micro_batches(self, model: nn.Module | None = None, *, average_each: bool = False) -> Iterator[MicroBatch]:
        """What this rank computes, one after the other: each forward and backward before the next.

        Args:
            model: as it is called; under DDP or FSDP2 gradients are averaged in the last micro-batch alone.
            average_each: in every one, which takes less memory under FSDP2 and more time.
        """
        count = self.plan.num_micro_batches
        for index in range(count):
            with averaging(model, now=average_each or index == count - 1):
                yield self._micro_batch(index)

    def run(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, MicroBatch], Tensor] = _loss_of_model,
        *,
        average_each: bool = False,
    ) -> Tensor:
        """Forward and backward passes of the whole step; then gradients are those of its loss. All ranks call it.

        Args:
            model: as it is called, in DDP or FSDP2 or by itself; by itself gradients are of this rank's part, and
                their mean over ranks is the step's.
            loss: of a model and a micro-batch; the model's own if not given. ``MicroBatch.mean`` scales it.
            average_each: as for ``micro_batches``.

        Returns:
            The loss of the whole step, the same on all ranks, without gradients.
        """
        total: Tensor | None = None
        for part in self.micro_batches(model, average_each=average_each):
            found = loss(model, part)
            torch.autograd.backward([found])
            total = found.detach() if total is None else total + found.detach()
        assert total is not None  # plans have a group
        return self._handle.average(total)

    def explain(self) -> str:
        """Which ranks share how many sequences, in words."""
        plan = self.plan
        lines = [
            f"step {self.number}: {len(self.lengths)} sequences, {sum(self.lengths)} tokens, planned by "
            f"{plan.source or 'hand'}; {format_seconds(plan.total_us / 1e6)} as costs have it"
        ]
        for index in range(plan.num_micro_batches):
            mine = [group for group in plan.groups if group.micro_batch == index]
            for group in mine:
                tokens = [self.lengths[k] for k in group.sequences]
                lines.append(
                    f"micro-batch {index}, {_shown(group.ranks)}: {len(tokens)} of them, {sum(tokens)} tokens, the "
                    f"longest {max(tokens)}"
                )
            idle = sorted(set(range(self._handle.num_ranks)) - {rank for group in mine for rank in group.ranks})
            if idle:
                lines.append(f"micro-batch {index}, {_shown(idle)}: idle")
        return "\n".join(lines)

    def _group_of(self, index: int) -> PlannedGroup | None:
        return _own(self.plan, self.rank, index)

    def _micro_batch(self, index: int) -> MicroBatch:
        own = self._group_of(index)
        if own is None:
            ranks: tuple[int, ...] = (self.rank,)
            sequences: tuple[int, ...] = ()
            context = SequenceContext(Layout(documents=(), ranks=((),)), alone=True)
            batch = packed([self._documents[_first_of(self.plan, index)]], empty=True)
        else:
            ranks, sequences = tuple(sorted(own.ranks)), own.sequences
            layout = self._handle.layout_of([self.lengths[k] for k in sequences], len(ranks))
            group = None if self._groups is None else self._groups.get(ranks)
            context = SequenceContext(layout, group, alone=group is None)
            batch = packed([self._documents[k] for k in sequences])
        return MicroBatch(
            index=index,
            ranks=ranks,
            sequences=sequences,
            context=context,
            batch=self._handle.shard_by(context, batch, num_labels_of_step=self.num_labels),
            num_labels=self.num_labels,
            num_averaged=self._handle.num_averaged,
        )


def planned_step(
    plan: SequencePlan,
    documents: Sequence[Document],
    handle: AppliedSequence,
    *,
    load: Callable[[int], Document] | None = None,
    number: int = 0,
    timeout_s: float | None = None,
) -> SequenceStep:
    """A step by a plan that every rank has. All ranks call it.

    Args:
        plan: which ranks share which documents.
        documents: of the whole step: tensors [tokens, ...], dicts of them, or numbers of tokens.
        handle: what ``mycel.sequence.apply`` gave for the model, over all ranks.
        load: gives a document of which only the number of tokens is said; each is asked for where it is needed.
        number: of the step.
        timeout_s: of exchanges of groups that are new; as torch has it if not given.

    Raises:
        MismatchError: ranks have different plans or documents; the message says which.
        VerificationError: groups overlap, or ranks or documents are unknown, missing or there twice.
        UsageError: no label counts, or the handle is not over all ranks.

    Examples:
        >>> import mycel.sequence
        >>> from mycel.planning.grouping import PlannedGroup
        >>> model = torch.nn.MultiheadAttention(4, 1, batch_first=True)
        >>> handle = mycel.sequence.apply(model)
        >>> groups = (PlannedGroup(micro_batch=0, ranks=(0,), sequences=(0, 1)),)
        >>> plan = SequencePlan(groups=groups, total_us=1.0, lower_bound_us=0.0)
        >>> step = planned_step(plan, [torch.randn(3, 4), torch.randn(2, 4)], handle)
        >>> step.num_labels, [part.batch.shape for part in step.micro_batches()]
        (3, [torch.Size([1, 5, 4])])
        >>> handle.close()
    """
    check_handle(handle)
    lengths = lengths_of(documents)
    agree_on_plan(plan, lengths, handle.group, handle.device)
    return assembled(plan, documents, lengths, handle, load=load, number=number, timeout_s=timeout_s)


def check_handle(handle: AppliedSequence) -> None:
    """Whether plans, which are of all ranks, can be carried out on a model.

    Raises:
        UsageError: other ranks have other sequences.
    """
    if not handle.is_averaged_by_all_that_share:
        raise UsageError(
            f"sequences are divided over {handle.num_ranks} ranks and gradients averaged over {handle.num_averaged}: "
            "plans divide all ranks into groups; call mycel.sequence.apply(model) without a dimension of a mesh"
        )


def assembled(
    plan: SequencePlan,
    documents: Sequence[Document],
    lengths: tuple[int, ...],
    handle: AppliedSequence,
    *,
    load: Callable[[int], Document] | None,
    number: int,
    timeout_s: float | None = None,
    waited_s: float = 0.0,
) -> SequenceStep:
    """A step of a plan that is the same on all ranks, with its process groups and this rank's documents.

    Args:
        plan: that ranks have agreed on.
        documents, handle, load, number, timeout_s: as for ``planned_step``.
        lengths: of the documents.
        waited_s: seconds that were waited for the plan.
    """
    check_groups(plan, lengths, handle.num_ranks)
    groups, new = None, 0
    if handle.group is not None and handle.num_ranks > 1:
        groups = SomeRanks.of(handle.group, timeout_s=timeout_s)
        new = groups.make(tuple(sorted(group.ranks)) for group in plan.groups)
    rank = 0 if handle.group is None else handle.group.rank()
    own = [_own(plan, rank, index) for index in range(plan.num_micro_batches)]
    wanted = sorted(
        {k for index, group in enumerate(own) for k in (group.sequences if group else (_first_of(plan, index),))}
    )
    found: dict[int, Tensor | dict[str, Tensor]] = {}
    if load is None:
        found = loaded(documents, wanted, None)
        num_labels = sum(map(num_labels_of, documents))
    else:
        error, count = None, 0
        try:
            found = loaded(documents, wanted, load)
            leads = [group for group in own if group is not None and rank == min(group.ranks)]
            count = sum(num_labels_of(found[k]) for group in leads for k in group.sequences)
        except Exception as failed:  # the others wait to hear of it
            error = failed
        num_labels = all_went_well(number, error, count, handle.group, handle.device)
    if not num_labels:
        raise UsageError(f"step {number}: no label of its {len(lengths)} documents counts: there is no loss")
    return SequenceStep(
        number=number,
        plan=plan,
        lengths=lengths,
        num_labels=num_labels,
        waited_s=waited_s,
        new_groups=new,
        _handle=handle,
        _groups=groups,
        _documents=found,
    )


def _own(plan: SequencePlan, rank: int, index: int) -> PlannedGroup | None:
    return next((g for g in plan.groups if g.micro_batch == index and rank in g.ranks), None)


def _first_of(plan: SequencePlan, index: int) -> int:
    """A document of a micro-batch: what batches are like, for ranks that are idle in it."""
    return next(g.sequences[0] for g in plan.groups if g.micro_batch == index)


def _shown(ranks: Sequence[int]) -> str:
    """Runs of ranks as people write them."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
