"""From a dense model to one with experts: each begins as a copy of the feed-forward network whose place they take."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mycel.arguments import whole_number
from mycel.errors import UsageError
from mycel.moe.activations import ACTIVATIONS
from mycel.moe.layer import MoE
from mycel.moe.parallel import ExpertParallel
from mycel.moe.routers import LinearProjection, TopKRouter

__all__ = ["upcycled"]

#: Tokens of the question that a network is asked, and how far its answer may be from ours, relatively.
_ASKED, _FAR = 16, 1e-4


@torch.no_grad()
def upcycled(
    mlp: nn.Module,
    num_experts: int,
    top_k: int = 2,
    *,
    router: str | nn.Module | None = None,
    parallel: ExpertParallel | DeviceMesh | None = None,
    **options: Any,
) -> MoE:
    """A mixture of experts that computes, to begin with, what a trained feed-forward network does.

    Every expert is a copy of the network; the router begins anew, with weights that add up to 1, so nothing is lost
    until training makes experts differ. The network is recognised by what it answers: two linear maps with an
    activation between them, or three with SwiGLU, in any order and under any names.

    Args:
        mlp: whole, on every rank.
        num_experts: of the layer.
        top_k: experts a token.
        router: as of ``MoE``; ``None``: softmax over all experts, the weights of the chosen ones renormalised. With
            another, the layer computes the same only where weights add up to 1.
        parallel: as of ``MoE``.
        options: of ``MoE``: ``balancing``, ``capacity``.

    Returns:
        In the network's type, on its device, in its mode.

    Raises:
        UsageError: the network is another one.

    References:
        Komatsuzaki et al., "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints", ICLR 2023
        (arXiv 2212.05055).

    Examples:
        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> layer, x = upcycled(mlp, num_experts=4), torch.randn(5, 8)
        >>> torch.allclose(layer(x), mlp(x), atol=1e-5)
        True
    """
    num_experts = whole_number(num_experts, "number of experts", least=1)
    top_k = whole_number(top_k, "top_k, experts a token", least=1)
    activation, maps = _understood(mlp)
    firsts, down = maps[:-1], maps[-1]
    (hidden, dim), like = firsts[0].weight.shape, firsts[0].weight
    bias = down.bias is not None
    made = TopKRouter(LinearProjection(dim, num_experts), top_k, renormalize=True) if router is None else router
    with torch.device(like.device):
        layer = MoE(
            *(dim, hidden, num_experts, top_k),
            router=made,
            activation=activation,
            bias=bias,
            parallel=parallel,
            dtype=like.dtype,
            **options,
        )
    one = {"gate_up_proj": torch.cat([m.weight for m in firsts]), "down_proj": down.weight}
    if bias:
        one |= {"gate_up_bias": torch.cat([_bias(m) for m in firsts]), "down_bias": _bias(down)}
    # Each rank takes its experts, and slices, of all of them; views cost nothing.
    layer.experts.load_state_dict({name: t.unsqueeze(0).expand(num_experts, *t.shape) for name, t in one.items()})
    return layer.train(mlp.training)


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def _understood(mlp: nn.Module) -> tuple[str, list[nn.Linear]]:
    """The activation, and the maps in our order: gate and up, or the first one; then down."""
    linear = [module for module in mlp.modules() if isinstance(module, nn.Linear)]
    if len(linear) not in (2, 3):
        raise UsageError(
            f"{type(mlp).__name__}: {len(linear)} linear maps; expected a feed-forward network of two, or of three "
            "with SwiGLU"
        )
    refused = ""
    for order in permutations(linear):
        *firsts, down = order
        (hidden, dim) = firsts[0].weight.shape
        if any(m.weight.shape != (hidden, dim) for m in firsts) or down.weight.shape != (dim, hidden):
            continue
        x = torch.randn(_ASKED, dim, generator=torch.Generator().manual_seed(0)).to(down.weight)
        try:
            answer = _asked(mlp, x)
        except Exception as error:  # whatever a foreign module may raise
            refused = f"; asked for tokens of {dim} numbers, it says: {error}"
            continue
        near = _FAR if down.weight.dtype in (torch.float32, torch.float64) else 0.03
        for name, ours in _answers(x.double(), firsts, down):
            if isinstance(answer, Tensor) and answer.shape == ours.shape and _distance(answer, ours) < near:
                return name, list(order)
    raise UsageError(
        f"{type(mlp).__name__}: no {len(linear)} linear maps with one of {', '.join(sorted(ACTIVATIONS))} between "
        f"them compute what it does{refused}"
    )


def _asked(mlp: nn.Module, x: Tensor) -> object:
    """Its answer without dropout; each module's mode stays."""
    modes = [(module, module.training) for module in mlp.modules()]
    try:
        return mlp.eval()(x)
    finally:
        for module, training in modes:
            module.training = training


def _answers(x: Tensor, firsts: list[nn.Linear], down: nn.Linear) -> Iterator[tuple[str, Tensor]]:
    """What our experts would answer, in float64, for each activation with as many maps."""

    def through(x: Tensor, linear: nn.Linear) -> Tensor:
        return x @ linear.weight.double().t() + _bias(linear).double()

    z = torch.cat([through(x, m) for m in firsts], dim=1)
    for name, (wide, activate) in ACTIVATIONS.items():
        if wide == len(firsts):
            yield name, through(activate(z), down)


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm().clamp_min(1e-30))
