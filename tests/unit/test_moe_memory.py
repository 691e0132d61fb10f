"""Experts in far memory: the same results under every policy, and near no more than each of them says."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mycel.comm import Pending
from mycel.errors import CommunicationError, UsageError
from mycel.moe import ExpertBias, GShardLoss, MoE, moe_loss
from mycel.moe.memory import (
    FETCH_POLICIES,
    EmulatedLink,
    ExpertStore,
    FetchPolicy,
    Link,
    Offload,
    PreGatedFetch,
    Ring,
    make_fetch_policy,
    pre_gate,
)
from mycel.moe.slots import RoutingResult

LAYERS, EXPERTS, TOP_K, DIM = 4, 8, 2, 16


class LateLink(Link):
    """Copies nothing until someone waits, and then everything that was asked for, in order: as late as can be."""

    def __init__(self) -> None:
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.asked: list[int] = []

    def fetch(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Pending[None]:
        self.queue += copies
        self.asked.append(len(copies))
        for _, near in copies:
            near.fill_(float("nan"))
        return Pending(self.carry)

    def carry(self) -> None:
        for far, near in self.queue:
            near.copy_(far)
        self.queue = []


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.moe = MoE(DIM, 8, EXPERTS, TOP_K, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        out: Tensor = x + self.moe(x)
        return out


def make_model(balancing: Callable[[], Any] = tuple, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(balancing=balancing(), **options) for _ in range(LAYERS)))


def count_into(active: list[int]) -> Callable[..., None]:
    """A hook that notes how many experts a router chose."""

    def hook(module: nn.Module, inputs: Any, output: RoutingResult) -> None:
        active.append(int((output.tokens_per_expert > 0).sum()))

    return hook


class Watching(FetchPolicy):
    """Passes on, and notes the store's residents after every word."""

    def __init__(self, inner: FetchPolicy) -> None:
        self.inner = inner
        self.words: list[tuple[str, int]] = []

    def begin(self, store: ExpertStore) -> None:
        self.inner.begin(store)

    def routed(self, store: ExpertStore, layer: int, experts: Sequence[int]) -> None:
        self.inner.routed(store, layer, experts)
        self.words.append(("routed", layer))

    def left(self, store: ExpertStore, layer: int) -> None:
        self.inner.left(store, layer)
        self.words.append(("left", layer))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", sorted(FETCH_POLICIES))
def test_results_are_the_same_and_buffers_as_few_as_promised(name: str, ahead: bool) -> None:
    for options in ({}, {"bias": True, "activation": "gelu"}):
        model = make_model(**options)
        if ahead:
            pre_gate(model)
        batches = [torch.randn(tokens, DIM) for tokens in (1, 1, 5, 0, 2)]
        active: list[int] = []
        routers = [m.router for m in model.modules() if isinstance(m, MoE)]
        hooks = [router.register_forward_hook(count_into(active)) for router in routers]
        with torch.inference_mode():
            wanted = [model(x) for x in batches]
            for hook in hooks:
                hook.remove()
            link = LateLink()
            with Offload(model, link, name) as offload:
                for x, y in zip(batches, wanted, strict=True):
                    assert torch.allclose(model(x), y, rtol=1e-5, atol=1e-6)
                store = offload.store
            assert all(torch.equal(model(x), y) for x, y in zip(batches, wanted, strict=True))  # closed
        tensors = 4 if options else 2
        assert sum(link.asked) == tensors * store.fetched
        assert store.fetched_bytes == store.fetched * store.expert_bytes
        passes = [active[i : i + LAYERS] for i in range(0, len(active), LAYERS)]
        pairs = max(a + b for one in passes for a, b in pairwise(one))
        later = [one[1:] for one in passes]  # those of the first layer are kept near by one policy
        bound = {
            "resident": LAYERS * EXPERTS,
            "on_demand": max(active),
            "prefetch_all": 2 * EXPERTS,
            "ring": 3 * EXPERTS,
            "pre_gated": pairs if ahead else max(active),
            "pre_gated_keep_first": EXPERTS
            + (max(a + b for one in later for a, b in pairwise(one)) if ahead else max(map(max, later))),
        }[name]
        assert store.peak == bound
        assert len(store._free) + store.resident == store.peak  # no buffer more
        if name in ("on_demand", "pre_gated"):
            assert store.fetched == sum(active) and store.resident == 0
        if name == "pre_gated_keep_first":
            assert store.fetched == EXPERTS + sum(map(sum, later)) and store.resident == EXPERTS


