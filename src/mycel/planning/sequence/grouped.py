"""Groups of a plan side by side: the documents of each in a zig-zag over its own ranks; other ranks are idle."""

from __future__ import annotations

from collections.abc import Sequence

from mycel.errors import UsageError
from mycel.planning.grouping.plan import SequencePlan
from mycel.planning.sequence.cuts import whole_ranks
from mycel.planning.sequence.layout import Layout, Segment
from mycel.planning.sequence.per_document import per_document_zigzag

__all__ = ["grouped"]


def grouped(
    lengths: Sequence[int], num_ranks: int, plan: SequencePlan, micro_batch: int = 0
) -> tuple[Layout, tuple[int, ...]]:
    """The layout of one micro-batch of a plan.

    Args:
        lengths: tokens of each sequence of the step.
        num_ranks: of the job.
        plan: its groups.
        micro_batch: which.

    Returns:
        The layout, and of each of its documents the index of the sequence.

    Raises:
        UsageError: the plan has no such micro-batch, or names ranks or sequences that are not there.

    Examples:
        >>> from mycel.planning.grouping import PlannedGroup
        >>> groups = (
        ...     PlannedGroup(micro_batch=0, ranks=(0, 1), sequences=(1,)),
        ...     PlannedGroup(micro_batch=0, ranks=(2,), sequences=(0,)),
        ... )
        >>> plan = SequencePlan(groups=groups, total_us=2.0, lower_bound_us=1.0)
        >>> layout, sequences = grouped([3, 8], 4, plan)
        >>> layout.tokens, sequences
        ((4, 4, 3, 0), (0, 1))
    """
    count = whole_ranks(num_ranks)
    mine = [group for group in plan.groups if group.micro_batch == micro_batch]
    if not mine:
        raise UsageError(f"micro-batch {micro_batch}: the plan has {plan.num_micro_batches}")
    sequences = tuple(sorted(k for group in mine for k in group.sequences))
    if len(set(sequences)) != len(sequences) or sequences[-1] >= len(lengths):
        raise UsageError(f"the plan has a sequence twice, or one of more than {len(lengths)}: is it for this step?")
    place = {sequence: document for document, sequence in enumerate(sequences)}
    held: list[list[Segment]] = [[] for _ in range(count)]
    for group in mine:
        local = per_document_zigzag([lengths[k] for k in group.sequences], len(group.ranks))
        for rank, segments in zip(group.ranks, local.ranks, strict=True):
            if not 0 <= rank < count or held[rank]:
                raise UsageError(f"group of ranks {list(group.ranks)}: rank {rank} is not there, or in two groups")
            held[rank] += [
                Segment(document=place[group.sequences[s.document]], start=s.start, stop=s.stop) for s in segments
            ]
    documents = tuple(int(lengths[k]) for k in sequences)
    return Layout(documents=documents, ranks=tuple(tuple(sorted(segments)) for segments in held)), sequences
