"""Ways to train within a budget, each with its peak and its modelled time, and the rates that the model takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mycel.errors import SynthesisError, UsageError
from mycel.memory.needs import Needs
from mycel.memory.needs.moments import moment_name
from mycel.memory.residency import Parts, Schedule, schedule_of
from mycel.memory.residency.schedule import tightest
from mycel.memory.tiers import CudaLink, EmulatedLink, Link
from mycel.planning.residency import Block, MemoryInstance, MemoryPlan, fast_plan

__all__ = [
    "Choice",
    "Limits",
    "Rates",
    "activations",
    "bytes_per_s",
    "flops_per_s",
    "mib",
    "near",
    "residency",
    "usual_link",
]

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
        fullest: the moment that needs most.
        degree: ranks that share a sequence.
    """

    way: str
    peak: int
    seconds: float | None
    says: str
    fullest: str = ""
    degree: int = 1

    @property
    def seconds_of_all(self) -> float | None:
        """Of all ranks that share a batch, for it."""
        return None if self.seconds is None else self.seconds * self.degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the modelled time of a step is made of.

    Attributes:
        flops_per_s: operations of blocks.
        gbps: of the link to far memory.
        exchange_s: seconds of a pass's exchanges with ranks that share the sequence, beside nothing else.
        micro_batches: backward passes of a step.
    """

    flops_per_s: float
    gbps: float
    exchange_s: float
    micro_batches: int

    def step_s(self, needs: Needs) -> float:
        """Of a step with everything near.

        Args:
            needs: of one pass.
        """
        return (needs.flops / self.flops_per_s + self.exchange_s) * self.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan of activations is made of; ranks that compute blocks again together have one plan.

    Attributes:
        blocks: in order of forward.
        capacity: bytes for what they save; not positive where all else takes the budget.
        gbps: of the link to far memory.
    """

    blocks: tuple[Block, ...]
    capacity: int
    gbps: float


# -- ways -------------------------------------------------------------------------------------------------------


def near(way: str, needs: Needs, budget: int, rates: Rates) -> Choice:
    """Everything near, as it is or computed again.

    Args:
        way: its name.
        needs: of a step that goes so.
        budget: bytes of near memory.
        rates: of this rank.
    """
    over = needs.peak - budget
    says = "everything near" if over <= 0 else f"{over} bytes too little"
    seconds = None if over > 0 else rates.step_s(needs)
    where = moment_name(needs.fullest.phase, needs.fullest.block)
    return Choice(way=way, peak=needs.peak, seconds=seconds, says=says, fullest=where)


def residency(
    way: str, needs: Needs, parts: Parts, budget: int, rates: Rates, slots: int | None = None
) -> tuple[Choice, Schedule | None]:
    """Parameters, gradients and optimizer state far, near when they are needed.

    Args:
        way: its name.
        needs: of a step that goes so, but with everything near.
        parts: units of the model.
        budget: bytes of near memory.
        rates: of this rank.
        slots: of a ring of units; what moves least if not given.
    """
    least, where = tightest(needs, parts)
    try:
        schedule = schedule_of(needs, parts, budget, micro_batches=rates.micro_batches, slots=slots)
    except SynthesisError as error:
        if slots is not None and least <= budget:
            return Choice(way=way, peak=needs.peak, seconds=None, says=str(error), fullest=where), None
        says = f"{where} needs {least}: {least - budget} bytes too little"
        return Choice(way=way, peak=least, seconds=None, says=says, fullest=where), None
    moving = schedule.moved_bytes / rates.gbps / 1e9
    seconds = max(rates.step_s(needs), moving)
    pinned = f"{len(schedule.pinned)} units near for good, the others {schedule.plan.way}"
    says = f"{mib(schedule.moved_bytes)} over the link a step, {pinned}"
    return Choice(way=way, peak=schedule.peak, seconds=seconds, says=says, fullest=where), schedule


def activations(
    needs: Needs, budget: int, rates: Rates, agree: Callable[[Limits], Limits] = lambda limits: limits
) -> tuple[Choice, tuple[list[str], MemoryInstance, MemoryPlan] | None]:
    """Activations kept, moved or computed again, block by block, while all else stays near.

    Args:
        needs: of a step with everything near.
        budget: bytes of near memory.
        rates: of this rank.
        agree: makes limits of those of all ranks that have to compute the same blocks again.
    """
    way = "activations"
    saved = sum(block.saved for block in needs.blocks)
    outside = max(0, needs.most("activations") - saved)
    others = max(moment.total - moment.activations for moment in needs.moments) + outside
    largest = max(needs.blocks, key=lambda block: block.saved + block.input, default=None)
    least = others + (largest.saved + largest.input if largest is not None else 0)
    where = moment_name("backward", largest.name) if largest is not None else ""
    # Where nothing is computed again, gradients of keys travel back, and keys twice: a third of it all is forward's.
    third_us = rates.exchange_s / 3 / max(1, len(needs.blocks)) * 1e6
    blocks = tuple(
        Block(
            forward_us=max(1, round(block.forward_flops / rates.flops_per_s * 1e6 + third_us)),
            backward_us=max(1, round(block.backward_flops / rates.flops_per_s * 1e6 + 2 * third_us)),
            saved=max(1, block.saved + block.input),
            input=block.input,
        )
        for block in needs.blocks
    )
    limits = agree(Limits(blocks=blocks, capacity=budget - others, gbps=rates.gbps))
    try:
        instance = MemoryInstance(
            blocks=limits.blocks,
            capacity=max(1, limits.capacity),
            out_bytes_per_us=limits.gbps * 1e3,
            in_bytes_per_us=limits.gbps * 1e3,
        )
        plan = fast_plan(instance)
    except (UsageError, SynthesisError) as error:
        says = f"all but activations takes {mib(others)}: " + (
            f"{least - budget} bytes too little" if least > budget else str(error)
        )
        # Where even the least would fit and still no plan was found, only what is known to suffice is said.
        peak = least if least > budget else needs.peak
        return Choice(way=way, peak=peak, seconds=None, says=says, fullest=where), None
    counts = ", ".join(f"{policy} {count}" for policy, count in plan.counts.items())
    seconds = rates.step_s(needs) + (plan.iteration_us - instance.ideal_us) * 1e-6 * rates.micro_batches
    choice = Choice(way=way, peak=budget, seconds=seconds, says=f"blocks: {counts}", fullest=where)
    return choice, ([block.name for block in needs.blocks], instance, plan)


# -- rates ------------------------------------------------------------------------------------------------------


def usual_link(device: torch.device) -> Link:
    """A fast one where nobody gives one.

    Args:
        device: where near is.
    """
    return CudaLink(device) if device.type == "cuda" else EmulatedLink(bandwidth_gbps=100.0)


def flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Of a product here, the fastest of a few.

    Args:
        device: that computes.
        dtype: of numbers.
    """
    a = torch.ones(_PROBE_WIDTH, _PROBE_WIDTH, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2.0 * _PROBE_WIDTH**3 / best


def bytes_per_s(link: Link, device: torch.device, *, budget: int) -> float:
    """Of a link to near memory, the fastest of a few.

    Args:
        link: between far and near.
        device: where near is.
        budget: bytes that near memory has; a small part of it is used for this.
    """
    num_bytes = max(1, min(_PROBE_BYTES, budget // 4))
    there = link.far(torch.zeros(num_bytes, dtype=torch.uint8))
    near = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        link.fetch([(there, near)]).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return num_bytes / best


def mib(num_bytes: int) -> str:
    """As people read it.

    Args:
        num_bytes: any.
    """
    return f"{num_bytes / (1 << 20):.1f} MiB"
