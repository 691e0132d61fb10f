"""DAEF: a deep autoencoder that is solved for, layer by layer, and the same for any division of the data over ranks.

The first layer is the directions in which the data vary most. Each further hidden layer is an extreme learning
machine's: a random layer, a ridge layer back to what went into it, whose transpose is the layer. The last is a ridge
layer to the data. Every layer takes one exchange over ranks, of second moments and not of examples.

References:
    D. Novoa-Paradela, O. Fontenla-Romero, B. Guijarro-Berdiñas, "Fast Deep Autoencoder for Federated Learning", 2022,
    arXiv 2206.05136.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mycel.data_parallel import closed_form
from mycel.data_parallel.closed_form import RidgeParts

#: What makes one of all ranks' parts; ranks may have several parts each.
Merge = Callable[[Callable[[], list[RidgeParts]]], RidgeParts]


@dataclass(frozen=True, slots=True, kw_only=True)
class DAEF:
    """A solved autoencoder.

    Attributes:
        center, scale: of the inputs, ``[d]``.
        layers: weights with a last row for the bias, ``[inputs + 1, outputs]``; all but the last are logistic.
    """

    center: Tensor
    scale: Tensor
    layers: tuple[Tensor, ...]

    def errors(self, x: Tensor) -> Tensor:
        """Mean squared difference of each example from what comes out: large for what is unlike the data."""
        z = (x - self.center) / self.scale
        h = z
        for weights in self.layers[:-1]:
            h = torch.sigmoid(_affine(h, weights))
        return (_affine(h, self.layers[-1]) - z).square().mean(1)


def _affine(h: Tensor, weights: Tensor) -> Tensor:
    return h @ weights[:-1] + weights[-1]


def fit(parts: list[Tensor], widths: list[int], merge: Merge, *, ridge: float = 1.0, seed: int = 0) -> DAEF:
    """Solve for an autoencoder.

    Args:
        parts: this rank's examples, in any number of parts, float64, ``[n, d]``.
        widths: of the hidden layers.
        merge: makes one of all parts of all ranks.
        ridge: of every ridge layer.
        seed: of the random layers, the same on all ranks.
    """
    center, scale, scaled = _moments(parts, merge)
    inside = [(part - center) / scale for part in parts]
    whole = inside
    directions = closed_form.principal_directions(scaled, widths[0])
    layers = [torch.cat([directions, directions.new_zeros(1, widths[0])])]
    for before, after in pairwise(widths):
        inside = [torch.sigmoid(_affine(part, layers[-1])) for part in inside]
        made = torch.Generator().manual_seed(seed * 1009 + len(layers))
        random = torch.randn(before + 1, after, generator=made, dtype=torch.float64)
        back = partial(_back, inside, random)
        decoder = closed_form.solve_ridge(merge(back), ridge)
        layers.append(torch.cat([decoder[:-1].T, random[-1:]]))
    inside = [torch.sigmoid(_affine(part, layers[-1])) for part in inside]
    last = merge(lambda: [closed_form.ridge_parts(h, z) for h, z in zip(inside, whole, strict=True)])
    return DAEF(center=center, scale=scale, layers=(*layers, closed_form.solve_ridge(last, ridge)))


def _back(inside: list[Tensor], random: Tensor) -> list[RidgeParts]:
    """Of the ridge layer from a random layer's outputs back to its inputs."""
    return [closed_form.ridge_parts(torch.sigmoid(_affine(h, random)), h) for h in inside]


def _moments(parts: list[Tensor], merge: Merge) -> tuple[Tensor, Tensor, RidgeParts]:
    """Mean and spread of each input over all examples, and what all examples that are centred and scaled say.

    A ridge layer's second moments with a constant have all three, so one exchange does for them. Inputs that never
    change keep their scale.
    """
    merged = merge(lambda: [closed_form.ridge_parts(part, None, form="sums") for part in parts]).as_sums()
    sums = merged.second[0] / merged.num_examples
    mean = sums[-1, :-1]
    covariance = sums[:-1, :-1] - torch.outer(mean, mean)
    variance, rounding = covariance.diagonal(), 1e-12 * sums.diagonal()[:-1]
    scale = torch.where(variance > rounding, variance, 1.0).sqrt()
    second = covariance * merged.num_examples / torch.outer(scale, scale)
    return mean, scale, replace(merged, second=second.unsqueeze(0), moment=merged.moment[:-1], bias=False)


def merged_here(parts: Callable[[], list[RidgeParts]]) -> RidgeParts:
    """For one process that has all parts."""
    return closed_form.merge_parts(parts())
