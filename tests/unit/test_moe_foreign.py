"""Models from elsewhere: dense ones upcycled, layers of Tutel and Megatron-Core read; held to what those compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mycel.errors import UsageError
from mycel.moe import ExpertBias, MoE, SequenceLoss, moe_loss, read_megatron, read_tutel, upcycled

DIM, HIDDEN, EXPERTS = 8, 12, 4


class Gated(nn.Module):
    """As Llama's, with names and an order of its own."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w2 = nn.Linear(HIDDEN, DIM, bias=bias)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w1 = nn.Linear(DIM, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


@pytest.mark.parametrize(
    "mlp",
    [
        Gated(bias=False),
        Gated(bias=True),
        nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Dropout(0.5), nn.Linear(HIDDEN, DIM)),
        nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.ReLU(), nn.Linear(DIM, DIM, bias=False)),
        Gated(bias=False).bfloat16(),
    ],
)
def test_upcycled_layers_begin_as_the_dense_network(mlp: nn.Module) -> None:
    dtype = next(mlp.parameters()).dtype
    x = torch.randn(9, DIM).to(dtype)
    layer = upcycled(mlp, EXPERTS, top_k=2)
    assert layer.training and mlp.training and layer.experts.down_proj.dtype == dtype
    mlp.eval()
    assert torch.allclose(layer(x), mlp(x), atol=1e-5 if dtype == torch.float32 else 0.02)
    layer(x).square().sum().backward()
    apart = layer.experts.down_proj.grad
    assert apart is not None and not torch.equal(apart[0], apart[1])  # from here on they learn differently
    with torch.no_grad():
        layer.experts.down_proj[0].zero_()
    assert torch.equal(layer.experts.down_proj[1], layer.experts.down_proj[2])  # copies, and not one tensor


def test_networks_that_are_not_understood_are_named() -> None:
    with pytest.raises(UsageError, match="4 linear maps"):
        upcycled(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4))), EXPERTS)
    tanh = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM))
    with pytest.raises(UsageError, match="with one of gelu, relu, silu, swiglu between them"):
        upcycled(tanh, EXPERTS)


def tutel_layer(x: Tensor, state: dict[str, Tensor], top_k: int) -> Tensor:
    """Token by token, as Tutel's own loops over stacked experts do."""
    scores = (x @ state["gates.0.wg.weight"].t()).softmax(dim=1)
    out = torch.zeros_like(x)
    for token, (values, chosen) in enumerate(zip(*scores.topk(top_k, dim=1), strict=True)):
        for weight, e in zip(values, chosen, strict=True):
            inside = functional.relu(
                x[token] @ state["experts.batched_fc1_w"][e].t() + state["experts.batched_fc1_bias"][e]
            )
            out[token] += weight * (inside @ state["experts.batched_fc2_w"][e] + state["experts.batched_fc2_bias"][e])
    return out


