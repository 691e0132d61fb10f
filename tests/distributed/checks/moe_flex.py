"""What every rank runs for ``test_moe_flex.py``: one layout of experts, all ways to use it, against the reference."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from mycel.moe import ExpertParallel, MoE, Tuner, experts_apart, keep_exchanges

_spec = importlib.util.spec_from_file_location("moe_checks", Path(__file__).with_name("moe.py"))
assert _spec is not None and _spec.loader is not None
moe = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(moe)

DIM, HIDDEN = moe.DIM, 8
LENGTHS = (8, 0, 11, 5)


def make(num_experts: int, *, plain: bool = True, **options: Any) -> MoE:
    """A layer; the same seed gives the same model for every division."""
    torch.manual_seed(11)
    form = {} if plain else {"activation": "gelu", "bias": True}
    layer = MoE(DIM, HIDDEN, num_experts, min(2, num_experts), **form, **options)
    with torch.no_grad():
        for name in ("gate_up_bias", "down_bias"):
            bias = getattr(layer.experts, name)
            if bias is not None:
                whole = torch.linspace(-1, 1, num_experts * bias.shape[1] * layer.experts.shard[1])
                whole = whole.view(num_experts, -1)
                index, shards = layer.experts.shard
                owned = layer.experts.owned
                bias.copy_(layer.experts.cuts[name].slice_of(whole[owned.start : owned.stop], index, shards))
    return layer


_CACHE: dict[Any, tuple[list[Tensor], list[Tensor], dict[str, Tensor]]] = {}


def expected(
    num_experts: int, plain: bool, lengths: tuple[int, ...]
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """In float64, token by token: outputs and gradients of tokens of each rank, gradients of parameters."""
    key = (num_experts, plain, lengths)
    if key not in _CACHE:
        case = moe.make_case("top_k", 0.0, "first", min(2, num_experts), "swiglu" if plain else "gelu")
        case["num_experts"] = num_experts
        params = {
            n: p.detach().double().requires_grad_() for n, p in make(num_experts, plain=plain).named_parameters()
        }
        tokens, factors = moe.batch(lengths)
        xs = [x.double().requires_grad_() for x in tokens]
        ys = [moe.reference.forward(params, x, case) for x in xs]
        losses = [(y * c.double()).sum() for y, c in zip(ys, factors, strict=True)]
        (sum(losses) / len(losses)).backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
        _CACHE[key] = ([y.detach() for y in ys], [x.grad * len(xs) for x in xs], gradients)
    return _CACHE[key]


def own_slice(layer: MoE, name: str, whole: Tensor) -> Tensor:
    """Of an expert parameter of the whole layer, what this rank has."""
    experts = layer.experts
    return experts.cuts[name].slice_of(whole[experts.owned.start : experts.owned.stop], *experts.shard)


def errors_of(
    layer: MoE, num_experts: int, plain: bool, place: int, lengths: tuple[int, ...], **plan: Any
) -> dict[str, float]:
    """How far output and every gradient are from the reference, parameters averaged over all ranks."""
    ys, x_grads, wanted = expected(num_experts, plain, lengths)
    tokens, factors = moe.batch(lengths)
    x = tokens[place].requires_grad_()
    layer.zero_grad()
    y = layer(x, **plan)
    (y * factors[place]).sum().backward()
    out = {"output": moe.error(y, ys[place]), "tokens": moe.error(x.grad, x_grads[place])}
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if name.startswith("experts."):
            out[name] = moe.error(grad, own_slice(layer, name.removeprefix("experts."), wanted[name]))
        else:
            dist.all_reduce(grad)
            out[name] = moe.error(grad / dist.get_world_size(), wanted[name])
    return out


def meshes(size: int) -> list[DeviceMesh]:
    flat = [DeviceMesh("cpu", list(range(size)))]
    return flat + ([DeviceMesh("cpu", torch.arange(size).view(2, -1))] if size % 2 == 0 else [])


def every_way(rank: int, size: int, shapes: list[tuple[int, int | None]]) -> dict[str, dict[str, float]]:
    """Layers by number of experts and shards; every r, exchange, degree and partition of each: errors."""
    out: dict[str, dict[str, float]] = {}
    lengths = LENGTHS[:size]
    for num_experts, shards in shapes:
        for mesh in meshes(size):
            layer = make(num_experts, parallel=ExpertParallel(mesh, tensor_shards=shards))
            routed = layer.routed
            for r in routed.layout.ways:
                for algorithm in routed.algorithms if r else routed.algorithms[:1]:
                    chunks = [(1, "tokens"), (3, "tokens")] if r else [(1, "tokens")]
                    if routed.layout.width > 1 and r:
                        chunks.append((2, "experts"))
                    for degree, partition in chunks:
                        plan = {"r": r, "algorithm": algorithm, "degree": degree, "partition": partition}
                        name = f"{num_experts} {shards} {mesh.ndim}d {plan}"
                        out[name] = errors_of(layer, num_experts, True, rank, lengths, **plan)
        for r in routed.layout.ways:  # biases
            parallel = ExpertParallel(meshes(size)[0], tensor_shards=shards)
            layer = make(num_experts, plain=False, parallel=parallel)
            out[f"{num_experts} {shards} biases {r}"] = errors_of(layer, num_experts, False, rank, lengths, r=r)
            layer = make(num_experts, parallel=replace(parallel, dispatcher="all_reduce"))
            out[f"{num_experts} {shards} all_reduce {r}"] = errors_of(layer, num_experts, True, 0, lengths[:1], r=r)
    return out


def trained(layer: MoE, rows: Tensor) -> torch.optim.Optimizer:
    """A step of Adam, alike for every division."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    layer(rows).square().sum().backward()
    optimizer.step()
    return optimizer


