"""Selection: simulate every method at several sizes, and say which one wins where, and by how much.

The table is made from simulated times only; it is a recommendation, not a measurement. The runtime chooses between
its own candidates by the cheaper estimate in ``mycel.collectives.cost``, since groups must be made quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mycel.arguments import the, whole_number
from mycel.brief import brief
from mycel.collectives.schedule import Schedule
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective, CollectiveName, as_collective
from mycel.collectives.synth import BY_SIZE, SYNTHESIZERS, candidates_for, synthesize
from mycel.collectives.synth.classics import CLASSICS, classics_for
from mycel.collectives.synth.forest import for_sizes
from mycel.collectives.time_bound import bound_seconds
from mycel.collectives.verify import verify_schedule
from mycel.cost import LinkCosts, link_costs
from mycel.errors import SynthesisError, UsageError
from mycel.names import spelled
from mycel.topology.model import Topology
from mycel.units import format_seconds, format_size

__all__ = ["DEFAULT_SIZES", "Row", "Selection", "select"]

#: Sizes to compare at if none are given: 1 KB to 64 MB.
DEFAULT_SIZES = tuple(1 << power for power in range(10, 27, 2))
#: Times whose ratio is nearer to 1 than this are equal: two decimals would print it as 1.00.
TIE = 1.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One size.

    Attributes:
        num_bytes: of the whole array.
        seconds: simulated time by method, in the order of methods, each with its best piece size; of ``forest``, the
            one that is fastest at this size, which ``synthesize(..., "forest", num_bytes=...)`` gives.
        piece_bytes: that piece size, by method.
        least_s: what no schedule can be quicker than in this model, from latency and bandwidth together
            (``mycel.collectives.time_bound``).
    """

    num_bytes: int
    seconds: dict[str, float]
    piece_bytes: dict[str, int]
    least_s: float

    __repr__ = brief

    @property
    def method(self) -> str:
        """The fastest; the earlier one where times are equal."""
        return min(self.seconds, key=lambda method: self.seconds[method])

    @property
    def gap(self) -> float:
        """Time of the fastest over the least possible: nothing can be more than so many times faster."""
        return self.seconds[self.method] / self.least_s

    @property
    def tied(self) -> tuple[str, ...]:
        """All that are as fast, as far as a simulation can tell; in the order of methods."""
        most = TIE * self.seconds[self.method]
        return tuple(method for method, seconds in self.seconds.items() if seconds <= most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which method for which size.

    Attributes:
        collective: what is moved.
        topology: where.
        costs: what messages were taken to cost.
        rows: by size.
        refused: why methods could not take part, by method.

    Examples:
        >>> from mycel.topology import load_topology
        >>> chosen = select(load_topology("ring:ranks=4,bandwidth=1 GB/s"), "all_gather", [1 << 10, 1 << 24])
        >>> [row.method for row in chosen.rows]
        ['greedy', 'forest']
        >>> print(chosen.explain())
        greedy is the fastest from 1KB to 16MB.
        >>> chosen.refused["hierarchical"]
        'hierarchical on ring_4: rank 0 has no node'
    """

    collective: Collective
    topology: Topology
    costs: LinkCosts
    rows: tuple[Row, ...]
    refused: dict[str, str]

    __repr__ = brief

    def explain(self) -> str:
        """Where the fastest method changes, in words."""
        first, last = self.rows[0], self.rows[-1]
        lines, leader = [], first.method
        for below, above in pairwise(self.rows):
            if leader in above.tied:
                continue
            gain = above.seconds[leader] / above.seconds[above.method]
            lines.append(
                f"Between {format_size(below.num_bytes)} and {format_size(above.num_bytes)} {above.method} "
                f"overtakes {leader}: at {format_size(above.num_bytes)} it takes "
                f"{format_seconds(above.seconds[above.method])}, {gain:.2f} times less."
            )
            leader = above.method
        if not lines:
            rivals = [
                method for method in first.tied if method != leader and all(method in r.tied for r in self.rows)
            ]
            sizes = f"from {format_size(first.num_bytes)} to {format_size(last.num_bytes)}"
            alike = f", and {' and '.join(rivals)} as fast" if rivals else ""
            lines.append(f"{leader} is the fastest {sizes}{alike}.")
        return "\n".join(lines)


def select(
    topology: Topology,
    collective: Collective | CollectiveName,
    sizes: Sequence[int] = DEFAULT_SIZES,
    *,
    methods: Sequence[str] | None = None,
    links: str | None = None,
    schedules: Sequence[Schedule] = (),
    progress: Callable[[str], None] | None = None,
) -> Selection:
    """Simulate methods at sizes.

    Args:
        topology: the fabric.
        collective: what to move, over all of its ranks; a name is enough where the root is rank 0 and all blocks are
            equal.
        sizes: in bytes, of the whole array.
        methods: candidates; all that serve the collective if not given. One that does not serve it, or not on this
            fabric, is left out.
        links: class of all links, a key of ``mycel.cost.LINK_CLASSES``; if not given, of each what its rate and place
            hint at, and what the topology states (``mycel.cost.link_costs``).
        schedules: of one's own, to compare as well; under their method's name, with ``own`` before it where a
            candidate has that.
        progress: is told what is being done, each time that something else is.

    Returns:
        Times by method at each size, and why methods could not take part.

    Raises:
        UsageError: no sizes, an unknown method or class of links, or no method that serves this collective on this
            fabric.

    Examples:
        >>> from mycel.topology import load_topology
        >>> fabric = load_topology("torus:dims=2x4,bandwidth=1 GB/s,latency=5us")
        >>> chosen = select(fabric, "broadcast", [1 << 10, 1 << 24], methods=["forest", "tree"])
        >>> [row.method for row in chosen.rows]  # few steps for few bytes, full links for many
        ['tree', 'forest']
    """
    topology = the(Topology, topology, "a topology", hint="mycel.load_topology reads one")
    collective = as_collective(collective, topology.num_ranks)
    sizes = [whole_number(size, "size in bytes", least=1) for size in sizes]
    known = [*SYNTHESIZERS, *CLASSICS]
    by_size = [method for method, served in BY_SIZE.items() if collective.name in served]
    usual = [*candidates_for(collective.name), *by_size, *classics_for(collective.name)]
    candidates = usual if methods is None else [spelled(method, known, "method") for method in methods]
    own = _named(schedules, topology, collective, candidates)
    candidates = [*candidates, *own]
    if not sizes:
        raise UsageError("no sizes to compare at")
    costs = link_costs(topology, links=links)
    rows: list[Row] = []
    refused: dict[str, str] = {}
    made: dict[str, tuple[Schedule, ...]] = {name: (schedule,) for name, schedule in own.items()}
    least = bound_seconds(topology, collective, links=links)
    for size in sorted(set(sizes)):
        seconds: dict[str, float] = {}
        pieces: dict[str, int] = {}
        for method in candidates:
            if method in refused:
                continue
            if progress is not None:
                progress(f"{collective.name} of {format_size(size)} by {method}")
            if method not in made or method in BY_SIZE:
                try:
                    made[method] = _schedules(topology, collective, method, size, links)
                except (SynthesisError, UsageError) as error:
                    refused[method] = str(error)
                    continue
                for schedule in made[method]:
                    verify_schedule(schedule)
            tried = [
                (simulate(schedule, size, piece_bytes=piece, links=links).seconds, -piece)
                for schedule in made[method]
                for piece in costs.pieces(size)
            ]
            best = min(tried)
            seconds[method], pieces[method] = best[0], -best[1]
        if not made:
            raise UsageError(f"no method serves {collective.name} on {topology.name}: {'; '.join(refused.values())}")
        rows.append(Row(num_bytes=size, seconds=seconds, piece_bytes=pieces, least_s=least.seconds(size)))
    return Selection(collective=collective, topology=topology, costs=costs, rows=tuple(rows), refused=refused)


def _named(
    schedules: Sequence[Schedule], topology: Topology, collective: Collective, taken: Sequence[str]
) -> dict[str, Schedule]:
    """Verified schedules of one's own, by names that no candidate has."""
    named: dict[str, Schedule] = {}
    for schedule in schedules:
        if schedule.collective != collective or schedule.topology.fingerprint != topology.fingerprint:
            raise UsageError(
                f"{schedule.method} is {schedule.collective.to_text()} on {schedule.topology.name}, and is to be "
                f"compared with {collective.to_text()} on {topology.name}"
            )
        verify_schedule(schedule)
        name = schedule.method
        while name in taken or name in named:
            name = f"own {name}"
        named[name] = schedule
    return named


def _schedules(
    topology: Topology, collective: Collective, method: str, num_bytes: int, links: str | None
) -> tuple[Schedule, ...]:
    """What a method has to offer for a size: a schedule, or forests of several depths that serve all sizes."""
    if method == "forest":
        return for_sizes(topology, collective)
    options = {"num_bytes": num_bytes, "links": links} if method in BY_SIZE else {}
    return (synthesize(topology, collective, method, **options),)
