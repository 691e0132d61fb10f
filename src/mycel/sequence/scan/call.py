"""The exclusive scan of affine maps over the segments of a layout, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm import Bundle, InBackground, Pending
from mycel.errors import UsageError
from mycel.planning.sequence import Layout
from mycel.sequence.context import SequenceContext
from mycel.sequence.scan.choice import choose
from mycel.sequence.scan.courier import Courier
from mycel.sequence.scan.graph import attached, begin
from mycel.sequence.scan.line import Line, Run, line_of, runs_of
from mycel.sequence.scan.maps import Maps, applied, composed
from mycel.sequence.scan.ways import WAYS, Nodes

__all__ = ["scan", "start_scan"]

#: One thread a group: its scans come one after the other.
_THREADS: WeakKeyDictionary[dist.ProcessGroup, InBackground] = WeakKeyDictionary()


@lru_cache(maxsize=256)
def _line(layout: Layout) -> tuple[tuple[Run, ...], Line]:
    return runs_of(layout), line_of(layout)


def scan(
    transition: Tensor, update: Tensor, context: SequenceContext, *, way: str = "auto", nodes: Nodes | None = None
) -> Tensor:
    """The state that comes into each segment here, where every segment maps a state ``S`` to ``M S + U``.

    States begin at zero with every document and pass through its segments in the order of their positions, whichever
    ranks hold them. All ranks call this, those without a segment too; so they do backwards.

    Args:
        transition: ``M`` of each segment here, of shape (segments, ...) for a number a state, (segments, ..., keys)
            for a diagonal, (segments, ..., keys, keys) for a matrix.
        update: ``U`` of each, of shape (segments, ..., keys, values).
        context: whose segments.
        way: one of ``WAYS``, or ``"auto"``: by size and fabric, measured once (``explain_scan``).
        nodes: ranks of each node, for two levels and for the choice; those of the topology if not given.

    Returns:
        Of shape (segments, ..., keys, values); zeros for segments without tokens.

    Raises:
        UsageError: shapes that do not fit, or no such way.

    Examples:
        >>> from mycel.planning.sequence import Layout, Segment
        >>> parts = [Segment(document=0, start=s, stop=s + 2) for s in (0, 2, 4)]
        >>> context = SequenceContext(Layout(documents=(6,), ranks=(tuple(parts),)))
        >>> scan(torch.full((3,), 0.5), torch.ones(3, 1, 1), context).flatten().tolist()
        [0.0, 1.0, 1.5]
    """
    return start_scan(transition, update, context, way=way, nodes=nodes, in_background=False).wait()


def start_scan(
    transition: Tensor,
    update: Tensor,
    context: SequenceContext,
    *,
    way: str = "auto",
    nodes: Nodes | None = None,
    in_background: bool = True,
) -> Pending[Tensor]:
    """As ``scan``, to be waited for. Nothing else may use the context's group before that.

    Args:
        transition, update, context, way, nodes: as for ``scan``.
        in_background: whether a thread of its own carries it on.
    """
    order = _checked(transition, update, context, way)
    batch = update.shape[1:-2]
    heads, (keys, values) = batch.numel(), update.shape[-2:]
    count = len(update)
    turned = update.reshape(count, heads, keys, values).mT
    flat = transition.expand(count, *batch, *[keys] * order).reshape(count, heads, *[keys] * order)
    runs, line = _line(context.layout)
    mine = [run for run in runs if run.rank == context.rank]
    used = Maps(transition=flat, update=turned)
    if context.num_ranks == 1 or not line:
        return Pending.done(_unturned(_spread(context, used, None, []), update))
    maps = _maps_of(used, mine, context)
    shape = maps.shape
    launch_in = _THREADS.setdefault(context.group, InBackground()) if in_background and context.group else None
    # The meter counts each pass under its own name.
    chosen = choose(context, line, shape, maps.update, way, nodes)

    def launch(maps: Maps, is_back: bool) -> Pending[Tensor]:
        courier = Courier(context, "scan.backward" if is_back else "scan")
        passed = line.reversed() if is_back else line
        work = lambda: WAYS[chosen.way].run(courier, passed, maps, chosen.nodes)  # noqa: E731
        return _run(work, maps.update, launch_in)

    pending = begin(maps, launch)

    def finish() -> Tensor:
        states = pending.wait()
        return _unturned(_spread(context, used, states, mine), update)

    return Pending(finish)


def _run(work: Callable[[], Tensor], like: Tensor, thread: InBackground | None) -> Pending[Tensor]:
    if thread is None:
        with torch.no_grad():
            return Pending.done(work())
    box: list[Tensor] = []
    pending = thread.start(lambda: box.append(work()), Bundle(flat=like, parts=(like,)))

    def finish() -> Tensor:
        pending.wait()
        return box.pop()

    return Pending(finish)


def _checked(transition: Tensor, update: Tensor, context: SequenceContext, way: str) -> int:
    """The order of the transition: 0 for numbers, 1 for diagonals, 2 for matrices."""
    segments = len(context.segments)
    if update.dim() < 3 or len(update) != segments:
        raise UsageError(
            f"updates of shape {tuple(update.shape)}: (segments, ..., keys, values), and rank {context.rank} has "
            f"{segments} segments"
        )
    order = transition.dim() - (update.dim() - 2)
    fits = 0 <= order <= 2 and tuple(transition.shape[transition.dim() - order :]) == (update.shape[-2],) * order
    if not fits or len(transition) != segments or transition.dtype != update.dtype:
        raise UsageError(
            f"transitions of shape {tuple(transition.shape)} and {transition.dtype} for updates of shape "
            f"{tuple(update.shape)} and {update.dtype}: one type, and after the segments and what states are batched "
            f"over nothing, or keys, or keys twice"
        )
    if way != "auto" and way not in WAYS:
        raise UsageError(f"no way of scanning is called {way!r}: auto, {', '.join(WAYS)}")
    return order


def _maps_of(used: Maps, runs: list[Run], context: SequenceContext) -> Maps:
    """The map of each run: its segments one after the other, only those of the last document."""
    order = used.shape.order
    transitions, updates = [], []
    for run in runs:
        first, *others = run.segments[run.tail :]
        transition, update = used.transition[first], used.update[first]
        for number in others:
            update = applied(used.transition[number], update, order) + used.update[number]
            transition = composed(used.transition[number], transition, order)
        if run.tail or not run.takes:
            transition = attached(torch.zeros_like(transition), transition)  # with the document the state begins
        if not run.gives:
            # Nothing leaves, and the way back still has to be joined.
            update = attached(torch.zeros_like(update), transition, update)
            transition = attached(torch.zeros_like(transition), transition)
        transitions.append(transition)
        updates.append(update)
    if not runs:
        return Maps(transition=used.transition[:0], update=used.update[:0].contiguous())
    return Maps(transition=torch.stack(transitions), update=torch.stack(updates))


def _spread(context: SequenceContext, used: Maps, states: Tensor | None, runs: list[Run]) -> Tensor:
    """What comes into every segment here, by what comes into the runs."""
    order, segments = used.shape.order, context.segments
    found: dict[int, Tensor] = {}
    if states is not None:
        for place, run in enumerate(runs):
            if run.takes:
                found[run.segments[0]] = states[place]
    ends = {(s.document, s.stop): number for number, s in enumerate(segments) if len(s)}
    for number in sorted(range(len(segments)), key=lambda n: (segments[n].document, segments[n].start)):
        segment = segments[number]
        before = ends.get((segment.document, segment.start))
        if len(segment) and segment.start and before is not None and number not in found:
            left = used.update[before]
            if before in found:
                left = left + applied(used.transition[before], found[before], order)
            found[number] = left
    nothing = torch.zeros_like(used.update[0]) if segments else None
    parts = [found.get(number, nothing) for number in range(len(segments))]
    spread = torch.stack([p for p in parts if p is not None]) if parts else used.update[:0]
    return attached(spread, *([used.transition, used.update] if states is None else [states]))


def _unturned(states: Tensor, update: Tensor) -> Tensor:
    return states.mT.reshape(update.shape)
