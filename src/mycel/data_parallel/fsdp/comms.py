"""The two collectives of an FSDP2 unit, with rows compressed on their way.

FSDP2 calls them on its own streams and uses what they wrote as soon as they return. It gives a flat tensor and no
names; ``mycel.data_parallel.fsdp.layout`` knows what lies where.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.messages import all_gather_single
from mycel.data_parallel.compress import Context
from mycel.data_parallel.fsdp.layout import Segment, Unit, layout_of
from mycel.data_parallel.fsdp.residuals import ResidualRows
from mycel.data_parallel.fsdp.route import Route
from mycel.data_parallel.fsdp.rows import RowCodec
from mycel.data_parallel.fsdp.steps import Steps
from mycel.data_parallel.policy import CompressionPolicy
from mycel.errors import UsageError

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError as error:  # this module is imported when a model is given, not with the library
    raise UsageError(f"torch {torch.__version__} has no custom communication for FSDP2: {error}") from None

__all__ = ["CompressedAllGather", "CompressedReduceScatter", "CountedReduceScatter"]

logger = logging.getLogger(__name__)


class _Rows:
    """What both collectives share: allocation, and codecs by what a row holds.

    Attributes:
        row_bytes: of a row's payload, as it was the last time.
    """

    def __init__(self, unit: Unit, policy: CompressionPolicy, route: Route, seed: int) -> None:
        self.unit, self.policy, self.route, self.seed = unit, policy, route, seed
        self._codecs: dict[tuple[Any, ...], RowCodec] = {}
        self.row_bytes = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the collective's tensors; see torch's ``Comm``."""
        return torch.empty(math.prod(int(n) for n in size), dtype=dtype, device=device)

    def codec(self, segments: tuple[Segment, ...], dtype: torch.dtype, step: int) -> RowCodec:
        """For rows of these parameters in this step; all ranks make the same."""
        chosen = tuple(
            self.policy.choose(segment.name, segment.shape, step) if segment.name else None for segment in segments
        )
        key = (segments, dtype, tuple(map(id, chosen)))  # policies keep their compressors, so ids stay
        if key not in self._codecs:
            self._codecs[key] = RowCodec(segments, chosen, dtype)
        self.row_bytes = self._codecs[key].num_bytes
        return self._codecs[key]

    def context(self, sender: int, row: int, *, step: int = 0) -> Context:
        """For one rank's payload for a row."""
        return Context(
            name=self.unit.name, step=step, rank=sender, world_size=self.route.num_rows, part=row, seed=self.seed
        )


