"""Which way attention goes: predicted for each, corrected by what was measured, and explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.planning.sequence import CAUSAL, Mask, contiguous, work_by_rank
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax.fabric import Fabric, agreed, fabric_of
from mycel.sequence.softmax.kernels import attend, attend_back
from mycel.sequence.softmax.predict import Handling, Kernels, Prediction, Shape, candidates, predict
from mycel.sequence.softmax.ways import Way, attend_by, check_way
from mycel.units import format_seconds, format_size

__all__ = ["Explanation", "explain", "shape_of", "tune_attention"]

#: Tokens of the block that kernels are measured with.
_BLOCK = 256
#: Tokens of a rank where starts are measured, and bytes that are copied where copying is.
_FEW, _COPIED = 8, 1 << 23
_IN_A_ROW = 8
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why attention goes the way it does.

    Attributes:
        way: that is taken.
        predictions: of every way that could be, the soonest first.
        measured: seconds of those that were tried, the slowest rank's median.
        source: what the prediction is made of.
    """

    way: Way
    predictions: tuple[Prediction, ...]
    measured: dict[Way, float]
    source: str

    __repr__ = brief

    def __str__(self) -> str:
        lines = [f"attention goes by {self.way.name}; wires by {self.source}, kernels and handling measured"]
        for p in self.predictions:
            tried = f", measured {format_seconds(self.measured[p.way])}" if p.way in self.measured else ""
            lines.append(
                f"  {p.way.name}: predicted {format_seconds(p.seconds)} (network {format_seconds(p.network_s)}, "
                f"computation {format_seconds(p.compute_s)}), {format_size(p.memory)} beside the own tokens{tried}"
            )
        return "\n".join(lines)


@dataclass(slots=True)
class _Known:
    """What a group has measured; the same on all of its ranks.

    Attributes:
        kernels: by shape and device.
        handling: by device.
        tried: by what is attended to: seconds of each way.
        turns: how often something was tried.
    """

    kernels: dict[tuple[Shape, torch.device], Kernels]
    handling: dict[torch.device, Handling]
    tried: dict[tuple[object, ...], dict[Way, float]]
    turns: int = 0


_KNOWN: WeakKeyDictionary[dist.ProcessGroup, _Known] = WeakKeyDictionary()


def explain(
    context: SequenceContext,
    shape: Shape,
    *,
    mask: Mask = CAUSAL,
    device: torch.device | str = "cpu",
    most_memory: int | None = None,
) -> Explanation:
    """Which way ``attention`` takes by itself, and why. All ranks of the context call it.

    The first call of a group measures what a kernel takes, and its wires where no topology says what they carry.

    Args:
        context: the ranks and what each holds.
        shape: of queries, keys and values: ``mycel.sequence.shape_of(q, k, v)``.
        mask: inside documents.
        device: of the tensors.
        most_memory: bytes beside a rank's own tokens that a way may take; any if not given.

    Raises:
        UsageError: every way takes more than ``most_memory``.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> context = SequenceContext(contiguous([8], 1))
        >>> shape = Shape(batch=1, heads=2, key_heads=2, width=8, value_width=8, dtype=torch.float32)
        >>> explain(context, shape).way.name  # one rank has everything
        'needed tokens'
    """
    group = context.group
    if group is None or context.num_ranks == 1:
        return Explanation(way=Way(between="needed"), predictions=(), measured={}, source="nothing: one rank")
    place = torch.device(device)
    known = _KNOWN.setdefault(group, _Known({}, {}, {}))
    return context.remember(
        ("attention explained", shape, mask, str(place), most_memory, known.turns),
        lambda: _explained(context, group, shape, mask, place, most_memory),
    )


def _explained(
    context: SequenceContext,
    group: dist.ProcessGroup,
    shape: Shape,
    mask: Mask,
    device: torch.device,
    most_memory: int | None,
) -> Explanation:
    known = _KNOWN[group]
    fabric = fabric_of(group, device)
    if (shape, device) not in known.kernels:
        known.kernels[shape, device] = Kernels(
            **dict(
                zip(("forward_s", "backward_s"), agreed(_kernel_seconds(shape, device), group, device), strict=True)
            )
        )
    if device not in known.handling:
        known.handling[device] = _handling(group, fabric, shape, device)
    kernels, handling = known.kernels[shape, device], known.handling[device]
    found = [
        predict(way, context, shape, mask, fabric, kernels, handling) for way in candidates(context, shape, fabric)
    ]
    fitting = [p for p in found if most_memory is None or p.memory <= most_memory]
    if not fitting:
        least = min(found, key=lambda p: p.memory)
        raise UsageError(
            f"attention over {context.num_ranks} ranks takes at least {format_size(least.memory)} beside the own "
            f"tokens, by {least.way.name}; {format_size(most_memory or 0)} are allowed: take more ranks"
        )
    measured = known.tried.get(_bucket(context, shape, mask, device), {})
    # What was measured says how far predictions are off; ways that were not tried are taken to be off as much.
    off = [measured[p.way] / p.seconds for p in found if p.way in measured and p.seconds > 0]
    factor = median(off) if off else 1.0
    ordered = tuple(sorted(fitting, key=lambda p: (measured.get(p.way, p.seconds * factor), p.memory, p.way.name)))
    return Explanation(way=ordered[0].way, predictions=ordered, measured=measured, source=fabric.source)


