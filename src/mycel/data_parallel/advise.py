"""Which compression would pay for this model on this fabric: measured where that is quick, predicted from there.

Measured, on all ranks at once: a pass without communication, a step of plain DDP, what collectives of two sizes
take, and how long each compressor works on the model's real gradients. A method's step is then

    compute + compress + sum over its collectives of (latency + bytes / rate) - what overlaps

Compressors *rehearse*: they hold their conversation with themselves, so that every request is seen and nothing is
sent. The share that overlaps with the backward pass is what the measured step of plain DDP shows.

Local updates are predicted from the same figures: a step computes, and a round's exchange is divided among its steps.
Sharded models (FSDP2) are another module's, ``advise_sharded``: there every method is measured.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.brief import brief
from mycel.comm.messages import all_gather_single
from mycel.cost import Line
from mycel.data_parallel.compress import Cast, Compressor, Context, DenseInt4, Item, make_compressor
from mycel.data_parallel.compress.rounds import AllGather, AllReduce, AllToAll, Request
from mycel.data_parallel.ddp import FUSE_BYTES, attach_ddp
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.rehearsal import alone
from mycel.errors import UsageError

__all__ = ["METHODS", "Advice", "LossOf", "Prediction", "advise", "measure", "time_steps"]

#: Loss of a new batch, computed with the module that is given (wrapped or not).
LossOf = Callable[[nn.Module], Tensor]

#: What is weighed by default, the most faithful first.
METHODS = ("bf16", "int8", "int4", "terngrad", "powersgd")

#: Steps of a round of local updates that are weighed.
ROUNDS = (10, 100)

#: A more faithful method is advised where it takes at most so many times the fastest one's step.
NEAR = 1.1

_SMALL, _LARGE = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A method for this model and fabric.

    Attributes:
        method: its name; ``uncompressed`` for plain DDP or FSDP2; ``local 10`` for rounds of ten local steps.
        step_s: forward and backward pass with communication.
        compress_s: of which compressing and decompressing.
        communicate_s: collectives, before anything overlaps.
        sent_bytes: by a rank in a step.
        error: what this method loses of this rank's gradient, relative to its norm, in one step without feedback.
        is_measured: ``step_s`` is; otherwise it is predicted.

    Examples:
        >>> int8 = Prediction(
        ...     method="int8", step_s=0.25, compress_s=0.05, communicate_s=0.1, sent_bytes=2e6, error=0.01
        ... )
        >>> int8.sent_bytes / int8.communicate_s  # bytes a second
        20000000.0
    """

    method: str
    step_s: float
    compress_s: float
    communicate_s: float
    sent_bytes: float
    error: float
    is_measured: bool = False

    __repr__ = brief


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was found; the same on all ranks but for ``error``.

    Attributes:
        compute_s: a forward and backward pass without communication, slowest rank; ``None`` where that is not known.
        overlap: share of the shorter of computing and communicating that the other hides in plain DDP; ``None`` for
            sharded models.
        predictions: the uncompressed step, then every method in the order of asking.
        local: local updates, the shortest rounds first; they change what is learnt, not how exactly a gradient
            travels, so they are no candidates for ``best``.

    Examples:
        >>> plain = Prediction(
        ...     method="uncompressed", step_s=0.5, compress_s=0.0, communicate_s=0.4, sent_bytes=8e6, error=0.0
        ... )
        >>> int8 = Prediction(
        ...     method="int8", step_s=0.25, compress_s=0.05, communicate_s=0.1, sent_bytes=2e6, error=0.01
        ... )
        >>> print(Advice(compute_s=0.1, overlap=0.0, predictions=(plain, int8)).explain())
        int8: 250 ms a step, 2.0 times faster than uncompressed (500 ms), with 4.0 times fewer bytes
    """

    compute_s: float | None
    overlap: float | None
    predictions: tuple[Prediction, ...]
    local: tuple[Prediction, ...] = ()

    __repr__ = brief

    @property
    def best(self) -> Prediction:
        """The first, hence most faithful, whose step is at most ``NEAR`` times the fastest one's."""
        fastest = min(p.step_s for p in self.predictions)
        return next(p for p in self.predictions if p.step_s <= NEAR * fastest)

    def explain(self) -> str:
        """A sentence, and another where meeting less often would be faster still."""
        best, plain = self.best, self.predictions[0]
        if best is plain:
            said = f"compression does not pay here: an uncompressed step takes {1e3 * plain.step_s:.0f} ms"
        else:
            fewer = plain.sent_bytes / best.sent_bytes
            said = (
                f"{best.method}: {1e3 * best.step_s:.0f} ms a step, {plain.step_s / best.step_s:.1f} times faster "
                f"than uncompressed ({1e3 * plain.step_s:.0f} ms), with {fewer:.1f} times fewer bytes"
            )
        enough = next((p for p in self.local if NEAR * p.step_s < best.step_s), None)
        if enough is None:
            return said
        return f"{said}; {enough.method} (local updates): {1e3 * enough.step_s:.0f} ms a step"


