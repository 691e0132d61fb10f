"""Elastic experts: sorted is the same model, a prefix is the prefix, kept or used; routers hit what is asked."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.checks.hugging_face_models import FAMILIES, make
from torch import Tensor, nn

import mycel.moe
from mycel.errors import UsageError
from mycel.moe import MoE
from mycel.moe.elastic import (
    LatencyTable,
    WidthRouter,
    elastic_experts,
    train_width_router,
    width_for_load,
    width_for_memory,
)
from mycel.moe.memory import EmulatedLink, Offload

DIM, HIDDEN, EXPERTS, TOKENS = 6, 16, 3, 40


def layer(activation: str = "swiglu", *, bias: bool = False, seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    made = MoE(DIM, HIDDEN, EXPERTS, 2, activation=activation, bias=bias).double()
    for parameter in made.experts.parameters():  # biases, too
        nn.init.normal_(parameter, std=0.4)
    return made


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(made: MoE, x: Tensor, width: int, means: Tensor | None) -> Tensor:
    """The layer with a loop over tokens and slots, and only the first neurons of each expert."""
    routing = made.router(x)
    y = torch.zeros_like(x)
    stacks = made.experts
    for t in range(len(x)):
        for expert, weight in zip(routing.top_k_index[t].tolist(), routing.top_k_weights[t], strict=True):
            rows = stacks.gate_up_proj[expert].split(HIDDEN)
            biases = stacks.gate_up_bias[expert].split(HIDDEN) if stacks.gate_up_bias is not None else (0.0, 0.0)
            z = [row @ x[t] + bias for row, bias in zip(rows, biases, strict=False)]
            inside = nn.functional.silu(z[0]) * z[1] if len(z) == 2 else z[0].relu()
            if means is not None:
                inside = torch.cat([inside[:width], means[expert][width:]])
            else:
                inside = inside * (torch.arange(HIDDEN) < width)
            out = stacks.down_proj[expert] @ inside
            y[t] += weight * (out if stacks.down_bias is None else out + stacks.down_bias[expert])
    return y


def inside_means(made: MoE, x: Tensor) -> Tensor:
    """Means of what neurons give, from the definition."""
    routing = made.router(x)
    found = torch.zeros(EXPERTS, HIDDEN, dtype=torch.float64)
    for expert in range(EXPERTS):
        rows = x[(routing.top_k_index == expert).any(1)]
        z = rows @ made.experts.gate_up_proj[expert].T
        if made.experts.gate_up_bias is not None:
            z = z + made.experts.gate_up_bias[expert]
        parts = z.split(HIDDEN, dim=1)
        inside = nn.functional.silu(parts[0]) * parts[1] if len(parts) == 2 else parts[0].relu()
        found[expert] = inside.mean(0)
    return found


@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("relu", True), ("swiglu", True)])
@torch.no_grad()
def test_sorted_is_the_same_model_and_narrow_is_its_prefix(activation: str, bias: bool) -> None:
    made, x = layer(activation, bias=bias), tokens()
    before = made(x)
    names = {name: tuple(p.shape) for name, p in made.named_parameters()}
    elastic = elastic_experts(made)
    torch.testing.assert_close(made(x), before, atol=0, rtol=0)
    with elastic.observe():
        made(x)
    elastic.sort()
    torch.testing.assert_close(made(x), before, atol=1e-13, rtol=1e-12)
    means = inside_means(made, x)
    for width in (1, 5, HIDDEN):
        elastic.use(width)
        torch.testing.assert_close(made(x), by_hand(made, x, width, means), atol=1e-12, rtol=1e-10)
    elastic.forget_means()
    elastic.use(5)
    torch.testing.assert_close(made(x), by_hand(made, x, 5, None), atol=1e-12, rtol=1e-10)
    elastic.close()
    torch.testing.assert_close(made(x), before, atol=1e-13, rtol=1e-12)
    assert {name: tuple(p.shape) for name, p in made.named_parameters()} == names


@torch.no_grad()
def test_importance_is_what_is_lost() -> None:
    """Spread puts a large constant neuron last, and the fold makes cutting it off free; magnitude keeps it."""
    made, x = layer("relu", bias=True), tokens()
    made.experts.gate_up_proj[:, 3] = 0.0
    made.experts.gate_up_bias[:, 3] = 50.0  # type: ignore[index]
    before = made(x)
    elastic = elastic_experts(made)
    with elastic.observe():
        made(x)
    elastic.sort()
    assert bool((made.experts.gate_up_bias[:, -1] == 50.0).all())  # type: ignore[index]
    elastic.use(HIDDEN - 1)
    torch.testing.assert_close(made(x), before)
    elastic.use(None)
    with elastic.observe():
        made(x)
    elastic.sort("magnitude")
    assert bool((made.experts.gate_up_bias[:, 0] == 50.0).all())  # type: ignore[index]
    elastic.close()


def test_gradients_reach_the_prefix_alone() -> None:
    made, x = layer(), tokens()
    elastic = elastic_experts(made)
    elastic.use(4)
    made(x).square().sum().backward()
    gradient = made.experts.gate_up_proj.grad
    down = made.experts.down_proj.grad
    assert gradient is not None and down is not None
    gate, up = gradient.split(HIDDEN, dim=1)
    for part in (gate, up, down.transpose(1, 2)):
        assert bool((part[:, 4:] == 0).all()) and bool((part[:, :4] != 0).any())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_hugging_face_models_are_elastic(family: str) -> None:
    """Full width equals, used equals kept, kept experts fit into far memory with fewer bytes, and all comes back."""
    model = make(family).eval()
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    before = model(ids).logits
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    applied = mycel.moe.apply(model)
    elastic = elastic_experts(model)
    with elastic.observe():
        model(ids)
    elastic.sort()
    torch.testing.assert_close(model(ids).logits, before, atol=2e-5, rtol=1e-4)
    width = elastic.num_neurons[0] // 4
    elastic.use(width)
    used = model(ids).logits
    assert float((used - before).abs().max()) > 1e-4
    whole_bytes, narrow_bytes = elastic.expert_bytes()[0], elastic.expert_bytes(width)[0]
    elastic.keep(width)
    torch.testing.assert_close(model(ids).logits, used, atol=2e-5, rtol=1e-4)
    with torch.inference_mode():
        link = EmulatedLink(bandwidth_gbps=50.0)
        with Offload(model, link, "on_demand") as offload:
            torch.testing.assert_close(model(ids).logits, used, atol=2e-5, rtol=1e-4)
            assert offload.store.expert_bytes == narrow_bytes < whole_bytes / 3
        link.close()
    elastic.close()
    torch.testing.assert_close(model(ids).logits, before, atol=2e-5, rtol=1e-4)
    applied.close()
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in state.items()}


@torch.no_grad()
def test_own_experts_kept_are_those_used() -> None:
    for bias in (False, True):
        made, x = layer("swiglu", bias=bias), tokens()
        elastic = elastic_experts(made)
        with elastic.observe():
            made(x)
        elastic.sort()
        whole = copy.deepcopy(made.state_dict())
        elastic.use(5)
        used = made(x)
        elastic.keep(5)
        torch.testing.assert_close(made(x), used)
        assert made.experts.down_proj.shape == (EXPERTS, DIM, 5)
        elastic.close()
        for name, tensor in made.state_dict().items():
            torch.testing.assert_close(tensor, whole[name], atol=0, rtol=0)
        assert set(made.state_dict()) == set(whole)


def test_random_widths_are_alike_everywhere() -> None:
    elastic = elastic_experts(nn.Sequential(layer(), layer()))
    drawn = [elastic.random_widths([2, 4, 16], step, seed=7) for step in range(30)]
    assert drawn == [elastic.random_widths([2, 4, 16], step, seed=7) for step in range(30)]
    assert {width for pair in drawn for width in pair} == {2, 4, 16} and len({tuple(pair) for pair in drawn}) > 5


# -- who chooses ------------------------------------------------------------------------------------------------

WIDTHS = (1, 2, 4, 8, 16)
TABLE = LatencyTable(
    widths=(WIDTHS,) * 4,
    seconds=tuple(tuple(1e-3 + 1e-4 * w * (1 + 0.1 * i) for w in WIDTHS) for i in range(4)),
    source="modelled",
)


def made_up_loss(widths: Any) -> float:
    """Later layers matter more."""
    return float(sum((i + 1) / width for i, width in enumerate(widths)))


def test_the_router_hits_the_latency_and_spends_it_well() -> None:
    torch.manual_seed(0)
    router = WidthRouter(TABLE)
    away = train_width_router(router, made_up_loss, steps=250, seed=3)
    assert sum(away[-50:]) < sum(away[:50])  # the surrogate has learnt something
    least, greatest = TABLE.range
    better = 0
    for share in (0.2, 0.35, 0.5, 0.65, 0.8):
        target = least + share * (greatest - least)
        widths = router.widths(target)
        assert abs(TABLE.latency(widths) - target) <= 0.05 * target
        # Beside it: any choice that takes as long, on average.
        made = torch.Generator().manual_seed(1)
        others: list[float] = []
        while len(others) < 20:
            some = [WIDTHS[int(torch.randint(5, (), generator=made))] for _ in range(4)]
            if abs(TABLE.latency(some) - target) <= 0.05 * target:
                others.append(made_up_loss(some))
        better += made_up_loss(widths) <= sum(others) / len(others)
    assert better >= 4


def test_tables_are_kept(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json") == TABLE
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="no table of latencies that can be read"):
        LatencyTable.load(tmp_path / "other.json")


def test_budgets() -> None:
    elastic = elastic_experts(nn.Sequential(layer(), layer()))
    each = elastic.expert_bytes(8)[0]
    assert each == 3 * DIM * 8 * 8
    assert width_for_memory(elastic, [4, 8, 16], 2 * 5 * each, num_experts=5) == 8
    with pytest.raises(UsageError, match="5 experts of each of 2 layers take at least 5760 bytes, and there are 100"):
        width_for_memory(elastic, [4, 8, 16], 100, num_experts=5)
    assert width_for_load([4, 8], 10, width_rows_a_second=80, deadline_s=1.0) == 8
    assert width_for_load([4, 8], 11, width_rows_a_second=80, deadline_s=1.0) == 4


# -- what makes no sense ------------------------------------------------------------------------------------------


def use_in_far_memory() -> None:
    model = nn.Sequential(layer())
    elastic = elastic_experts(model)
    link = EmulatedLink(bandwidth_gbps=50.0)
    with Offload(model, link, "on_demand"):
        try:
            elastic.use(4)
        finally:
            link.close()


def used_after_keep() -> None:
    elastic = elastic_experts(layer())
    elastic.keep(4)
    elastic.use(8)


def observed_narrow() -> None:
    elastic = elastic_experts(layer())
    elastic.use(4)
    with elastic.observe():
        pass


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: elastic_experts(nn.Linear(2, 2)), "Linear: no MoE layers in it"),
        (lambda: elastic_experts(layer()).use(17), "width of experts, in neurons: 17 is not in 1 to 16"),
        (lambda: elastic_experts(layer()).use(0), "width of experts, in neurons: 0 is not in 1 to 16"),
        (lambda: elastic_experts(layer()).use([4, 4]), "2 widths for 1 layers of experts"),
        (lambda: elastic_experts(layer()).sort(), "run the model inside observe.. first"),
        (lambda: [elastic_experts(made) for made in [layer()] * 2], "experts: these experts are elastic already"),
        (use_in_far_memory, "experts: in far memory; keep.. a prefix first"),
        (used_after_keep, "cut to a prefix by keep"),
        (observed_narrow, "use.. full width first"),
        (
            lambda: TABLE.choose([[1.0] * 5] * 4, target_s=1.0),
            "no widths take 1 s within 5%; all layers together take",
        ),
        (lambda: TABLE.latency([1, 2, 3, 4]), r"layer 2 has no width 3; the table has \(1, 2, 4, 8, 16\)"),
        (lambda: LatencyTable(widths=((2, 1),), seconds=((1.0, 1.0),), source="measured"), "layer 0: widths"),
        (lambda: width_for_load([], 1, width_rows_a_second=1, deadline_s=1), "at least one width"),
    ],
)
def test_what_makes_no_sense_is_said(call: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
