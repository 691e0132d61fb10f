"""What every rank runs for ``test_moe_codecs.py``: coded exchanges beside exact ones."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from mycel.compiled import Compiled
from mycel.moe import ExpertParallel, MoE, nodes_of
from mycel.moe.dispatch import make_dispatcher
from mycel.moe.lsh import LSHDispatcher
from mycel.moe.slots import routing_from_slots
from mycel.topology.builders import two_boxes
from mycel.wire import CODECS, Float8Codec, Int4Codec, Int8Codec, make_codec, noise

_spec = importlib.util.spec_from_file_location("moe", Path(__file__).with_name("moe.py"))
assert _spec is not None and _spec.loader is not None
moe = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(moe)

EXACT = {"fp8": Float8Codec, "int8": Int8Codec, "int4": Int4Codec}
#: Tokens of each rank, their width, experts.
LENGTHS, WIDTH, EXPERTS = (30, 0, 17, 5), 13, 6


def mesh_of(size: int, dispatcher: str) -> DeviceMesh:
    shape = (2, size // 2) if dispatcher == "hierarchical" else (size,)
    return DeviceMesh("cpu", torch.arange(size).view(shape))


def part_of_row(got: Tensor, want: Tensor) -> float:
    """Largest error as a part of the largest magnitude in its row."""
    if not want.numel():
        return 0.0
    return float(((got - want).abs().amax(dim=1) / want.abs().amax(dim=1)).max())


def errors(rank: int, size: int, dispatcher: str) -> dict[str, tuple[float, float, float, float]]:
    """One exchange of rows in float64, one expert a token: error, error of gradients, and what the codec states."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(LENGTHS[rank], WIDTH, dtype=torch.float64, generator=generator)
    index = torch.randint(0, EXPERTS, (LENGTHS[rank], 1), generator=generator)
    nothing = torch.zeros(LENGTHS[rank], EXPERTS)
    routing = routing_from_slots(index, torch.ones(LENGTHS[rank], 1), nothing, nothing, EXPERTS, full=True)
    out = {}
    exact: tuple[Tensor, Tensor] | None = None
    codecs = {name: make_codec(name) for name in CODECS}
    codecs |= {f"{name} exact": kind(gradients="exact") for name, kind in EXACT.items()}
    for name, codec in codecs.items():
        here = make_dispatcher(dispatcher, EXPERTS, mesh_of(size, dispatcher), codec=codec)
        leaf = x.clone().requires_grad_()
        rows = here.dispatch(leaf, routing).rows
        factor = torch.randn(rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + rank))
        rows.backward(factor)
        assert leaf.grad is not None
        if exact is None:
            assert name == "identity"
            exact = rows.detach(), leaf.grad
        found = part_of_row(rows.detach(), exact[0]), part_of_row(leaf.grad, exact[1])
        out[name] = (*found, codec.row_error(), codec.row_error(gradient=True))
    return out


def layers(rank: int, size: int, dispatcher: str) -> dict[str, dict[str, float]]:
    """A layer's output and gradients beside the float64 reference."""
    lengths = moe.LENGTHS[:size]
    out = {}
    for name in CODECS:
        layer = moe.make_layer(
            moe.PLAIN, parallel=ExpertParallel(mesh_of(size, dispatcher), dispatcher=dispatcher, codec=name)
        )
        out[name] = moe.errors_of(layer, moe.PLAIN, moe.make_layer(moe.PLAIN), rank, size, lengths)
    return out


