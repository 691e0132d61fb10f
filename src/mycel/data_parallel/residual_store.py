"""Residuals in eight bits: a quarter of the memory, where feedback would take back what sharding saves.

A residual is rounded up or down by chance to 8 bits with a scale for every 1,024 values, so that what the memory
itself loses has no direction and does not add up; rounded to the nearest, whatever is below half a step would be lost
for ever. Chance is seeded by what is rounded: a run that goes on from a checkpoint needs no state of it.

References:
    Xie, Lin, Toh, Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", 2024,
    arXiv 2407.04480 (compensation errors kept in 8 bits).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.int_bucket import Quantised

__all__ = ["EightBits", "Rounded"]

_CODEC = Quantised(8, stochastic=True)


@dataclass(slots=True)
class Rounded:
    """A residual as it is kept.

    Attributes:
        payload: codes and scales.
        shape: of the residual.
        factor: by which to multiply what they stand for; rescaling rounds nothing.
    """

    payload: Tensor
    shape: torch.Size
    factor: float = 1.0

    @classmethod
    def of(cls, name: str, residual: Tensor) -> Rounded:
        """Round a residual; every value must be finite."""
        context = Context(name=f"{name}/{float(residual.sum(dtype=torch.float64)).hex()}")
        return cls(_CODEC.compress(residual.contiguous(), context), residual.shape)

    def read(self) -> Tensor:
        """A new tensor of float32."""
        return _CODEC.decompress(self.payload, self.shape, Context(name="")).mul_(self.factor)


class EightBits(MutableMapping[str, Tensor]):
    """Residuals by parameter name: rounded when they are set, float32 when they are read.

    Attributes:
        kept: what is in memory.

    Examples:
        >>> memory = EightBits()
        >>> memory["w"] = torch.tensor([127.0, 0.0, -1.0])
        >>> memory["w"].tolist(), memory.kept["w"].payload.nbytes
        ([127.0, 0.0, -1.0], 7)
    """

    def __init__(self) -> None:
        self.kept: dict[str, Rounded] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.kept[name].read()

    def __setitem__(self, name: str, residual: Tensor) -> None:
        self.kept[name] = Rounded.of(name, residual)

    def __delitem__(self, name: str) -> None:
        del self.kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self.kept

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)
