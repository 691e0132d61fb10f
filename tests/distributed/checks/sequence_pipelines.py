"""Stages of a pipeline whose ranks divide the sequence: losses and gradients of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mycel.sequence
from mycel.moe import MoE, SwitchLoss, attach_moe_loss, moe_loss
from mycel.parallel import Pipeline
from mycel.pipeline.known.gpipe import gpipe
from mycel.pipeline.known.interleaved import interleaved
from mycel.pipeline.known.one_f_one_b import one_f_one_b
from mycel.pipeline.known.zb_h1 import zb_h1

DIM, HEADS, WORDS, MICRO_BATCHES = 8, 2, 11, 4
LENGTHS = [9, 1, 7]


class Block(nn.Module):
    """Attention and a feed-forward network, of experts where a mesh is given."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.own: nn.Module = nn.Linear(DIM, DIM)
        if experts is not None:
            mesh = None if experts == "whole" else experts
            self.own = MoE(DIM, 12, 4, 2, parallel=mesh, balancing=SwitchLoss(0.5))

    def forward(self, x: Tensor, documents: list[int] | None = None) -> Tensor:
        found = []
        for part in [x] if documents is None else x.split(documents, 1):
            q, k, v = self.qkv(part).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            found.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = x + torch.cat(found, 1)
        out: Tensor = y + torch.tanh(self.own(y))
        return out


class Model(nn.Module):
    """An embedding, blocks and a head; alone, or as the blocks of one stage with what comes before or after."""

    def __init__(self, num_blocks: int, experts: Any = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(num_blocks))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, x: Tensor, documents: list[int] | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, documents)
        out: Tensor = self.head(x)
        return out


class Part(nn.Module):
    """A stage: some blocks of the model, computed again in the backward pass if ``again``."""

    def __init__(self, model: Model, stage: int, num_stages: int, *, again: bool, attaches: bool) -> None:
        super().__init__()
        each = len(model.blocks) // num_stages
        self.blocks = nn.ModuleList(list(model.blocks)[stage * each : (stage + 1) * each])
        self.embed = model.embed if stage == 0 else nn.Identity()
        self.head = model.head if stage == num_stages - 1 else nn.Identity()
        self.again, self.attaches = again, attaches

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        out: Tensor = self.head(x)
        return attach_moe_loss(out, self, factor=1.0) if self.attaches else out


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of all micro-batches, two rows each, with the same documents in each row."""
    made = torch.Generator().manual_seed(70 + step)
    ids = torch.randint(0, WORDS, (2 * MICRO_BATCHES, sum(LENGTHS)), generator=made)
    return ids, ids.masked_fill(torch.rand(ids.shape, generator=made) < 0.1, -100)


def shifted(labels: Tensor) -> Tensor:
    parts = labels.split(LENGTHS, 1)
    return torch.cat([functional.pad(part[:, 1:], (0, 1), value=-100) for part in parts], 1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)


def in_one_process(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    """Loss of the step, each micro-batch by itself, as balance of experts is of a micro-batch."""
    targets, total = shifted(labels), torch.zeros((), dtype=torch.float64)
    count = int((targets != -100).sum())
    for x, y in zip(ids.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True):
        total = total + cross_entropy(model(x, LENGTHS), y).sum() / count + moe_loss(model) / MICRO_BATCHES
    total.backward()
    return total.detach()


def theirs(kind: Any) -> Callable[..., Any]:
    """A step of torch's own schedule."""

    def make(parts: dict[int, nn.Module], loss: Callable[..., Tensor], group: dist.ProcessGroup, size: int) -> Any:
        ((index, part),) = parts.items()
        stage = PipelineStage(part, index, size, torch.device("cpu"), group=group)
        return kind(stage, MICRO_BATCHES, loss_fn=loss).step

    return make


def ours(order: Callable[..., Any], *more: int) -> Callable[..., Any]:
    """A step of this library's."""

    def make(parts: dict[int, nn.Module], loss: Callable[..., Tensor], group: dist.ProcessGroup, size: int) -> Any:
        return Pipeline(order(size, MICRO_BATCHES, *more), parts, loss, group=group, timeout_s=60).step

    return make


