"""What every rank runs for ``test_fsdp_compression.py``."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mycel.data_parallel import compress
from mycel.data_parallel.advise_sharded import advise_sharded
from mycel.data_parallel.compress import COMPRESSORS, PowerSGD, Quantised, make_compressor
from mycel.data_parallel.fsdp import QSDP, FSDPCompression, attach
from mycel.data_parallel.fsdp.layout import units_of
from mycel.data_parallel.fsdp.route import Route
from mycel.data_parallel.lgreco import LGreCo
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError
from mycel.topology.builders import two_boxes

WIDTH = 48
STEPS = 4


class Model(nn.Module):
    """Odd sizes, norms, a layer that may be left out, a frozen one, tied ends, a parameter smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 31), nn.Tanh(), nn.Linear(31, WIDTH))
            for _ in range(2)
        )
        self.tiny = nn.Parameter(torch.ones(1, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, num_blocks: int = 2) -> Tensor:
        x = self.embedding(tokens) * self.tiny
        for block in self.blocks[:num_blocks]:
            x = x + block(x)
        return self.head(x + self.frozen(x))


def sharded(**options: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, rank: int, *, begin: int = 0, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(begin, begin + steps):
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def trains(rank: int, size: int) -> dict[str, list[float]]:
    """Losses with and without compression, for several ways of sharding."""
    found = {}
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "half": {"mp_policy": half},
        "kept": {"reshard_after_forward": False},
    }
    for name, chosen in options.items():
        found[name] = train(sharded(**chosen), rank)
        model = sharded(**chosen)
        compress(model, QSDP(bucket_size=64))
        found[f"{name}, compressed"] = train(model, rank)
    return found


def takes_any(rank: int, size: int) -> dict[str, list[float] | str]:
    """Losses with every registered compressor for gradients, or why it was refused."""
    found: dict[str, list[float] | str] = {"exact": train(sharded(), rank)}
    for name in COMPRESSORS:
        model = sharded()
        try:
            attach(model, make_compressor(name))
        except UsageError as error:
            found[name] = str(error)
        else:
            found[name] = train(model, rank)
    return found


def sends(rank: int, size: int) -> tuple[float, int, float]:
    """Bytes of a step as counted, by the formula, and of the same in full precision."""
    model = sharded()
    made = attach(model, QSDP(weight_bits=8, gradient_bits=4, bucket_size=64))
    train(model, rank, steps=1)
    before = made.stats.sent_bytes
    train(model, rank, begin=1, steps=1)
    counted = made.stats.sent_bytes - before
    exact = attach(sharded(), QSDP(), exact=["*"])
    train(_model_of(exact), rank, steps=1)
    before = exact.stats.sent_bytes
    train(_model_of(exact), rank, begin=1, steps=1)
    return counted, made.bytes_per_step(), exact.stats.sent_bytes - before


def _model_of(made: FSDPCompression) -> nn.Module:
    return next(unit.module for unit in made.units if unit.name == "")


def vectors_are_exact(rank: int, size: int) -> dict[str, tuple[int, float]]:
    """Elements of each gradient, and its largest difference from the uncompressed one at the same weights."""
    found = {}
    for name, method in {"none": None, "compressed": QSDP(weight_bits=None, gradient_bits=4)}.items():
        model = sharded()
        if method is not None:
            attach(model, method)
        loss_of(model, batch(rank, 0)).backward()
        found[name] = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.numel(), float((found["none"][n] - g).abs().max())) for n, g in found["compressed"].items()}


def same_weights_twice(rank: int, size: int) -> bool:
    """Whether the weights gathered for the backward pass are those of the forward pass, bit by bit, on all ranks."""
    model = sharded()
    attach(model, QSDP(weight_bits=4))
    seen = []
    for _ in range(2):
        model.unshard()
        seen.append(model.head.weight.detach().clone())
        model.reshard()
    everywhere = [torch.empty_like(seen[0]) for _ in range(size)]
    dist.all_gather(everywhere, seen[0].contiguous())
    exact = {n: p.full_tensor() for n, p in model.named_parameters()}["embedding.weight"]
    differs = not torch.equal(exact, seen[0])
    return differs and torch.equal(*seen) and all(torch.equal(other, seen[0]) for other in everywhere)


def accumulates(rank: int, size: int) -> tuple[float, float]:
    """Largest difference from the exact mean gradient of two micro-batches, and of their unused half."""
    worst = []
    for unused in (False, True):
        found = []
        for bits in (None, 8):
            model = sharded()
            attach(model, QSDP(weight_bits=None, gradient_bits=bits))
            model.set_requires_gradient_sync(False)
            model(batch(rank, 0), 1 if unused else 2).sum().backward()
            model.set_requires_gradient_sync(True)
            model(batch(rank, 1), 1 if unused else 2).sum().backward()
            found.append([p.grad.full_tensor() for p in model.parameters() if p.grad is not None])
        scale = max(float(g.abs().max()) for g in found[0])
        worst.append(max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)) / scale)
    return worst[0], worst[1]


