"""One call for a model that does not fit: what to keep, move, compute again or hold far, chosen by one model."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mycel.comm.handle import Handle
from mycel.errors import SynthesisError, UsageError
from mycel.memory.needs import Needs, blocks_of, loss_of, needs_of, recomputed
from mycel.memory.needs.trace import Batch, Loss
from mycel.memory.residency import Parts, Residency, Schedule, parts_of, schedule_of
from mycel.memory.residency.schedule import least_budget
from mycel.memory.swap import attach
from mycel.memory.tiers import CudaLink, EmulatedLink, FarMemory, Link, in_host, pinned
from mycel.planning.residency import Block, MemoryInstance, MemoryPlan, fast_plan
from mycel.units import format_seconds

__all__ = ["Choice", "Fitted", "fit"]

#: Bytes and rounds by which a link's rate is measured, and the width of the product that measures the processor.
_PROBE_BYTES, _ROUNDS, _PROBE_WIDTH = 4 << 20, 3, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way to train within the budget, or why it is none.

    Attributes:
        way: its name.
        peak: bytes of near memory at most, or the least that it would need.
        seconds: of a step, modelled; ``None`` where it does not fit.
        says: what it does, or what is missing.
    """

    way: str
    peak: int
    seconds: float | None
    says: str


class Fitted(Handle):
    """A model that trains within its budget, until it is closed.

    Attributes:
        way: that was chosen.
        choices: all that were looked at.
        needs: of the model's step as it is.
        budget: bytes of near memory.
    """

    def __init__(self, way: str, choices: tuple[Choice, ...], needs: Needs, budget: int) -> None:
        self.way, self.choices, self.needs, self.budget = way, choices, needs, budget
        self._held = ExitStack()
        self._says: list[Callable[[], str]] = []

    def hold(self, handle: Any) -> None:
        """Something at work, which is closed with this.

        Args:
            handle: a context; where it has ``explain``, that is told too.
        """
        self._held.enter_context(handle)
        if hasattr(handle, "explain"):
            self._says.append(handle.explain)

    def explain(self) -> str:
        """What was chosen, beside what else was looked at, and what it did so far."""
        lines = [f"a step needs {_mib(self.needs.peak)}, and there are {_mib(self.budget)}: {self.way}"]
        for choice in self.choices:
            taken = "*" if choice.way == self.way else " "
            cost = "does not fit" if choice.seconds is None else f"{format_seconds(choice.seconds)} a step, modelled"
            lines.append(f"{taken} {choice.way}: {_mib(choice.peak)}, {cost}; {choice.says}")
        return "\n".join([*lines, *(says() for says in self._says)])

    def close(self) -> None:
        """See ``Handle``."""
        self._held.close()


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    budget: int,
    link: Link | None = None,
    loss: Loss = loss_of,
    micro_batches: int = 1,
    far: FarMemory | None = None,
) -> Fitted:
    """Train a model within a budget of near memory, the loop unchanged.

    What a step needs is found without running it. Then the fastest that fits, by one model of time, is put to work:
    the model as it is; activations kept, moved or computed again block by block; parameters, gradients and optimizer
    state far, near when they are needed; or that with blocks computed again. Results are those of training without
    it, bit for bit.

    Args:
        model: any module whose blocks run in the same order each step; on a GPU, or on a processor, where far memory
            is mapped as shared and near memory what the allocator gives.
        optimizer: of torch, that trains it; one that looks at each parameter for itself.
        batch: arguments of the model, or those by name, of the size that a step has.
        budget: bytes of near memory for all that torch allocates in training.
        link: between near and far memory; a fast one on a processor and ``CudaLink`` on a GPU if not given.
        loss: of the model's output.
        micro_batches: backward passes of a step.
        far: lends far memory; of the host, or pinned for a GPU, if not given.

    Returns:
        A handle: ``explain()`` says what was chosen and why, ``close()`` ends it.

    Raises:
        UsageError: a budget or number of micro-batches that is not positive, or a model whose sizes depend on values.
        SynthesisError: nothing fits; the message says which way is nearest, and by how much it is too large.

    References:
        Fang et al., "PatrickStar", TPDS 2023; Wahib et al., "KARMA", SC 2020; Chen et al., "Training Deep Nets with
        Sublinear Memory Cost", 2016.

    Examples:
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> x = torch.randn(4, 64)
        >>> with fit(model, optimizer, (x,), budget=300_000) as fitted:
        ...     model(x).mean().backward()
        ...     optimizer.step()
        >>> fitted.way
        'residency'
    """
    if budget < 1 or micro_batches < 1:
        raise UsageError(f"a budget of {budget} bytes and {micro_batches} micro-batches: at least 1 of each")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rounding = 512 if device.type == "cuda" else 1
    needs = needs_of(model, batch, optimizer=optimizer, loss=loss, rounding=rounding)
    made = link is None
    carrier: Link = link if link is not None else _usual(device)
    lender = FarMemory(pinned if isinstance(carrier, CudaLink) else in_host) if far is None else far
    blocks = blocks_of(model)
    parts = parts_of(model, blocks)
    rate, gbps = _flops_per_s(device, next((p.dtype for p in model.parameters()), torch.float32)), 0.0
    base = needs.flops / rate * micro_batches
    ways: dict[str, tuple[Choice, Any]] = {}
    over = needs.peak - budget
    says = "everything near, as it is" if over <= 0 else f"{over} bytes too little"
    ways["keep"] = Choice(way="keep", peak=needs.peak, seconds=base if over <= 0 else None, says=says), None
    if over > 0:
        gbps = _bytes_per_s(carrier, device) / 1e9
        ways["activations"] = _activations(needs, budget, rate, gbps, base, micro_batches)
        ways["residency"] = _residency("residency", needs, parts, budget, base, gbps, micro_batches)
        again = needs_of(model, batch, optimizer=optimizer, loss=loss, rounding=rounding, recompute=True)
        longer = again.flops / rate * micro_batches
        ways["residency, recomputed"] = _residency(
            "residency, recomputed", again, parts, budget, longer, gbps, micro_batches
        )
    fitting = [choice for choice, _ in ways.values() if choice.seconds is not None]
    choices = tuple(choice for choice, _ in ways.values())
    if not fitting:
        if made:
            carrier.close()
        nearest = min(choices, key=lambda choice: choice.peak)
        raise SynthesisError(
            f"a budget of {budget} bytes: nothing fits; nearest is {nearest.way}, which needs {nearest.peak}, "
            f"{nearest.peak - budget} bytes more: a smaller batch, or a larger budget"
        )
    best = min(fitting, key=lambda choice: choice.seconds or 0.0)
    fitted = Fitted(best.way, choices, needs, budget)
    plan = ways[best.way][1]
    if best.way == "activations":
        names, instance, chosen = plan
        fitted.hold(attach(model, names, instance, chosen, link=carrier, far=lender))
    elif best.way != "keep":
        if best.way == "residency, recomputed":
            fitted.hold(recomputed(blocks))
        fitted.hold(Residency(model, optimizer, plan, blocks, carrier, far=lender, device=device))
    if made:
        fitted._held.push(lambda *_: carrier.close())
    return fitted


