"""What every rank runs for ``test_moe.py``: the layer on every dispatcher, against the token-by-token reference."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mycel.moe import (
    BiLevelRouter,
    CapacityPolicy,
    ExpertBias,
    LinearProjection,
    MoE,
    TopKRouter,
)
from mycel.moe.routing import RoutingResult, routing_from_slots

_spec = importlib.util.spec_from_file_location("moe_reference", Path(__file__).with_name("moe_reference.py"))
assert _spec is not None and _spec.loader is not None
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

DIM, HIDDEN, EXPERTS = 12, 10, 8
#: Tokens of each rank; one has none.
LENGTHS = (8, 0, 11, 5)
ROUTERS = ("top_k", "sigmoid", "cosine", "expert_choice", "relu", "bi_level", "custom")
#: Capacity factor and drop rule.
CAPACITIES = ((0.0, "first"), (0.6, "first"), (0.6, "priority"), (-1.0, "priority"))


class PositionRouter(nn.Module):
    """A router from outside: experts and weights by position."""

    num_experts = EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.2, 0.5, EXPERTS))

    def forward(self, x: Tensor, *, top_k: int | None = None, bias: Tensor | None = None) -> RoutingResult:
        k = 2 if top_k is None else top_k
        position = torch.arange(x.shape[0]).unsqueeze(1)
        index = (position + torch.arange(k)) % EXPERTS
        weights = self.gain.to(x.dtype)[index] * (position + 1) / (torch.arange(k) + 1)
        scores = torch.ones(x.shape[0], EXPERTS, dtype=x.dtype)
        return routing_from_slots(index, weights, scores, scores, EXPERTS, full=True)


def make_case(router: str, factor: float, drop: str, top_k: int = 2, activation: str = "swiglu") -> dict[str, Any]:
    return {
        "router": router,
        "factor": factor,
        "drop": drop,
        "top_k": top_k,
        "activation": activation,
        "num_experts": EXPERTS,
        "groups": 4,
    }


def make_layer(case: dict[str, Any], **options: Any) -> MoE:
    """The layer of a case; the same seed gives the same model on any number of ranks."""
    torch.manual_seed(7)
    router: Any = case["router"]
    top_k = case["top_k"]
    if router == "sigmoid":
        projection = LinearProjection(DIM, EXPERTS)
        router = TopKRouter(
            projection, top_k, score="sigmoid", renormalize=True, num_groups=4, top_groups=2, scale=2.5
        )
        options["balancing"] = bias = ExpertBias(EXPERTS)
        bias.bias.copy_(torch.linspace(-0.2, 0.2, EXPERTS))
    elif router == "bi_level":
        router = BiLevelRouter(LinearProjection(DIM, 2), LinearProjection(DIM, EXPERTS // 2), top_k)
    elif router == "custom":
        router = PositionRouter()
    elif router == "top_k":
        options |= {"shared_hidden": 6, "bias": case["activation"] == "gelu"}
    capacity = CapacityPolicy(factor=case["factor"], drop=case["drop"])
    activation = case["activation"]
    return MoE(DIM, HIDDEN, EXPERTS, top_k, router=router, capacity=capacity, activation=activation, **options)


def batch(lengths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of each rank, and what its loss multiplies its outputs with."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randn(n, DIM, generator=generator, dtype=torch.float64).float() for n in lengths]
    return tokens, [torch.randn(n, DIM, generator=generator, dtype=torch.float64).float() for n in lengths]


_CACHE: dict[Any, tuple[list[Tensor], list[Tensor], dict[str, Tensor]]] = {}


def expected(
    case: dict[str, Any], whole: MoE, lengths: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of tokens by rank, gradients of parameters: of the mean over ranks of their losses."""
    key = (*case.items(), lengths, dtype)
    if key not in _CACHE:
        params = {n: p.detach().double().requires_grad_() for n, p in whole.named_parameters()}
        params["bias"] = next((b.double() for b in whole.buffers()), torch.zeros(EXPERTS).double())
        tokens, factors = batch(lengths)
        xs = [x.to(dtype).double().requires_grad_() for x in tokens]
        ys = [reference.forward(params, x, case) for x in xs]
        losses = [(y * c.double()).sum() for y, c in zip(ys, factors, strict=True)]
        (sum(losses) / len(losses)).backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items() if n != "bias"}
        _CACHE[key] = ([y.detach() for y in ys], [x.grad * len(xs) for x in xs], gradients)
    return _CACHE[key]


