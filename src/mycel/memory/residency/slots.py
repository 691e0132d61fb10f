"""Where a unit puts a parameter's numbers and gradient: a plain parameter, or this rank's shard of one of FSDP2's."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Plain", "Shard", "Slot", "local"]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor.

    Args:
        tensor: of any kind.
    """
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, Tensor) else tensor


class Slot(Protocol):
    """One parameter, as a unit has it.

    Attributes:
        name: for people.
    """

    name: str

    @property
    def parameter(self) -> nn.Parameter:
        """That optimizers and users see."""

    def numbers(self) -> Tensor:
        """What is near or far as a whole: contiguous."""

    def be(self, numbers: Tensor) -> None:
        """Optimizers, checkpoints and computation see these numbers from now on."""

    def compute(self, numbers: Tensor) -> None:
        """Computation takes these."""

    def version(self) -> int:
        """Changes when somebody has written the numbers."""

    def gradient(self) -> Tensor | None:
        """This rank's, if there is one."""

    def be_gradient(self, gradient: Tensor | None) -> None:
        """Optimizers see this gradient."""

    def shaped(self, numbers: Tensor) -> Tensor:
        """A gradient's place in numbers that are laid out as the parameter's."""


class Plain:
    """A parameter of torch.

    Args:
        name: for people.
        parameter: not sharded.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self._parameter = name, parameter

    @property
    def parameter(self) -> nn.Parameter:
        """See ``Slot``."""
        return self._parameter

    def numbers(self) -> Tensor:
        """See ``Slot``."""
        return self._parameter.data

    def be(self, numbers: Tensor) -> None:
        """See ``Slot``."""
        self._parameter.data = numbers

    compute = be

    def version(self) -> int:
        """See ``Slot``."""
        return self._parameter._version

    def gradient(self) -> Tensor | None:
        """See ``Slot``."""
        return self._parameter.grad

    def be_gradient(self, gradient: Tensor | None) -> None:
        """See ``Slot``."""
        self._parameter.grad = gradient

    def shaped(self, numbers: Tensor) -> Tensor:
        """See ``Slot``."""
        return numbers


class Shard:
    """A parameter that FSDP2 has cut: this rank's part, padded to the largest, from which it gathers.

    Args:
        name: for people.
        param: FSDP2's own record of it.
    """

    def __init__(self, name: str, param: Any) -> None:
        self.name, self._param = name, param

    @property
    def parameter(self) -> nn.Parameter:
        """See ``Slot``."""
        sharded: nn.Parameter = self._param.sharded_param
        return sharded

    def numbers(self) -> Tensor:
        """See ``Slot``."""
        flat: Tensor = self._param._sharded_param_data
        return flat

    def be(self, numbers: Tensor) -> None:
        """See ``Slot``."""
        self._param._sharded_param_data = numbers
        self._param.sharded_param._local_tensor = self.shaped(numbers)

    def compute(self, numbers: Tensor) -> None:
        """See ``Slot``."""
        self._param._sharded_param_data = numbers

    def version(self) -> int:
        """See ``Slot``."""
        return int(self.parameter._version + local(self.parameter)._version)

    def gradient(self) -> Tensor | None:
        """See ``Slot``."""
        grad = self.parameter.grad
        return None if grad is None else local(grad)

    def be_gradient(self, gradient: Tensor | None) -> None:
        """See ``Slot``."""
        made = None if gradient is None else self._param.to_sharded_dtensor(gradient)
        self.parameter.grad = made

    def shaped(self, numbers: Tensor) -> Tensor:
        """See ``Slot``."""
        dim, size = self._param.fsdp_placement.dim, self._param.sharded_size
        with torch.no_grad():
            padded = numbers.view(self._param.padded_sharded_param_size)
            return padded.narrow(dim, 0, size[dim]) if padded.dim() else padded
