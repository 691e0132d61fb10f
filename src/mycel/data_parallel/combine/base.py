"""What a combiner is: how the replicas' vectors become one that all of them have."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist

from mycel.comm.bundle import Bundle
from mycel.comm.pending import Pending
from mycel.errors import UsageError

__all__ = ["Combiner", "check_combiner"]


class Combiner(Protocol):
    """Begins to combine and returns at once, so that work can go on while bytes travel.

    All ranks of the group must start the same bundles in the same order, and leave a bundle alone until it is
    finished. Afterwards it holds the same bits on every rank.

    Examples:
        >>> import torch
        >>> class Largest:
        ...     def start(self, bundle, group):
        ...         work = dist.all_reduce(bundle.flat, dist.ReduceOp.MAX, group=group, async_op=True)
        ...         return Pending(work.wait)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> own = torch.tensor([1.0, 2.0])
        >>> pending = Largest().start(Bundle.over(own, [own]), dist.group.WORLD)
        >>> pending.wait(), own.tolist()
        (True, [1.0, 2.0])
        >>> dist.destroy_process_group()
    """

    def start(self, bundle: Bundle, group: dist.ProcessGroup) -> Pending[None]:
        """Begin to replace what is in the bundle by the combination of all ranks' bundles.

        Args:
            bundle: this rank's contribution, overwritten by the result.
            group: the ranks; nothing else may run over it meanwhile.

        Returns:
            Waits for the result. Deadlines are the group's.
        """
        ...


def check_combiner(combiner: object) -> None:
    """Refuse what does not combine.

    Raises:
        UsageError: a class in place of an object, or another thing.
    """
    if isinstance(combiner, type):
        name = combiner.__name__
        raise UsageError(f"{name} is a class, and a combiner, such as Adasum(), is wanted: make one, {name}()")
    if not callable(getattr(combiner, "start", None)):
        raise UsageError(f"expected a combiner, such as Adasum(), got {type(combiner).__name__}")
