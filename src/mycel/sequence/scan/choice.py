"""Which way a scan takes: predicted from the topology, measured where predictions are near each other, remembered."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.brief import brief
from mycel.collectives.routes import shortest_routes
from mycel.comm import nodes_of
from mycel.comm.nodes import with_bandwidths
from mycel.cost import bytes_per_second, link_costs
from mycel.errors import UsageError
from mycel.sequence.context import SequenceContext
from mycel.sequence.scan.courier import Courier
from mycel.sequence.scan.line import Line
from mycel.sequence.scan.maps import Maps, Shape
from mycel.sequence.scan.messages import Round
from mycel.sequence.scan.ways import WAYS, Nodes
from mycel.topology.model import Topology

__all__ = ["Choice", "choose", "explain_scan", "predict"]

#: Ways whose prediction is within this factor of the least are measured.
_NEAR = 1.6
#: Seconds: so are ways predicted to be this quick, of which hosts may cost more than the wires that are modelled.
_QUICK_S = 0.01
_TRIALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way, and why.

    Attributes:
        way: its name.
        nodes: ranks of each node.
        predicted_s: of each way, where a topology says so.
        measured_s: of those that were tried: the median of the slowest rank.
    """

    way: str
    nodes: Nodes
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    measured_s: Mapping[str, float] = field(default_factory=dict)

    __repr__ = brief


#: What was chosen on a group, by layout, shape of states, and type.
_CHOICES: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], Choice]] = WeakKeyDictionary()


def choose(context: SequenceContext, line: Line, shape: Shape, like: Tensor, way: str, nodes: Nodes | None) -> Choice:
    """The way of a scan; the first time for this layout and shape all ranks may measure.

    Args:
        context: whose ranks.
        line: of its layout.
        shape: of the maps.
        like: of the type and on the device of states.
        way: asked for, or ``"auto"``.
        nodes: ranks of each node, where the caller knows better than the topology.

    Raises:
        UsageError: two levels are asked for, and nothing says which ranks share a node, or not each is in one.
    """
    group = context.group
    if group is None:
        raise UsageError("one rank alone has no ways to choose from")
    known = _CHOICES.setdefault(group, {})
    key = (context.layout.digest, shape, like.dtype, like.device, way, nodes)
    if key not in known:
        known[key] = _chosen(context, group, line, shape, like, way, nodes)
    return known[key]


def _chosen(
    context: SequenceContext,
    group: dist.ProcessGroup,
    line: Line,
    shape: Shape,
    like: Tensor,
    way: str,
    nodes: Nodes | None,
) -> Choice:
    communicator = with_bandwidths(group)
    topology = None if communicator is None else communicator.topology
    where = nodes or (nodes_of(topology) if topology is not None else ())
    has_levels = 1 < len(where) < context.num_ranks
    if nodes is not None and sorted(rank for node in nodes for rank in node) != list(range(context.num_ranks)):
        raise UsageError(f"nodes {nodes}: each of ranks 0 to {context.num_ranks - 1} once")
    if way == "two_levels" and not where:
        raise UsageError("two_levels: nothing says which ranks share a node; give nodes=((0, 1), (2, 3)) or so")
    if way != "auto":
        return Choice(way=way, nodes=where)
    names = [name for name in WAYS if name != "two_levels" or has_levels]
    predicted = {} if topology is None else predict(topology, line, shape, like.element_size(), where, names)
    if predicted:
        names = _candidates(predicted)
    if len(names) == 1:
        return Choice(way=names[0], nodes=where, predicted_s=predicted)
    measured = _measured(context, line, shape, like, where, names)
    return Choice(
        way=min(names, key=lambda name: measured[name]), nodes=where, predicted_s=predicted, measured_s=measured
    )


def _candidates(predicted: Mapping[str, float]) -> list[str]:
    """Ways that predictions cannot tell from the best."""
    most = max(_QUICK_S, _NEAR * min(predicted.values()))
    return [name for name, seconds in predicted.items() if seconds <= most]