def tutel_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "gates.0.wg.weight": (EXPERTS, DIM),
        "experts.batched_fc1_w": (EXPERTS, HIDDEN, DIM),
        "experts.batched_fc2_w": (EXPERTS, HIDDEN, DIM),
        "experts.batched_fc1_bias": (EXPERTS, HIDDEN),
        "experts.batched_fc2_bias": (EXPERTS, DIM),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_tutels_layers_compute_as_there() -> None:
    state, x = tutel_state(), torch.randn(7, DIM)
    layer = MoE(DIM, HIDDEN, EXPERTS, 2, activation="relu", bias=True)
    prefixed: dict[str, Any] = {f"blocks.1.{name}": value for name, value in state.items()}
    prefixed |= {"blocks.1._num_global_experts": torch.tensor(EXPERTS), "blocks.0.weight": torch.zeros(2)}
    layer.load_state_dict(read_tutel(prefixed, "blocks.1."))
    assert torch.allclose(layer(x), tutel_layer(x, state, 2), atol=1e-5)
    # Two experts on each of two ranks; and each expert on two of eight ranks, a half each.
    experts = {name for name in state if name.startswith("experts.")}
    whole = [{n: v[2 * r : 2 * r + 2] if n in experts else v for n, v in state.items()} for r in range(2)]
    halves = []
    for rank in range(2 * EXPERTS):
        one = {n: v[rank // 2].chunk(2)[rank % 2].unsqueeze(0) if n in experts else v for n, v in state.items()}
        halves.append(one)
    for ranks in (whole, halves):
        assert all(torch.equal(v, read_tutel(state)[n]) for n, v in read_tutel(ranks).items())
    with pytest.raises(UsageError, match=r"the states have 2 experts, its gate 4"):
        read_tutel(whole[:1])
    with pytest.raises(UsageError, match="no tensors of a layer of Tutel under"):
        read_tutel(prefixed, "blocks.7.")
    cosine = {**state, "gates.0.temperature": torch.ones(1)}
    with pytest.raises(UsageError, match=r"gates\.0\.temperature: a layer of Tutel has it"):
        read_tutel(cosine)


def megatron_layer(x: Tensor, gate: Tensor, first: Tensor, second: Tensor, shared: tuple[Tensor, Tensor]) -> Tensor:
    """Token by token: ``first[e] [2F, D]`` has gates and then ups."""

    def mlp(row: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        up = fc1 @ row
        return fc2 @ (functional.silu(up[: len(up) // 2]) * up[len(up) // 2 :])

    scores = (x @ gate.t()).softmax(dim=1)
    out = torch.stack([mlp(row, *shared) for row in x])
    for token, (values, chosen) in enumerate(zip(*scores.topk(2, dim=1), strict=True)):
        for weight, e in zip(values, chosen, strict=True):
            out[token] += weight * mlp(x[token], first[e], second[e])
    return out


@pytest.mark.parametrize("form", ["listed", "grouped", "long"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_megatrons_layers_compute_as_there(form: str, ranks: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    gate, first, second = drawn(EXPERTS, DIM), drawn(EXPERTS, 2 * HIDDEN, DIM), drawn(EXPERTS, DIM, HIDDEN)
    shared, x = (drawn(2 * HIDDEN, DIM), drawn(DIM, HIDDEN)), drawn(7, DIM)
    here = EXPERTS // ranks
    states = []
    for rank in range(ranks):
        state: dict[str, Any] = {"router.weight": gate, "router.expert_bias": torch.arange(4.0) * 0.0}
        state |= {"shared_experts.linear_fc1.weight": shared[0], "shared_experts.linear_fc2.weight": shared[1]}
        state["experts._extra_state"] = None
        own = range(rank * here, (rank + 1) * here)
        for place, e in enumerate(own):
            if form == "listed":
                state[f"experts.local_experts.{place}.linear_fc1.weight"] = first[e]
                state[f"experts.local_experts.{place}.linear_fc2.weight"] = second[e]
            elif form == "grouped":
                state[f"experts.linear_fc1.weight{place}"] = first[e]
                state[f"experts.linear_fc2.weight{place}"] = second[e]
        if form == "long":
            state["experts.weight1"] = first[own.start : own.stop].transpose(1, 2).reshape(DIM, -1)
            state["experts.weight2"] = second[own.start : own.stop].transpose(1, 2).reshape(-1, DIM)
        states.append({f"decoder.layers.2.mlp.{name}": value for name, value in state.items()})
    layer = MoE(DIM, HIDDEN, EXPERTS, 2, shared_hidden=HIDDEN, balancing=ExpertBias(EXPERTS))
    layer.load_state_dict(read_megatron(states, "decoder.layers.2.mlp."))
    assert torch.allclose(layer(x), megatron_layer(x, gate, first, second, shared), atol=1e-4)
    if ranks == 2 and form != "long":  # whose shapes do not say how many experts there are
        with pytest.raises(UsageError, match=r"the states have 2 experts, its router 4"):
            read_megatron(states[:1], "decoder.layers.2.mlp.")
    odd = {**states[0], "decoder.layers.2.mlp.shared_experts.gate_weight": torch.ones(1, DIM)}
    with pytest.raises(UsageError, match=r"mlp\.shared_experts\.gate_weight: a layer of Megatron-Core has it"):
        read_megatron([odd, *states[1:]], "decoder.layers.2.mlp.")


def test_sequences_are_balanced_one_by_one() -> None:
    torch.manual_seed(0)
    layer = MoE(DIM, HIDDEN, EXPERTS, 2, router="sigmoid", balancing=SequenceLoss(weight=0.5))
    x = torch.randn(3, 5, DIM)
    layer(x)
    routing = layer.router(x.view(-1, DIM))
    wanted = torch.zeros((), dtype=torch.float64)
    for sequence in range(3):
        own = slice(5 * sequence, 5 * sequence + 5)
        scores = routing.scores[own].double()
        shares = scores / scores.sum(dim=1, keepdim=True)
        for e in range(EXPERTS):
            chosen = int((routing.top_k_index[own] == e).sum())
            wanted += 0.5 / 3 * (EXPERTS / (2 * 5) * chosen) * shares[:, e].mean()
    assert torch.allclose(layer.loss.double(), wanted, atol=1e-7)
    moe_loss(layer).backward()
    assert layer.router.projection.weight.grad.abs().sum() > 0
    layer(x[:0])
    assert layer.loss == 0
