"""The blocks of a stage: a layer and what follows it without parameters, such as its activation."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["Block", "blocks_of"]


class Block:
    """Modules that run one after the other and learn from one error.

    Args:
        modules: at least one.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules

    def __call__(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


def blocks_of(stage: nn.Module) -> list[Block]:
    """Of an ``nn.Sequential``, a block begins at each child with parameters; another module is one block.

    Errors are added to what a block gives, after its activation, so that the activation's slope counts.

    Args:
        stage: a part of a model.

    Examples:
        >>> stage = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> [[type(module).__name__ for module in block.modules] for block in blocks_of(stage)]
        [['Flatten', 'Linear', 'Tanh'], ['Linear']]
    """
    if type(stage) is not nn.Sequential:
        return [Block([stage])]
    found: list[Block] = []
    begun = False  # whether the last block has parameters already
    for child in stage:
        has_parameters = any(True for _ in child.parameters())
        if not found or (has_parameters and begun):
            found.append(Block([]))
            begun = False
        found[-1].modules.append(child)
        begun = begun or has_parameters
    return found
