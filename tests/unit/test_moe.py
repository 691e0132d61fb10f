"""The MoE layer's parts, each against its formula; the layer on one rank against the token-by-token reference."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mycel.comm.sharing import SharedPass, begin_shared, end_shared
from mycel.errors import UsageError
from mycel.moe import (
    AdaptiveL1,
    BiLevelLoss,
    BiLevelRouter,
    CapacityPolicy,
    ExpertBias,
    ExpertParallel,
    Experts,
    GShardLoss,
    LinearProjection,
    LoadImportanceLoss,
    MoE,
    SwitchLoss,
    TopKRouter,
    ZLoss,
    make_dispatcher,
    moe_loss,
    update_balancing,
)
from mycel.moe.kernels import grouped_gemm
from mycel.moe.kernels.grouped_gemm import grouped_linear
from mycel.moe.routers import make_router
from mycel.moe.slots import RoutingResult, narrow, routing_from_slots
from mycel.wire import make_codec

CHECKS = Path(__file__).resolve().parents[1] / "distributed" / "checks" / "moe.py"
spec = importlib.util.spec_from_file_location("moe_checks", CHECKS)
assert spec is not None and spec.loader is not None
checks: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checks)

TOKENS = (13,)


def local_errors(case: dict[str, Any], layer: MoE, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    ys, x_grads, gradients = checks.expected(case, checks.make_layer(case), TOKENS, dtype)
    (x,), (factor,) = checks.batch(TOKENS)
    x = x.to(dtype).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype
    (y * factor.to(dtype)).sum().backward()
    out = {"output": checks.error(y, ys[0]), "tokens": checks.error(x.grad, x_grads[0])}
    return out | checks.parameter_errors(layer, {n: p.grad for n, p in layer.named_parameters()}, gradients)


cases = [checks.make_case(r, f, d) for r, (f, d) in itertools.product(checks.ROUTERS, checks.CAPACITIES)]


@pytest.mark.parametrize("case", cases, ids=lambda c: f"{c['router']}-{c['factor']}-{c['drop']}")
def test_one_rank_equals_the_reference(case: dict[str, Any]) -> None:
    errors = local_errors(case, checks.make_layer(case))
    assert max(errors.values()) < 1e-6, errors


def test_float64_is_exact_to_rounding() -> None:
    for case in cases[::4]:
        errors = local_errors(case, checks.make_layer(case).double(), torch.float64)
        assert max(errors.values()) < 1e-13, (case, errors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_as_its_dtype_allows(dtype: torch.dtype) -> None:
    case = checks.make_case("top_k", 0.0, "first")
    # The same parameters, rounded, in float64: what is left is the arithmetic.
    layer = checks.make_layer(case).to(dtype)
    whole = checks.make_layer(case).to(dtype).float()
    (x,), (factor,) = checks.batch(TOKENS)
    checks._CACHE.clear()
    ys, _, gradients = checks.expected(case, whole, TOKENS, dtype)
    checks._CACHE.clear()
    y = layer(x.to(dtype))
    (y.float() * factor).sum().backward()
    limit = 4 * torch.finfo(dtype).eps
    assert checks.error(y, ys[0]) < limit
    for name, parameter in layer.named_parameters():
        assert checks.error(parameter.grad, gradients[name]) < limit, name


def test_autocast_computes_experts_in_bfloat16_and_routes_in_float32() -> None:
    case = checks.make_case("top_k", 0.0, "first")
    layer = checks.make_layer(case)
    (x,), _ = checks.batch(TOKENS)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer(x)
        routing = layer.router(x)
    assert rounded.dtype == torch.float32 and routing.router_logits.dtype == torch.float32
    assert 1e-5 < checks.error(rounded, exact.detach().double()) < 4 * torch.finfo(torch.bfloat16).eps
    rounded.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, tracing
@pytest.mark.parametrize(("router", "capacity"), [("top_k", 0.0), ("top_k", 0.6), ("relu", 0.0)])
def test_compiles_whole(router: str, capacity: float) -> None:
    case = checks.make_case(router, capacity, "first")
    eager, compiled = checks.make_layer(case), checks.make_layer(case)
    begin_shared(SharedPass(group=None, averaged=None, num_tokens=1))
    end_shared()  # a model whose sequences are divided has run in this process before
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    (x,), _ = checks.batch(TOKENS)
    a, b = eager(x), run(x)
    a.square().sum().backward()
    b.square().sum().backward()
    assert checks.error(b, a.detach().double()) < 1e-6
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert checks.error(q.grad, p.grad.double()) < 1e-6


def test_checkpointing_recomputes_the_same() -> None:
    layer = checks.make_layer(checks.make_case("relu", 0.6, "priority"))
    (x,), _ = checks.batch(TOKENS)
    y = layer(x)
    y.square().sum().backward()
    wanted = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(layer.parameters(), wanted, strict=True))


def test_results_are_deterministic_and_gradients_contiguous_for_expanded_ones() -> None:
    layer = checks.make_layer(checks.make_case("top_k", 0.0, "first"))
    (x,), _ = checks.batch(TOKENS)
    layer(x).sum().backward()  # an upstream gradient of stride 0
    first = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x).sum().backward()
    assert all(torch.equal(p.grad, f) for p, f in zip(layer.parameters(), first, strict=True))


# -- grouped products over ragged loads -----------------------------------------------------------------------------


@st.composite
def ragged(draw: st.DrawFn) -> tuple[list[int], int]:
    """Rows of each group, with empty groups and hot ones, and rows after the last group."""
    counts = draw(st.lists(st.one_of(st.just(0), st.integers(0, 3), st.integers(20, 40)), min_size=1, max_size=6))
    return counts, draw(st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(ragged(), st.sampled_from([torch.float32, torch.float64]), st.sampled_from([(5, 7), (8, 12)]))
def test_grouped_products_of_ragged_loads(
    load: tuple[list[int], int], dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    """Widths that torch's kernel takes and that it does not."""
    (counts, after), (inner, outer) = load, widths
    rows = sum(counts) + after
    torch.manual_seed(rows)
    x = torch.randn(rows, inner, dtype=dtype, requires_grad=True)
    w = torch.randn(len(counts), outer, inner, dtype=dtype, requires_grad=True)
    y = grouped_linear(x, w, torch.tensor(counts))
    up = torch.randn(rows, outer, dtype=dtype)
    got = torch.autograd.grad(y, (x, w), up)
    wide_x, wide_w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    groups = [e for e, n in enumerate(counts) for _ in range(n)]
    parts = [wide_w[e] @ wide_x[i] for i, e in enumerate(groups)]
    wanted_y = (
        torch.stack([*parts, *[torch.zeros(outer, dtype=torch.float64)] * after]) if rows else torch.zeros(0, outer)
    )
    assert torch.equal(y[sum(counts) :], torch.zeros(after, outer, dtype=dtype))
    loss = (wanted_y * up.double()).sum() + 0 * wide_x.sum() + 0 * wide_w.sum()
    wanted = torch.autograd.grad(loss, (wide_x, wide_w))
    tolerance = 2e-6 if dtype == torch.float32 else 1e-14
    for a, b in zip((y, *got), (wanted_y, *wanted), strict=True):
        assert checks.error(a, b.double().detach()) <= tolerance


