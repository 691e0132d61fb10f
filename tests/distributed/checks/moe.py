"""What every rank runs for ``test_moe.py``: the layer on every dispatcher, against the token-by-token reference."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mycel.moe import (
    BiLevelRouter,
    CapacityPolicy,
    ExpertBias,
    ExpertParallel,
    LinearProjection,
    MoE,
    TopKRouter,
    expert_parameter_names,
    experts_apart,
    node_mesh,
    nodes_of,
)
from mycel.moe.slots import RoutingResult, routing_from_slots
from mycel.topology.builders import two_boxes

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
                layer = make_layer(case, parallel=ExpertParallel(mesh, dispatcher=dispatcher))
                name = f"{dispatcher} {tuple(mesh.shape)} {case['router']} {case['factor']} {case['drop']}"
                out[f"{name} {case['top_k']}"] = errors_of(layer, case, whole, rank, size, lengths)
    return out


# -- expert and data parallel -------------------------------------------------------------------------------------

PLAIN = make_case("top_k", 0.0, "first")


def expert_data_mesh(size: int, expert_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size // expert_ranks, expert_ranks), mesh_dim_names=("data", "expert"))


def expert_and_data(rank: int, size: int, form: str) -> dict[str, dict[str, float]]:
    """Every division of the ranks into expert and data parallel ones: gradients averaged by hand, FSDP2 or DDP."""
    out = {}
    whole = make_layer(PLAIN)
    for expert_ranks in [n for n in range(1, size + 1) if size % n == 0]:
        if form == "ddp" and expert_ranks < size:
            continue  # experts that several ranks hold are another wrapper's work
        mesh = expert_data_mesh(size, expert_ranks)
        layer = make_layer(PLAIN, parallel=mesh["expert"])
        run: Any = layer
        if form == "fsdp":
            fully_shard(layer.experts, mesh=mesh["data"])
            fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
        elif form == "ddp":
            names = expert_parameter_names(layer)
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, names)
            run = DistributedDataParallel(layer)
        ys, x_grads, wanted = expected(PLAIN, whole, LENGTHS[:size])
        tokens, factors = batch(LENGTHS[:size])
        x = tokens[rank].requires_grad_()
        y = run(x)
        (y * factors[rank]).sum().backward()
        got = {}
        for name, parameter in layer.named_parameters():
            grad = parameter.grad
            assert grad is not None
            if isinstance(grad, DTensor):
                got[name] = grad.full_tensor()
                continue
            is_expert = name.startswith("experts.")
            if form == "by hand" or (is_expert and expert_ranks < size):
                group = mesh.get_group("data") if is_expert else None
                dist.all_reduce(grad, group=group)
                grad /= size // expert_ranks if is_expert else size
            got[name] = grad
        errors = {"output": error(y, ys[rank]), "tokens": error(x.grad, x_grads[rank])}
        out[f"{form} {expert_ranks}"] = errors | parameter_errors(layer, got, wanted)
    return out


def summed_losses(rank: int, size: int) -> dict[str, float]:
    """``gradients="sum"``: what all ranks' losses together give."""
    parallel = ExpertParallel(DeviceMesh("cpu", list(range(size))), gradients="sum")
    layer = make_layer(PLAIN, parallel=parallel)
    _, _, wanted = expected(PLAIN, make_layer(PLAIN), LENGTHS[:size])
    tokens, factors = batch(LENGTHS[:size])
    (layer(tokens[rank]) * factors[rank]).sum().backward()
    owned = layer.experts.owned
    return {
        name: error(p.grad, size * wanted[name][owned.start : owned.stop])
        for name, p in layer.named_parameters()
        if name.startswith("experts.")
    }


