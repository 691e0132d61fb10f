"""Compression of the gradients of a model wrapped in ``DistributedDataParallel``.

One thread communicates, over a process group of its own, through DDP's buckets in DDP's order, which is the same on
all ranks. Nothing waits inside a callback, so many buckets, unused parameters and any backend work. Buckets whose
compressed bytes are few travel together.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mycel.comm.background import InBackground
from mycel.comm.bundle import Bundle
from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.compress.cast import Cast
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import Item
from mycel.data_parallel.ddp_hook import take_hook
from mycel.data_parallel.exchange import exchange
from mycel.data_parallel.feedback import ErrorFeedback
from mycel.data_parallel.handle import Handle
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.state import mean_residuals, pack_state, unpack_state
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError

__all__ = ["FUSE_BYTES", "DDPCompression", "attach_ddp"]

#: Buckets travel together until they have so many compressed bytes.
FUSE_BYTES = 256 << 10

_HALVES = (torch.bfloat16, torch.float16)


class DDPCompression(Handle):
    """Compression at work on a DDP-wrapped model; made by ``attach_ddp``.

    Attributes:
        policy: chooses compressors.
        feedback: this rank's residuals.
        stats: bytes and seconds since the last ``stats.reset()``.
        step: synchronised steps so far.

    Examples:
        >>> from mycel.data_parallel.compress import TopK
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = DistributedDataParallel(torch.nn.Linear(32, 16, bias=False))
        >>> with attach_ddp(model, TopK(0.1)) as compression:
        ...     model(torch.ones(1, 32)).sum().backward()
        >>> compression.step, list(compression.feedback.residuals)  # what was not sent is kept
        (1, ['weight'])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        policy: CompressionPolicy,
        group: dist.ProcessGroup,
        *,
        feedback: bool | None,
        decay: float,
        fuse_bytes: int,
        seed: int,
    ) -> None:
        self.policy = policy
        self.feedback = ErrorFeedback(decay=decay)
        self.stats = CommStats()
        self.step = 0
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._wants_feedback = feedback
        self._fuse_bytes, self._seed = fuse_bytes, seed
        trained = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        self._names = {id(p): n for n, p in trained}
        self._shapes = {n: p.shape for n, p in trained}
        self._order = {name: i for i, name in enumerate(self._shapes)}
        self._exact = {dtype: Cast(dtype) for dtype in (torch.float32, *_HALVES)}
        self._thread = InBackground()
        self._waiting: list[_Bucket] = []
        self._waiting_bytes = 0.0
        self._release = take_hook(model, self.hook)

    def bytes_per_step(self, step: int | None = None) -> float:
        """Bytes that this rank sends in a step, by the formula; see ``CommStats.sent_bytes``.

        Exact for compressors that work tensor by tensor. Where tensors travel joined, shares depend on DDP's
        buckets, and so do a few bytes of scales.

        Args:
            step: by default the current one.
        """
        step = self.step if step is None else step
        together: dict[int, tuple[Compressor, list[torch.Size]]] = {}
        for name, shape in self._shapes.items():
            compressor = self.policy.choose(name, shape, step) or self._exact[torch.float32]
            together.setdefault(id(compressor), (compressor, []))[1].append(shape)
        return sum(
            compressor.sent_bytes(shapes, rank=self._rank, world_size=self._size)
            for compressor, shapes in together.values()
        )

    def state_dict(self, *, own: bool = False) -> dict[str, Any]:
        """What a later run needs. Every rank calls it, between steps.

        Args:
            own: this rank's own residuals, with which a run of the same ranks goes on bit for bit; each rank saves
                its own. Otherwise their mean, the same on all ranks, for any number of ranks.

        Returns:
            Tensors, numbers and names; ``torch.load`` reads it with ``weights_only=True``.
        """
        residuals = self.feedback.residuals if own else mean_residuals(self.feedback, self._shapes, self._group)
        return pack_state(self.step, residuals, self.policy.compressors(), (self._rank, self._size) if own else None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was made.

        Raises:
            UsageError: the state is of another model, or another rank's own.
        """
        self.step = unpack_state(
            state, self._shapes, self.policy.compressors(), self.feedback, (self._rank, self._size)
        )

    def hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Takes a bucket from DDP. Called for every bucket of a backward pass, in the same order on all ranks."""
        taken = _Bucket(bucket, self._names)
        self._waiting.append(taken)
        self._waiting_bytes += self._compressed_bytes(taken)
        last = bool(bucket.is_last())
        if last or self._waiting_bytes >= self._fuse_bytes:
            buckets, self._waiting, self._waiting_bytes = self._waiting, [], 0.0
            self._thread.start(
                lambda: self._communicate(buckets, last=last), Bundle.over(taken.buffer, taken.gradients)
            )
        return taken.future()

    def close(self) -> None:
        """Have DDP average gradients exactly again, by its own all_reduce; call it on every rank, between steps.

        Residuals that have not been sent are dropped. Torch cannot take a communication hook off a model: it stays
        and passes buckets on, and ``compress`` may be called again.
        """
        self._release()

    def _compressed_bytes(self, bucket: _Bucket) -> float:
        return sum(
            self._compressor(name, gradient).wire_bytes(gradient.shape)
            for name, gradient in zip(bucket.names, bucket.gradients, strict=True)
        )

    def _compressor(self, name: str, gradient: Tensor) -> Compressor:
        chosen = self.policy.choose(name, gradient.shape, self.step)
        return chosen or self._exact[gradient.dtype if gradient.dtype in _HALVES else torch.float32]

    def _communicate(self, buckets: list[_Bucket], *, last: bool) -> None:
        """The thread's work: several buckets from gradients to means."""
        try:
            self._reduce(buckets)
            if last:
                self.step += 1
                self.stats.steps += 1
        except BaseException as error:
            for bucket in buckets:
                bucket.error = error
        for bucket in buckets:
            bucket.done.set_result(None)

    def _reduce(self, buckets: list[_Bucket]) -> None:
        together: dict[int, tuple[Compressor, list[tuple[str, Tensor]]]] = {}
        for bucket in buckets:
            for name, gradient in zip(bucket.names, bucket.gradients, strict=True):
                compressor = self._compressor(name, gradient)
                together.setdefault(id(compressor), (compressor, []))[1].append((name, gradient))
                self.stats.exact_bytes += (
                    2 * (self._size - 1) / self._size * gradient.numel() * gradient.element_size()
                )
        work = list(together.values())
        for _, entries in work:  # DDP orders buckets anew after the first step; what travels joined keeps one order
            entries.sort(key=lambda entry: self._order[entry[0]])
        keeps = [self._keeps(compressor) for compressor, _ in work]
        conversations = [
            compressor.converse([self._item(n, g, keep) for n, g in entries], keep_residual=keep)
            for (compressor, entries), keep in zip(work, keeps, strict=True)
        ]
        means = {}
        for (_, entries), outcomes in zip(work, exchange(conversations, self._group, self.stats), strict=True):
            for (name, gradient), outcome in zip(entries, outcomes, strict=True):
                gradient.copy_(outcome.mean)
                means[name] = gradient
                if outcome.residual is not None:
                    self.feedback.remember(name, outcome.residual, mean=outcome.mean)
        self.policy.observe(means, self.step)

    def _keeps(self, compressor: Compressor) -> bool:
        if any(compressor is exact for exact in self._exact.values()):
            return False
        return compressor.wants_feedback if self._wants_feedback is None else self._wants_feedback

    def _item(self, name: str, gradient: Tensor, keep: bool) -> Item:
        kept = keep or name in self.feedback.residuals
        tensor = self.feedback.compensate(name, gradient) if kept else gradient.float()
        if kept and not keep:  # compressed so far, exact from now on: the residual goes out at once
            del self.feedback.residuals[name]
        context = Context(name=name, step=self.step, rank=self._rank, world_size=self._size, seed=self._seed)
        return Item(tensor=tensor.contiguous(), context=context)


class _Bucket:
    """What DDP gave, and when it is done."""

    def __init__(self, bucket: Any, names: Mapping[int, str]) -> None:
        self.buffer: Tensor = bucket.buffer()
        self.gradients: list[Tensor] = bucket.gradients()
        self.names = [names[id(parameter)] for parameter in bucket.parameters()]
        self.error: BaseException | None = None
        devices = [self.buffer.device] if self.buffer.device.type == "cuda" else None
        self.done: torch.futures.Future[None] = torch.futures.Future(devices=devices)

    def future(self) -> torch.futures.Future[Tensor]:
        """The buffer, when it holds the mean. Raises what went wrong, which DDP passes on from ``backward``."""

        def value(_: object) -> Tensor:
            if self.error is not None:
                raise self.error
            return self.buffer

        return self.done.then(value)


def attach_ddp(
    model: DistributedDataParallel,
    method: Compressor | CompressionPolicy,
    *,
    feedback: bool | None = None,
    decay: float = 1.0,
    start_step: int = 0,
    fuse_bytes: int = FUSE_BYTES,
    group: dist.ProcessGroup | None = None,
    timeout_s: float | None = None,
    seed: int = 0,
) -> DDPCompression:
    """Compress the gradients of a DDP-wrapped model. Every rank calls it, once, before the first backward pass.

    Args:
        model: wrapped.
        method: a compressor, which is copied, for all matrices; or a policy, which belongs to this model from now on.
        feedback: whether to remember what compression loses; by default as each compressor wants it.
        decay: share of a residual that survives a step.
        start_step: exact steps before; for a bare compressor.
        fuse_bytes: buckets travel together until they have so many compressed bytes. Fewer overlap better with the
            backward pass, more save latencies.
        group: the model's ranks, for nothing else; by default a new group of them over the same backend.
        timeout_s: of a collective, for the new group; by default as torch has it.
        seed: of everything random.

    Returns:
        A handle: bytes, state, ``close()``.

    Raises:
        UsageError: options that make no sense, or the model's gradients are compressed or combined already.
    """
    if fuse_bytes < 0:
        raise UsageError(f"buckets fused up to {fuse_bytes} bytes: must not be negative")
    if isinstance(method, Compressor):
        method = CompressionPolicy(copy.deepcopy(method), start_step=start_step)
    elif start_step:
        raise UsageError("start_step belongs to the policy: CompressionPolicy(..., start_step=...)")
    if group is None:
        ranks = dist.get_process_group_ranks(model.process_group)
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return DDPCompression(model, method, group, feedback=feedback, decay=decay, fuse_bytes=fuse_bytes, seed=seed)
