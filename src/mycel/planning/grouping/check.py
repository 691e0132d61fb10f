"""Whether a plan of sequences is right, and what it takes: by its rules alone, without looking at the search."""

from __future__ import annotations

from collections import defaultdict

from mycel.errors import VerificationError
from mycel.planning.grouping.instance import SequenceInstance
from mycel.planning.grouping.plan import SequencePlan

__all__ = ["check_plan"]

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
    where: dict[int, int] = {}
    busy: dict[tuple[int, int], int] = {}
    slowest: dict[int, float] = defaultdict(float)
    costs = {(c.size if c.ranks is None else frozenset(c.ranks)): c.comm_us_per_token for c in instance.candidates}
    for number, group in enumerate(plan.groups):
        if not 0 <= group.micro_batch < instance.max_micro_batches:
            raise VerificationError(
                f"group {number}: micro-batch {group.micro_batch}; there are {instance.max_micro_batches}"
            )
        for rank in group.ranks:
            if not 0 <= rank < instance.num_ranks:
                raise VerificationError(f"group {number}: there is no rank {rank} among {instance.num_ranks}")
            other = busy.setdefault((group.micro_batch, rank), number)
            if other != number:
                raise VerificationError(
                    f"groups {other} and {number} overlap: both have rank {rank} in micro-batch {group.micro_batch}"
                )
        size = len(set(group.ranks))
        if size != len(group.ranks):
            raise VerificationError(f"group {number} has a rank twice: {list(group.ranks)}")
        comm = costs.get(frozenset(group.ranks), costs.get(size))
        if comm is None:
            raise VerificationError(f"group {number}: ranks {list(group.ranks)} are none of the candidates")
        tokens, time = 0, instance.us_per_step
        for sequence in group.sequences:
            if not 0 <= sequence < len(instance.lengths):
                raise VerificationError(f"group {number}: there is no sequence {sequence}")
            if sequence in where:
                raise VerificationError(f"sequence {sequence} is in groups {where[sequence]} and {number}")
            where[sequence] = number
            length = instance.lengths[sequence]
            tokens += length
            work = instance.us_per_token2 * length * length + instance.us_per_token * length
            time += work / size + comm * length
        if tokens > size * instance.capacity_tokens:
            raise VerificationError(
                f"group {number}: {tokens} tokens on {size} ranks, which hold {size * instance.capacity_tokens}"
            )
        slowest[group.micro_batch] = max(slowest[group.micro_batch], time)
    missing = [index for index in range(len(instance.lengths)) if index not in where]
    if missing:
        raise VerificationError(f"sequence {missing[0]} is in no group ({len(missing)} are missing)")
    total = sum(slowest.values())
    if abs(total - plan.total_us) > _ROUNDING * total:
        raise VerificationError(f"the plan says {plan.total_us} us, and its groups take {total} us")
    return total
