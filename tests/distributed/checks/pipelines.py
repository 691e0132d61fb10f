"""Orders carried out on ranks, against one process that has the whole model; what each check does is in its name."""

from __future__ import annotations

import os
import pickle
import random
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.errors import MismatchError, UsageError, VerificationError
from mycel.parallel import Controller, Pipeline, Step, serve
from mycel.parallel.torch_pipelining import keeps_receive_buffers
from mycel.pipeline.known.chimera import chimera
from mycel.pipeline.known.dualpipe import dualpipe
from mycel.pipeline.known.dualpipe_v import dualpipe_v
from mycel.pipeline.known.gpipe import gpipe
from mycel.pipeline.known.interleaved import interleaved
from mycel.pipeline.known.looped_bfs import looped_bfs
from mycel.pipeline.known.one_f_one_b import one_f_one_b
from mycel.pipeline.known.v_half import v_half
from mycel.pipeline.known.v_min import v_min
from mycel.pipeline.known.zb_h1 import zb_h1
from mycel.pipeline.known.zb_v import zb_v
from mycel.pipeline.order import NO_STAGE, Action, Kind, Order

WIDTH, ROWS = 12, 3
TORCHS = (gpipe, one_f_one_b, interleaved, looped_bfs, zb_h1, zb_v, dualpipe_v)


def torchs_orders(size: int) -> list[Order]:
    """Torch's seven, over so many ranks."""
    chunks = {interleaved: 2, looped_bfs: 2, zb_v: 2, dualpipe_v: 2}
    return [make(size, 2 * size, chunks.get(make, 1)) for make in TORCHS]


def random_order(
    seed: int,
    stage_ranks: Sequence[int],
    num_micro_batches: int,
    *,
    routes: Sequence[Sequence[int]] | None = None,
    feeds: Sequence[tuple[str, str]] | None = None,
    split: bool = False,
) -> Order:
    """Any right order: again and again something that could be done now is done."""
    choice = random.Random(seed)
    num_stages, num_ranks = len(stage_ranks), max(stage_ranks) + 1
    paths = [list(path) for path in routes or [range(num_stages)] * num_micro_batches]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    waits: dict[tuple[str, int], set[str]] = {}
    for m, path in enumerate(paths):
        pairs = list(feeds or [])
        if feeds is None:
            steps = list(pairwise(path))
            pairs += [(f"{a}F", f"{b}F") for a, b in steps] + [(f"{b}B", f"{a}B") for a, b in steps]
        pairs += [(f"{stage}F", f"{stage}B") for stage in path]
        for before, after in pairs:
            waits.setdefault((before, m), set())
            waits.setdefault((after, m), set()).add(before)
    late: list[Action] = []
    while waits or late:
        ready = [key for key in sorted(waits) if not any((before, key[1]) in waits for before in waits[key])]
        number = choice.randrange(len(ready) + len(late))
        if number >= len(ready):
            action = late.pop(number - len(ready))
            rows[stage_ranks[action.stage]].append(action)
            continue
        name, m = ready[number]
        del waits[name, m]
        if not name[0].isdigit():
            for row in rows:
                row.append(Action(stage=NO_STAGE, kind=Kind.SHARED, micro_batch=m, block=name))
            continue
        stage, kind = int(name[:-1]), Kind(name[-1])
        if kind is Kind.BACKWARD and split and choice.random() < 0.6:
            kind = Kind.INPUT
            late.append(Action(stage=stage, kind=Kind.WEIGHT, micro_batch=m))
        rows[stage_ranks[stage]].append(Action(stage=stage, kind=kind, micro_batch=m))
    return Order(
        rows=tuple(tuple(row) for row in rows),
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        routes=None if routes is None else tuple(tuple(path) for path in routes),
        feeds=None if feeds is None else tuple(feeds),
        name=f"random {seed}",
    )