def between_nodes(rank: int, size: int) -> dict[str, Any]:
    """Losses flat and between nodes, and what was sent how."""
    found: dict[str, Any] = {"none": train(sharded(), rank)}
    for name, topology in {"flat": None, "nodes": two_boxes(num_ranks=size)}.items():
        model = sharded()
        made = attach(model, QSDP(bucket_size=64), topology=topology)
        found[name] = train(model, rank)
        found[f"{name} bytes"] = {"compressed": made.stats.sent_bytes, "inside": made.inside_bytes}
        found[f"{name} formula"] = made.bytes_per_step()
        found[f"{name} weights"] = {n: t.numpy() for n, t in full(model).items()}
    return found


def feedback_pays_back(rank: int, size: int) -> tuple[float, float, float, float]:
    """The mean of the gradients that came through over many steps, against the exact one: with memory, with memory in
    eight bits, without; and how many times smaller the second memory is."""
    model = sharded()
    loss_of(model, batch(rank, 0)).backward()
    exact = model.blocks[0][1].weight.grad.full_tensor()
    errors, held = [], []
    for feedback, kept in ((True, "float32"), (True, "int8"), (False, "float32")):
        model = sharded()
        made = attach(model, Quantised(2, stochastic=False, bucket_size=256), feedback=feedback, residuals=kept)
        total = torch.zeros_like(exact)
        for _ in range(30):
            model.zero_grad()
            loss_of(model, batch(rank, 0)).backward()
            total += model.blocks[0][1].weight.grad.full_tensor()
        errors.append(float(((total / 30) - exact).norm() / exact.norm()))
        held.append(0 if made.feedback is None else made.feedback.num_bytes)
    return errors[0], errors[1], errors[2], held[0] / held[1]


def goes_on(rank: int, size: int, state: str | None) -> tuple[str, dict[str, float], list[float]]:
    """Three steps, or one more from a state: the state, the sum of residuals by parameter, losses."""
    model = sharded()
    made = attach(model, Quantised(2, stochastic=False, bucket_size=64))
    if state is not None:
        made.load_state_dict(torch.load(io.BytesIO(bytes.fromhex(state)), weights_only=True))
    else:
        train(model, rank, steps=3)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    residuals = {n: float(t.double().sum()) for n, t in made.state_dict().items() if n.startswith("residual")}
    return file.getvalue().hex(), residuals, train(model, rank, begin=3, steps=1)


def resumes_exactly(rank: int, size: int) -> bool:
    """Four steps at once give the weights of two, a checkpoint, and two."""
    whole = sharded()
    attach(whole, QSDP(weight_bits=4, gradient_bits=4))
    train(whole, rank)
    first = sharded()
    made = attach(first, QSDP(weight_bits=4, gradient_bits=4))
    train(first, rank, steps=2)
    second = sharded()
    second.load_state_dict(first.state_dict())
    attach(second, QSDP(weight_bits=4, gradient_bits=4)).load_state_dict(made.state_dict())
    train(second, rank, begin=2, steps=2)
    return all(torch.equal(a, b) for a, b in zip(full(whole).values(), full(second).values(), strict=True))


