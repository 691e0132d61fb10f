"""What ranks do in ``test_compression.py``."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mycel.compiled import Compiled
from mycel.data_parallel import (
    QSDP,
    Adasum,
    CompressionPolicy,
    Streaming,
    Sum,
    combine_gradients,
    compress,
    local_updates,
)
from mycel.data_parallel.compress import Cast, Compressor, PowerSGD, Quantised, make_compressor


class Odd(nn.Module):
    """Everything that is awkward: tied, frozen, unused, empty and tiny parameters, batch norm, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Linear(8 * 16, 128)
        self.tied = nn.Linear(128, 128, bias=False)
        self.again = nn.Linear(128, 128, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(128, 128).requires_grad_(False)
        self.unused = nn.Linear(64, 64)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x)).relu().flatten(1)
        x = self.tied(self.first(x)).relu()
        x = self.frozen(self.again(x)).relu() * self.scale + self.empty.sum()
        return self.last(x)


def model_and_batches(rank: int, count: int, *, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    model = Odd().to(dtype)
    generator = torch.Generator().manual_seed(100 + rank)
    batches = [
        (torch.randn(4, 1, 4, 4, generator=generator).to(dtype), torch.randint(0, 10, (4,), generator=generator))
        for _ in range(count)
    ]
    return model, batches


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.02, find_unused_parameters=True, **options)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same_everywhere(tensors: dict[str, Tensor]) -> bool:
    """Bit by bit."""
    flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors.values() if t.numel()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(flat, other) for other in everyone)


