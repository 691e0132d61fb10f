"""How many ranks share a sequence, as one more thing that ``mycel.memory.fit`` chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mycel.arguments import whole_number
from mycel.errors import UsageError
from mycel.planning.sequence import Layout
from mycel.sequence.models import AppliedSequence, apply
from mycel.sequence.models.batch import documents_of
from mycel.sequence.softmax import Way
from mycel.sequence.softmax.attention import WayName
from mycel.sequence.unsent import Unsent

__all__ = ["SequenceDegrees"]

#: Layers whose exchanges are known from sizes. Scans send messages between ranks by ways that they choose as they go.
_TRACED = {"attention", "torch", "convolution"}


class SequenceDegrees:
    """Divisors of the number of ranks, for ``mycel.memory.fit(..., degrees=SequenceDegrees())``.

    Ranks that share a sequence get the same batches, and those who do not others: ``fitted.sequence.replica`` says
    which. The greater the degree, the less a rank holds, and the fewer sequences a step has.

    Attributes:
        group: all ranks of the job.
        degrees: that are looked at, in rising order.

    Args:
        degrees: ranks that may share a sequence; all divisors of the number of ranks if not given.
        layout, way: as for ``mycel.sequence.apply``.

    Raises:
        UsageError: there are no processes, or a degree does not divide the number of ranks.

    Examples:
        On all ranks::

            with mycel.memory.fit(model, optimizer, batch, budget=8 << 30, degrees=SequenceDegrees()) as fitted:
                for batch in loader(fitted.sequence.replica):
                    model(**fitted.sequence.shard(batch)).loss.backward()
    """

    def __init__(
        self,
        degrees: Sequence[int] | None = None,
        *,
        layout: str | Callable[[Sequence[int], int], Layout] = "per_document_zigzag",
        way: Way | WayName = "auto",
    ) -> None:
        if not dist.is_initialized():
            raise UsageError("degrees of a sequence: there are no ranks to share it; call init_process_group first")
        self.group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        size = self.group.size()
        divisors = tuple(degree for degree in range(1, size + 1) if size % degree == 0)
        asked = divisors if degrees is None else tuple(whole_number(d, "a degree", least=1) for d in degrees)
        for degree in asked:
            if degree not in divisors:
                raise UsageError(
                    f"a degree of {degree} does not divide {size} ranks; these do: {', '.join(map(str, divisors))}"
                )
        if not asked:
            raise UsageError("degrees of a sequence: none is given")
        self.degrees: tuple[int, ...] = tuple(sorted(set(asked)))
        self._layout, self._way = layout, way
        self._meshes: dict[int, DeviceMesh] = {}

    def apply(self, model: nn.Module, degree: int) -> AppliedSequence:
        """Have the model compute on sequences that so many ranks share. All ranks call it.

        Args:
            model: the same on all ranks.
            degree: one of ``degrees``.

        Raises:
            UsageError: as ``mycel.sequence.apply``.
        """
        if degree not in self._meshes:
            device = next((p.device.type for p in model.parameters()), "cpu")
            ranks = torch.arange(self.group.size()).reshape(-1, degree)
            self._meshes[degree] = DeviceMesh(device, ranks, mesh_dim_names=("replica", "sequence"))
        handle = apply(model, self._meshes[degree], dim="sequence", layout=self._layout, way=self._way)
        handle.frame_forwards()  # blocks may be computed again
        return handle

    @contextmanager
    def traced(self, model: nn.Module, batch: Any, degree: int) -> Iterator[_Traced]:
        """See ``mycel.memory.degrees.Degrees``.

        Args:
            model: as one rank would have it for itself.
            batch: of the model: a dict, a tensor or a tuple of one.
            degree: one of ``degrees``.

        Raises:
            UsageError: arguments by place beside the tokens, or a layer that scans over the sequence.
        """
        whole = _whole(batch)
        with self.apply(model, degree) as handle:
            scans = [attached for attached in handle.attached if attached.kind not in _TRACED]
            if scans:
                raise UsageError(
                    f"{scans[0].path} ({type(scans[0].module).__name__}) scans over the sequence, and what it sends "
                    "is not known before it runs: choose a degree with mycel.sequence.apply, and fit without degrees"
                )
            lengths = documents_of(whole)
            group = self._meshes[degree].get_group("sequence")
            context = Unsent(handle.layout_of(lengths, degree), group, handle.device)
            here = handle.shard_by(context, whole)
            hook = model.register_forward_pre_hook(lambda *_: context.begin())
            try:
                yield _Traced(handle, context, here)
            finally:
                hook.remove()


class _Traced:
    """See ``mycel.memory.degrees.Shared``."""

    def __init__(self, handle: AppliedSequence, context: Unsent, here: Any) -> None:
        self._handle, self._context, self._here = handle, context, here

    def batch(self) -> Any:
        """See ``Shared``."""
        here = self._here
        made = _fake(here) if isinstance(here, Tensor) else {name: _fake(value) for name, value in here.items()}
        self._handle.prepared(made, self._context)
        return made

    @property
    def exchange_s(self) -> float:
        """See ``Shared``."""
        return self._context.seconds


def _fake(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, Tensor) else value


def _whole(batch: Any) -> Any:
    if isinstance(batch, Tensor | Mapping):
        return batch
    if isinstance(batch, Sequence) and len(batch) == 1 and isinstance(batch[0], Tensor):
        return batch[0]
    raise UsageError(
        "a batch that ranks share: give a tensor of tokens, or arguments by name; which of several by place have "
        "tokens, nobody says"
    )