def train_step(layer: MoE, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    layer(x).square().sum().backward()
    optimizer.step()


def reload(rank: int, size: int, folder: str) -> dict[str, bool]:
    """A checkpoint of one division, loaded into every other one: parameters and optimizer state are those saved."""
    x = batch((6,))[0][0]  # the same on all ranks, so that all divisions train alike
    whole = make_layer(PLAIN)
    exact = torch.optim.Adam(whole.parameters(), lr=0.1)
    saved = make_layer(PLAIN, parallel=DeviceMesh("cpu", list(range(size))))
    optimizer = torch.optim.Adam(saved.parameters(), lr=0.1)
    for layer, used in ((whole, exact), (saved, optimizer)):
        train_step(layer, used, x)
    state = {"model": saved.state_dict(), "optimizer": get_optimizer_state_dict(saved, optimizer)}
    dcp.save(experts_apart(saved, state), checkpoint_id=folder)
    kept = {n: p.detach().clone() for n, p in whole.named_parameters()}
    out = {}
    for expert_ranks in [n for n in range(1, size + 1) if size % n == 0]:
        for sharded in (False, True):
            mesh = expert_data_mesh(size, expert_ranks)
            layer = make_layer(PLAIN, parallel=mesh["expert"])
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(-3.0)
            if sharded:
                fully_shard(layer.experts, mesh=mesh["data"])
                fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
            fresh = torch.optim.Adam(layer.parameters(), lr=0.1)
            target = {"model": layer.state_dict(), "optimizer": get_optimizer_state_dict(layer, fresh)}
            dcp.load(experts_apart(layer, target), checkpoint_id=folder)
            layer.load_state_dict(target["model"])
            set_optimizer_state_dict(layer, fresh, target["optimizer"])
            owned = layer.experts.owned
            good = True
            for name, parameter in layer.named_parameters():
                want, moment = kept[name], exact.state[dict(whole.named_parameters())[name]]["exp_avg"]
                if name.startswith("experts."):
                    want, moment = want[owned.start : owned.stop], moment[owned.start : owned.stop]
                for got, expected_value in ((parameter.detach(), want), (fresh.state[parameter]["exp_avg"], moment)):
                    local = got.full_tensor() if isinstance(got, DTensor) else got
                    good &= torch.allclose(local, expected_value, rtol=1e-4, atol=1e-6)
            out[f"{expert_ranks} {'fsdp' if sharded else 'plain'}"] = good
    return out


# -- bytes ----------------------------------------------------------------------------------------------------------


def bytes_between_nodes(rank: int, size: int, top_k: int) -> dict[str, tuple[int, int]]:
    """Metered and counted bytes that leave the node, of one forward and backward pass."""
    topology = two_boxes(num_ranks=size)
    nodes = nodes_of(topology)
    mesh = node_mesh(topology)
    case = make_case("top_k", 0.0, "first", top_k=top_k)
    lengths = (9, 0, 12, 7)
    x = batch(lengths)[0][rank].requires_grad_()
    out = {}
    for dispatcher, codec, row_bytes in (
        ("all_to_all", "identity", 4 * DIM),
        ("all_to_all", "bf16", 2 * DIM),
        ("hierarchical", "identity", 4 * DIM),
    ):
        layer = make_layer(case, parallel=ExpertParallel(mesh, dispatcher=dispatcher, codec=codec))
        chosen = layer.router(x).top_k_index.tolist()
        node, half = rank // (size // 2), EXPERTS // 2
        own = set(range(node * half, (node + 1) * half))
        if dispatcher == "hierarchical":
            rows = sum(any(e not in own for e in token) for token in chosen)
            # Slots travel as 4 bytes of index and of weight each, weights' gradients come back.
            wanted = rows * (2 * row_bytes + 8 * top_k)
            counts = 8
        else:
            wanted = sum(e not in own for token in chosen for e in token) * 2 * row_bytes
            counts = 8 * (size // 2) * (EXPERTS // size)
        meter = layer.dispatcher.meter
        y = layer(x)
        forward = {name for name, _ in meter.sent}
        out_rows = meter.between(nodes) - counts
        sent_there = sum(n for (name, p), n in meter.sent.items() if name == "dispatch" and p not in nodes[node])
        sent_back = sum(n for (name, p), n in meter.sent.items() if name == "combine" and p not in nodes[node])
        assert forward <= {"counts", "dispatch", "combine"} and out_rows == sent_there + sent_back
        y.square().sum().backward()
        totals = torch.tensor([out_rows, wanted])
        dist.all_reduce(totals)
        out[f"{dispatcher} {codec}"] = (int(totals[0]), int(totals[1]))
    return out


def rounded_rows(rank: int, size: int) -> dict[str, float]:
    """Errors with rows rounded to bfloat16 on the wire."""
    layer = make_layer(PLAIN, parallel=ExpertParallel(DeviceMesh("cpu", list(range(size))), codec="bf16"))
    return errors_of(layer, PLAIN, make_layer(PLAIN), rank, size, LENGTHS[:size])


def wrong_meshes(rank: int, size: int) -> list[str]:
    """What is said about dispatchers that do not fit."""
    flat = DeviceMesh("cpu", list(range(size)))
    said = []
    for options in (
        {"mesh": flat, "dispatcher": "hierarchical"},
        {"mesh": flat, "dispatcher": "local"},
        {"mesh": flat, "dispatcher": "all_gather", "codec": "bf16"},
    ):
        try:
            MoE(4, 4, 4, parallel=ExpertParallel(**options))
        except ValueError as error:
            said.append(str(error))
    return said


def compiled(rank: int, size: int, dispatchers: list[str]) -> dict[str, dict[str, float]]:
    """The layer under ``torch.compile``; exchanges with sizes from data may break its graph, and must stay right."""
    out = {}
    some_are_full = make_case("top_k", 0.6, "first")
    for dispatcher, case in [("all_to_all", some_are_full), *((dispatcher, PLAIN) for dispatcher in dispatchers)]:
        torch.compiler.reset()
        layer = make_layer(case, parallel=ExpertParallel(meshes(size, dispatcher)[-1], dispatcher=dispatcher))
        layer.compile(backend="aot_eager")
        out[f"{dispatcher} {case['factor']}"] = errors_of(layer, case, make_layer(case), rank, size, LENGTHS[:size])
    return out
