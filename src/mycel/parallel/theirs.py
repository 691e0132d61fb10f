"""Orders that torch has a class for, and that class in the place of our executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from mycel.errors import UsageError
from mycel.parallel.torch_pipelining import buffers_of, torch_schedule
from mycel.pipeline.known.dualpipe_v import dualpipe_v
from mycel.pipeline.known.gpipe import gpipe
from mycel.pipeline.known.interleaved import interleaved
from mycel.pipeline.known.looped_bfs import looped_bfs
from mycel.pipeline.known.one_f_one_b import one_f_one_b
from mycel.pipeline.known.zb_h1 import zb_h1
from mycel.pipeline.known.zb_v import zb_v
from mycel.pipeline.order import Order

__all__ = ["TheirSchedule", "torch_name"]

_CLASSES: tuple[tuple[str, Callable[[int, int, int], Order]], ...] = (
    ("GPipe", gpipe),
    ("1F1B", one_f_one_b),
    ("Interleaved1F1B", interleaved),
    ("LoopedBFS", looped_bfs),
    ("InterleavedZeroBubble", zb_h1),
    ("ZBVZeroBubble", zb_v),
    ("DualPipeV", dualpipe_v),
)


def torch_name(order: Order) -> str | None:
    """The class of torch that carries out the very same order; ``None``: torch has none.

    Args:
        order: without messages.

    Examples:
        >>> torch_name(one_f_one_b(4, 8))
        '1F1B'
        >>> torch_name(Order.from_csv("0F0,0F1,0B1,0B0\\n1F1,1B1,1F0,1B0\\n"))
    """
    num_ranks = len(order.rows)
    chunks, rest = divmod(order.num_stages, num_ranks)
    if rest or order.has_communication:
        return None
    for name, make in _CLASSES:
        try:
            if make(num_ranks, order.num_micro_batches, chunks) == order:
                return name
        except UsageError:  # not for so many ranks, micro-batches or chunks
            continue
    return None


class TheirSchedule:
    """Torch's class for an order, called as ours.

    Args:
        name: of the class.
        order: that it carries out.
        modules: of this rank's stages.
        loss: of an output and a target.
        device: of the stages.
        group: the ranks.
        scale_grads: whether gradients are divided by the number of micro-batches.
    """

    def __init__(
        self,
        name: str,
        order: Order,
        modules: Mapping[int, nn.Module],
        loss: Callable[..., Tensor] | None,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        scale_grads: bool,
    ) -> None:
        self._stages = [
            PipelineStage(module, index, order.num_stages, device, group=group)
            for index, module in sorted(modules.items())
        ]
        self._is_last = order.num_stages - 1 in modules
        self.schedule = torch_schedule(name, self._stages, order.num_micro_batches, loss, scale_grads=scale_grads)
        #: Of the last step, by micro-batch.
        self.losses: dict[int, Tensor] = {}

    def step(self, *args: Any, losses: list[Tensor] | None = None, **more: Any) -> Any:
        """One step of torch's.

        Args:
            args: the batch.
            losses: filled with those of this rank.
            more: as torch's ``step`` takes it.
        """
        found: list[Tensor] = []
        output = self.schedule.step(*args, losses=found if self._is_last else None, **more)
        self._keep(found, losses)
        return output

    def eval(self, *args: Any, losses: list[Tensor] | None = None, **more: Any) -> Any:
        """Forwards of torch's.

        Args:
            args: the batch.
            losses: filled with those of this rank.
            more: as torch's ``eval`` takes it.
        """
        found: list[Tensor] = []
        output = self.schedule.eval(*args, losses=found if self._is_last else None, **more)
        self._keep(found, losses)
        return output

    def buffers(self) -> list[Tensor]:
        """The receive buffers that torch's stages of this rank hold."""
        return buffers_of(self._stages)

    def _keep(self, found: list[Tensor], losses: list[Tensor] | None) -> None:
        self.losses = {m: loss.detach() for m, loss in enumerate(found)}
        if losses is not None:
            losses[:] = found
