"""Linear probes in one exchange: what a frozen model's features say about labels, solved instead of trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.arguments import whole_number
from mycel.comm.meter import ByteMeter
from mycel.data_parallel.closed_form.over_ranks import merge_over_ranks
from mycel.data_parallel.closed_form.parts import RidgeParts, merge_parts, ridge_parts
from mycel.data_parallel.closed_form.solve import ridge_linear
from mycel.errors import UsageError

__all__ = ["linear_probe"]


def linear_probe(
    features: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    num_classes: int,
    *,
    ridge: float = 1.0,
    group: dist.ProcessGroup | None = None,
    meter: ByteMeter | None = None,
) -> nn.Linear:
    """A classifier on frozen features, by least squares over the batches of all ranks.

    The layer's targets are +1 for an example's class and -1 for the others. There are no steps, so ranks may have
    different numbers of batches.

    Args:
        features: of inputs, shape ``[n, d]``: a module, or what calls one; runs without gradients.
        batches: of this rank: inputs and labels, ``int64`` below ``num_classes``.
        num_classes: of the labels.
        ridge: see ``solve_ridge``.
        group: the ranks, all by default.
        meter: see ``merge_over_ranks``.

    Returns:
        The same on every rank, whatever rank an example was on.

    Raises:
        UsageError: on every rank, where one has no batches, or labels or features that cannot be.

    References:
        G. Alain, Y. Bengio, "Understanding intermediate layers using linear classifier probes", 2016,
        arXiv 1610.01644.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> x, labels = torch.tensor([[-2.0], [-1.0], [1.0], [2.0]]), torch.tensor([0, 0, 1, 1])
        >>> probe = linear_probe(nn.Identity(), [(x, labels)], num_classes=2, ridge=0.1)
        >>> probe(x).argmax(1).tolist()
        [0, 0, 1, 1]
        >>> dist.destroy_process_group()
    """
    classes = whole_number(num_classes, "number of classes", least=2)
    merged = merge_over_ranks(lambda: _own(features, batches, classes), group=group, meter=meter)
    return ridge_linear(merged, ridge)


@torch.no_grad()
def _own(
    features: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor]], num_classes: int
) -> RidgeParts:
    found: RidgeParts | None = None
    for inputs, labels in batches:
        if labels.dim() != 1 or labels.is_floating_point() or (len(labels) and int(labels.min()) < 0):
            raise UsageError(f"labels of a probe are whole numbers from 0 on, [n], got {labels.dtype} {labels.shape}")
        if len(labels) and int(labels.max()) >= num_classes:
            raise UsageError(f"label {int(labels.max())} of a probe with {num_classes} classes")
        if not len(labels):
            continue
        x = features(inputs)
        targets = torch.nn.functional.one_hot(labels, num_classes).to(x) * 2 - 1
        parts = ridge_parts(x, targets)
        found = parts if found is None else merge_parts([found, parts])
    if found is None:
        raise UsageError("no examples for the probe; give this rank some, or leave it out of the group")
    return found
