"""Pre-gating: the gate of a block chooses the experts of the next one."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from mycel.errors import UsageError
from mycel.moe.memory.layers import layers_of
from mycel.moe.memory.pre_gate import PreGate, Routes

__all__ = ["PreGated", "pre_gate"]


class PreGated:
    """What ``pre_gate`` did to a model.

    Attributes:
        gates: what stands in place of routers, in order.
    """

    def __init__(self, gates: list[PreGate], undo: list[Callable[[], None]]) -> None:
        self.gates, self._undo = gates, undo

    def close(self) -> None:
        """Give each layer its own gate back."""
        for undo in self._undo:
            undo()
        self._undo = []


def pre_gate(model: nn.Module) -> PreGated:
    """Move the gates of a model's layers of experts one layer ahead, in place.

    The first layer keeps its gate and gets a second one, that of the second layer; the last one has none. Weights
    stay what they were, so a model that was trained with its own gates needs some training in the new wiring, with
    the loss, the data and the balancing that it had before. In a Hugging Face model parameters stay where they are,
    and so do the entries of its state dictionary; close it before ``restore``.

    Args:
        model: with at least two ``MoE`` layers of one width, which run in the order of ``model.modules()``; or of
            Hugging Face, after ``mycel.moe.apply``.

    Returns:
        Its ``gates``, and ``close()``, which undoes it.

    Raises:
        UsageError: fewer than two layers, gates that are ahead already, or routers that are not understood.

    References:
        Hwang et al., "Pre-gated MoE", ISCA 2024 (arXiv 2308.12066).

    Examples:
        >>> import torch
        >>> from mycel.moe import MoE
        >>> model = nn.Sequential(MoE(8, 16, 4, 1), MoE(8, 16, 4, 1))
        >>> gated = pre_gate(model)
        >>> model(torch.randn(3, 8)).shape
        torch.Size([3, 8])
        >>> gated.close()
    """
    layers = layers_of(model)
    if len(layers) < 2:
        raise UsageError(f"{type(model).__name__} has {len(layers)} layers of experts; pre-gating needs at least 2")
    if any(layer.pre_gate is not None for layer in layers):
        raise UsageError(f"{type(model).__name__} is pre-gated already")
    routes, own = Routes(len(layers)), [layer.gate() for layer in layers]
    gates, undo = [], []
    for place, layer in enumerate(layers):
        following = layers[place + 1] if place + 1 < len(layers) else None
        gate = PreGate(
            place,
            routes,
            own=own[0] if place == 0 else None,
            ahead=None if following is None else own[place + 1],
            num_experts=layer.num_experts,
            bias_ahead=None if following is None else following.bias,
        )
        undo.append(layer.put(gate))
        gates.append(gate)
    return PreGated(gates, undo)
