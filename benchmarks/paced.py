"""Orders of pipelines measured on emulated clusters: computation is paced, messages, orders and losses are real.

A stage computes little and then sleeps until its modelled time is over, since ranks share few processors here; what
it sends goes over emulated links. Cases take turns step by step, so that what disturbs one disturbs all.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ranks import join, on_cluster, say, step_s
from mycel.parallel import Pipeline, Step
from mycel.pipeline.order import Order
from mycel.pipeline.simulate import simulate
from mycel.topology.model import Topology

#: Of a row of activations, in numbers.
WIDTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An order and who carries it out.

    Attributes:
        name: in tables.
        order: its JSON.
        times: seconds of each computation, by stage and kind such as ``0F``, or by kind alone, or a shared block.
        num_bytes: of an activation.
        runner: ``mycel``; ``runtime``: torch's runtime, over the same list; or the name of torch's class.
        receive_ahead: of mycel's executor.
    """

    name: str
    order: Mapping[str, Any]
    times: Mapping[str, float]
    num_bytes: int
    runner: str = "mycel"
    receive_ahead: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)


class _Begin(torch.autograd.Function):
    """First in a backward: takes the time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: _Pace) -> Tensor:
        ctx.pace = pace
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pace.begin = time.perf_counter()
        return grad, None


class _End(torch.autograd.Function):
    """Last in a backward: sleeps until its time is over. The anchor makes sure that it is part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, pace: _Pace) -> Tensor:
        ctx.pace = pace
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.pace.sleep(ctx.pace.backward_s)
        return grad, None, None


class _Pace:
    def __init__(self, forward_s: float, backward_s: float) -> None:
        self.forward_s, self.backward_s = forward_s, backward_s
        self.begin = 0.0

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, self.begin + seconds - time.perf_counter()))


class PacedStage(nn.Module):
    """A layer that takes as long as it is told to; a residual one can be left out."""

    def __init__(self, forward_s: float, backward_s: float, *, residual: bool = False) -> None:
        super().__init__()
        self._residual = residual
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH) + 1), nn.Parameter(torch.randn(WIDTH) / 4)
        self._pace = _Pace(forward_s, backward_s)
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        y = _End.apply(x, self._anchor, self._pace)
        changed = torch.tanh(y * self.weight + self.bias)
        y = _Begin.apply(y + changed / 4 if self._residual else changed, self._pace)
        time.sleep(max(0.0, begin + self._pace.forward_s - time.perf_counter()))
        return y


class _Ends:
    """The two ends of a micro-batch on all ranks at once: a scale that all have a part of, forwards and backwards."""

    def __init__(self, times: Mapping[str, float], size: int) -> None:
        self.times, self.size = times, size
        self.weight = torch.full((WIDTH,), 1.0 / size, requires_grad=True)
        self._parts: dict[int, Tensor] = {}

    def block(self, name: str) -> Callable[[Step, int], None]:
        work = self._forward if name[0] in "SE" else self._backward

        def run(step: Step, micro_batch: int) -> None:
            dist.barrier(group=step.group)  # it begins when the last rank is there, and its computation is paced
            begin = time.perf_counter()
            work(step, micro_batch)
            time.sleep(max(0.0, begin + self.times[name] - time.perf_counter()))

        return run

    def _forward(self, step: Step, micro_batch: int) -> None:
        (x,) = step.args(micro_batch)
        part = x * self.weight
        total = part.detach()[0].clone()
        dist.all_reduce(total, group=step.group)  # one row travels; rows differ by what all know
        self._parts[micro_batch] = part
        if step.has_stage(0):
            step.set_input(0, micro_batch, part.detach() * self.size + (total - self.size * part.detach()[0]))

    def _backward(self, step: Step, micro_batch: int) -> None:
        grad = torch.zeros(WIDTH)
        if step.has_stage(0):
            (found,) = step.input_grads(0, micro_batch)
            grad = found.sum(0)
        dist.broadcast(grad, group_src=0, group=step.group)
        part = self._parts.pop(micro_batch)
        part.backward(grad.expand_as(part).contiguous())