# -- ways -------------------------------------------------------------------------------------------------------


def _residency(
    way: str, needs: Needs, parts: Parts, budget: int, seconds: float, gbps: float, micro_batches: int
) -> tuple[Choice, Schedule | None]:
    least = least_budget(needs, parts)
    try:
        schedule = schedule_of(needs, parts, budget, micro_batches=micro_batches)
    except SynthesisError:
        return Choice(way=way, peak=least, seconds=None, says=f"{least - budget} bytes too little"), None
    moving = schedule.moved_bytes / gbps / 1e9
    says = f"{_mib(schedule.moved_bytes)} over the link a step, {len(schedule.pinned)} units near for good"
    return Choice(way=way, peak=schedule.peak, seconds=max(seconds, moving), says=says), schedule


def _activations(
    needs: Needs, budget: int, rate: float, gbps: float, base: float, micro_batches: int
) -> tuple[Choice, tuple[list[str], MemoryInstance, MemoryPlan] | None]:
    """Activations kept, moved or computed again, block by block, while all else stays near."""
    way = "activations"
    saved = sum(block.saved for block in needs.blocks)
    outside = max(0, needs.most("activations") - saved)
    others = max(moment.total - moment.activations for moment in needs.moments) + outside
    largest = max((block.saved + block.input for block in needs.blocks), default=0)
    least = others + largest
    blocks = tuple(
        Block(
            forward_us=max(1, round(block.forward_flops / rate * 1e6)),
            backward_us=max(1, round(block.backward_flops / rate * 1e6)),
            saved=max(1, block.saved + block.input),
            input=block.input,
        )
        for block in needs.blocks
    )
    try:
        instance = MemoryInstance(
            blocks=blocks,
            capacity=max(1, budget - others),
            out_bytes_per_us=gbps * 1e3,
            in_bytes_per_us=gbps * 1e3,
        )
        plan = fast_plan(instance)
    except (UsageError, SynthesisError):
        says = f"all but activations takes {_mib(others)}: {least - budget} bytes too little"
        return Choice(way=way, peak=max(least, budget + 1), seconds=None, says=says), None
    counts = ", ".join(f"{policy} {count}" for policy, count in plan.counts.items())
    seconds = base + (plan.iteration_us - instance.ideal_us) * 1e-6 * micro_batches
    choice = Choice(way=way, peak=budget, seconds=seconds, says=f"blocks: {counts}")
    return choice, ([block.name for block in needs.blocks], instance, plan)


# -- rates ------------------------------------------------------------------------------------------------------


def _usual(device: torch.device) -> Link:
    return CudaLink(device) if device.type == "cuda" else EmulatedLink(bandwidth_gbps=100.0)


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Of a product here, the fastest of a few."""
    a = torch.ones(_PROBE_WIDTH, _PROBE_WIDTH, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2.0 * _PROBE_WIDTH**3 / best


def _bytes_per_s(link: Link, device: torch.device) -> float:
    """Of a link to near memory, the fastest of a few."""
    there = link.far(torch.zeros(_PROBE_BYTES, dtype=torch.uint8))
    near = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        link.fetch([(there, near)]).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return _PROBE_BYTES / best


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
