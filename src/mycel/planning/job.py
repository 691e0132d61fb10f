"""A training job as a planner sees it: how many ranks in each direction, what a step is, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mycel.errors import UsageError
from mycel.planning.models.shape import ModelShape

__all__ = ["EXECUTORS", "RECOMPUTE", "Executor", "Job", "Mesh", "Recompute"]

Recompute = Literal["none", "full", "attention", "alternate"]
#: What is done again in the backward pass. ``attention``: the core of attention (Megatron's selective recomputation);
#: ``alternate``: every second matrix product and all that is not one (torchtitan's selective checkpointing).
RECOMPUTE: tuple[Recompute, ...] = ("none", "full", "attention", "alternate")
Executor = Literal["mycel", "torch", "megatron"]
#: ``torch``: a buffer for every micro-batch, in both directions, for the whole step (torch.distributed.pipelining to
#: 2.13). ``mycel``: two for activations and one for gradients. ``megatron``: one of each.
EXECUTORS: tuple[Executor, ...] = ("mycel", "torch", "megatron")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks in each direction; tensor parallelism is innermost, then context, data, and the pipeline outermost.

    Attributes:
        pp: stages of the pipeline.
        dp: replicas, or shards of them.
        tp: ranks that share a layer's matrices.
        cp: ranks that share a sequence.
        ep: ranks that share a layer's experts; they are taken from ``dp * cp``.

    Raises:
        UsageError: a degree below 1, or experts over ranks that are not there.

    Examples:
        >>> Mesh(pp=2, tp=4).num_ranks
        8
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp", "cp", "ep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"mesh: {name} is {value!r}; it must be a whole number from 1")
        if (self.dp * self.cp) % self.ep:
            raise UsageError(
                f"mesh: ep={self.ep} does not divide dp * cp = {self.dp * self.cp}, whose ranks share the experts; "
                f"{_nearest_divisor(self.dp * self.cp, self.ep)} would"
            )

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.pp * self.dp * self.tp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One way to train a model.

    Attributes:
        mesh: ranks in each direction.
        global_batch: sequences of a step.
        micro_batch: sequences that a replica works on at once.
        seq: tokens of a sequence.
        chunks: stages that a rank of the pipeline holds (interleaving).
        recompute: what is done again in the backward pass, one of ``RECOMPUTE``.
        is_sequence_parallel: what tensor parallelism does not share is shared along the sequence.
        is_scattered: tensor-parallel ranks send their share of a stage's boundary each, and the far side gathers it.
        zero: 0 nothing is sharded over replicas, 1 the optimizer's state, 2 gradients too, 3 parameters too (FSDP).
        is_flash: attention never writes its scores to memory.
        is_offloaded: the optimizer's state is in the host's memory.
        is_compiled: elementwise operations are fused by a compiler.
        is_float8: matrix products in 8 bits.
        is_async_tp: tensor parallelism's exchanges are cut up and hidden behind its products.
        is_loss_fused: one kernel makes the loss and, in place, the logits' gradient: no copies of them in 32 bits.
        has_dropout: masks are kept for the backward pass.
        executor: who runs the pipeline, one of ``EXECUTORS``; it decides how many boundary buffers are held.
        gradient_bytes: of one gradient as it is kept and reduced.
        shares: micro-batches of each replica in a step, where they differ; empty where all have equally many.
        coshard: pieces that attention (by heads) and the feed-forward network (by inner columns) are cut into, done
            one after the other on the same rank, each again in the backward pass; 1: whole.

    Raises:
        UsageError: what does not divide, with the nearest that does; shares that do not make the batch, or of
            replicas that exchange something for every micro-batch; pieces of what ranks share already.

    Examples:
        >>> Job(mesh=Mesh(dp=4), global_batch=64, micro_batch=2, seq=2048).num_micro_batches
        8
        >>> Job(mesh=Mesh(dp=4), global_batch=30, micro_batch=2, seq=2048)
        Traceback (most recent call last):
        ...
        mycel.errors.UsageError: batch 30 does not divide into micro-batches of 2 for 4 replicas; 32 would, or 24
        >>> Job(mesh=Mesh(dp=2), global_batch=30, micro_batch=2, seq=2048, shares=(9, 6)).num_micro_batches
        9
    """

    mesh: Mesh
    global_batch: int
    micro_batch: int
    seq: int
    chunks: int = 1
    recompute: Recompute = "none"
    is_sequence_parallel: bool = False
    is_scattered: bool = False
    zero: int = 0
    is_flash: bool = True
    is_offloaded: bool = False
    is_compiled: bool = False
    is_float8: bool = False
    is_async_tp: bool = False
    is_loss_fused: bool = False
    has_dropout: bool = False
    executor: Executor = "mycel"
    gradient_bytes: int = 4
    shares: tuple[int, ...] = ()
    coshard: int = 1

    def __post_init__(self) -> None:
        for name in ("global_batch", "micro_batch", "seq", "chunks", "coshard"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"job: {name} is {value!r}; it must be a whole number from 1")
        if self.recompute not in RECOMPUTE:
            raise UsageError(f"job: recompute is {self.recompute!r}; it must be one of {', '.join(RECOMPUTE)}")
        if self.executor not in EXECUTORS:
            raise UsageError(f"job: executor is {self.executor!r}; it must be one of {', '.join(EXECUTORS)}")
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"job: zero is {self.zero!r}; it must be 0, 1, 2 or 3")
        if self.gradient_bytes not in (2, 4):
            raise UsageError(f"job: gradient_bytes is {self.gradient_bytes!r}; it must be 2 or 4")
        each = self.mesh.dp * self.micro_batch
        if self.shares:
            self._check_shares()
        elif self.global_batch % each:
            low = self.global_batch // each * each
            raise UsageError(
                f"batch {self.global_batch} does not divide into micro-batches of {self.micro_batch} for "
                f"{self.mesh.dp} replicas; {low + each} would{f', or {low}' if low else ''}"
            )
        if self.seq % self.mesh.cp:
            raise UsageError(
                f"{self.seq} tokens do not divide over cp={self.mesh.cp}; {_nearest_divisor(self.seq, self.mesh.cp)} "
                "ranks would"
            )
        if self.coshard > 1:
            self._check_coshard()
        if self.chunks > 1 and self.mesh.pp == 1:
            raise UsageError(f"{self.chunks} chunks a rank need a pipeline, and pp is 1: set chunks=1 or pp=2")

    def _check_coshard(self) -> None:
        for name in ("tp", "cp", "ep"):
            if (degree := getattr(self.mesh, name)) > 1:
                raise UsageError(
                    f"coshard={self.coshard} with {name}={degree}: pieces are of layers that one rank has alone: set "
                    f"{name}=1, or coshard=1"
                )
        if self.recompute not in ("none", "full"):
            raise UsageError(
                f"coshard={self.coshard} with recompute={self.recompute}: every piece is done again whole: set "
                "recompute=none or recompute=full, or coshard=1"
            )

    def _check_shares(self) -> None:
        if len(self.shares) != self.mesh.dp:
            raise UsageError(f"{len(self.shares)} shares of the batch for dp={self.mesh.dp} replicas; each has one")
        for replica, share in enumerate(self.shares):
            if isinstance(share, bool) or not isinstance(share, int) or share < 1:
                raise UsageError(
                    f"shares: replica {replica} has {share!r} micro-batches; it must be a whole number from 1"
                )
        if sum(self.shares) * self.micro_batch != self.global_batch:
            raise UsageError(
                f"shares of {' + '.join(map(str, self.shares))} micro-batches of {self.micro_batch} make a batch of "
                f"{sum(self.shares) * self.micro_batch}, and it is {self.global_batch}: change one of them"
            )
        for what, is_there, way in (
            (f"ep={self.mesh.ep}", self.mesh.ep > 1, "ep=1"),
            ("zero=3", self.zero == 3, "zero=2"),
        ):
            # Exchanges of every micro-batch would be more on one replica than on another, and never end.
            if is_there:
                raise UsageError(
                    f"unequal shares of the batch with {what}, where replicas exchange something for every "
                    f"micro-batch: leave the shares out, or set {way}"
                )

    @property
    def num_micro_batches(self) -> int:
        """Of a step, on each replica; on the one with the most where they differ."""
        return max(self.shares) if self.shares else self.global_batch // (self.mesh.dp * self.micro_batch)

    def batches_of(self, replica: int) -> int:
        """Micro-batches of a step on one replica.

        Args:
            replica: from 0 to ``dp - 1``.
        """
        return self.shares[replica] if self.shares else self.num_micro_batches

    def check(self, shape: ModelShape) -> None:
        """That a model can be shared so.

        Args:
            shape: the model.

        Raises:
            UsageError: heads, layers or experts do not divide; the message has the nearest degree that does.
        """
        if shape.num_heads % self.mesh.tp:
            raise UsageError(
                f"tp={self.mesh.tp} does not divide the {shape.num_heads} heads of {shape.name}; "
                f"{_nearest_divisor(shape.num_heads, self.mesh.tp)} would"
            )
        if shape.num_layers < self.mesh.pp * self.chunks:
            raise UsageError(
                f"{self.mesh.pp} stages of {self.chunks} chunks are more than the {shape.num_layers} layers of "
                f"{shape.name}; at most pp={max(1, shape.num_layers // self.chunks)}"
            )
        if self.coshard > 1:
            self._check_pieces(shape)
        if self.mesh.ep > 1 and (not shape.num_experts or shape.num_experts % self.mesh.ep):
            has = f"the {shape.num_experts} experts" if shape.num_experts else "no experts"
            raise UsageError(
                f"ep={self.mesh.ep} does not divide {has} of {shape.name}; "
                f"{_nearest_divisor(max(1, shape.num_experts), self.mesh.ep)} would"
            )

    def _check_pieces(self, shape: ModelShape) -> None:
        if shape.num_experts:
            raise UsageError(
                f"coshard={self.coshard}, and {shape.name} has experts, which are not cut into pieces: set coshard=1"
            )
        for count, what in (
            (shape.num_heads, "heads"),
            (shape.num_kv_heads, "heads of keys and values"),
            (shape.ffn, "inner columns"),
        ):
            if count % self.coshard:
                raise UsageError(
                    f"coshard={self.coshard} does not divide the {count} {what} of {shape.name}; "
                    f"{_nearest_divisor(count, self.coshard)} would"
                )


def _nearest_divisor(number: int, near: int) -> int:
    """The divisor of a number that is nearest to another; the smaller of two as near."""
    found = {d for low in range(1, int(number**0.5) + 1) if number % low == 0 for d in (low, number // low)}
    return min(found, key=lambda d: (abs(d - near), d))
