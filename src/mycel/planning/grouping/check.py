"""Whether a plan of sequences is right, and what it takes: by its rules alone, without looking at the search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from mycel.errors import VerificationError
from mycel.planning.grouping.instance import SequenceInstance
from mycel.planning.grouping.plan import SequencePlan

__all__ = ["check_groups", "check_plan"]

#: Part by which sums of floats in different orders may differ.
_ROUNDING = 1e-9


def check_plan(instance: SequenceInstance, plan: SequencePlan) -> float:
    """Microseconds that the plan takes.

    Args:
        instance: what was to be planned.
        plan: its groups.

    Raises:
        VerificationError: a sequence is missing or there twice, ranks are unknown or work in two groups at a time,
            a group is none of the candidates or holds too much, or the stated time is not what its groups take.
    """
    for number, group in enumerate(plan.groups):
        if group.micro_batch >= instance.max_micro_batches:
            raise VerificationError(
                f"group {number}: micro-batch {group.micro_batch}; there are {instance.max_micro_batches}"
            )
    check_groups(plan, instance.lengths, instance.num_ranks)
    slowest: dict[int, float] = defaultdict(float)
    costs = {(c.size if c.ranks is None else frozenset(c.ranks)): c.comm_us_per_token for c in instance.candidates}
    for number, group in enumerate(plan.groups):
        size = len(group.ranks)
        comm = costs.get(frozenset(group.ranks), costs.get(size))
        if comm is None:
            raise VerificationError(f"group {number}: ranks {list(group.ranks)} are none of the candidates")
        tokens, time = 0, instance.us_per_step
        for sequence in group.sequences:
            length = instance.lengths[sequence]
            tokens += length
            work = instance.us_per_token2 * length * length + instance.us_per_token * length
            time += work / size + comm * length
        if tokens > size * instance.capacity_tokens:
            raise VerificationError(
                f"group {number}: {tokens} tokens on {size} ranks, which hold {size * instance.capacity_tokens}"
            )
        slowest[group.micro_batch] = max(slowest[group.micro_batch], time)
    total = sum(slowest.values())
    if abs(total - plan.total_us) > _ROUNDING * total:
        raise VerificationError(f"the plan says {plan.total_us} us, and its groups take {total} us")
    return total


def check_groups(plan: SequencePlan, lengths: Sequence[int], num_ranks: int) -> None:
    """Whether the groups of a plan can work side by side, whatever they cost.

    Args:
        plan: its groups.
        lengths: tokens of each sequence of the step.
        num_ranks: of the job.

    Raises:
        VerificationError: a sequence is missing, unknown or there twice, ranks are unknown or work in two groups at
            a time, or a micro-batch is skipped.

    Examples:
        >>> from mycel.planning.grouping import PlannedGroup
        >>> groups = tuple(PlannedGroup(micro_batch=0, ranks=(0, 1), sequences=(k,)) for k in (0, 1))
        >>> check_groups(SequencePlan(groups=groups, total_us=1.0, lower_bound_us=0.0), [5, 6], 2)
        Traceback (most recent call last):
        mycel.errors.VerificationError: groups 0 and 1 overlap: both have rank 0 in micro-batch 0
    """
    where: dict[int, int] = {}
    busy: dict[tuple[int, int], int] = {}
    for number, group in enumerate(plan.groups):
        if len(set(group.ranks)) != len(group.ranks):
            raise VerificationError(f"group {number} has a rank twice: {list(group.ranks)}")
        for rank in group.ranks:
            if not 0 <= rank < num_ranks:
                raise VerificationError(f"group {number}: there is no rank {rank} among {num_ranks}")
            other = busy.setdefault((group.micro_batch, rank), number)
            if other != number:
                raise VerificationError(
                    f"groups {other} and {number} overlap: both have rank {rank} in micro-batch {group.micro_batch}"
                )
        for sequence in group.sequences:
            if not 0 <= sequence < len(lengths):
                raise VerificationError(f"group {number}: there is no sequence {sequence} among {len(lengths)}")
            if sequence in where:
                raise VerificationError(f"sequence {sequence} is in groups {where[sequence]} and {number}")
            where[sequence] = number
    missing = [index for index in range(len(lengths)) if index not in where]
    if missing:
        raise VerificationError(f"sequence {missing[0]} is in no group ({len(missing)} are missing)")
    used = {group.micro_batch for group in plan.groups}
    skipped = [number for number in range(max(used, default=-1) + 1) if number not in used]
    if skipped:
        raise VerificationError(f"micro-batch {skipped[0]} has no group; they are counted from 0 without gaps")