def _runner(case: Case, rank: int, size: int) -> tuple[Callable[[], dict[int, float]], Callable[[], dict[str, int]]]:
    """Carries out a step of a case; the losses on the last stage's rank."""
    from torch.distributed.pipelining import PipelineStage, schedules

    order = Order.from_json(case.order)
    # Nodes that hold the same stage begin with the same weights.
    same = case.more.get("stage_of", range(order.num_stages))
    stages = []
    for number, alike in enumerate(same):
        torch.manual_seed(alike)
        paces = (case.times.get(f"{number}{kind}", case.times.get(kind, 0.0)) for kind in "FB")
        stages.append(PacedStage(*paces, residual="stage_of" in case.more))
    torch.manual_seed(100)
    own = {s: stages[s] for s in order.stages_of(rank)}
    rows = max(1, case.num_bytes // WIDTH // 4) * order.num_micro_batches
    inputs, targets = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    buffers: Callable[[], dict[str, int]] = dict
    if case.runner == "mycel":
        ends = _Ends(case.times, size)
        pipeline = Pipeline(
            order,
            own,
            nn.functional.mse_loss,
            shared={name: ends.block(name) for name in order.blocks},
            receive_ahead=case.receive_ahead,
        )
        step: Any = pipeline.step
        buffers = lambda: dict(pipeline.buffers())  # noqa: E731
    else:
        made = [PipelineStage(m, s, order.num_stages, torch.device("cpu")) for s, m in own.items()]
        if case.runner == "runtime":
            runtime = schedules._PipelineScheduleRuntime(
                made, order.num_micro_batches, loss_fn=nn.functional.mse_loss
            )
            with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                file.write(order.torch_csv())
                file.flush()
                runtime._load_csv(file.name)
            step = runtime.step
        else:
            kind = schedules.get_schedule_class(case.runner)
            single = issubclass(kind, schedules.PipelineScheduleSingle)
            step = kind(made[0] if single else made, order.num_micro_batches, loss_fn=nn.functional.mse_loss).step
    is_first = bool(order.blocks) or any(order.route_of(m)[0] in own for m in range(order.num_micro_batches))
    is_last = any(order.route_of(m)[-1] in own for m in range(order.num_micro_batches))

    def run() -> dict[int, float]:
        losses: list[Tensor] = []
        for module in own.values():
            module.zero_grad()
        step(
            *([inputs] if is_first else []),
            target=targets if is_last else None,
            losses=losses if is_last and case.runner != "mycel" else None,
            return_outputs=False,
        )
        if case.runner == "mycel":
            return {m: loss.item() for m, loss in pipeline.losses.items()}
        return {m: loss.item() for m, loss in enumerate(losses)}

    return run, buffers


def be_rank(file: str) -> None:
    """A rank: every case in turns; says the seconds of each step, and whether losses agree."""
    rank, size = join()
    work = json.loads(Path(file).read_text(encoding="utf-8"))
    cases = [Case(**case) for case in work["cases"]]
    runners = [_runner(case, rank, size) for case in cases]
    seconds: list[list[float]] = [[] for _ in cases]
    losses: list[dict[int, float]] = [{} for _ in cases]
    for turn in range(work["rounds"] + 1):  # the first is for warming up
        for place, (run, _) in enumerate(runners):
            found: dict[int, float] = {}
            spent = step_s(lambda run=run, found=found: found.update(run()))
            if turn:
                seconds[place].append(spent)
            losses[place] = found
    holders: list[Any] = [None] * size
    dist.all_gather_object(holders, losses)
    everything = [{m: loss for held in holders for m, loss in held[place].items()} for place in range(len(cases))]
    buffered: list[Any] = [None] * size
    dist.all_gather_object(buffered, [buffers() for _, buffers in runners])
    for place, case in enumerate(cases):
        say(
            case=case.name,
            runner=case.runner,
            seconds=seconds[place],
            losses=[everything[place][m] for m in sorted(everything[place])],
            received=[each[place].get("received") for each in buffered],
            needed=[each[place].get("needed") for each in buffered],
            more=dict(case.more),
        )
    dist.destroy_process_group()


def measure(
    topology: Topology, cases: Sequence[Case], *, rounds: int, backend: str = "mycel"
) -> list[dict[str, Any]]:
    """Run cases in turns on an emulated cluster.

    Args:
        topology: the cluster.
        cases: of as many ranks.
        rounds: steps of each case after one for warming up.
        backend: that carries the messages.

    Returns:
        A line for each case; ``simulated_s`` is no measurement, and is made of modelled times and links alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps({"rounds": rounds, "cases": [asdict(case) for case in cases]}), encoding="utf-8")
        heard = on_cluster(topology, Path(__file__), [str(file)], backend=backend)
    for line, case in zip(heard, cases, strict=True):
        run = simulate(Order.from_json(case.order), dict(case.times), topology=topology, message_bytes=case.num_bytes)
        line["simulated_s"] = run.makespan
    return heard


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median of pairs' ratios."""
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    half = len(ratios) // 2
    return ratios[half] if len(ratios) % 2 else (ratios[half - 1] + ratios[half]) / 2


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    be_rank(sys.argv[1])
