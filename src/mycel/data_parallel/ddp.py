"""Compression of the gradients of a model wrapped in ``DistributedDataParallel``.

One thread communicates, over a process group of its own, through DDP's buckets in DDP's order, which is the same on
all ranks. Nothing waits inside a callback, so many buckets, unused parameters and any backend work. Buckets whose
compressed bytes are few travel together. What a step taught (residuals, first directions, levels) is kept when its
last bucket is done, and only if all of its means are finite.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mycel.arguments import whole_number
from mycel.comm.background import InBackground
from mycel.comm.bundle import Bundle
from mycel.comm.handle import Handle
from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.compress.cast import Cast
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import AllReduce, Conversation, Item, Outcome
from mycel.data_parallel.ddp_hook import take_hook
from mycel.data_parallel.exchange import exchange
from mycel.data_parallel.feedback import ErrorFeedback, Scaler, check_residuals
from mycel.data_parallel.open_step import OpenStep
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.rehearsal import rehearse
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
        feedback: this rank's residuals, in ``memory``.
        stats: bytes and seconds since the last ``stats.reset()``.
        step: synchronised steps so far.

    Examples:
        >>> from mycel.data_parallel.compress import TopK
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = DistributedDataParallel(torch.nn.Linear(32, 16, bias=False))
        >>> with attach_ddp(model, TopK(0.1)) as compression:
        ...     model(torch.ones(1, 32)).sum().backward()
        >>> compression.step, list(compression.feedback.memory)  # what was not sent is kept
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
        scaler: Scaler | None,
        residuals: Literal["float32", "int8"],
    ) -> None:
        self.policy = policy
        self.feedback = ErrorFeedback(decay=decay, scaler=scaler, precision=residuals)
        self.stats = CommStats()
        self.step = 0
        self._group = group
        self._rank, self._size = group.rank(), group.size()
        self._wants_feedback = feedback
        self._fuse_bytes, self._seed = fuse_bytes, seed
        trained = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        self._names = {id(p): n for n, p in trained}
        self._shapes = {n: (torch.view_as_real(p) if p.is_complex() else p).shape for n, p in trained}
        self._complex = {n for n, p in trained if p.is_complex()}
        self._order = {name: i for i, name in enumerate(self._shapes)}
        self._exact = {dtype: Cast(dtype) for dtype in (torch.float32, torch.float64, *_HALVES)}
        self._thread = InBackground()
        self._open = OpenStep(policy, self.feedback)
        self._waiting: list[_Bucket] = []
        self._waiting_bytes = 0.0
        self._begins = True
        self._finds_unused = bool(model.find_unused_parameters) and not model.static_graph
        self._used: set[str] = set()
        watched = trained if self._finds_unused else []
        # Called before DDP's own hooks, and where DDP takes a parameter for used: when it has got a gradient.
        self._watches = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._used.add(name))
            for name, parameter in watched
        ]
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
            compressor = self._chosen(name, shape, step) or self._exact[torch.float32]
            together.setdefault(id(compressor), (compressor, []))[1].append(shape)
        used = 2 * (self._size - 1) / self._size * len(self._shapes) if self._asks_who_used() else 0.0
        return used + sum(
            compressor.sent_bytes(shapes, rank=self._rank, world_size=self._size)
            for compressor, shapes in together.values()
        )

    def rescale(self, factor: float) -> None:
        """Multiply what is remembered: losses are scaled by so many times as much from the next step on.

        For whoever scales losses without a ``scaler`` that was given to ``compress``; every rank calls it, between
        steps.

        Raises:
            UsageError: the factor is not a positive number.
        """
        self.feedback.rescale(factor)

    def state_dict(self, *, own: bool = False) -> dict[str, Any]:
        """What a later run needs. Every rank calls it, between steps.

        Args:
            own: this rank's own residuals, with which a run of the same ranks goes on bit for bit; each rank saves
                its own. Otherwise their mean, the same on all ranks, for any number of ranks.

        Returns:
            Tensors, numbers and names; ``torch.load`` reads it with ``weights_only=True``.
        """
        residuals = self.feedback.memory if own else mean_residuals(self.feedback, self._shapes, self._group)
        owner = (self._rank, self._size) if own else None
        return pack_state(self.step, residuals, self.policy.compressors(), owner, scale=self.feedback.scale)

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
        if bucket.index() == 0:  # what is left of a backward pass that failed is of no step
            self._waiting, self._waiting_bytes, self._begins = [], 0.0, True
        self._waiting.append(taken)
        self._waiting_bytes += self._compressed_bytes(taken)
        last = bool(bucket.is_last())
        if last or self._waiting_bytes >= self._fuse_bytes:
            buckets, self._waiting, self._waiting_bytes = self._waiting, [], 0.0
            begins, self._begins = self._begins, False
            used: set[str] | None = None
            if last:
                used, self._used = self._used, set()
            self._thread.start(
                lambda: self._communicate(buckets, begins=begins, used=used),
                Bundle.over(taken.flat, [taken.flat]),
            )
        return taken.future()

    def close(self) -> None:
        """Have DDP average gradients exactly again, by its own all_reduce; call it on every rank, between steps.

        Residuals that have not been sent are dropped. Torch cannot take a communication hook off a model: it stays
        and passes buckets on, and ``compress`` may be called again.
        """
        self._release()
        for watch in self._watches:
            watch.remove()

    def _compressed_bytes(self, bucket: _Bucket) -> float:
        if bucket.is_sparse:
            return float(bucket.flat.nbytes)
        return sum(
            self._compressor(name, gradient).wire_bytes(gradient.shape)
            for name, gradient in zip(bucket.names, bucket.gradients, strict=True)
        )

    def _chosen(self, name: str, shape: torch.Size, step: int) -> Compressor | None:
        """Complex numbers travel exact: what compressors know of magnitudes is of real ones."""
        return None if name in self._complex else self.policy.choose(name, shape, step)

    def _compressor(self, name: str, gradient: Tensor) -> Compressor:
        chosen = self._chosen(name, gradient.shape, self.step)
        return chosen or self._exact.get(gradient.dtype, self._exact[torch.float32])

    def _asks_who_used(self) -> bool:
        """Whether ranks tell each other which parameters they used: all answer alike, for all remember alike."""
        return self._finds_unused and bool(self.feedback.memory)

    def _communicate(self, buckets: list[_Bucket], *, begins: bool, used: set[str] | None) -> None:
        """The thread's work: several buckets from gradients to means.

        Args:
            begins: these are the first of a step.
            used: parameters that this rank used, where they are the last of a step.
        """
        try:
            if begins:
                self._open.settle(keep=False)
                self.feedback.follow_scaler()
            unused = self._reduce(buckets, used)
            if used is not None:
                self.step += 1
                self.stats.steps += 1
                self._open.settle(keep=self._open.is_finite(), unused=unused)
        except BaseException as error:
            for bucket in buckets:
                bucket.error = error
        for bucket in buckets:
            bucket.done.set_result(None)

    def _reduce(self, buckets: list[_Bucket], used: set[str] | None) -> set[str]:
        """Means in place of gradients; names of the parameters that no rank used, where that is asked."""
        together: dict[int, tuple[Compressor, list[tuple[str, Tensor]]]] = {}
        for bucket in buckets:
            if bucket.is_sparse:
                bucket.average_sparse(self._group, self.stats)
                continue
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
        asks = used is not None and self._asks_who_used()
        if asks:
            flags = torch.tensor([name in (used or ()) for name in self._shapes], dtype=torch.uint8)
            conversations.append(_largest_of(flags.to(buckets[0].buffer.device)))
        found = exchange(conversations, self._group, self.stats)
        unused = set()
        if asks:
            is_used = found.pop()[0].mean.tolist()
            unused = {name for name, is_in in zip(self._shapes, is_used, strict=True) if not is_in}
        means = {}
        for (_, entries), outcomes in zip(work, found, strict=True):
            for (name, gradient), outcome in zip(entries, outcomes, strict=True):
                gradient.copy_(outcome.mean)
                means[name] = gradient
                if outcome.residual is not None:
                    self.feedback.remember(name, outcome.residual)
        for bucket in buckets:
            self._open.add(bucket.flat, {n: means[n] for n in bucket.names if n in means}, self.step)
        return unused

    def _keeps(self, compressor: Compressor) -> bool:
        if any(compressor is exact for exact in self._exact.values()):
            return False
        return compressor.wants_feedback if self._wants_feedback is None else self._wants_feedback

    def _item(self, name: str, gradient: Tensor, keep: bool) -> Item:
        kept = keep or name in self.feedback.memory
        exact = gradient if gradient.dtype == torch.float64 and not keep else gradient.float()
        tensor = self.feedback.compensate(name, gradient) if kept else exact
        if kept and not keep:  # compressed so far, exact from now on: the residual goes out at once
            self.feedback.release(name)
        context = Context(name=name, step=self.step, rank=self._rank, world_size=self._size, seed=self._seed)
        return Item(tensor=tensor.contiguous(), context=context)


def _largest_of(flags: Tensor) -> Conversation:
    largest: Tensor = yield AllReduce(tensor=flags, op="max")
    return [Outcome(mean=largest)]


class _Bucket:
    """What DDP gave, and when it is done."""

    def __init__(self, bucket: Any, names: Mapping[int, str]) -> None:
        self.buffer: Tensor = bucket.buffer()
        self.is_sparse = self.buffer.is_sparse
        self.gradients: list[Tensor] = [] if self.is_sparse else bucket.gradients()
        if any(p.is_complex() for p in bucket.parameters()) and not self.is_sparse:
            # The buffer has both parts of each number, and torch's views of it only half of them.
            likes = [torch.view_as_real(p) if p.is_complex() else p for p in bucket.parameters()]
            pieces = self.buffer.split_with_sizes([like.numel() for like in likes])
            self.gradients = [piece.view(like.shape) for piece, like in zip(pieces, likes, strict=True)]
        self.names = [names[id(parameter)] for parameter in bucket.parameters()]
        self.error: BaseException | None = None
        devices = [self.buffer.device] if self.buffer.device.type == "cuda" else None
        self.done: torch.futures.Future[None] = torch.futures.Future(devices=devices)

    @property
    def flat(self) -> Tensor:
        """All numbers of the bucket as one vector."""
        return self.buffer._values().reshape(-1) if self.is_sparse else self.buffer

    def average_sparse(self, group: dist.ProcessGroup, stats: CommStats) -> None:
        """The mean of sparse gradients, exact: rows that ranks have touched travel with their places."""
        sent = float((group.size() - 1) * (self.buffer._indices().nbytes + self.buffer._values().nbytes))
        stats.exact_bytes += sent
        stats.sent(sent)
        self.buffer.div_(group.size())
        dist.all_reduce(self.buffer, group=group)

    def future(self) -> torch.futures.Future[Tensor]:
        """The buffer, when it holds the mean. Raises what went wrong, which DDP passes on from ``backward``."""

        def value(_: object) -> Tensor:
            if self.error is not None:
                raise self.error
            return self.buffer

        return self.done.then(value)


def _check_covered(model: DistributedDataParallel, policy: CompressionPolicy) -> None:
    """Refuse what would travel beside a compressor that nothing may travel without.

    Raises:
        UsageError: says which parameter.
    """
    if not any(compressor.covers_all for compressor in policy.compressors()):
        return
    for name, parameter in model.module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise UsageError(f"{name} is complex, and complex gradients travel in the clear: make it two real ones")
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False):
            raise UsageError(f"{name} has sparse gradients, and these travel in the clear: sparse=False")


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
    scaler: Scaler | None = None,
    residuals: Literal["float32", "int8"] = "float32",
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
        scaler: the ``GradScaler`` that scales the losses, whose scale the residuals then follow; without it, call
            ``rescale`` where a scale changes.
        residuals: how they are kept: ``"int8"``, rounded by chance, takes a quarter of the memory.

    Returns:
        A handle: bytes, state, ``close()``.

    Raises:
        UsageError: options that make no sense, or the model's gradients are compressed or combined already.
    """
    whole_number(fuse_bytes, "fuse_bytes, up to which buckets travel together", least=0)
    whole_number(seed, "seed")
    if isinstance(method, Compressor):
        method = CompressionPolicy(copy.deepcopy(method), start_step=start_step)
    elif start_step:
        raise UsageError("start_step belongs to the policy: CompressionPolicy(..., start_step=...)")
    check_residuals(method.compressors(), feedback, residuals)
    _check_covered(model, method)
    device = next((p.device for p in model.module.parameters() if p.requires_grad), torch.device("cpu"))
    rehearse(method.compressors(), device, residuals)
    if group is None:
        ranks = dist.get_process_group_ranks(model.process_group)
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    return DDPCompression(
        model,
        method,
        group,
        feedback=feedback,
        decay=decay,
        fuse_bytes=fuse_bytes,
        seed=seed,
        scaler=scaler,
        residuals=residuals,
    )
