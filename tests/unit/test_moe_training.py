"""The layer in real training loops: recomputed, in stages, made on the meta device, parametrized, clipped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from mycel.errors import UsageError
from mycel.moe import (
    AdaptiveL1,
    BiLevelRouter,
    CosineProjection,
    ExpertBias,
    ExpertParallel,
    LinearProjection,
    MoE,
    SwitchLoss,
    TopKRouter,
    Tuner,
    ZLoss,
    attach_moe_loss,
    clip_grad_norm,
    grad_norm,
    moe_loss,
)
from mycel.moe.memory import pre_gate

DIM, EXPERTS = 6, 8


def stack(num_layers: int = 3, **options: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([MoE(DIM, 8, EXPERTS, 2, **options) for _ in range(num_layers)]).double()


def tokens(seed: int, num_tokens: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, DIM, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def worst(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(some, others, strict=True))


Run = Callable[[nn.Module, Tensor], Tensor]


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(x)


def around_layers(layer: nn.Module, x: Tensor) -> Tensor:
    return x + checkpoint(layer, x, use_reentrant=False)


def around_blocks(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer gets is computed anew as well."""
    return checkpoint(lambda t: t + layer(torch.tanh(3 * t)), x, use_reentrant=False)


def whole_blocks(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(torch.tanh(3 * x))


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return x + checkpoint(layer, x, use_reentrant=True)


# -- pre-gated layers ------------------------------------------------------------------------------------------


def pre_gated(run: Run, order: str, *, frozen: bool = False) -> list[Tensor]:
    """Gradients after forward passes (letters) and backward passes (capitals) in some order."""
    model = stack(balancing=SwitchLoss(0.1))
    if frozen:
        for layer in model:
            layer.router.requires_grad_(False)
    pre_gate(model)
    under_way: dict[str, Tensor] = {}
    inputs = {name: tokens(ord(name)) for name in order.lower()}
    for step in order:
        if step.isupper():
            under_way.pop(step.lower()).backward()
        elif step == "+":
            torch.stack(list(under_way.values())).sum().backward()
        else:
            x = inputs[step]
            for layer in model:
                x = run(layer, x)
            under_way[step] = x.square().sum() * (1 + ord(step) % 7) + moe_loss(model)
    return [*gradients(model), *(x.grad for x in inputs.values() if x.grad is not None)]


@pytest.mark.parametrize("order", ["aA", "ab+", "abAcBC", "abBAcdDC"])
@pytest.mark.parametrize(("run", "like"), [(around_layers, plain), (around_blocks, whole_blocks)])
@pytest.mark.parametrize("frozen", [False, True])
def test_pre_gated_layers_are_computed_again_with_the_routes_of_their_pass(
    run: Run, like: Run, order: str, frozen: bool
) -> None:
    assert worst(pre_gated(run, order, frozen=frozen), pre_gated(like, order, frozen=frozen)) < 1e-12


def test_reentrant_checkpointing_of_pre_gated_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="use_reentrant=False"):
        pre_gated(reentrant, "aA")


def test_passes_that_are_over_are_forgotten() -> None:
    model = stack()
    gates = pre_gate(model).gates
    for step in range(5):
        x = tokens(step)
        for layer in model:
            x = around_layers(layer, x)
        x.sum().backward()
    del x
    assert [len(passes.alive) for passes in gates[0].routes.passes] == [0, 1, 1]  # the latest, which may be asked for


# -- balancing losses ------------------------------------------------------------------------------------------


def balanced(run: Run, order: str, factor: float = 1.0) -> tuple[list[float], list[Tensor], list[Tensor]]:
    model = stack(2, balancing=[SwitchLoss(0.3), ZLoss(0.2)])
    under_way: dict[str, Tensor] = {}
    values = []
    for step in order:
        if step == "+":
            torch.stack(list(under_way.values())).sum().backward()
        elif step.isupper():
            under_way.pop(step.lower()).backward()
        else:
            x = tokens(ord(step))
            for layer in model:
                x = run(layer, x)
            balance = moe_loss(model)
            values.append(float(balance.detach()))
            under_way[step] = factor * (x.square().sum() + balance) * (1 + ord(step) % 5)
    return values, gradients(model), [layer.take_counts() for layer in model]


@pytest.mark.parametrize("run", [reentrant, around_layers])
@pytest.mark.parametrize("order", ["aA", "ab+", "abAcBC"])
def test_losses_reach_routers_through_recomputed_layers(run: Run, order: str) -> None:
    for factor in (1.0, 1024.0):  # as a scaler does
        values, grads, counts = balanced(run, order, factor)
        wanted_values, wanted, wanted_counts = balanced(plain, order, factor)
        assert values == wanted_values and all(value > 0 for value in values)
        assert worst(grads, wanted) < 1e-12
        assert all(torch.equal(a, b) for a, b in zip(counts, wanted_counts, strict=True))  # every pass once


def test_losses_that_nobody_added_reach_nobody() -> None:
    """Not in this step, and not because they were added in the one before."""
    found = []
    for run in (reentrant, plain):
        model = stack(1, balancing=SwitchLoss(1.0))
        (run(model[0], tokens(1)).sum() + moe_loss(model)).backward()
        model.zero_grad()
        run(model[0], tokens(2)).sum().backward()
        found.append(gradients(model))
    assert worst(*found) < 1e-12


