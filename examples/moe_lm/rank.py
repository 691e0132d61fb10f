"""What each rank of the comparison runs; ``train.py`` starts it. Rank 0 prints one JSON object a line.

Models take turns, step by step, behind a barrier each, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from byte_model import ByteModel, Sizes, dense, experts, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import mycel.runtime
from mycel.demo.corpus import load_corpus, sample_batch
from mycel.demo.train import learning_rate
from mycel.moe import ExpertParallel, MoE, expert_parameter_names, moe_loss, node_mesh, nodes_of
from mycel.topology.model import Topology

#: Name of a model, and the exchange and codec of its experts; the dense one has none.
MODELS: dict[str, tuple[str, str] | None] = {
    "dense": None,
    "flat": ("all_to_all", "identity"),
    "flat, int8": ("all_to_all", "int8"),
    "hierarchical": ("hierarchical", "identity"),
    "hierarchical, bf16": ("hierarchical", "bf16"),
    "hierarchical, fp8": ("hierarchical", "fp8"),
    "hierarchical, int8": ("hierarchical", "int8"),
    "hierarchical, int4": ("hierarchical", "int4"),
}
#: Where no cluster is emulated, all ranks are in one place; this is how they would be divided.
BOXES = ((0, 1), (2, 3))
PEAK_RATE = 4e-3
HELD_OUT_WINDOWS = 256


@dataclass(kw_only=True)
class Runner:
    """A model in training.

    Attributes:
        nodes: ranks of each machine.
        seconds: of each step on this rank.
        sent: bytes that left the node over this rank's cables, of all steps.
        rows: bytes of rows that did, as the layers counted them.
    """

    name: str
    model: ByteModel
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    nodes: Sequence[Sequence[int]]
    seconds: list[float] = field(default_factory=list)
    sent: int = 0
    rows: int = 0

    def step(self, text: Tensor, options: argparse.Namespace, rate: float, counter: Callable[[], int]) -> None:
        """One step on this rank's next windows."""
        inputs, targets = sample_batch(text, options.batch_size, options.length, self.generator)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        meters = [layer.dispatcher.meter for layer in self.model.modules() if isinstance(layer, MoE)]
        for meter in meters:
            meter.reset()
        dist.barrier()
        before, begin = counter(), time.perf_counter()
        loss = loss_of(self.wrapped, inputs, targets) + moe_loss(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begin)
        dist.barrier()
        self.sent += counter() - before
        self.rows += sum(meter.between(self.nodes) for meter in meters)

    @torch.no_grad()
    def held_out_loss(self, inputs: Tensor, targets: Tensor) -> float:
        """Nats a byte over all ranks' windows."""
        parts = zip(inputs.split(32), targets.split(32), strict=True)
        losses = torch.stack([loss_of(self.model, some, wanted).double() for some, wanted in parts])
        return over_ranks(losses.mean().view(1), dist.ReduceOp.SUM).item() / dist.get_world_size()


def make_runner(name: str, sizes: Sizes, mesh: DeviceMesh, nodes: Sequence[Sequence[int]], seed: int) -> Runner:
    """A model of ``MODELS`` at its beginning."""
    exchange = MODELS[name]
    feed: Callable[[], nn.Module] = partial(dense, sizes)
    if exchange is not None:
        feed = partial(experts, sizes, ExpertParallel(mesh, dispatcher=exchange[0], codec=exchange[1]))
    model = ByteModel(sizes, feed, seed=seed)
    return Runner(
        name=name,
        model=model,
        wrapped=DistributedDataParallel(model, gradient_as_bucket_view=True),
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        ),
        generator=torch.Generator().manual_seed(1000 * seed + dist.get_rank()),
        nodes=nodes,
    )


def over_ranks(values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    """The ranks' sums or maxima."""
    combined = values.double().clone()
    dist.all_reduce(combined, op=how)
    return combined


def cables_between_nodes(topology: Topology | None) -> Callable[[], int]:
    """What reads the bytes this rank has sent over cables that leave its node; 0 without an emulated cluster."""
    if topology is None:
        return lambda: 0
    own = topology.ranks[dist.get_rank()]
    node = topology.vertices[own].node
    ends = [link.dst for link in topology.links if link.src == own and topology.vertices[link.dst].node != node]
    names = {f"to{vertex}" for vertex in ends}  # an emulated rank's interfaces are called after what they lead to

    def read() -> int:
        lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
        counted = {name.strip(): fields.split() for name, fields in (line.split(":") for line in lines)}
        return sum(int(counted[name][8]) for name in names)

    return read


def say(**record: object) -> None:
    """One line of JSON from rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(record), flush=True)


def train(options: argparse.Namespace) -> None:
    """All models, step by step in turn."""
    communicator = mycel.runtime.tensor_group().communicator
    topology = communicator.topology if options.emulated else None
    nodes = BOXES if topology is None else nodes_of(topology)
    mesh = DeviceMesh("cpu", torch.tensor(BOXES)) if topology is None else node_mesh(topology)
    counter = cables_between_nodes(topology)
    corpus = load_corpus(max_bytes=3 << 20)
    sizes = Sizes(length=options.length)
    windows = sample_batch(corpus.held_out, HELD_OUT_WINDOWS, options.length, torch.Generator().manual_seed(1))
    inputs, targets = (w[dist.get_rank() :: dist.get_world_size()] for w in windows)
    runners = [make_runner(name, sizes, mesh, nodes, options.seed) for name in MODELS]
    for runner in runners:
        say(event="start", name=runner.name, parameters=count(runner.model))
    for step in range(options.steps):
        rate = learning_rate(step, peak=PEAK_RATE, warm_up=min(20, options.steps // 4), steps=options.steps)
        for runner in runners:
            runner.step(corpus.train, options, rate, counter)
        if (step + 1) % options.eval_every == 0 or step + 1 == options.steps:
            for runner in runners:
                loss = runner.held_out_loss(inputs, targets)
                elapsed = over_ranks(torch.tensor(runner.seconds), dist.ReduceOp.MAX).sum().item()
                say(event="eval", name=runner.name, step=step + 1, loss=loss, elapsed_s=elapsed)
    for runner in runners:
        totals = over_ranks(torch.tensor([runner.sent, runner.rows]), dist.ReduceOp.SUM) / options.steps
        seconds = over_ranks(torch.tensor(runner.seconds), dist.ReduceOp.MAX)
        say(
            event="end",
            name=runner.name,
            step_s=seconds[min(3, options.steps - 1) :].median().item(),
            bytes_between=totals[0].item() if options.emulated else None,
            bytes_of_rows=totals[1].item(),
        )


def count(model: nn.Module) -> int:
    """Parameters of the whole model: of each rank's experts, and once of everything else."""
    names = set(expert_parameter_names(model))
    own = sum(p.numel() for name, p in model.named_parameters() if name in names)
    others = sum(p.numel() for name, p in model.named_parameters() if name not in names)
    return others + int(over_ranks(torch.tensor([own]), dist.ReduceOp.SUM).item())


def main() -> None:
    """``train.py`` or ``mycel emulate`` has set RANK and the rest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--eval-every", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--emulated", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("mycel")
    train(options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