def unlike_orders(size: int) -> list[Order]:
    """What torch has no class for: unequal stages a rank, routes past stages, any sequence of micro-batches."""
    there_and_back = [*range(size), *reversed(range(size - 1))]
    uneven = [rank for rank in range(size) for _ in range(1 + rank % 2)]
    straight = list(range(size))
    skips = [[s for s in range(size) if s in (0, size - 1) or (s + m) % 3] for m in range(4)]
    swaps = [[0, *([2, 1] if size > 3 and m % 2 else range(1, min(3, size - 1))), *range(3, size)] for m in range(4)]
    swaps = [[*path, size - 1] if path[-1] != size - 1 else path for path in swaps]
    both_ways = [chimera(size, 2 * size), dualpipe(size, 2 * size)] if size % 2 == 0 else []
    return [
        *both_ways,
        v_half(size, 4),
        v_min(size, 4),
        random_order(1, there_and_back, 4),
        random_order(2, uneven, 5),
        random_order(3, straight, 5),
        random_order(4, straight, 4, split=True),
        random_order(5, there_and_back, 3, split=True),
        random_order(6, straight, 4, routes=skips),
        random_order(7, straight, 4, routes=swaps, split=True),
    ]


def stages_of(num_stages: int, *, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]


def batch_of(order: Order, step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    shape = (ROWS * order.num_micro_batches, WIDTH)
    return torch.randn(shape, generator=made), torch.randn(shape, generator=made)


def in_one_process(
    order: Order, stages: Sequence[nn.Module], inputs: Tensor, targets: Tensor
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Losses by micro-batch and gradients by stage of the whole model, each micro-batch along its route."""
    losses = []
    count = order.num_micro_batches
    for m, (x, y) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
        for stage in order.route_of(m):
            x = stages[stage](x)
        losses.append(nn.functional.mse_loss(x, y))
    torch.stack(losses).mean().backward()
    grads = [[p.grad.clone() for p in stage.parameters()] for stage in stages]
    for stage in stages:
        stage.zero_grad()
    return [loss.detach() for loss in losses], grads


def close(name: str, found: Iterable[Tensor], right: Iterable[Tensor]) -> None:
    """Equal within a millionth of the largest."""
    for mine, one in zip(found, right, strict=True):
        off = float((mine - one).abs().max() / one.abs().max().clamp_min(1e-30))
        assert off <= 1e-6, f"{name}: off by {off:.1e} of the largest"


def carry_out(rank: int, order: Order, wrap: Callable[[nn.Module], nn.Module] = lambda m: m, **more: Any) -> None:
    """Two steps of an order: losses, gradients, outputs and buffers."""
    whole = stages_of(order.num_stages)
    mine = {index: wrap(stages_of(order.num_stages)[index]) for index in order.stages_of(rank)}
    pipeline = Pipeline(order, mine, nn.functional.mse_loss, **more)
    for step in range(2):
        inputs, targets = batch_of(order, step)
        right_losses, right_grads = in_one_process(order, whole, inputs, targets)
        losses: list[Tensor] = []
        first = any(order.route_of(m)[0] in mine for m in range(order.num_micro_batches))
        output = pipeline.step(*([inputs] if first else []), target=targets, losses=losses)
        what = f"{order.name}, step {step}, rank {rank}"
        ending = [m for m in range(order.num_micro_batches) if order.route_of(m)[-1] in mine]
        if ending:
            close(f"{what}, losses", losses, [right_losses[m] for m in ending])
            with torch.no_grad():
                parts = []
                for m in ending:
                    x = inputs.chunk(order.num_micro_batches)[m]
                    for stage in order.route_of(m):
                        x = whole[stage](x)
                    parts.append(x)
            close(f"{what}, outputs", [output], [torch.cat(parts)])
        else:
            assert output is None and not losses
        for index, module in mine.items():
            close(f"{what}, stage {index}", [p.grad for p in module.parameters()], right_grads[index])
            module.zero_grad()
        buffers = pipeline.buffers()
        assert buffers["received"] <= buffers["needed"], f"{what}: {buffers}"


def torchs(rank: int, size: int) -> None:
    for order in torchs_orders(size):
        carry_out(rank, order)


def searched(rank: int, size: int, texts: Sequence[str]) -> None:
    """Orders that search has found, handed over as JSON."""
    for text in texts:
        carry_out(rank, Order.from_json(text))


def unlike(rank: int, size: int) -> None:
    for number, order in enumerate(unlike_orders(size)):
        carry_out(rank, order, receive_ahead=(number + 1) % 3)


# -- blocks that all ranks carry out together ----------------------------------------------------------------------

WORDS = 24


class Embedding:
    """A table of words divided over all ranks: its forward and its backward are two blocks."""

    def __init__(self, rank: int, size: int) -> None:
        torch.manual_seed(7)
        own = slice(rank * WORDS // size, (rank + 1) * WORDS // size)
        self.first, self.weight = own.start, torch.randn(WORDS, WIDTH)[own].clone().requires_grad_()
        self.looked_up: dict[int, Tensor] = {}

    def forward(self, step: Step, micro_batch: int) -> None:
        (words,) = step.args(micro_batch)
        places = words - self.first
        here = (places >= 0) & (places < len(self.weight))
        part = self.weight[places.clamp(0, len(self.weight) - 1)] * here[:, None]
        whole = part.detach().clone()
        dist.all_reduce(whole, group=step.group)
        self.looked_up[micro_batch] = part
        if step.has_stage(0):
            step.set_input(0, micro_batch, whole)

    def backward(self, step: Step, micro_batch: int) -> None:
        part = self.looked_up.pop(micro_batch)
        grad = torch.empty_like(part)
        if step.has_stage(0):
            (found,) = step.input_grads(0, micro_batch)
            assert found is not None
            grad = found
        dist.broadcast(grad, group_src=0, group=step.group)
        part.backward(grad)


def m_shape(rank: int, size: int, text: str) -> None:
    """An embedding on all ranks before the first stage and after its backward; one order is from search."""
    chain = [(f"{s}F", f"{s + 1}F") for s in range(size - 1)] + [(f"{s + 1}B", f"{s}B") for s in range(size - 1)]
    feeds = [("embed", "0F"), *chain, ("0B", "embed_back")]
    orders = [random_order(seed, range(size), 4, feeds=feeds, split=seed == 12) for seed in (11, 12)]
    for order in [Order.from_json(text), *orders]:
        whole = stages_of(size)
        torch.manual_seed(7)
        table = torch.randn(WORDS, WIDTH).requires_grad_()
        mine, embedding = stages_of(size)[rank], Embedding(rank, size)
        blocks = {"embed": embedding.forward, "embed_back": embedding.backward}
        pipeline = Pipeline(order, {rank: mine}, nn.functional.mse_loss, shared=blocks)
        words, targets = torch.arange(ROWS * 4) * 5 % WORDS, batch_of(order, 0)[1]
        for _ in range(2):
            right, grads = in_one_process(order, [nn.Sequential(Look(table), whole[0]), *whole[1:]], words, targets)
            losses: list[Tensor] = []
            pipeline.step(words, target=targets, losses=losses)
            if rank == size - 1:
                close("losses", losses, right)
            close("stage", [p.grad for p in mine.parameters()], grads[rank][rank == 0 :])
            count = order.num_micro_batches
            own = grads[0][0][embedding.first : embedding.first + len(embedding.weight)]
            close("table", [embedding.weight.grad / count], [own])  # the block divides for itself
            embedding.weight.grad = None
            mine.zero_grad()


class Look(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.detach().clone())

    def forward(self, words: Tensor) -> Tensor:
        return self.table[words]


class Meeting:
    """A layer between two stages, its columns divided over all ranks; forward and backward are two blocks."""

    def __init__(self, rank: int, size: int) -> None:
        torch.manual_seed(9)
        own = slice(rank * WIDTH // size, (rank + 1) * WIDTH // size)
        self.own, self.weight = own, torch.randn(WIDTH, WIDTH)[:, own].clone().requires_grad_()
        self.met: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, step: Step, micro_batch: int) -> None:
        last = step.group.size() // 2 - 1
        given = step.outputs(last, micro_batch)[0] if step.has_stage(last) else torch.empty(ROWS, WIDTH)
        dist.broadcast(given, group_src=last, group=step.group)
        given = given.clone().requires_grad_()
        part = given @ self.weight
        whole = torch.zeros(ROWS, WIDTH)
        whole[:, self.own] = part.detach()
        dist.all_reduce(whole, group=step.group)
        self.met[micro_batch] = given, part
        if step.has_stage(last + 1):
            step.set_input(last + 1, micro_batch, whole)

    def backward(self, step: Step, micro_batch: int) -> None:
        first = step.group.size() // 2
        given, part = self.met.pop(micro_batch)
        grad: Tensor | None = torch.empty(ROWS, WIDTH)
        if step.has_stage(first):
            (grad,) = step.input_grads(first, micro_batch)
        assert grad is not None
        dist.broadcast(grad, group_src=first, group=step.group)
        part.backward(grad[:, self.own])
        assert given.grad is not None
        dist.all_reduce(given.grad, group=step.group)
        if step.has_stage(first - 1):
            step.set_output_grads(first - 1, micro_batch, given.grad)


class Times(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def nn_shape(rank: int, size: int, text: str) -> None:
    """A layer of all ranks between the halves of a chain, and its backward, in an order from search."""
    order = Order.from_json(text)
    whole, mine, meeting = stages_of(size), stages_of(size)[rank], Meeting(rank, size)
    torch.manual_seed(9)
    between = Times(torch.randn(WIDTH, WIDTH))
    blocks = {"meet": meeting.forward, "meet_back": meeting.backward}
    pipeline = Pipeline(order, {rank: mine}, nn.functional.mse_loss, shared=blocks)
    half, count = size // 2, order.num_micro_batches
    for step in range(2):
        inputs, targets = batch_of(order, step)
        model = nn.Sequential(*whole[:half], between, *whole[half:])
        right = [
            nn.functional.mse_loss(model(x), y)
            for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True)
        ]
        torch.stack(right).mean().backward()
        losses: list[Tensor] = []
        pipeline.step(*([inputs] if rank == 0 else []), target=targets, losses=losses)
        if rank == size - 1:
            close("losses", losses, [loss.detach() for loss in right])
        close("stage", [p.grad for p in mine.parameters()], [p.grad for p in whole[rank].parameters()])
        close("block", [meeting.weight.grad / count], [between.weight.grad[:, meeting.own]])
        meeting.weight.grad = None
        model.zero_grad()
        mine.zero_grad()


def overlapped(rank: int, size: int) -> None:
    """Forward and backward of one action by a function of one's own, which here does the backward first."""
    order = dualpipe_v(size, 4 * size)
    pairs = [action for action in order.rows[rank] if action.kind is Kind.OVERLAP]
    assert pairs
    seen = []

    def backward_first(forward: Callable[[], None], backward: Callable[[], None]) -> None:
        seen.append(True)
        backward()
        forward()

    carry_out(rank, order, overlap=backward_first)
    assert len(seen) == 2 * len(pairs)


def overlap_that_forgets(rank: int, size: int) -> None:
    order = Order.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    inputs, targets = batch_of(order, 0)
    carry_out(rank, order, overlap=lambda forward, backward: (backward(), forward()))
    for overlap, did in ((lambda forward, _: forward(), "0F1"), (lambda *_: None, "nothing")):
        pipeline = Pipeline(order, {0: stages_of(1)[0]}, nn.functional.mse_loss, overlap=overlap)
        words = f"(0F1;0B0)OVERLAP_F_B: overlap has to carry out both parts once, and did {did}"
        raises(UsageError, words, lambda pipeline=pipeline: pipeline.step(inputs, target=targets))


def compiled(rank: int, size: int) -> None:
    """Compiled stages run in orders with whole backwards; where those are cut in two they are refused first."""

    def made(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend="aot_eager")

    carry_out(rank, one_f_one_b(size, 4), made)
    order = zb_h1(size, 4)
    split = {leaf.stage for leaf in order.rows[rank] if leaf.kind is Kind.INPUT}
    assert rank in split
    in_place = stages_of(size)[rank]
    in_place.compile(backend="aot_eager")
    for module in (made(stages_of(size)[rank]), in_place):
        raises(
            UsageError,
            f"stage {rank} is made by torch.compile, and the order has its backward in two halves",
            lambda module=module: Pipeline(order, {rank: module}, nn.functional.mse_loss),
        )


def k_shape(rank: int, size: int, text: str) -> None:
    """Two branches that meet in a block of all ranks, which computes the loss, and back; one order is from search."""
    half = size // 2
    ends = (half - 1, size - 1)
    feeds = [(f"{s}F", f"{s + 1}F") for s in range(size - 1) if s != ends[0]]
    feeds += [(f"{s + 1}B", f"{s}B") for s in range(size - 1) if s != ends[0]]
    feeds += [(f"{ends[0]}F", "meet"), (f"{ends[1]}F", "meet"), ("meet", f"{ends[0]}B"), ("meet", f"{ends[1]}B")]

    def meet(step: Step, micro_batch: int) -> None:
        found = []
        for end in ends:
            output = step.outputs(end, micro_batch)[0] if step.has_stage(end) else torch.empty(ROWS, WIDTH)
            dist.broadcast(output, group_src=end, group=step.group)
            found.append(output.clone().requires_grad_())
        loss = nn.functional.mse_loss(found[0] * found[1], step.target(micro_batch))
        step.set_loss(micro_batch, loss)
        loss.backward()
        for end, output in zip(ends, found, strict=True):
            if step.has_stage(end):
                step.set_output_grads(end, micro_batch, output.grad)

    orders = [random_order(seed, range(size), 4, feeds=feeds, split=seed == 14) for seed in (13, 14)]
    for order in [Order.from_json(text), *orders]:
        whole, mine = stages_of(size), stages_of(size)[rank]
        pipeline = Pipeline(order, {rank: mine}, shared={"meet": meet})
        inputs, targets = batch_of(order, 0)
        for _ in range(2):
            right = []
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                one, other = nn.Sequential(*whole[:half])(x), nn.Sequential(*whole[half:])(x)
                right.append(nn.functional.mse_loss(one * other, y))
            torch.stack(right).mean().backward()
            losses: list[Tensor] = []
            pipeline.step(*([inputs] if rank in (0, half) else []), target=targets, losses=losses)
            close("losses", losses, [loss.detach() for loss in right])
            close("stage", [p.grad for p in mine.parameters()], [p.grad for p in whole[rank].parameters()])
            mine.zero_grad()
            for stage in whole:
                stage.zero_grad()


# -- what may be inside of stages ----------------------------------------------------------------------------------


def sharded(rank: int, size: int) -> None:
    """FSDP2 inside of stages: two pipelines beside each other, whose stages share parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "pipe"))
    data, pipe = mesh.get_local_rank("data"), mesh.get_local_rank("pipe")
    count = size // 2
    there_and_back = [*range(count), *reversed(range(count))]
    for order in (one_f_one_b(count, 4), zb_v(count, 4), random_order(21, there_and_back, 4)):
        whole = stages_of(order.num_stages)
        mine = {index: stages_of(order.num_stages)[index] for index in order.stages_of(pipe)}
        for module in mine.values():
            fully_shard(module, mesh=mesh["data"], reshard_after_forward=False)
        pipeline = Pipeline(order, mine, nn.functional.mse_loss, group=mesh.get_group("pipe"))
        for step in range(2):
            parts = [batch_of(order, 10 * step + part) for part in range(2)]
            found = [in_one_process(order, whole, *part) for part in parts]
            losses: list[Tensor] = []
            inputs, targets = parts[data]
            pipeline.step(*([inputs] if 0 in mine else []), target=targets, losses=losses)
            if order.num_stages - 1 in mine:
                close(f"{order.name}, losses", losses, found[data][0])
            for index, module in mine.items():
                right = [(a + b) / 2 for a, b in zip(found[0][1][index], found[1][1][index], strict=True)]
                close(f"{order.name}, stage {index}", [p.grad.full_tensor() for p in module.parameters()], right)
                module.zero_grad()
    halves = zb_v(count, 4)
    mine = {index: stages_of(halves.num_stages)[index] for index in halves.stages_of(pipe)}
    for module in mine.values():
        fully_shard(module, mesh=mesh["data"], reshard_after_forward=True)
    raises(
        UsageError,
        "reshard_after_forward=False",
        lambda: Pipeline(halves, mine, nn.functional.mse_loss, group=mesh.get_group("pipe")),
    )
    mine = {index: nn.Sequential(stages_of(halves.num_stages)[index]) for index in halves.stages_of(pipe)}
    for module in mine.values():
        fully_shard(module[0], mesh=mesh["data"])
    raises(
        UsageError,
        "call fully_shard on the stage",
        lambda: Pipeline(halves, mine, nn.functional.mse_loss, group=mesh.get_group("pipe")),
    )


class Recomputed(nn.Module):
    """A module whose activations are computed again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def recomputed(rank: int, size: int) -> None:
    for order in (one_f_one_b(size, 4), zb_v(size, 4), random_order(31, range(size), 4, split=True)):
        carry_out(rank, order, Recomputed)


def evaluated(rank: int, size: int) -> None:
    """Forwards only, before, between and after steps."""
    order = random_order(41, [*range(size), *range(size)], 4, split=True)
    whole = stages_of(order.num_stages)
    mine = {index: stages_of(order.num_stages)[index] for index in order.stages_of(rank)}
    pipeline = Pipeline(order, mine, nn.functional.mse_loss)
    inputs, targets = batch_of(order, 0)
    right, grads = in_one_process(order, whole, inputs, targets)
    for _ in range(2):
        losses: list[Tensor] = []
        pipeline.eval(*([inputs] if 0 in mine else []), target=targets, losses=losses)
        if order.num_stages - 1 in mine:
            close("losses", losses, right)
        assert all(p.grad is None for module in mine.values() for p in module.parameters())
        pipeline.step(*([inputs] if 0 in mine else []), target=targets)
        for index, module in mine.items():
            close(f"stage {index}", [p.grad for p in module.parameters()], grads[index])
            module.zero_grad()


# -- a rank that goes away -----------------------------------------------------------------------------------------


class Mortal(nn.Module):
    """A layer that ends its process, or stops it, in its twelfth forward: the second step's fourth."""

    def __init__(self, inner: nn.Module, number: int | None) -> None:
        super().__init__()
        self.inner, self.number, self.calls = inner, number, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.number is not None and self.calls == 8 + 4:
            os.kill(os.getpid(), self.number)
        return self.inner(x)


def lost(rank: int, size: int, backend: str, how: str, victim: int, timeout_s: float) -> Any:
    """What a rank's process says of the step in which the victim's goes; runs in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how] if rank == victim else None
            os.write(writing, pickle.dumps(_steps(rank, size, backend, number, timeout_s)))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    told, until, said = dist.FileStore(os.environ["STORE_FILE"] + "-told", -1), time.monotonic() + 4 * timeout_s, b""
    if rank == victim:  # it stays as it is until all others have said what they have to say
        while told.add("told", 0) < size - 1 and time.monotonic() < until:
            time.sleep(0.05)
    elif select.select([reading], [], [], 4 * timeout_s)[0]:
        said = os.read(reading, 1 << 16)
    told.add("told", int(rank != victim))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return pickle.loads(said) if said else None


def _steps(rank: int, size: int, backend: str, number: int | None, timeout_s: float) -> list[tuple[str, str, float]]:
    store = dist.FileStore(os.environ["STORE_FILE"], size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    layer = Mortal(stages_of(1)[0], number)
    pipeline = Pipeline(one_f_one_b(size, 8), {rank: layer}, nn.functional.mse_loss, timeout_s=timeout_s)
    batch, said = torch.ones(16, WIDTH), []
    for _ in range(2):
        began = time.monotonic()
        try:
            pipeline.step(*([batch] if rank == 0 else []), target=batch)
            said.append(("none", "", time.monotonic() - began))
        except Exception as error:
            said.append((type(error).__name__, str(error), time.monotonic() - began))
    return said


# -- what people get wrong, and torch's own classes ----------------------------------------------------------------


def raises(kind: type[Exception], words: str, work: Callable[[], object]) -> None:
    try:
        work()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised; expected {words!r}")


def refused(rank: int, size: int) -> None:
    order = one_f_one_b(size, 4)
    mine, loss = stages_of(size)[rank], nn.functional.mse_loss
    inputs, targets = batch_of(order, 0)
    raises(UsageError, "the group has 2", lambda: Pipeline(one_f_one_b(size + 1, 4), {rank: mine}, loss))
    raises(UsageError, "was given modules of none", lambda: Pipeline(order, {}, loss))
    raises(UsageError, "has no shared block", lambda: Pipeline(order, {rank: mine}, loss, shared={"e": print}))
    raises(UsageError, "timeout_s", lambda: Pipeline(order, {rank: mine}, loss, timeout_s=0))
    raises(
        UsageError,
        "none of torch's own",
        lambda: Pipeline(random_order(1, range(size), 4), {rank: mine}, loss, executor="torch"),
    )
    wrong = Order.from_csv(order.to_csv().replace("1B0", "1B1", 1))
    raises(VerificationError, "1B", lambda: Pipeline(wrong, {rank: mine}, loss))
    raises(MismatchError, "another order", lambda: Pipeline(one_f_one_b(size, 4 + rank), {rank: mine}, loss))
    pipeline = Pipeline(order, {rank: mine}, loss)
    raises(UsageError, "does not divide into 4", lambda: pipeline.step(inputs[:-1], target=targets[:-1]))
    pipeline.step(*([inputs] if rank == 0 else []), target=targets)
    if rank == 0:  # whose first forward sends nothing, so that the others may begin the next step
        raises(UsageError, "all micro-batches have the same shape", lambda: pipeline.step(inputs[:4]))


def by_torch(rank: int, size: int) -> None:
    """The seven orders by torch's own classes give what ours does, but hold every micro-batch's buffer."""
    for order in torchs_orders(size):
        whole = stages_of(order.num_stages)
        inputs, targets = batch_of(order, 0)
        _, right = in_one_process(order, whole, inputs, targets)
        mine = {index: stages_of(order.num_stages)[index] for index in order.stages_of(rank)}
        pipeline = Pipeline(order, mine, nn.functional.mse_loss, executor="torch")
        for _ in range(2):
            pipeline.step(*([inputs] if 0 in mine else []), target=targets)
            for index, module in mine.items():
                close(f"{order.name}, {index}", [p.grad for p in module.parameters()], right[index])
                module.zero_grad()
        found = pipeline.buffers()
        ours = Pipeline(order, mine, nn.functional.mse_loss)
        ours.step(*([inputs] if 0 in mine else []), target=targets)
        assert ours.buffers()["received"] <= ours.buffers()["needed"], order.name
        if keeps_receive_buffers():
            assert ours.buffers()["needed"] <= found["received"], (order.name, found)
        else:
            assert "received" not in found


def without_private_names(rank: int, size: int) -> None:
    """On a torch that lacks what the executor needs, torch's own orders run all the same, and others are refused."""
    from mycel.parallel import pipeline as module
    from mycel.parallel import torch_pipelining

    torch_pipelining._PRIVATE = ((torch, ("what_the_next_release_has_not",)),)
    module.missing_names = torch_pipelining.missing_names
    order, mine = one_f_one_b(size, 4), stages_of(size)[rank]
    inputs, targets = batch_of(order, 0)
    right_losses, right = in_one_process(order, stages_of(size), inputs, targets)
    pipeline = Pipeline(order, {rank: mine}, nn.functional.mse_loss)
    pipeline.step(*([inputs] if rank == 0 else []), target=targets)
    close("stage", [p.grad for p in mine.parameters()], right[rank])
    if rank == size - 1:
        close("losses", [pipeline.losses[m] for m in range(4)], right_losses)
    unknown = random_order(1, range(size), 4)
    raises(UsageError, "what_the_next", lambda: Pipeline(unknown, {rank: mine}, nn.functional.mse_loss))


def sends_let_go(rank: int, size: int) -> int:
    """How many messages are not known to be through at once, of 16 micro-batches; torch holds all to the end."""
    pipeline = Pipeline(one_f_one_b(size, 16), {rank: stages_of(size)[rank]}, nn.functional.mse_loss)
    inputs, targets = batch_of(pipeline.order, 0)
    for _ in range(2):
        pipeline.step(*([inputs] if rank == 0 else []), target=targets)
    return pipeline.buffers()["sent"]


def controlled(rank: int, size: int, file: str) -> list[str]:
    """The last rank holds the orders of two jobs on the others; steps come in the one sequence that it says."""
    group = dist.new_group(list(range(size - 1)))
    store = dist.FileStore(file, size)
    happened: list[str] = []
    if rank == size - 1:
        controller = Controller(store, size - 1, timeout_s=60)
        controller.load("one", one_f_one_b(size - 1, 4))
        controller.load("other", random_order(51, range(size - 1), 3))
        gangs = controller.run(["one", "other", "other"]) + controller.run(["one"])
        assert [gang.number for gang in gangs] == [0, 1, 2, 3]
        raises(UsageError, "no job 'third'", lambda: controller.run(["third"]))
        controller.close()
        return happened

    def job(name: str) -> Callable[[Order], Callable[[int], None]]:
        def ready(order: Order) -> Callable[[int], None]:
            whole, mine = stages_of(order.num_stages), stages_of(order.num_stages)[rank]
            pipeline = Pipeline(order, {rank: mine}, nn.functional.mse_loss, group=group)

            def step(number: int) -> None:
                happened.append(f"{name}{number}")
                inputs, targets = batch_of(order, number)
                _, right = in_one_process(order, whole, inputs, targets)
                pipeline.step(*([inputs] if rank == 0 else []), target=targets)
                close(name, [p.grad for p in mine.parameters()], right[rank])
                mine.zero_grad()

            return step

        return ready

    serve(store, rank, {"one": job("one"), "other": job("other")}, timeout_s=60)
    return happened


def threefold(rank: int, size: int) -> None:
    """Tensor x pipeline x data: stages whose layers are divided over two ranks, twice, and sharded between them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, size // 4, 2), mesh_dim_names=("data", "pipe", "tensor"))
    data, pipe = mesh.get_local_rank("data"), mesh.get_local_rank("pipe")
    count = size // 4

    def made(num_stages: int) -> list[nn.Module]:
        torch.manual_seed(3)
        return [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(num_stages)
        ]

    for order in (one_f_one_b(count, 4), zb_v(count, 4), random_order(61, range(count), 4, split=True)):
        whole, mine = made(order.num_stages), {}
        for index in order.stages_of(pipe):
            module = made(order.num_stages)[index]
            parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mine[index] = fully_shard(module, mesh=mesh["data"], reshard_after_forward=False)
        pipeline = Pipeline(order, mine, nn.functional.mse_loss, group=mesh.get_group("pipe"))
        for step in range(2):
            parts = [batch_of(order, 10 * step + part) for part in range(2)]
            found = [in_one_process(order, whole, *part) for part in parts]
            losses: list[Tensor] = []
            pipeline.step(*([parts[data][0]] if 0 in mine else []), target=parts[data][1], losses=losses)
            if order.num_stages - 1 in mine:
                close(f"{order.name}, losses", losses, found[data][0])
            for index, module in mine.items():
                right = [(a + b) / 2 for a, b in zip(found[0][1][index], found[1][1][index], strict=True)]
                close(f"{order.name}, stage {index}", [p.grad.full_tensor() for p in module.parameters()], right)
                module.zero_grad()