class CompressedAllGather(_Rows, AllGather):
    """Gathers a unit's parameters in fewer bytes. Every rank, the owner too, computes with what came back.

    Args:
        step: says how many steps the model has made, for policies that begin late.
    """

    def __init__(
        self, unit: Unit, policy: CompressionPolicy, route: Route, seed: int, step: Callable[[], int]
    ) -> None:
        super().__init__(unit, policy, route, seed)
        self.step = step

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor``; see torch's ``AllGather``. It is done when this returns.

        Where ``reshard_after_forward`` is a number, a few ranks have kept the weights of the forward pass between
        them (hpZ of ZeRO++), which have been rounded once: they travel as they are.
        """
        if dist.get_world_size(group) != self.route.num_rows:
            self.route.check_inside(group, self.unit.name)
            all_gather_single(output_tensor, input_tensor, group=group)
            self.route.inside.add_even("gather", input_tensor.nbytes, group)
            return
        if not input_tensor.is_floating_point() or input_tensor.numel() != sum(s.numel for s in self.unit.segments):
            raise UsageError(
                f"module {self.unit.name!r} gathers {input_tensor.numel()} elements of {input_tensor.dtype}, its "
                "parameters have others (parameters of several types, or tensor subclasses with a gather of their "
                "own): shard it separately and leave it out of compression"
            )
        codec = self.codec(self.unit.segments, input_tensor.dtype, self.step())
        self.route.stats.exact_bytes += (self.route.num_sent - 1) * input_tensor.nbytes
        payloads = self.route.gather(codec.encode(input_tensor, self.context(self.route.rank, self.route.rank)))
        output = output_tensor.view(self.route.num_rows, -1)
        sources = self.route.sources()
        rows = output if len(sources) == len(output) else output.new_empty((len(sources), output.shape[1]))
        for payload, row, source in zip(payloads, rows, sources, strict=True):
            codec.decode(payload, row, self.context(source, source))
        self.route.spread(rows, output)


class CompressedReduceScatter(_Rows, ReduceScatter):
    """Sums a unit's gradients; what travels between ranks is compressed, the own share stays exact.

    Attributes:
        step: sums so far.
        feedback: residuals of what was lost on the way, to be sent later; ``None`` keeps none.
    """

    def __init__(self, unit: Unit, policy: CompressionPolicy, route: Route, seed: int, steps: Steps) -> None:
        super().__init__(unit, policy, route, seed)
        self.step, self.feedback = 0, steps.feedback
        self._steps, self._warned = steps, False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See torch's ``Comm``. Called before every reduction, by a world of one rank too, which reduces nothing."""
        self._steps.reduces()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor`` with the sum or mean of the own row; see torch's ``ReduceScatter``."""
        divisor = self._divisor(op)
        rows = input_tensor.view(self.route.num_rows, -1)
        segments = self._segments(rows.shape[1])
        rows = self.route.add_inside(rows)
        codec = self.codec(segments, rows.dtype, self.step)
        self.route.stats.exact_bytes += (self.route.num_sent - 1) * rows[0].nbytes
        if self.feedback is not None:
            parts = rows.split_with_sizes([segment.numel for segment in segments], dim=1)
            rows = torch.cat(
                [self.feedback.compensate(s.name, part) for s, part in zip(segments, parts, strict=True)], dim=1
            )
        payloads = torch.empty((len(rows), codec.num_bytes), dtype=torch.uint8, device=rows.device)
        sources, own = self.route.sources(), self.route.own
        for place, (row, payload) in enumerate(zip(rows, payloads, strict=True)):
            if place != own:
                payload.copy_(codec.encode(row, self.context(self.route.rank, sources[place], step=self.step)))
        total = rows[own].float() if rows.dtype != torch.float32 else rows[own].clone()
        heard = self.route.exchange(payloads)
        others = [place for place in range(len(rows)) if place != own]
        senders = [self.context(sources[place], self.route.rank, step=self.step) for place in others]
        codec.add([heard[place] for place in others], total, senders)
        if self.feedback is not None:
            rows[own] = 0  # compensated rows are new and done with: what is left of them are the residuals
            for place, payload in enumerate(payloads):
                if place != own:
                    found = torch.zeros_like(total)
                    codec.add([payload], found, [self.context(self.route.rank, sources[place], step=self.step)])
                    rows[place] -= found
            parts = rows.split_with_sizes([segment.numel for segment in segments], dim=1)
            for segment, part in zip(segments, parts, strict=True):
                if segment.name:
                    self.feedback.remember(segment.name, part.clone())
        if divisor != 1:
            total /= divisor
        output_tensor.copy_(total)
        self._notify(output_tensor, total if divisor != 1 else total / self.route.num_rows, segments)
        self.step += 1

    def residual_rows(self) -> ResidualRows:
        """Where this rank's residuals lie in whole parameters."""
        return ResidualRows(
            unit=self.unit,
            places=self.route.sources(),
            num_rows=self.route.num_rows,
            groups=[self.route.group],
            num_keepers=self.route.num_rows,
            share=self.route.num_rows / self.route.num_sent,
        )

    def _notify(self, applied: Tensor, mean: Tensor, segments: tuple[Segment, ...]) -> None:
        """This rank's shards of the mean gradient, as they are applied, and for the policy."""
        shards = mean.split_with_sizes([segment.numel for segment in segments])
        named = {s.name: shard.view(s.shard_shape) for s, shard in zip(segments, shards, strict=True) if s.name}
        self._steps.add(applied, named, self.step)

    def _divisor(self, op: Any) -> int:
        if op == dist.ReduceOp.SUM:
            return 1
        if op == dist.ReduceOp.AVG:
            return self.route.num_rows
        raise UsageError(
            f"module {self.unit.name!r} reduces gradients with {op}; call "
            "set_force_sum_reduction_for_comms(True) on it"
        )

    def _segments(self, row_numel: int) -> tuple[Segment, ...]:
        found = layout_of(self.unit.segments, row_numel)
        if found is not None:
            return found
        if not self._warned:
            self._warned = True
            logger.warning(
                "module %r: several sets of parameters have gradients of %d elements a rank, and which of them got "
                "some is unknown; such gradients travel uncompressed",
                self.unit.name,
                row_numel,
            )
        return (
            Segment(
                name="", numel=row_numel, shape=(row_numel,), shard_shape=(row_numel,), shard_dim=0, trainable=False
            ),
        )


class CountedReduceScatter(ReduceScatter):
    """What reduces gradients that travel as they are, with steps counted.

    Args:
        inner: does it.
        steps: counts.
    """

    def __init__(self, inner: Any, steps: Steps) -> None:
        self._inner, self._steps = inner, steps

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See torch's ``Comm``."""
        self._steps.reduces()
        found: Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return found

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """See torch's ``ReduceScatter``."""
        return self._inner(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
        )
