"""What every rank runs for ``test_direct_feedback.py``, and the model, which one process has as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.errors import MismatchError, UsageError
from mycel.parallel.direct_feedback import DirectFeedback, feedback_bytes

WIDTHS = (6, 9, 7, 8, 5)
CLASSES, EXAMPLES, SEED = 4, 12, 11


def layers(classes: int = CLASSES) -> list[nn.Module]:
    torch.manual_seed(0)
    made: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        made += [nn.Linear(before, after), nn.Tanh()]
    return [*made, nn.Linear(WIDTHS[-1], classes)]


def data(classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(EXAMPLES, WIDTHS[0], generator=made), torch.randint(0, classes, (EXAMPLES,), generator=made)


def stage_of(rank: int, size: int, classes: int) -> nn.Sequential:
    """Whole layers with their activations, as evenly as they go; the rest of them on the last rank."""
    every = layers(classes)
    per = max(1, 5 // size)
    begin, end = 2 * per * rank, 2 * per * (rank + 1) if rank < size - 1 else len(every)
    return nn.Sequential(*every[begin:end])


def gradients(rank: int, size: int, classes: int, micro_batches: int, error: str) -> dict[str, Any]:
    stage = stage_of(rank, size, classes)
    trainer = DirectFeedback(
        stage, nn.functional.cross_entropy, micro_batches=micro_batches, error=error, seed=SEED, timeout_s=60.0
    )
    x, target = data(classes)
    loss = trainer.step(x if rank == 0 else None, target=target if rank == size - 1 else None)
    sent = {name: trainer.meter.total([name]) for name in ("forward", "error")}
    return {
        "grads": [p.grad for p in stage.parameters()],
        "loss": None if loss is None else float(loss),
        "sent": sent,
        "columns": trainer.columns,
        "expected": 8 + feedback_bytes(EXAMPLES, classes, trainer.columns, error),
        "waited": trainer.waited_s > 0 or rank == 0,
    }


def everything(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{classes} {micro} {error}": gradients(rank, size, classes, micro, error)
        for classes, micro, error in ((4, 1, "float32"), (4, 3, "float32"), (20, 2, "float32"), (4, 2, "ternary"))
    }
    found["complaints"] = [
        complaint(lambda: DirectFeedback(nn.Linear(2, 2), None)),
        complaint(lambda: DirectFeedback(nn.Linear(2, 2), nn.functional.mse_loss, micro_batches=1 + (rank == 1))),
    ]
    return found


def complaint(call: Any) -> str:
    try:
        call()
    except (UsageError, MismatchError) as error:
        return str(error)
    return "nothing"


@contextmanager
def alone() -> Iterator[None]:
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