def predict(
    topology: Topology, line: Line, shape: Shape, itemsize: int, nodes: Nodes, names: list[str] | None = None
) -> dict[str, float]:
    """Modelled seconds of each way: rounds of messages along shortest routes, each as long as its busiest link.

    A gather takes what the bound of its schedules says.

    Args:
        topology: the fabric, with rates.
        line: of the layout.
        shape: of the maps.
        itemsize: bytes of a number.
        nodes: ranks of each node.
        names: of the ways; all if not given.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> from mycel.sequence.scan.line import line_of
        >>> from mycel.topology import load_topology
        >>> boxes, shape = load_topology("two_boxes:ranks=8"), Shape(heads=4, values=256, keys=256, order=0)
        >>> seconds = predict(boxes, line_of(contiguous([64], 8)), shape, 4, nodes_of(boxes))
        >>> min(seconds, key=seconds.get)
        'two_levels'
    """
    wanted = list(WAYS) if names is None else names
    if not 1 < len(nodes) < topology.num_ranks:
        wanted = [name for name in wanted if name != "two_levels"]
    routes = {rank: shortest_routes(topology, rank) for rank in range(topology.num_ranks)}
    return {
        name: sum(
            _seconds(topology, routes, each, itemsize)
            for each in WAYS[name].messages(line, shape, topology.num_ranks, nodes)
        )
        for name in wanted
    }


def _seconds(topology: Topology, routes: Mapping[int, Mapping[int, object]], sent: Round, itemsize: int) -> float:
    rate, costs = bytes_per_second(topology), link_costs(topology)
    ways = {pair: routes[pair[0]][pair[1]].vertices for pair in sent.numbers}  # type: ignore[attr-defined]
    latency = max(sum(costs.message(way)) for way in ways.values())
    if sent.is_gather:
        from mycel.collectives.bound import bound

        each = next(iter(sent.numbers.values())) * itemsize
        return latency + each * topology.num_ranks / (float(bound(topology, "all_gather").algbw) * rate)
    loads: Counter[tuple[int, int]] = Counter()
    for pair, numbers in sent.numbers.items():
        for hop in pairwise(ways[pair]):
            loads[hop] += numbers * itemsize
    return latency + max(load / (topology.capacity[hop] * rate) for hop, load in loads.items())


@torch.no_grad()
def _measured(
    context: SequenceContext, line: Line, shape: Shape, like: Tensor, nodes: Nodes, names: list[str]
) -> dict[str, float]:
    """Seconds of scans of zeros, ways in turns; the same on all ranks."""
    own = len(line.of(context.rank))
    maps = Maps(
        transition=like.new_zeros(own, shape.heads, *[shape.keys] * shape.order),
        update=like.new_zeros(own, shape.heads, shape.values, shape.keys),
    )
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(_TRIALS + 1):
        for name in names:
            begin = _now(like.device)
            courier = Courier(context, "scan.measured")
            WAYS[name].run(courier, line, maps, nodes)
            spent = torch.tensor([_now(like.device) - begin], dtype=torch.float64, device=like.device)
            seconds[name].append(float(courier.gather(spent).max()))  # so all begin the next one together
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}  # the first one connects


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def explain_scan(context: SequenceContext) -> str:
    """What was chosen for the scans of a context's layout: modelled and measured milliseconds of every way.

    Args:
        context: whose scans.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> explain_scan(SequenceContext(contiguous([4], 1)))
        'one rank: no state travels'
    """
    if context.group is None or context.num_ranks == 1:
        return "one rank: no state travels"
    lines = []
    for (digest, shape, dtype, _, asked, _), choice in _CHOICES.get(context.group, {}).items():
        if digest != context.layout.digest or not isinstance(shape, Shape):
            continue
        size = f"{shape.heads} states of {shape.keys} x {shape.values} in {str(dtype).removeprefix('torch.')}"
        lines.append(f"{size}: {choice.way}" + ("" if asked == "auto" else ", as asked for"))
        for name in {**choice.predicted_s, **choice.measured_s}:
            modelled = f"{1e3 * choice.predicted_s[name]:.2f}" if name in choice.predicted_s else "-"
            tried = f"{1e3 * choice.measured_s[name]:.2f}" if name in choice.measured_s else "-"
            lines.append(f"  {name:14} modelled {modelled:>8} ms, measured {tried:>8} ms")
    return "\n".join(lines) or "no scan yet"
