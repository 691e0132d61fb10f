"""What ranks tell each other at the start of a step: whether all go on, with the same documents and the same plan.

One rank plans, because a search that looks at the clock finds another plan everywhere. A rank that cannot go on says
why instead, so that nobody waits for it, and everybody says the same.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.messages import all_gather_single
from mycel.errors import CommunicationError, MismatchError, MycelError, SynthesisError, UsageError, VerificationError
from mycel.planning.grouping import SequencePlan

__all__ = ["Brought", "agree_on_plan", "agree_on_step", "all_went_well", "digest_of"]

_GOES_ON, _ENDED, _FAILED = 0, 1, 2
#: Errors that are the same one for everybody.
_SHARED: dict[str, type[MycelError]] = {
    kind.__name__: kind for kind in (MismatchError, SynthesisError, UsageError, VerificationError)
}
_FIRST = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What a rank comes to the start of a step with.

    Attributes:
        lengths: of its documents.
        plan: of the rank that plans.
        ended: whether it has no more steps.
        error: why it cannot go on.
    """

    lengths: tuple[int, ...] = ()
    plan: SequencePlan | None = None
    ended: bool = False
    error: Exception | None = None


def digest_of(value: object) -> int:
    """A number of 63 bits that is the same for equal values that JSON can say.

    Args:
        value: such as a plan's JSON, or lengths.

    Examples:
        >>> digest_of([1, 2]) == digest_of((1, 2)) != digest_of([2, 1])
        True
    """
    text = json.dumps(value, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def agree_on_step(
    number: int, brought: Brought, group: dist.ProcessGroup | None, device: torch.device
) -> SequencePlan | None:
    """The plan of a step, the same on all ranks; all of them call it.

    Args:
        number: of the step, for messages.
        brought: by this rank.
        group: all ranks of the job; ``None``: one process alone.
        device: of tensors that the group can exchange.

    Returns:
        The first rank's plan; ``None`` where all have no more steps.

    Raises:
        MismatchError: some have other documents than most, or no more; the message says which.
        MycelError: what a rank failed with.
    """
    state = _FAILED if brought.error is not None else _ENDED if brought.ended else _GOES_ON
    told = _of_error(brought.error) if brought.error is not None else b""
    if brought.plan is not None and state == _GOES_ON:
        told = json.dumps(brought.plan.to_json()).encode()
    table = _told_by_all([state, digest_of(brought.lengths), len(told)], group, device)
    _raise_failed(number, brought.error, told, table, group, device)
    ended = [rank for rank, (state, _, _) in enumerate(table) if state == _ENDED]
    if len(ended) == len(table):
        return None
    if ended:
        raise MismatchError(
            f"step {number}: {_ranks(ended)} without more documents, and others go on: give all ranks as many steps"
        )
    others = _unlike([digest for _, digest, _ in table])
    if others:
        raise MismatchError(
            f"step {number}: {_ranks(others)} with documents of other lengths than most: all ranks get the documents "
            "of the whole step, which groups divide; a loader that divides them too is for data parallel ranks"
        )
    return SequencePlan.from_json(json.loads(_from(_FIRST, told, table[_FIRST][2], group, device)))


def agree_on_plan(
    plan: SequencePlan, lengths: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Compare what ranks found by themselves.

    Args:
        plan: this rank's.
        lengths: of its documents.
        group: all ranks of the job; ``None``: one process alone.
        device: of tensors that the group can exchange.

    Raises:
        MismatchError: some have another plan, or documents of other lengths; the message says which.
    """
    own = plan.to_json()["groups"]
    table = _told_by_all([digest_of(own), digest_of(list(lengths))], group, device)
    for what, column in (("plan", 0), ("documents", 1)):
        others = _unlike([row[column] for row in table])
        if others:
            which = "another plan" if what == "plan" else "documents of other lengths"
            raise MismatchError(
                f"{_ranks(others)} with {which} than most: one rank plans and tells the others, as "
                "mycel.sequence.steps has it"
                if what == "plan"
                else f"{_ranks(others)} with {which} than most: give all ranks the documents of the whole step"
            )


def all_went_well(
    number: int, error: Exception | None, count: int, group: dist.ProcessGroup | None, device: torch.device
) -> int:
    """The sum of what ranks count, if none has failed.

    Args:
        number: of the step, for messages.
        error: what this rank failed with.
        count: of this rank.
        group: all ranks of the job; ``None``: one process alone.
        device: of tensors that the group can exchange.

    Raises:
        MycelError: what a rank failed with.
    """
    told = b"" if error is None else _of_error(error)
    table = _told_by_all([_GOES_ON if error is None else _FAILED, count, len(told)], group, device)
    _raise_failed(number, error, told, table, group, device)
    return sum(row[1] for row in table)


def _raise_failed(
    number: int,
    own: Exception | None,
    told: bytes,
    table: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    failed = [rank for rank, row in enumerate(table) if row[0] == _FAILED]
    if not failed:
        return
    text = _from(failed[0], told, table[failed[0]][2], group, device)
    if own is not None:
        raise own
    said = json.loads(text)
    shared = _SHARED.get(said["kind"])
    if shared is not None and failed[0] == _FIRST:
        raise shared(said["message"])
    raise CommunicationError(f"step {number}: rank {failed[0]} cannot go on: {said['kind']}: {said['message']}")


def _of_error(error: Exception) -> bytes:
    message = " ".join(str(error).split())
    return json.dumps({"kind": type(error).__name__, "message": message}).encode()


def _told_by_all(
    numbers: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[tuple[int, ...]]:
    """As many whole numbers of every rank."""
    if group is None:
        return [tuple(numbers)]
    own = torch.tensor([*numbers], dtype=torch.int64, device=device)
    whole = own.new_empty(len(numbers) * group.size())
    all_gather_single(whole, own, group=group)
    return [tuple(row) for row in whole.view(group.size(), -1).tolist()]


def _from(rank: int, own: bytes, length: int, group: dist.ProcessGroup | None, device: torch.device) -> bytes:
    """A rank's text, on all of them."""
    if group is None:
        return own
    text: Tensor
    if group.rank() == rank:
        text = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    else:
        text = torch.empty(length, dtype=torch.uint8, device=device)
    dist.broadcast(text, group_src=rank, group=group)
    return bytes(text.tolist())


def _unlike(values: Sequence[int]) -> list[int]:
    usual = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != usual]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank {shown} is" if len(ranks) == 1 else f"ranks {shown}{more} are"