def advise(
    module: nn.Module,
    loss_of: LossOf,
    *,
    methods: Sequence[str] = METHODS,
    group: dist.ProcessGroup | None = None,
    steps: int = 5,
) -> Advice:
    """Measure and predict. Every rank of the group calls it.

    Args:
        module: not wrapped; its parameters are not changed.
        loss_of: see ``LossOf``.
        methods: names of compressors, the most faithful first.
        group: the ranks that would train; by default all.
        steps: timed passes of each kind.

    Returns:
        Predictions for plain DDP, every method, and local updates; ``best`` and ``explain()`` choose among them.

    Raises:
        UsageError: fewer than two ranks, no steps, an unknown method, or a model without gradients.

    Examples:
        On two ranks or more, as ``torchrun`` starts them::

            dist.init_process_group("mycel")
            advice = advise(model, lambda module: loss(module(inputs), targets), methods=["bf16", "int8"])
            if dist.get_rank() == 0:
                print(advice.explain())
    """
    group = group or dist.group.WORLD
    if group is None or group.size() < 2 or steps < 1:
        raise UsageError("advice needs at least two ranks and one step: start it with torchrun or mycel emulate")
    compressors = {name: make_compressor(name) for name in methods}
    ddp = DistributedDataParallel(copy.deepcopy(module), process_group=group)
    time_steps(ddp, loss_of, group, 2)  # the second has final buckets
    plain_s = time_steps(ddp, loss_of, group, steps)
    gradients = {n: p.grad.float() for n, p in ddp.module.named_parameters() if p.grad is not None}
    if not gradients:
        raise UsageError("no parameter of the model has a gradient: nothing would be communicated")
    with ddp.no_sync():
        compute_s = time_steps(ddp, loss_of, group, steps)
    lines = {kind: _line(kind, next(iter(gradients.values())).device, group) for kind in ("sum", "apart", "gather")}
    _, requests, _ = _rehearse(Cast(torch.float32), gradients, group)
    communicate_s = _seconds(requests, lines)
    hidden = compute_s + communicate_s - plain_s
    overlap = min(1.0, max(0.0, hidden / max(1e-9, min(compute_s, communicate_s))))
    predictions = [
        Prediction(
            method="uncompressed",
            step_s=plain_s,
            compress_s=0.0,
            communicate_s=communicate_s,
            sent_bytes=_sent(requests, group),
            error=0.0,
            is_measured=True,
        )
    ]
    # A round exchanges as much as an exact step does, and DenseInt4 an eighth of it.
    local = [
        _local(steps_of_round, name, codec, gradients, compute_s, lines, group)
        for steps_of_round in ROUNDS
        for name, codec in (("", Cast(torch.float32)), (" int4", DenseInt4()))
    ]
    for name, compressor in compressors.items():
        runs = [_rehearse(compressor, gradients, group) for _ in range(steps)]
        compress_s = _slowest(statistics.median(seconds for seconds, _, _ in runs), group)
        requests = runs[-1][1]
        communicate_s = _seconds(requests, lines)
        # Few bytes travel together at the end of the backward pass, and nothing is left to hide them.
        can_hide = _sent(requests, group) > FUSE_BYTES
        covered = overlap * min(compute_s, communicate_s) if can_hide else 0.0
        predictions.append(
            Prediction(
                method=name,
                step_s=compute_s + compress_s + communicate_s - covered,
                compress_s=compress_s,
                communicate_s=communicate_s,
                sent_bytes=_sent(requests, group),
                error=runs[-1][2],
            )
        )
    return Advice(compute_s=compute_s, overlap=overlap, predictions=tuple(predictions), local=tuple(local))


def _local(
    steps: int,
    name: str,
    codec: Compressor,
    gradients: Mapping[str, Tensor],
    compute_s: float,
    lines: Mapping[str, Line],
    group: dist.ProcessGroup,
) -> Prediction:
    """A step of rounds of so many, in which changes of the gradients' shapes are exchanged once."""
    seconds, requests, error = _rehearse(codec, gradients, group)
    compress_s, communicate_s = _slowest(seconds, group) / steps, _seconds(requests, lines) / steps
    return Prediction(
        method=f"local {steps}{name}",
        step_s=compute_s + compress_s + communicate_s,
        compress_s=compress_s,
        communicate_s=communicate_s,
        sent_bytes=_sent(requests, group) / steps,
        error=error,
    )