@pytest.mark.parametrize("slots", [2, 3])
def test_a_ring_brings_the_layers_in_their_order(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of use, ``slots`` layers further than the one that has computed, and round again."""
    brought: list[int] = []
    late: list[int] = []
    start, take = ExpertStore.start, ExpertStore.take

    def noted(store: ExpertStore, layer: int, experts: Any) -> None:
        before = store.fetched
        start(store, layer, experts)
        if store.fetched > before:
            brought.append(layer)

    def taken(store: ExpertStore, layer: int, experts: Any) -> Any:
        before = store.fetched
        found = take(store, layer, experts)
        if store.fetched > before:
            late.append(layer)
        return found

    monkeypatch.setattr(ExpertStore, "start", noted)
    monkeypatch.setattr(ExpertStore, "take", taken)
    torch.manual_seed(0)
    model = make_model()
    with torch.inference_mode(), Offload(model, LateLink(), Ring(slots=slots)):
        for _ in range(2):
            model(torch.randn(5, DIM))
    assert brought == [place % LAYERS for place in range(2 * LAYERS + slots)]
    assert late == []  # nothing was missing when a layer computed


def test_two_blocks_of_one_token_are_four_experts_of_many() -> None:
    model = make_model()
    pre_gate(model)
    with torch.inference_mode(), Offload(model, LateLink(), "pre_gated") as offload:
        for seed in range(5):
            torch.manual_seed(seed)
            model(torch.randn(1, DIM))
    assert offload.store.peak == 2 * TOP_K
    assert offload.store.peak / offload.store.num_experts <= 0.15


def test_pre_gated_blocks_are_announced_one_block_early() -> None:
    for ahead in (False, True):
        model = make_model()
        if ahead:
            pre_gate(model)
        policy = Watching(make_fetch_policy("pre_gated"))
        with torch.inference_mode(), Offload(model, LateLink(), policy):
            model(torch.randn(2, DIM))
        place = {word: number for number, word in enumerate(policy.words)}
        for layer in range(LAYERS):
            assert place["routed", layer] < place["left", layer]
            if layer:
                assert (place["routed", layer] < place["left", layer - 1]) == ahead


def test_gates_stand_one_block_ahead() -> None:
    model, plain = make_model(), make_model()
    gates = pre_gate(model).gates
    x = torch.randn(6, DIM)
    inputs: list[Tensor] = []
    hooks = [block.moe.register_forward_pre_hook(lambda m, a: inputs.append(a[0])) for block in model]
    model(x)
    for hook in hooks:
        hook.remove()
    got = [gate.routes.of[gate.place].top_k_index for gate in gates]
    for layer in range(LAYERS):
        seen = inputs[max(0, layer - 1)]  # the first layer has its own gate as well
        assert torch.equal(got[layer], plain[layer].moe.router(seen).top_k_index)
    names = sorted(name for name, _ in model.named_parameters() if "router" in name)
    assert names == sorted(
        ["0.moe.router.own.projection.weight"]
        + [f"{layer}.moe.router.ahead.projection.weight" for layer in range(LAYERS - 1)]
    )


def test_pre_gated_models_train_and_copy() -> None:
    model = make_model(lambda: [GShardLoss(), ExpertBias(EXPERTS)])
    gates = pre_gate(model).gates
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(32, DIM)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, 1)).square().mean()
        (loss + 0.01 * moe_loss(model)).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for g in gates for p in g.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    assert twin[0].moe.router.routes is twin[1].moe.router.routes is not gates[0].routes


def test_the_next_layers_bias_decides() -> None:
    model = make_model(lambda: ExpertBias(EXPERTS))
    gates = pre_gate(model).gates
    x = torch.randn(12, DIM)
    model(x)
    before = [route.top_k_index for route in gates[0].routes.of]
    assert not (before[1] == 5).any(dim=1).all()
    model[1].moe.balancing[0].bias[5] = 100.0  # type: ignore[index]
    model(x)
    after = [route.top_k_index for route in gates[0].routes.of]
    assert (after[1] == 5).any(dim=1).all()
    assert torch.equal(after[0], before[0])


def test_an_emulated_link_brings_everything_and_keeps_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("mycel.memory.tiers.link.time.perf_counter", lambda: 100.0)
    monkeypatch.setattr("mycel.memory.tiers.link.time.sleep", slept.append)
    link = EmulatedLink(bandwidth_gbps=1e-6, latency_s=0.5)  # 1000 bytes a second
    far = [torch.arange(250.0), torch.ones(125)]
    near = [torch.zeros(250), torch.zeros(125)]
    transfers = [link.fetch([(f, n)]) for f, n in zip(far, near, strict=True)]
    for transfer in transfers:
        transfer.wait()
    assert all(torch.equal(f, n) for f, n in zip(far, near, strict=True))
    assert slept == pytest.approx([1.5, 2.5])  # the second begins when the first has ended
    link.close()


def test_a_transfer_that_does_not_end_is_named() -> None:
    link = EmulatedLink(bandwidth_gbps=1e9, deadline_s=0.0)
    hold = threading.Event()

    class Stuck:
        def copy_(self, far: Tensor) -> None:
            hold.wait(60)

    transfer = link.fetch([(torch.zeros(3), Stuck())])  # type: ignore[list-item]
    with pytest.raises(CommunicationError, match="a transfer of 12 bytes"):
        transfer.wait()
    hold.set()
    link.close()


def test_what_cannot_be_is_named() -> None:
    model = make_model()
    with Offload(model, LateLink(), "on_demand"):
        with pytest.raises(UsageError, match="have no gradients"):
            model(torch.randn(2, DIM))
        with pytest.raises(UsageError, match="in far memory already"):
            Offload(model, LateLink(), "on_demand")
        with torch.inference_mode(), pytest.raises(UsageError, match="cannot be taken in parts; partition by tokens"):
            model[0].moe(torch.randn(2, DIM), degree=2, partition="experts")
    routers = [block.moe.router for block in model]
    gated = pre_gate(model)
    with pytest.raises(UsageError, match="pre-gated already"):
        pre_gate(model)
    gated.close()
    assert all(block.moe.router is router for block, router in zip(model, routers, strict=True))
    pre_gate(model)
    with pytest.raises(UsageError, match="pre-gated layer 1 has 3 tokens, the layer before routed none"):
        model[1](torch.randn(3, DIM))
    with pytest.raises(UsageError, match="needs at least 2"):
        pre_gate(make_model()[:1])
    with pytest.raises(UsageError, match="known: on_demand, pre_gated, pre_gated_keep_first, prefetch_all, res"):
        make_fetch_policy("fast")
    with pytest.raises(UsageError, match="-1 layers kept near"):
        PreGatedFetch(keep=-1)
    with pytest.raises(UsageError, match="ring of 1 slots"):
        Ring(slots=1)
    with pytest.raises(UsageError, match="experts of different sizes"):
        Offload(nn.Sequential(MoE(8, 8, 2, 1), MoE(8, 16, 2, 1)), LateLink(), "ring")