def shape_of(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """What is attended to, without the tokens; tensors as ``attention`` takes them."""
    return Shape(
        batch=q.shape[0],
        heads=q.shape[1],
        key_heads=k.shape[1],
        width=q.shape[3],
        value_width=v.shape[3],
        dtype=q.dtype,
    )


def tune_attention(
    q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, mask: Mask = CAUSAL, finalists: int = 3
) -> Explanation:
    """Measure the ways that are predicted to be soonest, forward and backward in turns, and keep the soonest.

    All ranks of the context call it, with what they attend to. What is kept serves every later context of the same
    group with about as many tokens, of the same shape and mask.

    Args:
        q, k, v, context, mask: as for ``attention``.
        finalists: how many ways.
    """
    group = context.group
    shape = shape_of(q, k, v)
    first = explain(context, shape, mask=mask, device=q.device)
    if group is None or context.num_ranks == 1:
        return first
    ways = [p.way for p in first.predictions[:finalists]]
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for turn in range(_REPEATS + 1):
        for way in ways:
            seconds = _seconds(partial(_there_and_back, way, q, k, v, context, mask), q.device)
            if turn:
                times[way].append(seconds)
    slowest = agreed([median(times[way]) for way in ways], group, q.device)
    bucket = _bucket(context, shape, mask, q.device)
    known = _KNOWN[group]
    known.turns += 1
    known.tried[bucket] = {**known.tried.get(bucket, {}), **dict(zip(ways, slowest, strict=True))}
    return _explained(context, group, shape, mask, q.device, None)


def _there_and_back(way: Way, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, mask: Mask) -> None:
    check_way(way, context, q.shape[1])
    with _apart():
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = attend_by(way, leaves[0], leaves[1], leaves[2], context, mask, q.shape[-1] ** -0.5)
        torch.autograd.backward([out], [torch.ones_like(out)])


@contextmanager
def _apart() -> Iterator[None]:
    """Graphs of one's own, in the middle of anybody's forward pass.

    Where that is computed again later, what hooks it has on saved tensors would begin with that now.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        yield


def _kernel_seconds(shape: Shape, device: torch.device) -> list[float]:
    """Forward and backward, for one query and one key."""
    q = torch.zeros(shape.batch, shape.heads, _BLOCK, shape.width, dtype=shape.dtype, device=device)
    k = q.new_zeros(shape.batch, shape.key_heads, _BLOCK, shape.width)
    v = q.new_zeros(shape.batch, shape.key_heads, _BLOCK, shape.value_width)
    out, lse = attend(q, k, v, 1.0)
    runs: list[Callable[[], object]] = [
        lambda: attend(q, k, v, 1.0),
        lambda: attend_back(out, q, k, v, out, lse, 1.0),
    ]
    return [median(_seconds(run, device) for _ in range(_REPEATS)) / _BLOCK**2 for run in runs]


def _handling(group: dist.ProcessGroup, fabric: Fabric, shape: Shape, device: torch.device) -> Handling:
    """What attention to next to nothing takes beyond what its wires should, and a byte that is copied.

    The slowest rank's, all at once and several times in a row: ranks on one machine are in each other's way then, as
    they are in training.
    """
    size = group.size()
    context = SequenceContext(contiguous([_FEW * size], size), group)
    q = torch.zeros(shape.batch, shape.heads, _FEW, shape.width, dtype=shape.dtype, device=device)
    k = q.new_zeros(shape.batch, shape.key_heads, _FEW, shape.width)
    v = q.new_zeros(shape.batch, shape.key_heads, _FEW, shape.value_width)
    # As keys and values are packed: two that are strided, into one that is not.
    half = torch.zeros(16, _COPIED // 2 // (16 * 16 * 4), 16, device=device)
    runs: list[Callable[[], object]] = [
        partial(_there_and_back, Way(between="gathered"), q, k, v, context, CAUSAL),
        lambda: torch.cat([half, half], -1).transpose(0, 1).contiguous(),
    ]
    taken = []
    for run in runs:
        run()  # for the first time
        agreed([0.0], group, device)

        def several(run: Callable[[], object] = run) -> None:
            for _ in range(_IN_A_ROW):
                run()

        taken.append(median(_seconds(several, device) for _ in range(_REPEATS)) / _IN_A_ROW)
    whole_s, copied_s = agreed(taken, group, device)
    gathered = size * _FEW * shape.key_bytes
    starts_s = whole_s - 2 * fabric.gather(gathered) - fabric.scatter(gathered)
    # Three exchanges; and each byte is written by one operator and again by the other.
    return Handling(start_s=max(0.0, starts_s) / 3, byte_s=copied_s / (2 * _COPIED))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    began = perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began


def _bucket(context: SequenceContext, shape: Shape, mask: Mask, device: torch.device) -> tuple[object, ...]:
    """What is alike enough for measurements to hold: tokens and work within a factor of two."""
    work = int(work_by_rank(context.layout, mask).max())
    return shape, mask, device, max(context.layout.tokens).bit_length(), work.bit_length()