def error(got: Tensor | None, want: Tensor) -> float:
    """Distance relative to the size of what is wanted."""
    if got is None:
        return float(want.norm())
    return float((got.detach().double() - want).norm() / want.norm().clamp_min(1e-30)) if want.numel() else 0.0


def parameter_errors(layer: MoE, gradients: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Of each parameter's gradient.

    The cosine router's temperature is one number, a sum of many that nearly cancel: its error is relative to the
    gradient of the router's directions, which are summands of the same size.
    """
    out = {}
    for name, _ in layer.named_parameters():
        want = wanted[name]
        if name.startswith("experts."):
            want = want[layer.experts.owned.start : layer.experts.owned.stop]
        out[name] = error(gradients[name], want)
        if name.endswith("log_scale"):
            out[name] *= float(want.norm() / wanted["router.projection.directions"].norm())
    return out


def meshes(size: int, dispatcher: str) -> list[DeviceMesh]:
    """Every way to lay the ranks out for a dispatcher."""
    if dispatcher != "hierarchical":
        return [DeviceMesh("cpu", list(range(size)))]
    shapes = [(n, size // n) for n in range(1, size + 1) if size % n == 0]
    return [DeviceMesh("cpu", torch.arange(size).view(shape)) for shape in shapes]


def errors_of(
    layer: MoE, case: dict[str, Any], whole: MoE, rank: int, size: int, lengths: tuple[int, ...]
) -> dict[str, float]:
    """How far output and every gradient of a rank are from the reference, parameters averaged as DDP does."""
    same = layer.dispatcher.same_tokens
    lengths = lengths[:1] if same else lengths
    place = 0 if same else rank
    ys, x_grads, gradients = expected(case, whole, lengths)
    tokens, factors = batch(lengths)
    x = tokens[place].requires_grad_()
    y = layer(x)
    (y * factors[place]).sum().backward()
    out = {"output": error(y, ys[place]), "tokens": error(x.grad, x_grads[place])}
    got = {}
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if not name.startswith("experts."):
            dist.all_reduce(grad)
            grad /= size
        got[name] = grad
    return out | parameter_errors(layer, got, gradients)


def share_work(cases: list[dict[str, Any]], rank: int, size: int, lengths: tuple[int, ...]) -> None:
    """The reference is slow: every rank works out some of it."""
    wanted = [(case, some) for case in cases for some in {lengths, lengths[:1]}]
    for case, some in wanted[rank::size]:
        expected(case, make_layer(case), some)
    if size > 1:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, _CACHE)
        for part in found:
            _CACHE.update(part)


def every_combination(rank: int, size: int, dispatchers: list[str]) -> dict[str, dict[str, float]]:
    """Router x capacity rule x dispatcher: errors of each."""
    out = {}
    lengths = LENGTHS[:size]
    cases = [make_case(r, f, d) for r, (f, d) in itertools.product(ROUTERS, CAPACITIES)]
    cases.append(make_case("top_k", 0.0, "first", top_k=3, activation="gelu"))
    share_work(cases, rank, size, lengths)
    for dispatcher in dispatchers:
        for mesh in meshes(size, dispatcher):
            for case in cases:
                whole = make_layer(case)
                layer = make_layer(case, mesh=mesh, dispatcher=dispatcher)
                name = f"{dispatcher} {tuple(mesh.shape)} {case['router']} {case['factor']} {case['drop']}"
                out[f"{name} {case['top_k']}"] = errors_of(layer, case, whole, rank, size, lengths)
    return out