def reloading(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Slices from a state of the whole layer, and from checkpoints of another number of slices."""
    two = DeviceMesh("cpu", torch.arange(size).view(2, -1), mesh_dim_names=("data", "expert"))
    flat = DeviceMesh("cpu", list(range(size)))
    forms: dict[str, dict[str, Any]] = {
        "slices of two": {"parallel": flat},
        "slices of four": {"parallel": ExpertParallel(flat, tensor_shards=4)},
        "whole": {"parallel": two["expert"]},
        "alone": {},
    }
    whole = make(2, plain=False)
    layer = make(2, plain=False, **forms["slices of two"])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    layer.load_state_dict(whole.state_dict())
    rows = moe.batch((6,))[0][0]  # on all ranks the same, so that divisions train alike
    exact, optimizer = trained(whole, rows), trained(layer, rows)
    state = {"model": layer.state_dict(), "optimizer": get_optimizer_state_dict(layer, optimizer)}
    dcp.save(experts_apart(layer, state), checkpoint_id=folder)
    out: dict[str, Any] = {}
    for name, options in forms.items():
        other = make(2, plain=False, **options)
        fresh = torch.optim.Adam(other.parameters(), lr=0.1)
        target = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, fresh)}
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(-3.0)
        dcp.load(experts_apart(other, target), checkpoint_id=folder)
        other.load_state_dict(target["model"])
        set_optimizer_state_dict(other, fresh, target["optimizer"])
        good = True
        for part, parameter in other.named_parameters():
            want = whole.get_parameter(part)
            moment = exact.state[want]["exp_avg"]
            if part.startswith("experts."):
                want, moment = (own_slice(other, part.removeprefix("experts."), t) for t in (want, moment))
            for got, wanted in ((parameter, want), (fresh.state[parameter]["exp_avg"], moment)):
                good &= torch.allclose(got.detach(), wanted.detach(), rtol=1e-4, atol=1e-6)
        out[name] = good
    return out


def switching(rank: int, size: int) -> dict[str, Any]:
    """Storage and bytes while a layer goes through all degrees of parallelism and back."""
    layer = make(1, parallel=DeviceMesh("cpu", list(range(size))))
    meter = layer.dispatcher.meter
    x = moe.batch(LENGTHS[:size])[0][rank]
    pointers = [p.untyped_storage().data_ptr() for p in layer.parameters()]
    kept = [p.detach().clone() for p in layer.parameters()]
    seen: dict[int, list[dict[str, int]]] = {}
    results = {}
    for r in (4, 1, 2, 0, 2, 4, 0, 1):
        meter.reset()
        results[r] = layer(x, r=r)
        (results[r].sum() * 0.5).backward()
        by_name: dict[str, int] = {}
        for (name, _), num_bytes in meter.sent.items():
            by_name[name] = by_name.get(name, 0) + num_bytes
        seen.setdefault(r, []).append(by_name)
    same = all(torch.equal(a, b) for a, b in zip(kept, layer.parameters(), strict=True))
    return {
        "unmoved": same and pointers == [p.untyped_storage().data_ptr() for p in layer.parameters()],
        "bytes": seen,
        "apart": max(float((results[r] - results[4]).abs().max()) if len(x) else 0.0 for r in results),
        "weights": sum(p.numel() for n, p in layer.named_parameters() if n.startswith("experts.")) * 4,
    }


def token_replicas(rank: int, size: int) -> dict[str, Any]:
    """Two expert ranks of two tensor-parallel ranks each: errors, and rows' bytes with and without duplicates."""
    mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1), mesh_dim_names=("expert", "tensor"))
    place, lengths = rank // (size // 2), (7, 12)
    parallel = ExpertParallel(mesh, tensor_shards=size // 2)
    layer = make(4, parallel=replace(parallel, replicas=mesh["tensor"]))
    errors = errors_of(layer, 4, True, place, lengths)
    nodes = [list(range(size // 2)), list(range(size // 2, size))]
    sent = layer.dispatcher.meter.between(nodes)
    whole = make(4, parallel=parallel)
    x = moe.batch(lengths)[0][place].requires_grad_()
    whole(x).sum().backward()
    totals = torch.tensor([sent, whole.dispatcher.meter.between(nodes)])
    dist.all_reduce(totals)
    return {"errors": errors, "bytes": totals.tolist()}


def kept_exchanges(rank: int, size: int, plan: dict[str, Any]) -> dict[str, Any]:
    """A step with checkpointing, exchanges kept and not, beside one without: bytes, equal gradients."""
    mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1))
    layer = make(8, parallel=mesh)
    x = moe.batch(LENGTHS[:size])[0][rank].requires_grad_()
    out: dict[str, Any] = {}
    for name, options in (("none", None), ("again", {}), ("kept", {"context_fn": keep_exchanges})):
        layer.zero_grad()
        x.grad = None
        layer.dispatcher.meter.reset()
        y = layer(x, **plan) if options is None else checkpoint(layer, x, use_reentrant=False, **options, **plan)
        y.square().sum().backward()
        grads = [x.grad, *(p.grad for p in layer.parameters())]
        out.setdefault("first", grads)
        equal = all(torch.equal(a, b) for a, b in zip(out["first"], grads, strict=True))
        out[name] = (layer.dispatcher.meter.total(), equal)
    del out["first"]
    return out


def adapting(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Steps of two loads with a layer that chooses: what was chosen, how far results were off, what is remembered."""
    mesh = DeviceMesh("cpu", torch.arange(size).view(2, -1))
    file = Path(folder) / "choices.json"
    tuner = Tuner(degrees=(1, 2), finalists=2, trials=1, file=file)
    layer = make(4, parallel=ExpertParallel(mesh, tensor_shards=2, tuner=tuner))
    fixed = make(4, parallel=ExpertParallel(mesh, tensor_shards=2))
    apart = 0.0
    for step in range(16):
        x = moe.batch(LENGTHS[:size] if step % 2 else (40, 30, 33, 20))[0][rank].requires_grad_()
        y, same = layer(x), fixed(x, r=0)
        apart = max(apart, float((y - same).detach().abs().max()) if len(x) else 0.0)
        y.square().sum().backward()
    with torch.no_grad():
        layer(x)
    checkpoint(layer, x, use_reentrant=False, context_fn=keep_exchanges).sum().backward()
    dist.barrier()
    again = make(4, parallel=ExpertParallel(mesh, tensor_shards=2, tuner=tuner))
    again(x).sum().backward()
    chosen = {bucket: choice.chosen for bucket, choice in layer.chooser.table.items()}
    kept = {bucket: choice.chosen for bucket, choice in again.chooser.table.items() if choice.chosen is not None}
    return {"chosen": chosen, "kept": kept, "apart": apart, "table": layer.explain()}
