"""Gather and scatter of parts of any length, of which a rank other than the root knows only its own.

Where parts go straight between the root and a rank, each end states how long the part is, and nobody else has to
know. Where ranks must pass on the parts of others, they learn all lengths from the root first: a small all_gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mycel.collectives.spec import CollectiveName
from mycel.runtime.calls import Call
from mycel.runtime.communicator import Communicator
from mycel.runtime.headers import PARTS
from mycel.runtime.tensors import check_parts, element_code, gather_call, moving_call

__all__ = ["parts_call"]


def parts_call(
    communicator: Communicator | None,
    name: CollectiveName,
    root: int,
    target: Tensor,
    source: Tensor,
    parts: Sequence[Tensor],
) -> Call:
    """The call of a gather or scatter.

    Args:
        communicator: the group's, which has several ranks.
        name: ``gather`` or ``scatter``.
        root: which rank has the whole.
        target, source: contiguous: the whole at the root, this rank's part on the other side; empty where nothing is.
        parts: the root's list; empty elsewhere.

    Raises:
        ValueError: the root's list has not one tensor a rank, all of the type and its own of the length of its
            tensor; or lengths differ, and the tensors are on devices or links may be rerouted.
        MismatchError: ranks do not agree on a length, where these are told beforehand.
    """
    if communicator is None:
        raise RuntimeError("a group of one rank has no communicator")
    rank, n = communicator.rank, communicator.size
    part = source if name == "gather" else target
    own = part.numel()
    if rank == root:
        check_parts(f"{name} over {n} ranks: in the root's list", parts, part, rank, n)
    if communicator.reroutes or not target.is_cpu:
        # With rerouting, too, this must stay one collective: a signal handler could come between two.
        if len({each.numel() for each in parts}) > 1:
            where = "with MYCEL_ON_LINK_FAILURE=replan" if target.is_cpu else f"on {target.device}"
            raise ValueError(f"{name} over {n} ranks: {where}, parts must be of one length")
        return moving_call(name, own * n, target, source, root=root)
    lengths = [part.numel() for part in parts] or [own if r == rank else 0 for r in range(n)]
    element = element_code(target.dtype)
    direct = communicator.sends_parts_directly(name, root)
    if not direct:
        lengths = _told_by(communicator, name, root, element, lengths)
    return Call(
        name=name,
        title=PARTS[name] if direct else None,
        root=root,
        num_elements=sum(lengths),
        item_bytes=target.element_size(),
        input_address=source.data_ptr(),
        output_address=target.data_ptr(),
        element=element,
        block_elements=tuple(lengths) if direct or len(set(lengths)) > 1 else None,
        knows_all=not direct,
        keep=(target, source),
    )


def _told_by(
    communicator: Communicator, name: CollectiveName, root: int, element: int, lengths: list[int]
) -> list[int]:
    """The root's lengths, which those of the others must agree with."""
    n = communicator.size
    stated = torch.empty(n, n + 1, dtype=torch.int64)
    call = gather_call(stated.view(-1), torch.tensor([root, *lengths], dtype=torch.int64))
    communicator.run(replace(call, title=PARTS[name], element=element))  # messages speak of what was called
    roots: list[int] = stated[:, 0].tolist()
    if len(set(roots)) > 1:
        words = []
        for other in sorted(set(roots), key=lambda other: (roots.count(other), other)):  # the odd one out comes first
            callers = ", ".join(f"rank {rank}" for rank in range(n) if roots[rank] == other)
            words.append(f"{callers} called {name} with root {other}")
        raise communicator.disagree(f"ranks do not agree: {', '.join(words)}")
    whole, own = stated[root, 1:], stated[:, 1:].diagonal()
    for rank in (own != whole).nonzero().view(-1).tolist()[:1]:  # every rank sees the same first one
        raise communicator.disagree(
            f"ranks do not agree: in {name}, rank {rank} has {own[rank]} elements, for which the root, rank {root}, "
            f"has {whole[rank]}"
        )
    counted: list[int] = whole.tolist()
    return counted