def between_replicas(rank: int, size: int) -> dict[str, Any]:
    """Two shards, two replicas: losses as torch does it and compressed between replicas, weights, bytes."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {"native": train(sharded(mesh=mesh), rank)}
    methods = {
        "exact": CompressionPolicy(None),
        "int8": QSDP(gradient_bits=8, bucket_size=64),
        "powersgd": PowerSGD(rank=24, min_ratio=0.5),
    }
    for name, method in methods.items():
        model = sharded(mesh=mesh["shard"])
        made = attach(model, method, replicas=mesh["replicate"].get_group())
        found[name] = train(model, rank)
        found[f"{name} ratio"] = made.stats.ratio
        found[f"{name} weights"] = {n: t.numpy() for n, t in full(model).items()}
        again = attach(sharded(mesh=mesh["shard"]), method, replicas=mesh["replicate"].get_group())
        again.load_state_dict(state := made.state_dict())
        found[f"{name} state"] = all(torch.equal(state[k], v) for k, v in again.state_dict().items())
    return found


def adapts(rank: int, size: int) -> tuple[list[float], dict[str, float], str]:
    """Losses, and the levels that L-GreCo chose from gradient shards."""
    model = sharded()
    policy = LGreCo(Quantised(4, bucket_size=64), every=2, window=1, alpha=0.5)
    attach(model, policy)
    losses = train(model, rank)
    return losses, {row.name: row.level for row in policy.table}, policy.explain()


def detaches(rank: int, size: int) -> tuple[list[float], list[float]]:
    """Losses without compression, and after it was taken away."""
    model = sharded()
    attach(model, QSDP(weight_bits=2, gradient_bits=2)).close()
    return train(sharded(), rank), train(model, rank)


def refuses(rank: int, size: int) -> list[str]:
    """Messages for what cannot be done."""
    messages = []

    def tried(call: Any) -> None:
        try:
            call()
        except UsageError as error:
            messages.append(str(error))

    tried(lambda: attach(Model(), QSDP()))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    tried(lambda: attach(sharded(mesh=mesh), QSDP()))
    other = sharded()
    made = attach(other, QSDP())
    tried(lambda: made.load_state_dict({"step.": torch.tensor(1)}))
    mixed = sharded()
    tried(lambda: attach(mixed, QSDP(), topology=two_boxes(num_ranks=2 * size)))
    return messages


def overflows(rank: int, size: int) -> dict[str, tuple[list[bool], bool]]:
    """Whether gradients are finite, step by step, and whether the step that overflowed has changed residuals."""
    found = {}
    for name in ("sign", "top_k", "tagc", "fp8", "int8 memory"):
        model = sharded()
        rounded = name == "int8 memory"
        made = attach(model, make_compressor("sign" if rounded else name), residuals="int8" if rounded else "float32")
        assert made.feedback is not None
        seen, kept = [], {}
        for step in range(4):
            model.zero_grad()
            factor = float("inf") if step == 1 and rank == 0 else 1.0
            (loss_of(model, batch(rank, step)) * factor).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            seen.append(all(bool(g.full_tensor().isfinite().all()) for g in grads))  # type: ignore[attr-defined]
            if step == 0:
                kept = {n: t.clone() for n, t in made.feedback.memory.items()}
            elif step == 1:
                same = all(torch.equal(kept[n], t) for n, t in made.feedback.memory.items())
        assert made.stats.steps == 4
        found[name] = (seen, same and bool(kept))
    return found


def counts(rank: int, size: int) -> dict[str, float]:
    """Steps that are counted, for several ways of sharding and compressing."""
    found = {}
    for name, method in {
        "both": QSDP(),
        "weights": QSDP(gradient_bits=None),
        "sign": make_compressor("sign"),
    }.items():
        model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        made = compress(model, method)
        for _ in range(3):
            model(torch.randn(4, 32)).sum().backward()
        found[name] = made.stats.steps
    return found


def keeps_near(rank: int, size: int) -> dict[str, Any]:
    """Losses with weights kept between two ranks after the forward pass, beside those kept by all four; and with
    gradients of 4 bits between nodes of two ranks, too, which is all of ZeRO++."""
    found: dict[str, Any] = {"exact": train(sharded(), rank, steps=2)[1:]}
    for name, reshard in {"all": True, "two": 2, "nodes": 2}.items():
        model = sharded(reshard_after_forward=reshard)
        method = QSDP(gradient_bits=4) if name == "nodes" else QSDP()
        made = attach(model, method, topology=two_boxes(num_ranks=size) if name == "nodes" else None)
        train(model, rank, steps=1)
        before = made.stats.sent_bytes
        found[name] = train(model, rank, begin=1, steps=1)
        found[f"{name} sent"] = (made.stats.sent_bytes - before, made.bytes_per_step())
        found[f"{name} inside"] = made.inside_bytes
    crossed = Route(dist.group.WORLD, CommStats(), ((0, 2), (1, 3)))
    near = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3), (0, 1), (2, 3))]
    for group in near:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            try:
                crossed.check_inside(group, "block")
                found.setdefault("said", []).append("")
            except UsageError as error:
                found.setdefault("said", []).append(str(error))
    return found


def advises(rank: int, size: int) -> dict[str, Any]:
    """What is measured of a sharded model, which is as it was afterwards."""
    model = sharded()
    before = full(model)
    names = ("int8", "w8g8", "w4g4")
    found = advise_sharded(model, lambda m: loss_of(m, batch(rank, 0)), methods=names, steps=1)
    return {
        "sent": {p.method: p.sent_bytes for p in found.predictions},
        "error": {p.method: p.error for p in found.predictions},
        "measured": all(p.is_measured and p.step_s > 0 for p in found.predictions),
        "untouched": all(torch.equal(a, b) for a, b in zip(before.values(), full(model).values(), strict=True)),
        "formula": sum(
            (size - 1) * 4 * (sum(s.numel for s in u.segments) * (2 if u.param_group._reshard_after_forward else 1)
            + sum(s.numel for s in u.segments if s.trainable))
            for u in units_of(model)
        ),
    }  # fmt: skip