def test_the_kernel_in_the_open_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on GPUs, here on a CPU, with a kernel that leaves NaN where it writes nothing."""
    kernel = grouped_gemm.functional.grouped_mm

    def careless(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        class Poisoned(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return torch.where(torch.arange(len(y)).unsqueeze(1) < offs[-1], y, math.nan)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                assert grads[0].is_contiguous()
                return torch.nan_to_num(grads[0])

        class PoisonedGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return torch.where(torch.arange(len(grads[0])).unsqueeze(1) < offs[-1], grads[0], math.nan)

        return Poisoned.apply(kernel(PoisonedGradient.apply(a), b, offs=offs))

    torch.manual_seed(0)
    x = torch.randn(9, 8, requires_grad=True)
    w = torch.randn(3, 12, 8, requires_grad=True)
    counts = torch.tensor([4, 0, 3])
    wanted = grouped_linear(x, w, counts)
    gradients = torch.autograd.grad(wanted.sum(), (x, w))
    monkeypatch.setattr(grouped_gemm.functional, "grouped_mm", careless)
    got = grouped_gemm._by_grouped_mm(x, w, counts)
    for a, b in zip((got, *torch.autograd.grad(got.sum(), (x, w))), (wanted, *gradients), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3, unique=True), max_size=12), st.booleans())
@example([[4, 5, 6], [6, 5, 4]], False)
def test_dispatch_and_combine_of_any_slots(index: list[list[int]], full: bool) -> None:
    """Index 4 is an empty slot; experts with a factor of their own show in the result which rows they had."""
    index = [[min(e, 4) for e in row] for row in index]
    if full:
        index = [row for row in index if 4 not in row]
    slots = torch.tensor(index, dtype=torch.int64).view(-1, 3)
    torch.manual_seed(len(index))
    x = torch.randn(len(index), 6, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(len(index), 3, dtype=torch.float64).masked_fill(slots == 4, 0.0).requires_grad_()
    scores = torch.zeros(len(index), 4)
    routing = routing_from_slots(slots, weights, scores, scores, 4, full=full)
    dispatcher = make_dispatcher("local", 4, None)
    arrived = dispatcher.dispatch(x, routing)
    counts = arrived.tokens_per_expert.tolist()
    assert counts == [sum(row.count(e) for row in index) for e in range(4)]
    expert_of_row = [e for e, n in enumerate(counts) for _ in range(n)]
    factor = torch.tensor([1.0 + e for e in expert_of_row], dtype=torch.float64).unsqueeze(1)
    y = dispatcher.combine(arrived.rows[: len(expert_of_row)] * factor, arrived)
    wanted = sum(
        (weights[:, k : k + 1] * (1.0 + slots[:, k : k + 1]) * x * (slots[:, k : k + 1] < 4) for k in range(3)),
        start=torch.zeros_like(x),
    )
    assert torch.allclose(y, wanted, rtol=1e-12)
    if len(index):
        got = torch.autograd.grad(y.square().sum(), (x, weights))
        used = (slots < 4).double()
        for a, b in zip(got, torch.autograd.grad(wanted.square().sum(), (x, weights)), strict=True):
            b = b * used if b.shape == used.shape else b
            assert torch.allclose(a, b, rtol=1e-10)


# -- balancing ------------------------------------------------------------------------------------------------------


def some_routing(num_tokens: int = 11) -> tuple[RoutingResult, Tensor]:
    torch.manual_seed(1)
    router = TopKRouter(LinearProjection(6, 4), 2)
    x = torch.randn(num_tokens, 6)
    routing = router(x)
    return routing, routing.router_logits.detach().double()


def test_gshard_and_switch_losses() -> None:
    routing, logits = some_routing()
    p = logits.softmax(1)
    first = [row[0] for row in routing.top_k_index.tolist()]
    every = [e for row in routing.top_k_index.tolist() for e in row]
    gshard = 4 * sum(float(p[:, e].mean()) * first.count(e) / 11 for e in range(4))
    switch = 4 * sum(float(p[:, e].mean()) * every.count(e) / 22 for e in range(4))
    assert GShardLoss(0.5).loss(routing).item() == pytest.approx(0.5 * gshard, rel=1e-6)
    assert SwitchLoss(0.5).loss(routing).item() == pytest.approx(0.5 * switch, rel=1e-6)


def test_z_loss() -> None:
    routing, logits = some_routing()
    wanted = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 11
    assert ZLoss(2.0).loss(routing).item() == pytest.approx(2 * wanted, rel=1e-6)


def test_load_importance_loss() -> None:
    routing, logits = some_routing()
    importance = logits.softmax(1).sum(0).tolist()
    load = [0.0] * 4
    normal = torch.distributions.Normal(0.0, 0.8 / 4)
    for row in logits:
        threshold = sorted(row.tolist())[-2]
        for e in range(4):
            load[e] += float(normal.cdf(row[e] - threshold))

    def cv2(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return sum((v - mean) ** 2 for v in values) / len(values) / mean**2

    got = LoadImportanceLoss(1.0, noise=0.8).loss(routing).item()
    assert got == pytest.approx((cv2(importance) + cv2(load)) / 2, rel=1e-5)


def test_bi_level_loss() -> None:
    torch.manual_seed(2)
    router = BiLevelRouter(LinearProjection(6, 2), LinearProjection(6, 3), 1)
    x = torch.randn(9, 6)
    routing = router(x)
    p, q = (level(x).softmax(1).mean(0).detach() for level in (router.node, router.local))
    chosen = routing.top_k_index[:, 0].tolist()
    nodes = sum(float(p[i]) * sum(c // 3 == i for c in chosen) / 9 for i in range(2))
    locals_ = sum(float(q[j]) * sum(c % 3 == j for c in chosen) / 9 for j in range(3))
    loss = BiLevelLoss(2, node_weight=0.3, local_weight=0.7).loss(routing)
    assert loss.item() == pytest.approx(0.3 * 2 * nodes + 0.7 * 3 * locals_, rel=1e-5)


@pytest.mark.parametrize(
    "policy",
    [GShardLoss(), SwitchLoss(), ZLoss(), LoadImportanceLoss(), AdaptiveL1(4, 2), BiLevelLoss(2), ExpertBias(4)],
    ids=lambda p: type(p).__name__,
)
def test_losses_of_no_tokens_are_zero(policy: Any) -> None:
    routing, _ = some_routing(0)
    assert policy.loss(routing).item() == 0.0


@pytest.mark.parametrize("policy", [GShardLoss(1.0), SwitchLoss(1.0), LoadImportanceLoss(1.0)])
def test_descending_a_balancing_loss_balances(policy: Any) -> None:
    torch.manual_seed(0)
    layer = MoE(6, 4, 4, 1, balancing=policy)
    with torch.no_grad():
        layer.router.projection.weight[0] += 0.5  # type: ignore[index]
    x = torch.randn(256, 6) + 1.0
    optimizer = torch.optim.Adam(layer.router.parameters(), lr=0.05)
    before = layer.router(x).tokens_per_expert.max()
    for _ in range(60):
        optimizer.zero_grad()
        layer(x)
        moe_loss(layer).backward()
        optimizer.step()
    assert layer.router(x).tokens_per_expert.max() < 0.75 * before


def test_expert_bias_evens_the_load_without_a_loss() -> None:
    torch.manual_seed(0)
    policy = ExpertBias(4, rate=0.02)
    layer = MoE(6, 4, 4, 1, balancing=policy)
    with torch.no_grad():
        layer.router.projection.weight[0] += 0.5  # type: ignore[index]
    x = torch.randn(400, 6) + 1.0
    before = layer.router(x).tokens_per_expert.max()
    weights = layer.router(x).scores
    for _ in range(60):
        layer(x)
        update_balancing(layer)
    after = layer.router(x, bias=policy.selection_bias)
    assert after.tokens_per_expert.max() < 0.6 * before
    assert torch.equal(after.top_k_weights, weights.gather(1, after.top_k_index))
    assert moe_loss(layer).item() == 0.0


def test_adaptive_l1_finds_the_wanted_number_of_experts() -> None:
    torch.manual_seed(0)
    layer = MoE(8, 4, 8, 6, router="relu", balancing=AdaptiveL1(8, 2, initial=1e-4))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    x = torch.randn(128, 8) + 1.0  # what has no mean has positive logits half of the time, whatever the weights
    active = []
    for _ in range(300):
        optimizer.zero_grad()
        ((layer(x) - x).square().mean() + layer.loss).backward()
        optimizer.step()
        active.append(float(layer.router(x).tokens_per_expert.sum()) / 128)
        update_balancing(layer)
    assert active[0] > 3.0
    assert 1.5 < sum(active[-100:]) / 100 < 2.5


def test_counts_are_of_training_steps_since_the_last_update() -> None:
    layer = MoE(6, 4, 4, 2, balancing=ExpertBias(4))
    layer(torch.randn(5, 6))
    layer(torch.randn(3, 6))
    layer.eval()(torch.randn(7, 6))
    counts = layer.take_counts()
    assert counts[-1] == 8 and counts[:-1].sum() == 16
    assert layer.take_counts().sum() == 0


# -- capacity, slots, settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "limit"), [(0, 64, 2, None), (1.0, 64, 2, 16), (1.25, 65, 1, 11), (-2.0, 8, 2, 4)]
)
def test_capacity_follows_the_sign_convention(factor: float, tokens: int, top_k: int, limit: int | None) -> None:
    policy = CapacityPolicy(factor=factor)
    assert policy.limit(num_tokens=tokens, top_k=top_k, num_experts=8) == limit


def test_a_full_expert_keeps_first_choices_or_best_scores() -> None:
    # Four tokens, one expert too popular: as second choice of token 0, as first one of the others.
    index = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]])
    scores = torch.tensor([[0.1, 0.2], [0.5, 0.1], [0.9, 0.1], [0.7, 0.1]])
    routing = routing_from_slots(index, torch.ones(4, 2), scores, scores, 2, full=True)
    kept = {
        drop: CapacityPolicy(factor=0.5, drop=drop).apply(routing, top_k=2).top_k_index.tolist()
        for drop in ("first", "priority")
    }
    assert kept["first"] == [[1, 2], [0, 1], [0, 2], [2, 2]]
    assert kept["priority"] == [[1, 2], [2, 2], [0, 1], [0, 2]]


def test_narrow_keeps_what_is_used() -> None:
    index = torch.tensor([[4, 2, 4, 0], [4, 4, 4, 4], [4, 1, 4, 4]])
    weights = torch.arange(12.0).view(3, 4).masked_fill(index == 4, 0.0)
    logits = torch.zeros(3, 4)
    got, used = narrow(routing_from_slots(index, weights, logits, logits, 4, full=False))
    assert used == 3
    assert got.top_k_index.tolist() == [[0, 2], [4, 4], [1, 4]]
    assert got.top_k_weights.tolist() == [[3.0, 1.0], [0.0, 0.0], [9.0, 0.0]]


def test_top_k_and_capacity_change_at_every_call() -> None:
    layer = MoE(6, 4, 4, 2)
    x = torch.randn(16, 6)
    assert torch.equal(layer(x), layer(x, top_k=2))
    assert not torch.allclose(layer(x), layer(x, top_k=3))
    assert not torch.allclose(layer(x), layer(x, capacity_factor=0.5))
    assert torch.equal(layer(x), layer(x, capacity_factor=4.0))


def test_a_layer_that_has_run_can_be_copied() -> None:
    layer = MoE(6, 4, 4, 2, balancing=GShardLoss())
    x = torch.randn(16, 6)
    y = layer(x)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.loss, layer.loss) and copied.loss.grad_fn is None
    assert torch.equal(copied(x), y)
    layer.loss.backward()
    assert layer.router.projection.weight.grad.any()


def test_no_tokens_give_zero_gradients() -> None:
    layer = MoE(6, 4, 4, 2, bias=True, shared_hidden=3)
    layer(torch.zeros(0, 6)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_parameters_do_not_depend_on_the_division() -> None:
    torch.manual_seed(5)
    whole = Experts(4, 6, 5)
    for owned in (range(2), range(2, 4), range(4, 5), range(5, 5)):
        torch.manual_seed(5)
        part = Experts(4, 6, 5, owned=owned)
        assert torch.equal(part.down_proj, whole.down_proj[owned.start : owned.stop])
        part.load_state_dict({name: tensor * 2 for name, tensor in whole.state_dict().items()})
        assert torch.equal(part.gate_up_proj, 2 * whole.gate_up_proj[owned.start : owned.stop])


def test_the_public_form_stays_small_and_is_made_where_torch_says() -> None:
    assert len(inspect.signature(MoE).parameters) <= 12
    with torch.device("meta"):
        layer = MoE(6, 4, 4, 2, shared_hidden=3, balancing=ExpertBias(4), dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in layer.parameters())
    assert all(b.is_meta and b.dtype == torch.float32 for b in layer.buffers())
    given = MoE(6, 4, 4, 2, shared_hidden=3, balancing=ExpertBias(4), device="meta", dtype=torch.bfloat16)
    assert [(n, p.device, p.dtype) for n, p in given.named_parameters()] == [
        (n, p.device, p.dtype) for n, p in layer.named_parameters()
    ]
    with pytest.raises(TypeError, match="unexpected keyword argument 'mesh'"):
        MoE(6, 4, 4, 2, mesh=None)  # type: ignore[call-arg]
    torch.manual_seed(1)
    wanted = MoE(6, 4, 4, 2).state_dict()
    torch.manual_seed(1)
    with torch.device("cpu"):
        assert all(torch.equal(value, wanted[name]) for name, value in MoE(6, 4, 4, 2).state_dict().items())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: make_router("best", 4, 4, 2), "unknown router 'best'.*; known: cosine"),
        (lambda: MoE(4, 4, 4, 5), "top_k 5 of 4 experts"),
        (lambda: MoE(4, 4, 4)(torch.zeros(1, 4), top_k=9), "top_k 9 of 4 experts"),
        (lambda: MoE(4, 0, 4), "hidden width: 0 is not at least 1"),
        (lambda: MoE(4, 4, 4, activation="sinus"), "unknown activation 'sinus'"),
        (lambda: MoE(4, 4, 4, parallel=ExpertParallel(gradients="max")), "gradients 'max'"),  # type: ignore[arg-type]
        (lambda: MoE(4, 4, 4, parallel=ExpertParallel(dispatcher="pigeon")), "unknown dispatcher 'pigeon'"),
        (
            lambda: MoE(4, 4, 4, parallel=ExpertParallel(dispatcher="all_to_all")),
            "wants a mesh of 1 dimensions, got none",
        ),
        (lambda: MoE(4, 4, 4, router=make_router("relu", 4, 6, 2)), "among 6 experts, the layer has 4"),
        (lambda: MoE(4, 4, 4, router="relu", balancing=ExpertBias(4)), "bias the choice of ReLURouter"),
        (lambda: MoE(4, 4, 4, balancing=[ExpertBias(4), ExpertBias(4)]), "2 policies"),
        (lambda: CapacityPolicy(drop="last"), "drop rule 'last'"),  # type: ignore[arg-type]
        (lambda: make_codec("zip"), "unknown codec 'zip'"),
        (lambda: LoadImportanceLoss(noise=0.0), "noise 0.0"),
        (lambda: TopKRouter(nn.Linear(4, 4), 2), "Linear does not say its num_experts"),
        (lambda: TopKRouter(LinearProjection(4, 4), 2, num_groups=3), "4 experts in 3 groups"),
        (lambda: TopKRouter(LinearProjection(4, 4), 3, num_groups=2), "the best 1 groups have 2 experts"),
        (lambda: BiLevelRouter(LinearProjection(4, 2), LinearProjection(4, 2), 3), "visits one node"),
    ],
)
def test_settings_that_do_not_fit_are_named(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("[", r"\[")):
        make()
