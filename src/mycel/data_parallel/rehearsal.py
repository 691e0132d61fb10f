"""Compressors hold a conversation with themselves, so that nothing compiles while other ranks wait.

Loops for CPU tensors are compiled at their first call, once on a machine, for some seconds; loading numba takes part
of one in every process. That first call would be in a rank's first collective, which has a deadline and in which
other ranks wait already. So whoever attaches a compressor has it speak before its ranks meet.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import AllReduce, AllToAll, Conversation, Item, Outcome, Request
from mycel.data_parallel.feedback import ErrorFeedback

__all__ = ["alone", "rehearse"]

#: Large enough that every compressor takes it; two ranks' shares are alike, so that each payload could be a peer's.
_SHAPE = (64, 64)
_NAME = "rehearsal"


def alone(conversation: Conversation, size: int) -> tuple[list[Outcome], list[Request]]:
    """Hold a conversation with oneself: every peer is this rank, and nothing is sent.

    Args:
        conversation: not begun yet.
        size: ranks that it believes to be among.

    Returns:
        What it comes to, and what it asked for.
    """
    answer: Any = None
    requests: list[Request] = []
    while True:
        try:
            request = conversation.send(answer)
        except StopIteration as end:
            return end.value, requests
        requests.append(request)
        if isinstance(request, AllReduce):
            answer = request.tensor * size if request.op == "sum" else request.tensor
        elif isinstance(request, AllToAll):
            source = max(request.parts, key=len)
            answer = [_of_length(source, n) for n in request.sizes]
        else:
            answer = [_of_length(request.tensor, n) for n in request.sizes]


def rehearse(
    compressors: Iterable[Compressor], device: torch.device, precision: Literal["float32", "int8"] = "float32"
) -> None:
    """Have everything compiled or loaded that a step with these compressors will call; their state stays as it is.

    Args:
        compressors: that may be chosen.
        device: of what they will compress; nothing is compiled but for CPUs.
        precision: of residuals.
    """
    if device.type != "cpu":
        return
    tensor = torch.linspace(-1.0, 1.0, _SHAPE[0] * _SHAPE[1]).view(_SHAPE)
    for compressor in compressors:
        speaker = copy.deepcopy(compressor)
        item = Item(tensor=tensor.clone(), context=Context(name=_NAME, world_size=2))
        alone(speaker.converse([item], keep_residual=True), 2)
    memory = ErrorFeedback(precision=precision)
    memory.remember(_NAME, tensor)
    memory.settle(keep=True)
    memory.compensate(_NAME, tensor)


def _of_length(source: Tensor, length: int) -> Tensor:
    return functional.pad(source[:length], (0, max(0, length - len(source))))
