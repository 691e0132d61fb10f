"""One call for a model that does not fit: what to keep, move, compute again or hold far, chosen by one model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from mycel.arguments import the, whole_number
from mycel.comm.handle import Handle
from mycel.errors import SynthesisError, UsageError
from mycel.memory.degrees import Degrees
from mycel.memory.needs import Needs, loss_of, recomputed
from mycel.memory.needs.trace import Batch, Loss
from mycel.memory.residency import Residency
from mycel.memory.search import Search, subject_of
from mycel.memory.swap import attach
from mycel.memory.swap.blocks import is_swapped
from mycel.memory.tiers import CudaLink, FarMemory, Link, in_host, pinned
from mycel.memory.ways import Choice, mib, usual_link
from mycel.units import format_seconds

__all__ = ["Choice", "Fitted", "fit"]

#: Models of which something is at work.
_HELD: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Fitted(Handle):
    """A model that trains within its budget, until it is closed.

    Attributes:
        way: that was chosen.
        degree: ranks that share a sequence.
        choices: all that were looked at.
        needs: of a step as it is, on what a rank has of a sequence by this degree.
        budget: bytes of near memory.
        sequence: what ``mycel.sequence.apply`` gives, where degrees were looked at; ``None`` where none were.
        handles: what is at work: a ``Residency``, a ``Swapping``, or what has blocks computed again.
    """

    def __init__(self, chosen: Choice, choices: tuple[Choice, ...], needs: Needs, budget: int) -> None:
        self.way, self.degree = chosen.way, chosen.degree
        self.choices, self.needs, self.budget = choices, needs, budget
        self.sequence: Any = None  # of a floor above
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
        over = self.sequence is not None
        chosen = _named(self.way, self.degree, over=over)
        lines = [f"a step needs {mib(self.needs.peak)}, and there are {mib(self.budget)}: {chosen}"]
        for choice in self.choices:
            taken = "*" if (choice.way, choice.degree) == (self.way, self.degree) else " "
            cost = "does not fit" if choice.seconds is None else f"{format_seconds(choice.seconds)} a step, modelled"
            if choice.seconds_of_all is not None and choice.degree > 1:
                cost += f", {format_seconds(choice.seconds_of_all)} of all that share it"
            named = _named(choice.way, choice.degree, over=over)
            lines.append(f"{taken} {named}: {mib(choice.peak)}, {cost}; {choice.says}")
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
    degrees: Degrees | None = None,
) -> Fitted:
    """Train a model within a budget of near memory, the loop unchanged.

    What a step needs is found without running it. Then the fastest that fits, by one model of time, is put to work:
    the model as it is; activations kept, moved or computed again block by block; parameters, gradients and optimizer
    state far, near when they are needed; or that with blocks computed again. Results are those of training without
    it, bit for bit.

    With ``degrees`` each of these ways is looked at with one, two and more ranks that share a sequence. What counts
    then is the time of a batch on all ranks that share it, since the fewer share one, the more batches a step has.
    All ranks call this, with the same batch, and choose alike.

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
        degrees: ``mycel.sequence.SequenceDegrees``: numbers of ranks that may share a sequence.

    Returns:
        A handle: ``explain()`` says what was chosen and why, ``close()`` ends it. With ``degrees``,
        ``sequence.shard(batch)`` gives what the model is called with, and ``sequence.replica`` says whose batches.

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
    if degrees is not None:
        degrees = the(Degrees, degrees, "degrees")  # type: ignore[type-abstract]  # a protocol
    subject = subject_of(model, degrees)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    made = link is None
    carrier: Link = link if link is not None else usual_link(device)
    lender = FarMemory(pinned if isinstance(carrier, CudaLink) else in_host) if far is None else far
    search = Search(subject, batch, optimizer, loss, budget, micro_batches, device, carrier, slots)
    try:
        looked_at = search.alone() if degrees is None else search.shared(degrees)
        fitting = [each for each in looked_at if each.choice.seconds is not None]
        if not fitting:
            raise _refused(budget, [each.choice for each in looked_at], shared=degrees is not None)
    except BaseException:
        if made:
            carrier.close()
        raise
    best = min(fitting, key=lambda each: each.choice.seconds_of_all or 0.0)
    fitted = Fitted(best.choice, tuple(each.choice for each in looked_at), best.needs, budget)
    if made:
        fitted._held.push(lambda *_: carrier.close())
    try:
        if degrees is not None:
            fitted.sequence = degrees.apply(model, best.choice.degree)
            fitted.hold(fitted.sequence)
        if fitted.way == "activations":
            names, instance, chosen = best.plan
            fitted.hold(attach(model, names, instance, chosen, link=carrier, far=lender))
        if fitted.way.endswith("recomputed"):
            fitted.hold(recomputed(subject.again))
        if fitted.way.startswith("residency"):
            fitted.hold(Residency(model, optimizer, best.plan, subject.blocks, carrier, far=lender, device=device))
    except BaseException:
        fitted.close()
        raise
    _HELD.add(model)
    fitted._held.callback(_HELD.discard, model)
    return fitted


def _refused(budget: int, choices: Sequence[Choice], *, shared: bool) -> SynthesisError:
    nearest = min(choices, key=lambda choice: choice.peak)
    where = f" (fullest in {nearest.fullest})" if nearest.fullest else ""
    return SynthesisError(
        f"a budget of {budget} bytes: nothing fits; nearest is {_named(nearest.way, nearest.degree, over=shared)}"
        f"{where}, which needs {nearest.peak}, {nearest.peak - budget} bytes more: "
        f"{'more ranks, ' if shared else ''}a smaller batch, or a larger budget"
    )


def _named(way: str, degree: int, *, over: bool) -> str:
    """A way, for people, with how many ranks share a sequence where that was to choose."""
    return f"{way}, {degree} rank{'s' if degree > 1 else ''} a sequence" if over else way
