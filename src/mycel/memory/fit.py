"""One call for a model that does not fit: what to keep, move, compute again or hold far, chosen by one model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mycel.arguments import the, whole_number
from mycel.comm.handle import Handle
from mycel.comm.sharded import is_fully_sharded
from mycel.errors import SynthesisError, UsageError
from mycel.memory.needs import Needs, blocks_of, groups_of, innermost, loss_of, needs_of, recomputed
from mycel.memory.needs.trace import Batch, Loss
from mycel.memory.residency import Parts, Residency, parts_of, sharded_parts
from mycel.memory.swap import attach
from mycel.memory.swap.blocks import is_swapped
from mycel.memory.tiers import CudaLink, FarMemory, Link, in_host, pinned
from mycel.memory.ways import Choice, activations, bytes_per_s, flops_per_s, mib, near, residency, usual_link
from mycel.units import format_seconds

__all__ = ["Choice", "Fitted", "fit"]

#: Models of which something is at work.
_HELD: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Fitted(Handle):
    """A model that trains within its budget, until it is closed.

    Attributes:
        way: that was chosen.
        choices: all that were looked at.
        needs: of the model's step as it is.
        budget: bytes of near memory.
        handles: what is at work: a ``Residency``, a ``Swapping``, or what has blocks computed again.
    """

    def __init__(self, way: str, choices: tuple[Choice, ...], needs: Needs, budget: int) -> None:
        self.way, self.choices, self.needs, self.budget = way, choices, needs, budget
        self.handles: list[Any] = []
        self._held = ExitStack()
        self._says: list[Callable[[], str]] = []

    def hold(self, handle: Any) -> None:
        """Something at work, which is closed with this.

        Args:
            handle: a context; where it has ``explain``, that is told too.
        """
        self._held.enter_context(handle)
        self.handles.append(handle)
        if hasattr(handle, "explain"):
            self._says.append(handle.explain)

    def explain(self) -> str:
        """What was chosen, beside what else was looked at, and what it did so far."""
        lines = [f"a step needs {mib(self.needs.peak)}, and there are {mib(self.budget)}: {self.way}"]
        for choice in self.choices:
            taken = "*" if choice.way == self.way else " "
            cost = "does not fit" if choice.seconds is None else f"{format_seconds(choice.seconds)} a step, modelled"
            lines.append(f"{taken} {choice.way}: {mib(choice.peak)}, {cost}; {choice.says}")
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
    slots: int | None = None,
) -> Fitted:
    """Train a model within a budget of near memory, the loop unchanged.

    What a step needs is found without running it. Then the fastest that fits, by one model of time, is put to work:
    the model as it is; activations kept, moved or computed again block by block; parameters, gradients and optimizer
    state far, near when they are needed; or that with blocks computed again. Results are those of training without
    it, bit for bit.

    Args:
        model: any module whose blocks run in the same order each step; on a GPU, or on a processor, where far memory
            is mapped as shared and near memory what the allocator gives. Of one that ``fully_shard`` has sharded,
            itself last, this rank's shards are far; then all ranks call this, and choose alike.
        optimizer: of torch, that trains it; one that looks at each parameter for itself.
        batch: arguments of the model, or those by name, of the size that a step has.
        budget: bytes of near memory for all that torch allocates in training.
        link: between near and far memory; a fast one on a processor and ``CudaLink`` on a GPU if not given.
        loss: of the model's output.
        micro_batches: backward passes of a step.
        far: lends far memory; of the host, or pinned for a GPU, if not given.
        slots: where parameters come and go, they go round a ring of so many units, at least 2; what moves least if
            not given.

    Returns:
        A handle: ``explain()`` says what was chosen and why, ``close()`` ends it.

    Raises:
        UsageError: a budget or number of micro-batches that is not positive, a model whose sizes depend on values,
            one that is sharded in part, or over a mesh of two dimensions, or one that trains within a budget already.
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
    if model in _HELD:
        raise UsageError(f"{type(model).__name__} trains within a budget already; close that first")
    swapped = next((name for name, module in model.named_modules() if is_swapped(module)), None)
    if swapped is not None:
        raise UsageError(f"{type(model).__name__}: a plan is carried out on {swapped!r} already; close that first")
    if link is not None:
        link = the(Link, link, "a link")  # type: ignore[type-abstract]  # of any concrete kind
    if far is not None:
        far = the(FarMemory, far, "far memory")
    budget = whole_number(budget, "a budget in bytes", least=1)
    micro_batches = whole_number(micro_batches, "a number of micro-batches", least=1)
    slots = None if slots is None else whole_number(slots, "slots of a ring", least=2)
    subject = _subject(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rounding = 512 if device.type == "cuda" else 1
    needs = needs_of(model, batch, optimizer=optimizer, loss=loss, rounding=rounding)
    made = link is None
    carrier: Link = link if link is not None else usual_link(device)
    lender = FarMemory(pinned if isinstance(carrier, CudaLink) else in_host) if far is None else far
    rate = flops_per_s(device, next((p.dtype for p in model.parameters()), torch.float32))
    ways: dict[str, tuple[Choice, Any]] = {"keep": (near("keep", needs, budget, rate, micro_batches), None)}
    if needs.peak > budget or subject.group is not None:  # ranks look at the same ways, whatever each has
        gbps = bytes_per_s(carrier, device, budget=budget) / 1e9
        again = needs_of(model, batch, optimizer=optimizer, loss=loss, rounding=rounding, recompute=True)
        if subject.group is None:
            ways["activations"] = activations(needs, budget, rate, gbps, micro_batches)
        else:
            ways["recomputed"] = near("recomputed", again, budget, rate, micro_batches), None
        for way, of in (("residency", needs), ("residency, recomputed", again)):
            ways[way] = residency(way, of, subject.parts, budget, rate, gbps, micro_batches, slots)
    choices = _agreed(tuple(choice for choice, _ in ways.values()), subject.group)
    fitting = [choice for choice in choices if choice.seconds is not None]
    if not fitting:
        if made:
            carrier.close()
        nearest = min(choices, key=lambda choice: choice.peak)
        where = f" (fullest in {nearest.fullest})" if nearest.fullest else ""
        raise SynthesisError(
            f"a budget of {budget} bytes: nothing fits; nearest is {nearest.way}{where}, which needs {nearest.peak}, "
            f"{nearest.peak - budget} bytes more: a smaller batch, or a larger budget"
        )
    best = min(fitting, key=lambda choice: choice.seconds or 0.0)
    fitted = Fitted(best.way, choices, needs, budget)
    plan = ways[best.way][1]
    if made:
        fitted._held.push(lambda *_: carrier.close())
    try:
        if best.way == "activations":
            names, instance, chosen = plan
            fitted.hold(attach(model, names, instance, chosen, link=carrier, far=lender))
        if best.way.endswith("recomputed"):
            fitted.hold(recomputed(subject.again))
        if best.way.startswith("residency"):
            fitted.hold(Residency(model, optimizer, plan, subject.blocks, carrier, far=lender, device=device))
    except BaseException:
        fitted.close()
        raise
    _HELD.add(model)
    fitted._held.callback(_HELD.discard, model)
    return fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """A model as ways see it.

    Attributes:
        blocks: that the residency of parameters follows: modules, or FSDP2's groups.
        again: modules that are computed again.
        parts: units.
        group: of the ranks that have to choose alike; ``None`` where each has a whole model.
    """

    blocks: Mapping[str, Any]
    again: dict[str, nn.Module]
    parts: Parts
    group: dist.ProcessGroup | None


def _subject(model: nn.Module) -> _Subject:
    if not any(is_fully_sharded(module) for module in model.modules()):
        blocks = blocks_of(model)
        return _Subject(blocks=blocks, again=blocks, parts=parts_of(model, blocks), group=None)
    groups = groups_of(model)
    modules = {name: group.modules[0] for name, group in groups.items()}
    again = {name: modules[name] for name in innermost(modules)}
    group = next(iter(groups.values()))._all_gather_process_group
    return _Subject(blocks=groups, again=again, parts=sharded_parts(model, groups), group=group)


def _agreed(choices: tuple[Choice, ...], group: dist.ProcessGroup | None) -> tuple[Choice, ...]:
    """What fits on every rank takes as long as on the slowest; what does not, lacks what the worst one lacks."""
    if group is None or group.size() == 1:
        return choices
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, [(choice.peak, choice.seconds) for choice in choices], group=group)
    made = []
    for place, choice in enumerate(choices):
        peak = max(each[place][0] for each in found)
        times = [each[place][1] for each in found]
        missing = None in times
        says = "another rank has too little" if missing and choice.seconds is not None else choice.says
        made.append(replace(choice, peak=peak, seconds=None if missing else max(times), says=says))
    return tuple(made)
