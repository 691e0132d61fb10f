"""Gradients of a DDP-wrapped model combined by something else than the mean."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mycel.comm.background import InBackground
from mycel.comm.bundle import Bundle
from mycel.data_parallel.combine.base import Combiner
from mycel.errors import UsageError

__all__ = ["combine_gradients"]


def combine_gradients(
    model: DistributedDataParallel, combiner: Combiner, *, group: dist.ProcessGroup | None = None
) -> None:
    """Have a DDP-wrapped model's gradients combined by ``combiner``, layer by layer, while others are computed.

    Call it once, before the first backward pass. The combiner has a process group of its own and works through DDP's
    buckets in their order, which is the same on every rank, in the background.

    Args:
        model: the wrapped model.
        combiner: for example ``Adasum()``.
        group: the ranks, for nothing else; by default a new group of the model's ranks.

    Raises:
        UsageError: the model is not wrapped by DDP.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"combine_gradients needs a DistributedDataParallel model, got {type(model).__name__}; "
            "for other models combine what local updates have changed: local_updates(..., combiner=...)"
        )
    ranks = dist.get_process_group_ranks(model.process_group)
    state = _State(combiner, group or dist.new_group(ranks, use_local_synchronization=True))
    model.register_comm_hook(state, _hook)


class _State:
    """What the hook keeps."""

    def __init__(self, combiner: Combiner, group: dist.ProcessGroup) -> None:
        self.combiner = combiner
        self.group = group
        self.thread = InBackground()


# Without annotations: DDP compares them with classes, and under ``from __future__ import annotations`` they are text.
def _hook(state, bucket):  # type: ignore[no-untyped-def]
    """A communication hook of DDP: a ``_State`` and a ``GradBucket`` become a future of the bucket's buffer."""
    return _combined(state, bucket.buffer(), bucket.gradients())


def _combined(state: _State, buffer: Tensor, gradients: list[Tensor]) -> torch.futures.Future[Tensor]:
    bundle = Bundle.over(buffer, gradients)
    raw: torch.futures.Future[None] = torch.futures.Future()
    failures: list[BaseException] = []

    def job() -> None:
        try:
            state.combiner.start(bundle, state.group).wait()
        except BaseException as error:  # raised by the callback below: DDP reads a future without asking how it went
            failures.append(error)
        raw.set_result(None)

    state.thread.start(job, bundle)

    def value(_: object) -> Tensor:
        if failures:
            raise failures[0]
        return buffer

    return raw.then(value)
