"""Training stages without a backward chain: one broadcast of the output's error, and all stages update at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.arguments import whole_number
from mycel.comm.meter import ByteMeter
from mycel.comm.start import group_or_all
from mycel.errors import MismatchError, UsageError
from mycel.parallel.direct_feedback.blocks import Block, blocks_of
from mycel.parallel.direct_feedback.errors import ErrorForm, check_rows, feedback_matrix
from mycel.parallel.messages import Messages
from mycel.pipeline.order import Action, Kind

__all__ = ["DirectFeedback"]


class DirectFeedback:
    """A model in stages, one a rank, trained by direct feedback alignment.

    Forwards go from stage to stage as in a pipeline. Backwards nothing goes from stage to stage: the last rank
    broadcasts the error ``e`` of the output, the loss's derivative, and each block gets ``B e`` with a fixed random
    ``B`` of its own in place of the gradient of what it gives. The model's last block has its true gradient, as
    ever. So ``delta = (B e) * f'(a)``, and no stage waits for the one above it.

    It is another rule of learning than back-propagation: tasks that are not easy are learnt worse by it. Gradients
    are in ``.grad`` after ``step``; optimizers are the caller's. The same model in other divisions over ranks has the
    same gradients.

    Args:
        stage: this rank's part of the model, in the order of ranks. Of an ``nn.Sequential`` every layer learns
            from an error of its own, with the activation that follows it.
        loss: of the model's output and the target, the mean over examples; needed on the last rank.
        micro_batches: that a batch is cut into, so that stages compute side by side.
        error: ``float32``, or ``ternary``: three values, five a byte, and a scale a row.
        seed: of the fixed matrices, the same on all ranks.
        group: the ranks, all by default.
        meter: counts bytes, as ``forward`` and ``error``.
        timeout_s: longest wait for one message from the stage before; ``None``: as long as the group waits.

    Attributes:
        loss: of the last step, on the last rank.
        waited_s: seconds of the last step in which this rank waited for the stage before.
        feedback_s: seconds in which it waited for the error.
        columns: numbers in a row of what is broadcast, after the first step.

    Raises:
        UsageError: no loss on the last rank, or settings that cannot be.
        MismatchError: ranks have different settings.

    References:
        A. Nøkland, "Direct Feedback Alignment Provides Learning in Deep Neural Networks", NIPS 2016,
        arXiv 1609.01596.
        J. Launay, I. Poli, F. Boniface, F. Krzakala, "Direct Feedback Alignment Scales to Modern Deep Learning Tasks
        and Architectures", NeurIPS 2020, arXiv 2006.12878.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> trainer = DirectFeedback(model, nn.functional.cross_entropy)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> x, y = torch.eye(2), torch.tensor([1, 0])
        >>> for _ in range(50):
        ...     optimizer.zero_grad()
        ...     _ = trainer.step(x, target=y)
        ...     optimizer.step()
        >>> model(x).argmax(1).tolist()
        [1, 0]
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        stage: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        micro_batches: int = 1,
        error: str = "float32",
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        meter: ByteMeter | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._group = group_or_all(group, "DirectFeedback")
        self._rank, self._size = self._group.rank(), self._group.size()
        self._micro_batches = whole_number(micro_batches, "micro_batches", least=1)
        self._form, self._seed = ErrorForm(name=error), seed
        self._blocks: Sequence[Block] = blocks_of(stage)
        self._loss = loss
        self._device = next((p.device for p in stage.parameters()), torch.device("cpu"))
        self._first = self._agree()
        self.meter = ByteMeter() if meter is None else meter
        self._messages = Messages(self._group, self._device, {}, timeout_s)
        self._matrices: dict[int, Tensor] = {}
        self.columns = self._steps = 0
        self.loss: Tensor | None = None
        self.waited_s = self.feedback_s = 0.0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the model's end."""
        return self._rank == self._size - 1

    def _agree(self) -> int:
        """Check that ranks have the same settings, and a loss; gives the number of blocks before this rank."""
        lacks = self.is_last and self._loss is None
        names = (len(self._blocks), self._micro_batches, int(self._form.name == "ternary"), self._seed, int(lacks))
        mine = torch.tensor(names, dtype=torch.int64, device=self._device)
        found = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(found, mine, group=self._group)
        said = [one.tolist() for one in found]
        if said[-1][4]:
            raise UsageError(f"rank {self._size - 1} has the end of the model and no loss; give DirectFeedback one")
        for rank, one in enumerate(said):
            if one[1:4] != said[0][1:4]:
                raise MismatchError(
                    f"rank {rank} was given (micro_batches, ternary, seed) {tuple(one[1:4])}, rank 0 "
                    f"{tuple(said[0][1:4])}; all ranks need the same"
                )
        return sum(one[0] for one in said[: self._rank])

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self, batch: Tensor | None = None, *, target: Tensor | None = None) -> Tensor | None:
        """One batch: all ranks call it; gradients are added to ``.grad``.

        Args:
            batch: on the first rank; examples along the first dimension.
            target: on the last rank.

        Returns:
            The loss on the last rank.

        Raises:
            UsageError: a batch or a target that is missing or cannot be cut into micro-batches, or a block whose
                output has no row for each row of the error.
        """
        self.waited_s = self.feedback_s = 0.0
        self._steps += 1
        self._messages.restart()
        given = self._cut(batch, "batch", wanted=self._rank == 0)
        targets = self._cut(target, "target", wanted=self.is_last)
        kept: list[list[Tensor]] = []
        errors: list[Tensor] = []
        losses: list[Tensor] = []
        for m in range(self._micro_batches):
            outputs = self._forward(m, given[m] if given else None)
            if self.is_last:
                found, error = self._end(outputs.pop(), targets[m])
                losses.append(found)
                errors.append(error)
            kept.append(outputs)
        error_of_rows = self._broadcast(torch.cat(errors) if errors else None, kept)
        rows = torch.chunk(error_of_rows, self._micro_batches)
        for outputs, own in zip(kept, rows, strict=True):
            self._learn(outputs, own)
        self._messages.finish()
        self.loss = torch.stack(losses).sum() if losses else None
        return self.loss

    def _cut(self, tensor: Tensor | None, name: str, *, wanted: bool) -> Sequence[Tensor]:
        if not wanted:
            return ()
        if tensor is None:
            raise UsageError(f"rank {self._rank} has an end of the model: step needs a {name} there")
        if not len(tensor) or len(tensor) % self._micro_batches:
            raise UsageError(
                f"{name} of {len(tensor)} examples: cannot be cut into {self._micro_batches} equal micro-batches"
            )
        return torch.chunk(tensor, self._micro_batches)

    def _forward(self, m: int, x: Tensor | None) -> list[Tensor]:
        """What each block gives, with a graph of its own; sent on where a rank comes after."""
        if x is None:
            receive = Action(stage=self._rank, kind=Kind.RECV_F, micro_batch=m)
            with self._waiting("waited_s"):
                self._messages.post(receive, (self._rank - 1, self._rank), self._rank - 1, trains=False)
                (came,) = self._messages.take(receive, self._rank - 1, trains=False)
            assert came is not None
            x = came
        outputs = []
        for block in self._blocks:
            x = block(x.detach())
            outputs.append(x)
        if not self.is_last:
            sent = x.detach()
            send = Action(stage=self._rank, kind=Kind.SEND_F, micro_batch=m)
            self._messages.send_outputs(send, (self._rank, self._rank + 1), self._rank + 1, [sent], trains=False)
            self._count("forward", sent.numel() * sent.element_size(), [self._rank + 1])
        return outputs

    def _end(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The loss's share of the batch's; the error, ``[rows, classes]``. Gives the last block its true gradient."""
        assert self._loss is not None
        leaf = output.detach().requires_grad_()
        loss = self._loss(leaf, target) / self._micro_batches
        (error,) = torch.autograd.grad(loss, leaf)
        output.backward(error)  # type: ignore[no-untyped-call]
        return loss.detach(), error.reshape(-1, error.shape[-1])

    # -- the error ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _broadcast(self, error: Tensor | None, kept: Sequence[Sequence[Tensor]]) -> Tensor:
        """From the last rank to all: one message, after one of 16 bytes that says its shape."""
        if not self.columns:
            self._choose_columns(error, kept[0])
        with self._waiting("feedback_s"):
            shape = torch.tensor([0 if error is None else len(error)], dtype=torch.int64, device=self._device)
            self._from_last(shape)
            rows = int(shape)
            payload = torch.empty(self._form.num_bytes(rows, self.columns), dtype=torch.uint8, device=self._device)
            if error is not None:
                if error.shape[1] > self.columns:
                    error = error.float() @ self._matrix(-1, error.shape[1], self.columns)
                payload.copy_(self._form.encode(error, self._seed * 1_000_003 + self._steps))
            self._from_last(payload)
        return self._form.decode(payload, rows, self.columns)

    def _choose_columns(self, error: Tensor | None, outputs: Sequence[Tensor]) -> None:
        """Once: the error's own width, or that of the widest block where it is smaller; known to all ranks."""
        widest = max((output.shape[-1] for output in outputs), default=0)
        numbers = torch.tensor([0 if error is None else error.shape[1], widest], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        classes, width = numbers.tolist()
        self.columns = min(classes, width) if width else classes

    def _from_last(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, group=self._group, group_src=self._size - 1)
        if self.is_last:
            self._count("error", tensor.nbytes, range(self._size - 1))

    def _learn(self, outputs: Sequence[Tensor], error: Tensor) -> None:
        """Each block's own error, and from it its gradients; nothing waits for another rank."""
        for place, output in enumerate(outputs):
            if not output.requires_grad:
                continue
            block = self._first + place
            check_rows(len(error), output.numel(), block)
            matrix = self._matrix(block, error.shape[1], output.numel() // len(error))
            output.backward((error @ matrix).view_as(output).to(output.dtype))  # type: ignore[no-untyped-call]

    def _matrix(self, block: int, columns: int, features: int) -> Tensor:
        known = self._matrices.get(block)
        if known is None or known.shape != (columns, features):
            known = feedback_matrix(self._seed, block, columns, features).to(self._device)
            self._matrices[block] = known
        return known

    # -- what it costs --------------------------------------------------------------------------------------------

    def _count(self, name: str, num_bytes: int, ranks: Sequence[int]) -> None:
        self.meter.add(name, [num_bytes if rank in ranks else 0 for rank in range(self._size)], self._group)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.perf_counter() - begin)