@pytest.mark.parametrize("run", [plain, reentrant, around_layers])
def test_stages_of_a_pipeline_have_their_losses(run: Run) -> None:
    """Two stages, three micro-batches, whose backward passes come later: the first stage has no loss to add to."""
    whole, parts = stack(2, balancing=SwitchLoss(0.5)), stack(2, balancing=SwitchLoss(0.5))
    under_way = []
    for micro in range(3):
        x = tokens(micro)
        for layer in whole:
            x = plain(layer, x)
        ((x.square().sum() + moe_loss(whole)) / 3).backward()

        sent = attach_moe_loss(run(parts[0], tokens(micro)), parts[0], factor=1 / 3)
        received = sent.detach().requires_grad_()
        loss = (run(parts[1], received).square().sum() + moe_loss(parts[1])) / 3
        under_way.append((sent, received, loss))
    for sent, received, loss in under_way:
        loss.backward()
        sent.backward(received.grad)
    assert worst(gradients(parts), gradients(whole)) < 1e-12


# -- tuners ----------------------------------------------------------------------------------------------------


def test_tuned_layers_are_computed_again_where_tokens_need_no_gradient() -> None:
    torch.manual_seed(0)
    layer = MoE(DIM, 8, EXPERTS, 2, parallel=ExpertParallel(tuner=Tuner(trials=2)))
    other = MoE(DIM, 8, EXPERTS, 2)
    other.load_state_dict(layer.state_dict())
    for step in range(5):
        x = tokens(step).detach().float()
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
        other(x).square().sum().backward()
    assert worst(gradients(layer), gradients(other)) < 1e-5


# -- parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: MoE(DIM, 8, EXPERTS, 2, bias=True, shared_hidden=4, balancing=ExpertBias(EXPERTS)),
        lambda: MoE(DIM, 8, EXPERTS, 2, router="cosine"),
        lambda: MoE(DIM, 8, EXPERTS, 2, router="relu", balancing=AdaptiveL1(EXPERTS, 2, initial=0.25)),
        lambda: MoE(DIM, 8, 4, 1, router=BiLevelRouter(LinearProjection(DIM, 2), LinearProjection(DIM, 2), 1)),
        lambda: MoE(DIM, 8, EXPERTS, 2, router=TopKRouter(CosineProjection(DIM, EXPERTS, temperature=0.1), 2)),
        lambda: MoE(DIM, 8, EXPERTS, 2, router=TopKRouter(LinearProjection(DIM, EXPERTS, bias=True), 2)),
    ],
)
def test_layers_of_the_meta_device_are_initialised_as_others(make: Callable[[], MoE]) -> None:
    """As FSDP2 documents it: the meta device, ``to_empty``, and ``reset_parameters`` of every module that has one."""
    torch.manual_seed(0)
    like = make()
    with torch.device("meta"):
        layer = make()
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(float("nan"))
    for module in layer.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
    wanted = dict(like.state_dict())
    for name, value in layer.state_dict().items():
        assert value.isfinite().all(), name
        if value.std(correction=0) == 0:  # what is not drawn
            torch.testing.assert_close(value, wanted[name])
        else:
            torch.testing.assert_close(value.std(), wanted[name].std(), rtol=0.6, atol=0)


class Delta(nn.Module):
    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(shape[0], 2, shape[2]))
        self.b = nn.Parameter(torch.randn(shape[0], shape[1], 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def test_experts_can_be_parametrized_and_called_functionally() -> None:
    torch.manual_seed(0)
    layer, x = MoE(DIM, 8, EXPERTS, 2), tokens(0).detach().float()
    state = copy.deepcopy(layer.state_dict())
    wanted = layer(x)
    called = torch.func.functional_call(layer, {name: p.detach() for name, p in layer.named_parameters()}, (x,))
    torch.testing.assert_close(called, wanted)
    doubled = {"experts.down_proj": 2 * layer.experts.down_proj.detach()}
    torch.testing.assert_close(torch.func.functional_call(layer, doubled, (x,)), 2 * wanted)

    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(layer.experts, name).shape
        parametrize.register_parametrization(layer.experts, name, Delta(shape))
    torch.testing.assert_close(layer(x), wanted)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for n, p in layer.named_parameters() if n.endswith(".a"))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(".original"):
                parameter.zero_()
    layer.experts.reset_parameters()
    assert all(p.norm() > 0 for n, p in layer.named_parameters() if n.endswith(".original"))
    for name in ("gate_up_proj", "down_proj"):
        parametrize.remove_parametrizations(layer.experts, name)
    layer.load_state_dict(state)
    torch.testing.assert_close(layer(x), wanted)


def test_clipping_of_a_model_that_is_not_divided_is_torchs() -> None:
    for limit in (0.01, 1e6):
        ours, theirs = stack(), stack()
        for model in (ours, theirs):
            model[0](tokens(0)).square().sum().backward()
        norm = clip_grad_norm(ours, limit)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), limit))
        assert worst(gradients(ours), gradients(theirs)) < 1e-12
        torch.testing.assert_close(grad_norm(ours), norm.clamp_max(limit), rtol=1e-4, atol=0)
    assert float(grad_norm(stack())) == 0.0


def test_a_bias_moves_by_the_mean_count() -> None:
    """Where half of the experts have more than the median and less than the mean, or the other way round."""
    policy = ExpertBias(num_experts=5, rate=1.0)
    policy.update(torch.tensor([0, 2, 3, 4, 91]), torch.tensor(100))
    assert policy.bias.tolist() == [1, 1, 1, 1, -1]  # mean 20, median 3
    policy.reset_parameters()
    policy.update(torch.tensor([0, 26, 25, 24, 25]), torch.tensor(100))
    assert policy.bias.tolist() == [1, -1, -1, -1, -1]  # mean 20, median 25