def trains(rank: int, size: int, name: str) -> dict[str, Any]:
    """Several steps of the awkward model with many buckets; what was sent beside what the formula says."""
    model, batches = model_and_batches(rank, 6)
    ddp = wrap(model)
    handle = compress(ddp, CompressionPolicy(make_compressor(name), min_elements=64), fuse_bytes=4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    identical = True
    for batch in batches:
        loss_of(ddp, batch).backward()
        identical &= same_everywhere(gradients(model))
        assert model.unused.weight.grad is None or not model.unused.weight.grad.any()
        optimizer.step()
        optimizer.zero_grad()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return {
        "identical": identical and same_everywhere(dict(model.named_parameters())),
        "finite": finite,
        "steps": handle.step,
        "sent": handle.stats.sent_bytes,
        "exact": handle.stats.exact_bytes,
    }


def equals_uncompressed(rank: int, size: int) -> float:
    """Largest difference from plain DDP where nothing is lost, over several steps with accumulation."""
    off = 0.0
    results = []
    for compressed in (False, True):
        model, batches = model_and_batches(rank, 6)
        ddp = wrap(model)
        if compressed:
            compress(ddp, Cast(torch.float32), fuse_bytes=2048)
        for i in range(0, 6, 2):
            with ddp.no_sync():
                loss_of(ddp, batches[i]).backward()
            loss_of(ddp, batches[i + 1]).backward()
        results.append(gradients(model))
    for name, gradient in results[0].items():
        if gradient.numel():
            off = max(off, float((gradient - results[1][name]).abs().max()))
    return off


def telescopes(rank: int, size: int, name: str) -> tuple[float, float]:
    """Distance of the sum of what was applied from the sum of means, with residuals and without; relative."""
    torch.manual_seed(0)
    model = nn.Linear(96, 64, bias=False)
    ddp = DistributedDataParallel(model)
    handle = compress(ddp, make_compressor(name), feedback=True)
    applied, exact = torch.zeros(64, 96), torch.zeros(64, 96)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(8):
        x, y = torch.randn(16, 96, generator=generator), torch.randn(16, 64, generator=generator)
        own = torch.autograd.grad((model(x) * y).sum(), model.weight)[0]
        dist.all_reduce(own)
        exact += own / size
        (ddp(x) * y).sum().backward()
        applied += model.weight.grad
        model.zero_grad()
    residual = handle.state_dict()["residuals"]["weight"]
    return float((applied + residual - exact).norm() / exact.norm()), float((applied - exact).norm() / exact.norm())


def zeros(rank: int, size: int, name: str) -> bool:
    """All-zero gradients give zeros, also after others."""
    model = nn.Linear(64, 64)
    ddp = DistributedDataParallel(model)
    compress(ddp, make_compressor(name), feedback=False)
    fine = True
    for factor in (0.0, 1.0, 0.0):
        (ddp(torch.ones(4, 64)).sum() * factor).backward()
        assert model.weight.grad is not None
        fine &= bool(model.weight.grad.isfinite().all()) and bool(model.weight.grad.any()) == (factor != 0)
        model.zero_grad()
    return fine


def half_types(rank: int, size: int, name: str) -> bool:
    """bfloat16 parameters, then float32 ones under autocast."""
    fine = True
    for dtype in (torch.bfloat16, torch.float32):
        model, batches = model_and_batches(rank, 3, dtype=dtype)
        ddp = wrap(model)
        compress(ddp, make_compressor(name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
                loss = loss_of(ddp, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        fine &= same_everywhere(dict(model.named_parameters()))
        fine &= all(bool(p.isfinite().all()) for p in model.parameters())
    return fine


def overflow_is_forgotten(rank: int, size: int, name: str) -> bool:
    """A step with infinite gradients on one rank is seen by all, and leaves no trace in memories."""
    model = nn.Linear(64, 64, bias=False)
    ddp = DistributedDataParallel(model)
    compress(ddp, make_compressor(name), feedback=True)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for step in range(3):
        x = torch.randn(8, 64, generator=generator)
        ddp(x * (float("inf") if step == 1 and rank == 0 else 1.0)).square().sum().backward()
        assert model.weight.grad is not None
        seen.append(bool(model.weight.grad.isfinite().all()))
        model.zero_grad()
    return seen == [True, False, True]


class Layers(nn.Module):
    """Three layers, of which the middle one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor, *, skip: bool) -> Tensor:
        x = self.first(x).tanh()
        return self.last(x if skip else x + self.middle(x).tanh())


class Scale:
    """A scaler that overflows when it is told to."""

    def __init__(self) -> None:
        self.scale = 1024.0

    def get_scale(self) -> float:
        return self.scale


def telescopes_anyhow(rank: int, size: int, name: str) -> float:
    """Largest part of a layer's gradients that is neither applied nor kept: unused layers, overflows, scales."""
    model, reference, scaler = Layers(), Layers(), Scale()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    handle = compress(ddp, make_compressor(name), feedback=True, scaler=scaler, fuse_bytes=0)
    applied, exact = ({n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(2))
    generator = torch.Generator().manual_seed(rank)
    for step in range(9):
        x, skip, bad = torch.randn(8, 32, generator=generator), step in (2, 5), step in (3, 6)
        model.zero_grad()
        reference.zero_grad()
        factor = float("inf") if bad and rank == size - 1 else 1.0
        hook = model.first.weight.register_hook(lambda g, factor=factor: g * factor)
        (ddp(x, skip=skip).square().sum() * scaler.scale).backward()
        hook.remove()
        gradients_now = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(bool(g.isfinite().all()) for g in gradients_now) != bad
        assert all(bool(kept.isfinite().all()) for kept in handle.feedback.memory.values())
        if bad:
            scaler.scale /= 2
            continue
        reference(x, skip=skip).square().sum().backward()
        for parameter, (n, other) in zip(model.parameters(), reference.named_parameters(), strict=True):
            own = torch.zeros_like(other) if other.grad is None else other.grad.clone()
            dist.all_reduce(own)
            exact[n] += own / size
            if parameter.grad is not None:
                applied[n] += parameter.grad / scaler.scale
        if step == 4:
            scaler.scale *= 4
    state = handle.state_dict()
    for n, kept in state["residuals"].items():
        applied[n] += kept / state["scale"]
    return max(float((applied[n] - exact[n]).norm() / exact[n].norm()) for n in exact)


def overflow_changes_nothing(rank: int, size: int, name: str) -> bool:
    """One layer overflows on one rank: residuals and what compressors keep, of every layer, are what they were."""
    model = Layers()
    ddp = DistributedDataParallel(model)
    handle = compress(ddp, make_compressor(name), feedback=True, fuse_bytes=0)
    generator = torch.Generator().manual_seed(rank)

    def kept() -> dict[str, Tensor]:
        directions = handle.policy.compressors()[0].state_dict()
        return {
            n: t.clone()
            for n, t in (dict(handle.feedback.memory) | {f"of {n}": t for n, t in directions.items()}).items()
        }

    def step(factor: float) -> None:
        hook = model.first.bias.register_hook(lambda g: g * factor)  # which travels exact
        ddp(torch.randn(8, 32, generator=generator), skip=False).square().sum().backward()
        hook.remove()
        model.zero_grad()

    step(1.0)
    before = kept()
    step(float("nan") if rank == 0 else 1.0)
    after = kept()
    fine = bool(before) and set(before) == set(after) and all(torch.equal(before[n], after[n]) for n in before)
    step(1.0)
    return fine and not torch.equal(before["middle.weight"], kept()["middle.weight"])


class ComplexLayer(nn.Module):
    """Complex weights, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 32, sparse=True)
        self.turn = nn.Parameter(torch.randn(32, 32, dtype=torch.complex64))
        self.last = nn.Parameter(torch.randn(32, 8, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.embedding(tokens).to(torch.complex64) @ self.turn).abs().double() @ self.last


def complex_sparse_and_double(rank: int, size: int) -> dict[str, float]:
    """Distance of gradients from plain DDP's, for parameters that no compressor is for."""
    found: list[dict[str, Tensor]] = []
    for compressed in (False, True):
        model = ComplexLayer()
        ddp = DistributedDataParallel(model)
        if compressed:
            compress(ddp, CompressionPolicy(Quantised(4), rules={"last": None}))
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            model.zero_grad()
            ddp(torch.randint(0, 40, (16,), generator=generator)).square().sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({n: g.to_dense() if g.is_sparse else g for n, g in grads.items()})
    return {n: float((g - found[1][n]).abs().max() / g.abs().max()) for n, g in found[0].items()}


def _steps(handle_state: Any, rank: int, size: int, first: int, last: int, weights: Any, method: Compressor) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    if weights is not None:
        model.load_state_dict(weights)
    ddp = DistributedDataParallel(model)
    handle = compress(ddp, method)
    if handle_state is not None:
        handle.load_state_dict(handle_state)
    for step in range(first, last):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        ddp(x[rank::size]).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    return model.state_dict(), handle


def resumes(rank: int, size: int, name: str) -> bool:
    """Stopped and gone on with its own state: the same, bit for bit, as without the stop."""
    through, _ = _steps(None, rank, size, 0, 8, None, make_compressor(name))
    through = {n: t.clone() for n, t in through.items()}
    half, handle = _steps(None, rank, size, 0, 4, None, make_compressor(name))
    file = io.BytesIO()
    torch.save({"model": half, "compression": handle.state_dict(own=True)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again, _ = _steps(loaded["compression"], rank, size, 4, 8, loaded["model"], make_compressor(name))
    return all(torch.equal(through[n], again[n]) for n in through)


def first_half(rank: int, size: int, file: str) -> list[float]:
    """Train on this many ranks, save what any number of ranks can load; the rest of the run as it would have been."""
    weights, handle = _steps(None, rank, size, 0, 6, None, PowerSGD(rank=2))
    state = {"model": weights, "compression": handle.state_dict()}
    if rank == 0:
        torch.save(state, file)
    dist.barrier()
    return second_half(rank, size, file)


def second_half(rank: int, size: int, file: str) -> list[float]:
    """Go on with mean residuals."""
    loaded = torch.load(file, weights_only=True)
    weights, handle = _steps(loaded["compression"], rank, size, 6, 12, loaded["model"], PowerSGD(rank=2))
    assert handle.step == 12
    return [float(t.double().sum()) for t in weights.values()] + [float(t.norm()) for t in weights.values()]


def complaints(rank: int, size: int) -> list[str]:
    """What is refused, in words."""
    model = nn.Linear(8, 8)
    found = []
    ddp = DistributedDataParallel(model)
    handle = compress(ddp, Quantised(4))
    for action in (
        lambda: compress(model, Quantised(4)),
        lambda: compress(ddp, Quantised(4), fuse_bytes=-1),
        lambda: compress(ddp, CompressionPolicy(None), start_step=3),
        lambda: compress(ddp, Quantised(4)),
        lambda: combine_gradients(ddp, Adasum()),
        lambda: handle.load_state_dict({"version": 7}),
        lambda: handle.load_state_dict(handle.state_dict(own=True) | {"owner": [5, 9]}),
        lambda: handle.load_state_dict(handle.state_dict() | {"residuals": {"weight": torch.zeros(3)}}),
    ):
        try:
            action()
        except ValueError as error:
            found.append(str(error))
    return found


def closes(rank: int, size: int) -> list[tuple[str, float, float]]:
    """Distance from the exact mean gradient while something is attached, and after its handle was closed."""
    model = nn.Linear(64, 64, bias=False)
    ddp = DistributedDataParallel(model)
    found = []

    def off(step: int) -> float:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * rank + step))
        exact = torch.autograd.grad(model(x).square().sum(), model.weight)[0]
        dist.all_reduce(exact)
        ddp(x).square().sum().backward()
        assert model.weight.grad is not None
        distance = float((model.weight.grad - exact / size).norm() / exact.norm())
        model.zero_grad()
        return distance

    attached: dict[str, Callable[[], Any]] = {
        "compressed": lambda: compress(ddp, Quantised(2)),
        "combined": lambda: combine_gradients(ddp, Sum()),
        "again": lambda: compress(ddp, Quantised(2)),
    }
    for name, attach in attached.items():
        with attach() as handle:
            attached_off = off(0)
        handle.close()  # twice is as good as once
        found.append((name, attached_off, off(1)))
    return found


def failure_is_raised(rank: int, size: int) -> str:
    """An error in the thread that communicates is raised by ``backward``."""

    class Broken(CompressionPolicy):
        def observe(self, means: Any, step: int) -> None:
            raise ValueError("this policy cannot look")

    ddp = DistributedDataParallel(nn.Linear(8, 8))
    compress(ddp, Broken(None))
    try:
        ddp(torch.ones(2, 8)).sum().backward()
    except Exception as error:
        return str(error)
    return ""


def formula(rank: int, size: int, name: str) -> tuple[float, float]:
    """Bytes metered in a step, and by the formula."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 50))
    ddp = DistributedDataParallel(model)
    handle = compress(ddp, CompressionPolicy(make_compressor(name), min_elements=0))
    for _ in range(2):
        handle.stats.reset()
        ddp(torch.randn(2, 100)).sum().backward()
    return handle.stats.sent_bytes, handle.bytes_per_step()


def trainer(rank: int, size: int) -> tuple[list[float], int, float]:
    """Hugging Face's trainer with a callback, as the guide has it: losses, synchronised steps, ratio of bytes."""
    # What a launcher sets, for libraries that ask the environment and not torch.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    losses: list[float] = []
    handles = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **_: Any) -> None:
            handles.append(compress(trainer.model_wrapped, PowerSGD(rank=2)))

        def on_log(self, *args: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    sizes = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    torch.manual_seed(0)
    row = torch.arange(16) * 3 % 64
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=12,
            per_device_train_batch_size=2,
            learning_rate=0.01,
            gradient_accumulation_steps=2,
            ddp_find_unused_parameters=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row}] * 256
        trainer = Trainer(model=GPT2LMHeadModel(sizes), args=arguments, train_dataset=data, callbacks=[Watch()])
        trainer.train()
    return losses, handles[0].step, handles[0].stats.ratio


def advice(rank: int, size: int) -> dict[str, Any]:
    """What is advised for a small model, and its parts."""
    from mycel.data_parallel.advise import advise

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    before = [p.clone() for p in model.parameters()]
    found = advise(model, lambda m: m(torch.ones(4, 64)).square().sum(), steps=2)
    return {
        "best": found.best.method,
        "sent": {p.method: p.sent_bytes for p in found.predictions},
        "error": {p.method: p.error for p in found.predictions},
        "step": {p.method: p.step_s for p in found.predictions},
        "local": {p.method: (p.sent_bytes, p.step_s >= (found.compute_s or 0.0)) for p in found.local},
        "untouched": all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)),
        "text": found.explain(),
    }


def each(rank: int, size: int, function: str, names: list[str]) -> dict[str, Any]:
    """What another check gives for every compressor, one after the other."""
    return {name: globals()[function](rank, size, name) for name in names}


# -- what is compiled, and when -------------------------------------------------------------------------------


def machine_code() -> dict[str, int]:
    """How many kinds of arguments each compiled function of compressors has code for, in this process."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("mycel.wire", "mycel.data_parallel")):
            for value in vars(module).values():
                if isinstance(value, Compiled):
                    found[f"{value.__module__}.{value.__name__}"] = len(value.signatures) if value.is_loaded else 0
    return found


def compiles_in_a_step(rank: int, size: int, kind: str, name: str) -> dict[str, Any]:
    """What a step or a meeting gets code for that attaching did not."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "local":
        local_updates(optimizer, Streaming(steps=2, fragments=2), model=model, compressor=make_compressor(name))
    elif kind == "sharded":
        model = fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compress(model, QSDP() if name == "qsdp" else make_compressor(name))
    else:
        model = DistributedDataParallel(model)
        residuals: Any = "int8" if kind == "eight bits" else "float32"
        compress(model, CompressionPolicy(make_compressor(name), min_elements=64), residuals=residuals)
    before = machine_code()
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))).square().sum().backward()
        optimizer.step()
    after = machine_code()
    return {"new": sorted(n for n, count in after.items() if count != before.get(n, 0)), "any": any(after.values())}