#: Who carries it out, what averages over the ranks of a stage, stages a rank, whether the stage is applied rather
#: than the model, recomputation, experts.
CASES: dict[str, tuple[Callable[..., Any], str, int, bool, bool, bool]] = {
    "torch gpipe": (theirs(ScheduleGPipe), "fsdp", 1, False, False, False),
    "torch 1f1b": (theirs(Schedule1F1B), "fsdp", 1, True, True, False),
    "1f1b": (ours(one_f_one_b), "ddp", 1, False, True, False),
    "gpipe, experts": (ours(gpipe), "ddp", 1, True, False, True),
    "interleaved": (ours(interleaved, 2), "ddp", 2, False, False, False),
    "zb_h1": (ours(zb_h1), "ddp", 1, False, False, False),
    "zb_h1, sharded": (ours(zb_h1), "fsdp", 1, False, True, False),
}


def stages_over_ranks(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    """Of each case how far losses and gradients of two steps are from one process."""
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "cp"))
    return {name: _case(mesh, *CASES[name]) for name in names}


def _case(
    mesh: DeviceMesh, make: Callable[..., Any], averages: str, chunks: int, by_stage: bool, again: bool, experts: bool
) -> float:
    place, size = mesh.get_local_rank("pp"), mesh["pp"].size()
    num_stages, far = size * chunks, 0.0
    whole, model = Model(4, "whole" if experts else None), Model(4, mesh["cp"] if experts else None)
    handles = [] if by_stage else [mycel.sequence.apply(model, mesh["cp"])]
    parts: dict[int, nn.Module] = {}
    for index in range(place, num_stages, size):
        part = Part(model, index, num_stages, again=again, attaches=experts)
        if by_stage:
            handles.append(mycel.sequence.apply(part, mesh["cp"]))
        parts[index] = part
        if averages == "ddp":
            parts[index] = DistributedDataParallel(part, process_group=mesh.get_group("cp"))
        elif averages == "fsdp":
            fully_shard(part, mesh=mesh["cp"])
    handle = handles[0]
    scale = [0.0]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return handle.mean(cross_entropy(logits, labels), scale[0])

    step = make(parts, loss, mesh.get_group("pp"), size)
    for number in range(2):
        ids, labels = batch(number)
        wanted = in_one_process(whole, ids, labels)
        given = {"input_ids": ids, "labels": labels}
        made = handle.shard(given, documents=LENGTHS)
        scale[0] = float(handle.count_labels(given, LENGTHS)) / MICRO_BATCHES
        losses: list[Tensor] = []
        last = num_stages - 1 in parts
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(
                *([made["input_ids"]] if 0 in parts else []),
                target=made["labels"] if last else None,
                losses=losses if last else None,
            )
        if last and not experts:
            got = handle.average(torch.stack(losses).mean())
            far = max(far, abs(float(got / wanted) - 1))
        for index, part in parts.items():
            far = max(far, _gradients(index, part, whole, num_stages))
            part.zero_grad()
        whole.zero_grad()
    handle.close()
    return far


def _gradients(index: int, part: nn.Module, whole: Model, num_stages: int) -> float:
    found, each = 0.0, len(whole.blocks) // num_stages
    inner: Any = getattr(part, "module", part)
    for name, parameter in inner.named_parameters():
        kind, _, rest = name.partition(".")
        if kind == "blocks":
            number, _, rest = rest.partition(".")
            rest = f"{int(number) + index * each}.{rest}"
        wanted, gradient = whole.get_parameter(f"{kind}.{rest}").grad, parameter.grad
        assert wanted is not None and gradient is not None
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[operator]
        if ".experts." in name:
            experts: Any = inner.blocks[int(number)].own.experts
            wanted = wanted[list(experts.owned)]
        found = max(found, float((gradient - wanted).norm() / wanted.norm()))
    return found
