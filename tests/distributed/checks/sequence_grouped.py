"""Steps on groups of unequal degree over real processes, under DDP and FSDP2, beside one process; ranks that die."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.errors import CommunicationError
from mycel.planning.grouping import Candidate, PlannedGroup, SequencePlan, SequencePlanner
from mycel.sequence import MicroBatch, apply, planned_step, steps

WIDTH, WORDS, LIMIT_S = 8, 32, 60.0
LENGTHS = ([14, 3, 6, 1, 5], [4, 17], [2, 2, 2, 9, 3, 3])
#: For three ranks: unequal groups, an idle rank, and all ranks on one document.
GROUPS = [
    (0, (0, 1), (0,)),
    (0, (2,), (1, 3)),
    (1, (1, 2), (2,)),
    (2, (2, 0, 1), (4,)),
]


class Block(nn.Module):
    """Attention and a causal convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.conv(x.mT)[..., : x.shape[1]].mT.tanh()


class Net(nn.Module):
    """Two blocks, the second computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids))
        return self.head(checkpoint(self.blocks[1], x, use_reentrant=False))


def documents_of(lengths: Sequence[int], seed: int) -> list[dict[str, Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, WORDS, (length,), generator=chance) for length in lengths]
    return [{"input_ids": x, "labels": x.masked_fill(x == 5, -100)} for x in ids]


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)


def loss_of(model: nn.Module, part: MicroBatch) -> Tensor:
    return part.mean(losses_of(model(part.batch["input_ids"]), part.batch["labels"]))


def alone(model: nn.Module, documents: list[dict[str, Tensor]], *, hugging: bool = False) -> Tensor:
    """The step's loss in one process, each document by itself, with gradients."""
    count = sum(int((d["labels"][1:] != -100).sum()) for d in documents)
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    for d in documents:
        if len(d["labels"]) > 1:
            ids = d["input_ids"][None]
            logits = model(input_ids=ids, use_cache=False).logits if hugging else model(ids)
            total = total + losses_of(logits[:, :-1], d["labels"][None, 1:]).sum() / count
    total.backward()
    return total.detach()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        found[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def farthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert set(found) == set(wanted)
    return max(float((found[name] - gradient).abs().max()) for name, gradient in wanted.items())


def plan() -> SequencePlan:
    made = tuple(PlannedGroup(micro_batch=m, ranks=r, sequences=s) for m, r, s in GROUPS)
    return SequencePlan(groups=made, total_us=1.0, lower_bound_us=0.0)


def gradients(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """Float64: how far loss and gradients are from one process, under each wrapper."""
    torch.manual_seed(0)
    net = Net().double()
    documents = documents_of(LENGTHS[0], 1)
    reference = copy.deepcopy(net)
    loss = alone(reference, documents)
    wanted = gradients_of(reference)
    found = {}
    for wrapper in ("ddp", "fsdp2", "fsdp2, averaged in each micro-batch"):
        model = copy.deepcopy(net)
        handle = apply(model)
        wrapped: nn.Module = model
        if wrapper == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (world_size,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        step = planned_step(plan(), documents, handle)
        got = step.run(wrapped, loss_of, average_each="each" in wrapper)
        found[wrapper] = (abs(float(got - loss)), farthest(gradients_of(wrapped), wanted))
        wrapped.zero_grad()
        step.run(wrapped, loss_of)  # twice in a row
        found[f"{wrapper}, again"] = (0.0, farthest(gradients_of(wrapped), wanted))
        handle.close()
    return found


def losses(rank: int, world_size: int) -> dict[str, Any]:
    """A Llama in float32 over some steps that are planned here: losses beside one process, and degrees."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    reference = copy.deepcopy(model)
    batches = [documents_of(lengths, seed) for seed, lengths in enumerate((*LENGTHS, *LENGTHS))]
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference))
    planner = SequencePlanner(
        num_ranks=world_size,
        capacity_tokens=8,
        us_per_token2=1.0,
        us_per_token=1.0,
        us_per_step=10.0,
        candidates=tuple(Candidate(size=n, comm_us_per_token=n - 1.0) for n in range(1, world_size + 1)),
        max_micro_batches=3,
        limit_s=0,
    )
    got, wanted, degrees = [], [], []
    with apply(model) as handle, planner:
        ddp = DistributedDataParallel(model)
        for step in steps(batches, planner, handle):
            got.append(step.run(ddp).item())
            optimizer.step()
            optimizer.zero_grad()
            degrees.append(sorted(len(group.ranks) for group in step.plan.groups))
            wanted.append(alone(reference, batches[step.number], hugging=True).item())
            other.step()
            other.zero_grad()
    return {"losses": got, "wanted": wanted, "degrees": degrees}


def everything(rank: int, world_size: int) -> dict[str, Any]:
    """Both, in one launch."""
    return {"gradients": gradients(rank, world_size), **losses(rank, world_size)}


def lost(rank: int, world_size: int, victim: int) -> tuple[str, str] | None:
    """A rank is killed on its way into the agreement on a plan; what the others say."""
    told = dist.FileStore(os.environ["STORE_FILE"] + "-told", -1)
    others = world_size - 1

    def wait_for_the_others() -> None:
        until = time.monotonic() + LIMIT_S
        while told.add("told", 0) < others and time.monotonic() < until:
            time.sleep(0.05)

    if rank == victim and (pid := os.fork()):  # what is killed is a child, so that the test's own rank lives
        wait_for_the_others()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None
    store = dist.FileStore(os.environ["STORE_FILE"], -1)
    dist.init_process_group(
        "mycel", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=LIMIT_S)
    )
    handle = apply(Net())

    def plans(lengths: tuple[int, ...]) -> SequencePlan:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)  # in the thread that plans, while the others wait to be told
        return plan()

    def batches() -> Iterator[Iterable[Any]]:
        yield documents_of(LENGTHS[0], 1)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        yield documents_of(LENGTHS[0], 2)

    found = ("none", "")
    try:
        for step in steps(batches(), plans, handle):  # type: ignore[arg-type]
            step.run(handle._model, loss_of)
    except CommunicationError as error:
        found = type(error).__name__, str(error)
    told.add("told", 1)
    wait_for_the_others()  # who ends now is another loss
    return found
