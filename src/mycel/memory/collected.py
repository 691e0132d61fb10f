"""What a recomputation saves, watched: nothing of it may be written in place before a backward computes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mycel.errors import UsageError

__all__ = ["collected"]


@contextmanager
def collected(who: str, told: Callable[[Tensor], None] = lambda x: None) -> Iterator[None]:
    """Around what torch's checkpoint computes again.

    Without a checkpoint torch refuses a backward whose saved tensors were written in place since. Its checkpoint
    looks at no version, and gives gradients of the numbers that were written.

    Args:
        who: is computed again, for messages.
        told: gets each tensor that is saved, before checkpoint has it.

    Raises:
        UsageError: a tensor was written in place after it was saved; the message says which shape.
    """
    # Torch's own hooks collect what the recomputation saves; the innermost ones are the only ones that see it.
    collect, give = torch._C._autograd._top_saved_tensors_default_hooks(True)
    saved: list[tuple[Tensor, int]] = []

    def look() -> None:
        for x, version in saved:
            if x._version != version:
                raise UsageError(
                    f"{who}: a tensor of shape {list(x.shape)} that it saved for its gradients was modified in place "
                    "afterwards"
                )

    def note(x: Tensor) -> Tensor:
        told(x)
        saved.append((x.detach(), x._version))
        try:
            made: Tensor = collect(x)
        except BaseException:  # torch ends a recomputation so, once it has everything
            look()
            raise
        return made

    with saved_tensors_hooks(note, give):
        yield
    look()
