"""Carries out conversations: all at once, so that requests of one kind travel as one collective.

Every rank has the same conversations in the same order, hence the same requests in every round. Collectives of one
round are started together and awaited one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.messages import all_gather_single
from mycel.data_parallel.compress.rounds import AllGather, AllReduce, AllToAll, Conversation, Outcome, Request
from mycel.data_parallel.stats import CommStats

__all__ = ["exchange"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "or": dist.ReduceOp.BOR}
#: Waits for a collective and gives the answer to each of the requests that it carried.
_Answers = Callable[[], list[Any]]


def exchange(
    conversations: Sequence[Conversation], group: dist.ProcessGroup, stats: CommStats | None = None
) -> list[list[Outcome]]:
    """What each conversation comes to.

    Args:
        conversations: not begun yet; the same ones in the same order on every rank of the group.
        group: whose ranks take part. Nothing else may use it at the same time.
        stats: counts bytes, collectives and seconds.

    Raises:
        CommunicationError: a collective of mycel's backend failed; other backends raise their own errors.
    """
    stats = stats or CommStats()
    outcomes: list[list[Outcome]] = [[] for _ in conversations]
    answers: list[Any] = [None] * len(conversations)
    talking = list(range(len(conversations)))
    while talking:
        began = time.perf_counter()
        requests: dict[tuple[object, ...], list[tuple[int, Request]]] = {}
        for i in tuple(talking):
            try:
                request = conversations[i].send(answers[i])
            except StopIteration as end:
                outcomes[i] = end.value
                talking.remove(i)
            else:
                requests.setdefault(_kind(request), []).append((i, request))
        computed = time.perf_counter()
        started = [
            ([i for i, _ in together], _start([r for _, r in together], group, stats))
            for together in requests.values()
        ]
        for members, finish in started:
            for i, answer in zip(members, finish(), strict=True):
                answers[i] = answer
        stats.compute_s += computed - began
        stats.wait_s += time.perf_counter() - computed
    return outcomes


def _kind(request: Request) -> tuple[object, ...]:
    """Requests of one kind may travel together."""
    if isinstance(request, AllReduce):
        return "all_reduce", request.op, request.tensor.dtype, request.tensor.device
    return type(request).__name__, None, None, _device(request)


def _device(request: AllToAll | AllGather) -> torch.device:
    return request.parts[0].device if isinstance(request, AllToAll) else request.tensor.device


def _start(requests: Sequence[Any], group: dist.ProcessGroup, stats: CommStats) -> _Answers:
    if isinstance(requests[0], AllReduce):
        return _all_reduce(requests, group, stats)
    if isinstance(requests[0], AllToAll):
        return _all_to_all(requests, group, stats)
    return _all_gather(requests, group, stats)


def _all_reduce(requests: Sequence[AllReduce], group: dist.ProcessGroup, stats: CommStats) -> _Answers:
    shapes = [r.tensor.shape for r in requests]
    lengths = [r.tensor.numel() for r in requests]
    fused = requests[0].tensor if len(requests) == 1 else torch.cat([r.tensor.reshape(-1) for r in requests])
    size = group.size()
    work = None
    if fused.numel() and size > 1:
        stats.sent(2 * (size - 1) / size * fused.numel() * fused.element_size())
        work = dist.all_reduce(fused, op=_OPS[requests[0].op], group=group, async_op=True)

    def finish() -> list[Any]:
        if work is not None:
            work.wait()
        parts = fused.view(-1).split_with_sizes(lengths)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return finish


def _all_to_all(requests: Sequence[AllToAll], group: dist.ProcessGroup, stats: CommStats) -> _Answers:
    size = group.size()
    sends = [sum(len(r.parts[peer]) for r in requests) for peer in range(size)]
    gets = [sum(r.sizes[peer] for r in requests) for peer in range(size)]
    outgoing = torch.cat([r.parts[peer] for peer in range(size) for r in requests])
    incoming = outgoing.new_empty(sum(gets))
    work = None
    if size > 1:
        stats.sent(float(sum(sends)))
        work = dist.all_to_all_single(incoming, outgoing, gets, sends, group=group, async_op=True)

    def finish() -> list[Any]:
        if work is not None:
            work.wait()
        return _by_request(incoming.split_with_sizes(gets), [r.sizes for r in requests])

    return finish


def _all_gather(requests: Sequence[AllGather], group: dist.ProcessGroup, stats: CommStats) -> _Answers:
    size = group.size()
    gets = [sum(r.sizes[peer] for r in requests) for peer in range(size)]
    own = requests[0].tensor if len(requests) == 1 else torch.cat([r.tensor for r in requests])
    stats.sent(float((size - 1) * len(own)), collectives=int(size > 1))
    work = None
    incoming = own
    if size > 1:
        incoming = own.new_empty(sum(gets))
        if len(set(gets)) == 1:
            work = all_gather_single(incoming, own, group=group, async_op=True)
        else:  # Gloo gathers equal blocks only; handing the own one to everybody is as many bytes
            work = dist.all_to_all_single(
                incoming, own.repeat(size), gets, [len(own)] * size, group=group, async_op=True
            )

    def finish() -> list[Any]:
        if work is not None:
            work.wait()
        return _by_request(incoming.split_with_sizes(gets), [r.sizes for r in requests])

    return finish


def _by_request(from_peers: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Any]:
    """Blocks by peer, each made of the requests' parts, as lists by request."""
    apart = [block.split_with_sizes([by_peer[peer] for by_peer in sizes]) for peer, block in enumerate(from_peers)]
    return [[parts[i] for parts in apart] for i in range(len(sizes))]