def trained(rank: int, size: int, dispatcher: str, seed: int, saved: list[str] | None) -> tuple[str, list[bytes]]:
    """Two layers, of fp8 and int8 rows, trained for six steps, or from a checkpoint on for the last three.

    Returns:
        The checkpoint after three steps and the weights in the end.
    """
    codecs = Float8Codec(seed=seed), Int8Codec(seed=seed)
    if saved is not None:  # other objects made and used before, as in a program that has changed since
        for codec in (make_codec("int4"), make_codec("int8"), *codecs):
            codec.encode(torch.randn(5, 7), gradient=True)
    mesh = mesh_of(size, dispatcher)
    options: dict[str, Any] = {"dispatcher": dispatcher, "gradients": "sum"}
    divided = [ExpertParallel(mesh, codec=codec, **options) for codec in codecs]
    model = nn.ModuleList(moe.make_layer(moe.PLAIN, parallel=parallel) for parallel in divided)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if saved is not None:
        state = torch.load(io.BytesIO(bytes.fromhex(saved[rank])), weights_only=True)
        model.load_state_dict(state["model"])  # strict: codecs add nothing
        optimizer.load_state_dict(state["optimizer"])
    middle = ""
    for step in range(0 if saved is None else 3, 6):
        for part in range(2):  # gradients of two micro-batches are added up, the first layer's by recomputation
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x = torch.randn(LENGTHS[rank] + part, moe.DIM, generator=generator)
            y = model[1](checkpoint(model[0], x.requires_grad_(), use_reentrant=False))
            (y * torch.randn(y.shape, generator=generator)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if saved is None and step % 2:
            model[0](x.detach())  # evaluated in between
        if step == 2:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            middle = file.getvalue().hex()
    return middle, [p.detach().numpy().tobytes() for p in model.parameters()]


def metered(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """Bytes that all-to-all sends to the other node, metered and counted, by codec."""
    tokens, width, experts, top_k = 40, 9, 8, 3
    nodes = nodes_of(two_boxes(num_ranks=size))
    other = next(node for node in nodes if rank not in node)
    out: dict[str, tuple[int, int]] = {}
    row_bytes = {"identity": 4 * width, "bf16": 2 * width, "fp8": width + 2, "int8": width + 2, "int4": 7}
    for name, num_bytes in row_bytes.items():
        torch.manual_seed(0)
        layer = MoE(
            width, 8, experts, top_k, parallel=ExpertParallel(DeviceMesh("cpu", list(range(size))), codec=name)
        )
        x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        layer(x).square().sum().backward()
        owner = layer.router(x).top_k_index // (experts // size)
        gone = sum(int((owner == r).sum()) for r in other)
        every: list[Any] = [None] * size
        torch.distributed.all_gather_object(every, owner)
        come = sum(int((every[r] == rank).sum()) for r in other)
        counts = len(other) * (experts // size) * 8
        # Out with tokens, back with results, and the same for gradients.
        out[name] = layer.dispatcher.meter.between(nodes), counts + num_bytes * 2 * (gone + come)
    return out


def centroids(rank: int, size: int, dispatcher: str) -> dict[str, float]:
    """A layer whose centroids travel, beside the same layer with all experts here: buckets do not look further."""
    settings = {"num_hashes": 1, "directions": 2, "radius": 0.8}
    generator = torch.Generator().manual_seed(rank)
    points = torch.randn(3, moe.DIM, generator=generator)
    x = points[torch.randint(0, 3, (4 * moe.LENGTHS[rank],), generator=generator)]
    x = x + 0.3 * torch.randn(x.shape, generator=generator)
    factor = torch.randn(x.shape, generator=generator)
    results = []
    owned = range(0)
    for mesh in (mesh_of(size, dispatcher), None):
        inner = make_dispatcher(dispatcher if mesh else "local", moe.EXPERTS, mesh)
        parallel = ExpertParallel(dispatcher=LSHDispatcher(inner, **settings), gradients="sum")
        layer = moe.make_layer(moe.PLAIN, parallel=parallel)
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        (y * factor).sum().backward()
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        if mesh is not None:
            owned = layer.experts.owned
        else:
            for name in [name for name in gradients if name.startswith("experts.")]:
                torch.distributed.all_reduce(gradients[name])  # of all ranks' tokens, as divided experts have it
                gradients[name] = gradients[name][owned.start : owned.stop]
        results.append({"output": y, "tokens": leaf.grad, **gradients})
        sent = layer.dispatcher.sent
    out = {name: moe.error(results[0][name], want.detach().double()) for name, want in results[1].items()}
    return out | {"share sent": sent[0] / max(1, sent[1])}


def metered_centroids(rank: int, size: int) -> tuple[int, int]:
    """Bytes that leave this rank with centroids, metered, and as many rows would need."""
    totals = []
    for wrap in (True, False):
        inner = make_dispatcher("all_to_all", moe.EXPERTS, mesh_of(size, "all_to_all"), codec=make_codec("int8"))
        layer = moe.make_layer(moe.PLAIN, parallel=ExpertParallel(dispatcher=LSHDispatcher(inner) if wrap else inner))
        x = torch.eye(moe.DIM)[torch.arange(20).remainder(2)]  # two tokens, ten times each
        layer(x)
        totals.append(layer.dispatcher.meter.total(["dispatch"]))
    return totals[0], totals[1]


def compiles_late(rank: int, size: int, name: str) -> dict[str, Any]:
    """What the first exchange there and back gets code for that making the dispatcher did not."""
    here = make_dispatcher("all_to_all", EXPERTS, mesh_of(size, "all_to_all"), codec=make_codec(name))
    loops = [value for value in vars(noise).values() if isinstance(value, Compiled)]
    before = [len(loop.signatures) if loop.is_loaded else 0 for loop in loops]
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    index = torch.arange(8).remainder(EXPERTS).unsqueeze(1)
    nothing = torch.zeros(8, EXPERTS)
    routing = routing_from_slots(index, torch.ones(8, 1), nothing, nothing, EXPERTS, full=True)
    here.dispatch(x, routing).rows.square().sum().backward()
    after = [len(loop.signatures) if loop.is_loaded else 0 for loop in loops]
    return {"same": before == after, "any": any(after)}
