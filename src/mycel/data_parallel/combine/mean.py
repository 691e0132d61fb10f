"""Mean and sum of all ranks: one all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from mycel.comm.bundle import Bundle
from mycel.comm.pending import Pending

__all__ = ["Mean", "Sum"]


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum: a step as long as all ranks' steps together. With many ranks the learning rate has to shrink.

    Examples:
        >>> import torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> own = torch.tensor([1.0, 2.0])
        >>> Sum().start(Bundle.over(own, [own]), dist.group.WORLD).wait()
        >>> own.tolist()  # two ranks with the same would have [2.0, 4.0]
        [1.0, 2.0]
        >>> dist.destroy_process_group()
    """

    def start(self, bundle: Bundle, group: dist.ProcessGroup) -> Pending[None]:
        """See ``Combiner``. Bytes a rank: those of one all-reduce, at best ``2 (W-1)/W`` times the bundle."""
        work = dist.all_reduce(bundle.flat, group=group, async_op=True)

        def finish() -> None:
            if work is not None:
                work.wait()

        return Pending(finish)


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean: a step as long as one rank's, with less noise. With many ranks the learning rate may grow.

    Examples:
        >>> import torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> own = torch.tensor([1.0, 2.0])
        >>> Mean().start(Bundle.over(own, [own]), dist.group.WORLD).wait()
        >>> own.tolist()  # as any number of ranks with the same
        [1.0, 2.0]
        >>> dist.destroy_process_group()
    """

    def start(self, bundle: Bundle, group: dist.ProcessGroup) -> Pending[None]:
        """See ``Combiner``. Bytes a rank: those of one all-reduce, at best ``2 (W-1)/W`` times the bundle."""
        added = Sum().start(bundle, group)

        def finish() -> None:
            added.wait()
            bundle.flat.div_(dist.get_world_size(group))

        return Pending(finish)
