"""What combiners of tasks share: which rank holds which tasks, that ranks agree on what is shared, and a thread.

A rank has one *version* of the shared gradient, that of its task, or of each of several tasks. All have as many.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mycel.comm.background import InBackground
from mycel.comm.bundle import Bundle
from mycel.comm.pending import Pending
from mycel.data_parallel.combine.tasks.quadratic import Matrix
from mycel.errors import UsageError

__all__ = ["TaskCombiner", "check_shared", "shares_of_tasks"]


class TaskCombiner(ABC):
    """A rank, or several, hold a task, or a rank several; their gradients of what all tasks share become one.

    Args:
        tasks: number of each rank's task, by rank of the group, from 0 without gaps; ranks of one task are averaged
            first. By default every rank is a task. Where ranks have several versions, a number for each of them,
            those of rank 0 first.
        shards: ranks that hold the other shards of this replica.

    Attributes:
        whole: a combination is of all gradients together, so that nothing is combined before the last is there.
        step: combinations so far.

    Raises:
        UsageError: numbers of tasks that leave some out.
    """

    whole = True

    def __init__(self, *, tasks: Sequence[int] | None = None, shards: dist.ProcessGroup | None = None) -> None:
        self.tasks = None if tasks is None else tuple(int(task) for task in tasks)
        if self.tasks is not None and sorted(set(self.tasks)) != list(range(len(set(self.tasks)))):
            raise UsageError(f"tasks by rank {self.tasks}: number them from 0 on, without gaps")
        self.shards = shards
        self.step = 0
        self._thread = InBackground()
        self._agreed: set[tuple[int, int, int]] = set()

    def start(self, bundle: Bundle, group: dist.ProcessGroup) -> Pending[None]:
        """See ``Combiner``."""
        return self.start_all([bundle], group)

    def start_all(self, bundles: Sequence[Bundle], group: dist.ProcessGroup) -> Pending[None]:
        """Begin to replace what is in several bundles, which are one vector together, by the combination.

        Args:
            bundles: this rank's contribution, overwritten by the result; at least one.
            group: the ranks; nothing else may run over it meanwhile.
        """
        return self.start_versions([bundles], group)

    def start_versions(self, versions: Sequence[Sequence[Bundle]], group: dist.ProcessGroup) -> Pending[None]:
        """Begin to replace the first version by the combination of all versions of all ranks.

        Args:
            versions: this rank's contributions, each in as many bundles of the same lengths; the others than the
                first are left with numbers that mean nothing.
            group: as of ``start_all``.
        """
        return self._thread.start(lambda: self._job(versions, group), versions[0][0])

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs, the same on all ranks: tensors and numbers."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was made."""
        self.step = int(state["step"])

    @abstractmethod
    def combine(self, versions: Sequence[Sequence[Bundle]], group: dist.ProcessGroup, shares: Matrix) -> None:
        """The work, in the background.

        Args:
            versions: as given to ``start_versions``.
            shares: of each version in each task's mean, ``[K, V]``, those of rank 0 first.
        """

    def _job(self, versions: Sequence[Sequence[Bundle]], group: dist.ProcessGroup) -> None:
        shares = shares_of_tasks(self.tasks, group.size() * len(versions))
        bundles, count = versions[0], sum(bundle.flat.numel() for bundle in versions[0])
        known = (id(group), count, len(versions))
        if known not in self._agreed:
            layers = "; ".join(f"{list(part.shape)}" for bundle in bundles for part in bundle.parts)
            of_tasks = f" of {len(versions)} tasks" if len(versions) > 1 else ""
            check_shared(f"{count} numbers{of_tasks}", layers, group, bundles[0].flat.device)
            self._agreed.add(known)
        self.combine(versions, group, shares)
        self.step += 1


def shares_of_tasks(tasks: tuple[int, ...] | None, size: int) -> Matrix:
    """The mean over each task's ranks as a matrix, ``[K, W]``.

    Raises:
        UsageError: there are not as many numbers as ranks.

    Examples:
        >>> shares_of_tasks((0, 0, 1), 3).tolist()
        [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    if tasks is None:
        return np.eye(size)
    if len(tasks) != size:
        raise UsageError(
            f"tasks of {len(tasks)} ranks were given, and the group has {size}: one number a rank, or, where ranks "
            "have several tasks, one for each of them"
        )
    members = np.array([[float(task == of_rank) for of_rank in tasks] for task in range(max(tasks) + 1)])
    shares: Matrix = members / members.sum(1, keepdims=True)
    return shares


def check_shared(amount: str, layers: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Every rank hears whether all share the same layers, before anything travels whose size depends on it.

    Args:
        amount: how much is shared, for the message.
        layers: what, in words that are the same where it is the same.

    Raises:
        UsageError: on every rank, where they do not.
    """
    if group.size() == 1:
        return
    digest = int.from_bytes(hashlib.blake2b(f"{amount} {layers}".encode(), digest_size=8).digest(), "little") >> 1
    own = torch.tensor([digest], dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(all_of_them, own, group=group)
    digests = [int(found) for found in all_of_them]
    if len(set(digests)) > 1:
        usual = max(digests, key=digests.count)
        others = [rank for rank, found in enumerate(digests) if found != usual]
        raise UsageError(
            f"tasks disagree about what they share: ranks {others} of {group.size()} hold other layers than the rest "
            f"(here, rank {group.rank()}: {amount}); leave what is a task's own out, heads=['head.*'], or build one "
            "trunk on all ranks"
        )
