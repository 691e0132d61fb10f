"""Which compression would pay for a sharded model (FSDP2): every method is attached, measured and taken away again.

Rehearsing, as for DDP, would miss what matters here: gathers wait for nobody but the next layer, and how much of them
hides depends on prefetching. A few steps say it. Nothing is learnt in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.data_parallel.advise import Advice, LossOf, Prediction, time_steps
from mycel.data_parallel.compress import Compressor, Context, make_compressor
from mycel.data_parallel.fsdp.attach import attach
from mycel.data_parallel.fsdp.qsdp import QSDP
from mycel.errors import UsageError

__all__ = ["SHARDED_METHODS", "advise_sharded"]

#: What is weighed, the most faithful first; names of compressors, for gradients alone, may be asked for too.
SHARDED_METHODS: Mapping[str, Callable[[], QSDP]] = {
    "w8g8": lambda: QSDP(),
    "w8g4": lambda: QSDP(gradient_bits=4),
    "w4g4": lambda: QSDP(weight_bits=4, gradient_bits=4),
}


def advise_sharded(
    model: nn.Module, loss_of: LossOf, *, methods: Sequence[str] | None = None, steps: int = 5
) -> Advice:
    """Measure a step of a sharded model without compression and with each method. Every rank calls it.

    Args:
        model: after ``fully_shard`` of it and its parts; its parameters are not changed.
        loss_of: the loss of a new batch, computed with the model.
        methods: keys of ``SHARDED_METHODS`` and names of compressors, the most faithful first.
        steps: timed passes of each.

    Returns:
        Advice; ``error`` is of this rank's shards of the gradients.

    Raises:
        UsageError: fewer than two ranks, no steps, an unknown method, or one that does not fit the model.

    Examples:
        On two ranks or more, as ``torchrun`` starts them::

            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            advice = advise_sharded(model, lambda module: loss(module(inputs), targets))
    """
    group = dist.group.WORLD
    if group is None or group.size() < 2 or steps < 1:
        raise UsageError("advice needs at least two ranks and one step: start it with torchrun or mycel emulate")
    names = tuple(SHARDED_METHODS) if methods is None else tuple(methods)
    made = {name: SHARDED_METHODS[name]() if name in SHARDED_METHODS else make_compressor(name) for name in names}
    with attach(model, QSDP()) as counting:  # only to count what a step without it would send
        time_steps(model, loss_of, group, 1)
        exact_bytes = counting.stats.exact_bytes
    plain_s = time_steps(model, loss_of, group, steps)
    shards = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    found = [_prediction("uncompressed", plain_s, exact_bytes, 0.0)]
    for name, method in made.items():
        with attach(model, method) as handle:
            time_steps(model, loss_of, group, 1)
            sent, covered = handle.stats.sent_bytes, handle.stats.exact_bytes
            step_s = time_steps(model, loss_of, group, steps)
        gradients = method.gradients if isinstance(method, QSDP) else method
        error = 0.0 if gradients is None else _error(gradients, shards)
        # What a method for gradients alone leaves as it is, weights, is sent beside it.
        found.append(_prediction(name, step_s, sent + exact_bytes - covered, error))
    model.zero_grad()
    return Advice(compute_s=None, overlap=None, predictions=tuple(found))


def _prediction(method: str, step_s: float, sent_bytes: float, error: float) -> Prediction:
    return Prediction(
        method=method,
        step_s=step_s,
        compress_s=0.0,
        communicate_s=0.0,
        sent_bytes=sent_bytes,
        error=error,
        is_measured=True,
    )


def _local(gradient: Tensor) -> Tensor:
    found: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return found.detach().float()


def _error(compressor: Compressor, shards: Iterable[Tensor]) -> float:
    """Of the matrices that it takes, relative to the norm of everything."""
    lost = norm = 0.0
    for place, shard in enumerate(shards):
        norm += float(torch.linalg.vector_norm(shard)) ** 2
        if shard.dim() > 1 and shard.numel() and compressor.takes(shard.shape):
            context = Context(name=f"shard {place}")
            back = compressor.decompress(compressor.compress(shard.contiguous(), context), shard.shape, context)
            lost += float(torch.linalg.vector_norm(shard - back)) ** 2
    return (lost / norm) ** 0.5 if norm else 0.0