def measure(
    module: nn.Module,
    loss_of: LossOf,
    method: str,
    *,
    group: dist.ProcessGroup | None = None,
    steps: int = 5,
) -> float:
    """Seconds of a step with a method, measured: the median over steps of the slowest rank's.

    Args:
        method: name of a compressor, or ``uncompressed``.

    Raises:
        UsageError: no compressor has that name.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise UsageError("there is no process group")
    ddp = DistributedDataParallel(copy.deepcopy(module), process_group=group)
    if method != "uncompressed":
        attach_ddp(ddp, make_compressor(method))
    time_steps(ddp, loss_of, group, 2)
    return time_steps(ddp, loss_of, group, steps)


def time_steps(model: nn.Module, loss_of: LossOf, group: dist.ProcessGroup, steps: int) -> float:
    """Seconds of a forward and backward pass: the median over steps of the slowest rank's."""
    device = next(model.parameters()).device
    times = []
    for _ in range(steps):
        model.zero_grad()
        _settle(device, group)
        begin = time.perf_counter()
        loss_of(model).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(_slowest(time.perf_counter() - begin, group))
    return statistics.median(times)


def _line(kind: str, device: torch.device, group: dist.ProcessGroup) -> Line:
    """What a kind of collective takes by bytes of payload; from two sizes."""
    size, seconds = group.size(), []
    for num_bytes in (_SMALL, _LARGE):
        times = []
        for _ in range(4):
            tensor = torch.zeros(num_bytes // size * size, dtype=torch.uint8, device=device)
            out = tensor.new_empty(size * len(tensor))
            _settle(device, group)
            begin = time.perf_counter()
            if kind == "sum":
                dist.all_reduce(tensor.view(torch.float32), group=group)
            elif kind == "apart":
                dist.all_to_all_single(out[: len(tensor)], tensor, group=group)
            else:
                all_gather_single(out, tensor, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(_slowest(time.perf_counter() - begin, group))
        seconds.append(statistics.median(times[1:]))
    return Line.through((_SMALL, seconds[0]), (_LARGE, seconds[1]))


def _rehearse(
    compressor: Compressor, gradients: Mapping[str, Tensor], group: dist.ProcessGroup
) -> tuple[float, list[Request], float]:
    """Seconds of computing, every request, and the relative error of one step, of a method on its own."""
    policy = CompressionPolicy(compressor)
    exact = Cast(torch.float32)
    together: dict[int, tuple[Compressor, list[str]]] = {}
    for name, gradient in gradients.items():
        chosen = policy.choose(name, gradient.shape, 0) or exact
        together.setdefault(id(chosen), (chosen, []))[1].append(name)
    _settle(next(iter(gradients.values())).device, group)
    begin = time.perf_counter()
    requests: list[Request] = []
    lost = 0.0
    for chosen, names in together.values():
        items = [
            Item(
                tensor=gradients[name].contiguous(),
                context=Context(name=name, rank=group.rank(), world_size=group.size()),
            )
            for name in names
        ]
        outcomes, asked = alone(chosen.converse(items, keep_residual=True), group.size())
        requests += asked
        lost += sum(float(o.residual.square().sum()) for o in outcomes if o.residual is not None)
    seconds = time.perf_counter() - begin
    for chosen, _ in together.values():
        chosen.settle(keep=True)  # what it begins the next step with, as PowerSGD with this one's directions
    norm = sum(float(g.square().sum()) for g in gradients.values())
    return seconds, requests, (lost / norm) ** 0.5 if norm else 0.0


def _kind_and_bytes(request: Request) -> tuple[str, int]:
    """Bytes as ``_line`` counts them: of the tensor, of all parts, of the own block."""
    if isinstance(request, AllReduce):
        return "sum", request.tensor.numel() * request.tensor.element_size()
    if isinstance(request, AllToAll):
        return "apart", sum(map(len, request.parts)) * len(request.parts) // max(1, len(request.parts) - 1)
    return "gather", len(request.tensor)


def _seconds(requests: Sequence[Request], lines: Mapping[str, Line]) -> float:
    total = 0.0
    for request in requests:
        kind, num_bytes = _kind_and_bytes(request)
        total += lines[kind].at(num_bytes)
    return total


def _sent(requests: Sequence[Request], group: dist.ProcessGroup) -> float:
    total = 0.0
    for request in requests:
        if isinstance(request, AllReduce):
            total += 2 * (group.size() - 1) / group.size() * request.tensor.numel() * request.tensor.element_size()
        elif isinstance(request, AllToAll):
            total += sum(map(len, request.parts))
        elif isinstance(request, AllGather):
            total += (group.size() - 1) * len(request.tensor)
    return total


def _settle(device: torch.device, group: dist.ProcessGroup) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _slowest(seconds: float, group: dist.ProcessGroup) -> float:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return float(value)
