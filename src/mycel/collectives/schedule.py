"""Schedule: who sends which chunk to whom, over which links, copied or reduced, after what.

The array of the collective is cut into ``num_units`` equal units (a multiple of the number of blocks); a *chunk*
is a run of units; chunks partition the array and none crosses a block. Every rank has a place for every chunk.
A *transfer* reads the chunk at its source and, at its destination, overwrites the chunk (copy) or adds to it
(reduce). It happens after the transfers it names, which stand before it in the tuple: the order of the tuple is
an order in which everything may be done, and pipelining follows it.

The ends of a transfer are *compute vertices*: the ranks, and after them the switches that can copy and add, in the
order of ``Topology.compute_vertices``. Such a switch has a place for every chunk too, empty before; an addition into
an empty place of a switch starts the sum there, so that contributions may come in any order.

In all_reduce a rank may have further places for a chunk, 1, 2 and so on, so that partners can add each other's sums
at the same time: each sends what it holds while it forms the next sum apart from it. A transfer says which place of
its source it reads and which of its destination it writes (``places``). The first addition to a place after the first
starts from what the place before it holds; additions at one rank follow each other in the order of the tuple. In the
end the last place that a rank has written holds its result.

Sizes in bytes do not occur here: a schedule serves every size (see ``lower``).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mycel.brief import brief
from mycel.collectives.columns import BoolArray, Columns, IntArray, Transfer
from mycel.collectives.orbit import Orbit
from mycel.collectives.part import Parts
from mycel.collectives.schedule_fields import claim, is_marked, is_reduce, places_of, text_of, whole
from mycel.collectives.slots import Slots
from mycel.collectives.spec import Collective
from mycel.errors import MycelError, ScheduleError
from mycel.topology.link_class import stated_from_json, stated_to_json
from mycel.topology.model import Link, Topology, Vertex

__all__ = ["SCHEDULE_VERSION", "Chunk", "Schedule", "Transfer"]

SCHEDULE_VERSION = 1
#: Places that a rank can have for a chunk: more than exchanges of any number of ranks take, and little memory.
MAX_PLACES = 64
#: Chunks beyond which all are tested at once, and units up to which 64 bits count them with room to spare.
_MANY_CHUNKS, _MOST_COUNTED = 1000, 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Units ``start .. stop-1`` of the collective's array."""

    start: int
    stop: int

    @property
    def num_units(self) -> int:
        """Length in units."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A collective on a topology, as transfers. Frozen and hashable.

    Construction checks the form (indices, ranges, paths that exist); whether the result is *right* is for
    ``mycel.collectives.verify`` to say.

    Attributes:
        collective: what is moved.
        topology: along which links, over as many ranks as the collective has.
        method: name of the algorithm that made it.
        num_units: equal units that the collective's array is divided into; a multiple of its blocks' total weight.
        chunks: ranges of units, each inside one block; together all of the array.
        transfers: one chunk each from one rank (or switch that computes) to another along a path, after earlier ones.
        version: of this form.
        is_timed: whether transfers stand in the order of a plan in time, which every channel keeps; if not, channels
            send by depth, so that pieces of many chunks flow through it side by side.

    Raises:
        ScheduleError: malformed; the message names the chunk or transfer.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> schedule = synthesize(load_topology("ring:ranks=4,bandwidth=1 GB/s"), "all_gather")
        >>> schedule.method, schedule.algbw, schedule.depth  # GB/s, and transfers that wait for each other
        ('forest', Fraction(8, 3), 2)
        >>> Schedule.from_text(schedule.to_text()) == Schedule.from_json(schedule.to_json()) == schedule
        True
    """

    collective: Collective
    topology: Topology
    method: str
    num_units: int
    chunks: tuple[Chunk, ...]
    transfers: tuple[Transfer, ...]
    version: int = SCHEDULE_VERSION
    is_timed: bool = False

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.version != SCHEDULE_VERSION:
            raise ScheduleError(f"schedule version {self.version}; this mycel reads version {SCHEDULE_VERSION}")
        if self.collective.num_ranks != self.topology.num_ranks:
            raise ScheduleError(
                f"{self.collective.name} over {self.collective.num_ranks} ranks on a topology of "
                f"{self.topology.num_ranks}"
            )
        if self.orbit is None:
            self._check_chunks()
            self._check_transfers()
        else:
            self._check_orbit(self.orbit)

    @classmethod
    def of_columns(
        cls,
        *,
        collective: Collective,
        topology: Topology,
        method: str,
        num_units: int,
        chunks: tuple[Chunk, ...],
        columns: Columns,
    ) -> Schedule:
        """The schedule of transfers given as columns; ``transfers`` is made of them when somebody asks for it.

        Raises:
            ScheduleError: as for transfers.
        """
        schedule = object.__new__(cls)
        fields = {"collective": collective, "topology": topology, "method": method, "num_units": num_units}
        for name, value in (fields | {"chunks": chunks, "version": SCHEDULE_VERSION, "columns": columns}).items():
            object.__setattr__(schedule, name, value)
        schedule.__post_init__()
        return schedule

    @classmethod
    def of_orbit(cls, *, collective: Collective, topology: Topology, method: str, orbit: Orbit) -> Schedule:
        """The schedule of ranks that are alike, stated by rank 0's part; the rest is made when somebody asks for it.

        Raises:
            ScheduleError: as for transfers; or shares that are not the collective's. Whether ranks are alike is for
                ``mycel.collectives.verify`` to say.
        """
        schedule = object.__new__(cls)
        fields = {"collective": collective, "topology": topology, "method": method, "version": SCHEDULE_VERSION}
        fields |= {"num_units": int(orbit.stops[-1]) * topology.num_ranks, "orbit": orbit}
        for name, value in fields.items():
            object.__setattr__(schedule, name, value)
        schedule.__post_init__()
        return schedule

    @cached_property
    def orbit(self) -> Orbit | None:
        """What the schedule was made of, where that was one rank's part and the moves to all others."""
        return None  # ``of_orbit`` has put it in this one's place

    @cached_property
    def columns(self) -> Columns:
        """The transfers as columns."""
        return Columns.of(self.transfers) if self.orbit is None else self.orbit.expanded()

    if not TYPE_CHECKING:  # so that the type checker still knows every attribute

        def __getattr__(self, name: str) -> Any:
            """``transfers`` and ``chunks`` of a schedule not made of them; called only while they are missing."""
            known = self.__dict__
            found: tuple[Any, ...]
            if name == "transfers" and ("columns" in known or known.get("orbit") is not None):
                found = tuple(self.columns.transfers())
            elif name == "chunks" and known.get("orbit") is not None:
                stops = self.chunk_stops.tolist()
                found = tuple(Chunk(start=start, stop=stop) for start, stop in pairwise([0, *stops]))
            else:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            object.__setattr__(self, name, found)
            return found

    def _check_chunks(self) -> None:
        weight = self.collective.total_weight
        if self.num_units <= 0 or self.num_units % weight:
            what = "blocks" if self.collective.weights is None else "parts, as the weights of the blocks need"
            raise ScheduleError(f"{self.num_units} units do not divide into {weight} {what}")
        if len(self.chunks) > _MANY_CHUNKS and self._divide_the_array():
            return
        reached = 0
        for position, chunk in sorted(enumerate(self.chunks), key=lambda item: item[1].start):
            if chunk.start != reached or chunk.stop <= chunk.start:
                raise ScheduleError(
                    f"chunk {position} covers units {chunk.start}..{chunk.stop}; expected one starting at {reached}"
                )
            if chunk.stop > self.block_starts[self.block_of(position) + 1]:
                raise ScheduleError(f"chunk {position} ({chunk.start}..{chunk.stop}) crosses a block boundary")
            reached = chunk.stop
        if reached != self.num_units:
            raise ScheduleError(f"chunks cover {reached} of {self.num_units} units")

    def _divide_the_array(self) -> bool:
        """Whether chunks follow each other without a gap, each inside a block; tested for all of them at once."""
        if self.num_units >= _MOST_COUNTED:
            return False
        try:
            begin, end = self.chunk_starts, self.chunk_stops
        except OverflowError:
            return False
        order = np.argsort(begin, kind="stable")
        follow = np.concatenate([[0], end[order]]) == np.concatenate([begin[order], [self.num_units]])
        block = np.searchsorted(self.block_bounds, begin, side="right") - 1
        return bool(follow.all() and (end > begin).all() and (end <= self.block_bounds[block + 1]).all())

    def _check_orbit(self, orbit: Orbit) -> None:
        """Test rank 0's part, whose images are formed as it is."""
        c, n = self.collective, self.collective.num_ranks
        turns = c.name == "all_to_all"
        if c.root is not None or c.weights is not None or orbit.turns != turns or orbit.num_ranks != n:
            raise ScheduleError(f"{c.to_text()}: not a collective in which all ranks have equal shares")
        if not len(orbit.stops) or (orbit.units <= 0).any():
            raise ScheduleError(f"{c.to_text()}: a chunk of rank 0 holds no units")
        if turns and (len(orbit.stops) != n or len(set(orbit.units.tolist())) > 1):
            raise ScheduleError(f"{c.to_text()}: rank 0 needs {n} equal chunks, one a block")
        bad = np.flatnonzero(self._malformed(orbit.columns, len(orbit.stops))).tolist()
        if bad:
            raise ScheduleError(f"{c.to_text()}: transfer {bad[0]} of rank 0's part is malformed")

    def _check_transfers(self) -> None:
        """Test all columns at once; only what fails is looked at one by one, for the message."""
        try:
            suspects = np.flatnonzero(self._malformed(self.columns, len(self.chunks))).tolist()
        except OverflowError:
            suspects = list(range(len(self.transfers)))
        for position in suspects:
            self._check_transfer(position, self.transfers[position])

    def _malformed(self, columns: Columns, num_chunks: int) -> BoolArray:
        compute_vertices = np.array(self.topology.compute_vertices, dtype=np.int64)
        links, vertices = self.topology.capacity, self.topology.vertices
        is_path = [
            len(path) >= 2
            and all(hop in links for hop in pairwise(path))
            and all(vertices[vertex].kind == "switch" for vertex in path[1:-1])
            for path in columns.paths
        ]
        ends = np.array([(p[0], p[-1]) if fine else (-1, -1) for p, fine in zip(columns.paths, is_path, strict=True)])
        first, last = ends.reshape(-1, 2)[columns.path].T
        found: BoolArray = (columns.chunk < 0) | (columns.chunk >= num_chunks) | (columns.src == columns.dst)
        for vertex, end in ((columns.src, first), (columns.dst, last)):
            exists = (vertex >= 0) & (vertex < len(compute_vertices))
            found |= ~exists | (end != compute_vertices[np.where(exists, vertex, 0)])
        waiting = np.repeat(np.arange(len(columns)), np.diff(columns.after_start))
        found[waiting[(columns.after < 0) | (columns.after >= waiting)]] = True
        if columns.places is not None:
            read, written = columns.places.T
            outside = (columns.places < 0).any(axis=1) | (columns.places >= MAX_PLACES).any(axis=1)
            further, n = (read > 0) | (written > 0), self.collective.num_ranks
            is_fine = (self.collective.name == "all_reduce") & (columns.src < n) & (columns.dst < n)
            found |= outside | (further & ~is_fine) | ((written > 0) & ~columns.reduce)
        return found

    def _check_transfer(self, position: int, transfer: Transfer) -> None:
        where = f"transfer {position} (chunk {transfer.chunk}, {transfer.src} -> {transfer.dst})"
        if not 0 <= transfer.chunk < len(self.chunks):
            raise ScheduleError(f"{where}: no such chunk; chunks are 0..{len(self.chunks) - 1}")
        n, ends, path = self.topology.num_ranks, self.topology.compute_vertices, transfer.path
        if not (0 <= transfer.src < len(ends) and 0 <= transfer.dst < len(ends)):
            switches = f", switches that compute {n}..{len(ends) - 1}" if len(ends) > n else ""
            raise ScheduleError(f"{where}: ranks are 0..{n - 1}{switches}")
        if transfer.src == transfer.dst:
            raise ScheduleError(f"{where}: a rank does not send to itself")
        if len(path) < 2 or path[0] != ends[transfer.src] or path[-1] != ends[transfer.dst]:
            raise ScheduleError(f"{where}: path {path} does not lead from {transfer.src} to {transfer.dst}")
        for hop in pairwise(path):
            if hop not in self.topology.capacity:
                raise ScheduleError(f"{where}: no link {hop[0]} -> {hop[1]} in {self.topology.name}")
        for vertex in path[1:-1]:
            if self.topology.vertices[vertex].kind != "switch":
                raise ScheduleError(f"{where}: path {path} passes through rank vertex {vertex}")
        self._check_places(where, transfer)
        for earlier in transfer.after:
            if not 0 <= earlier < position:
                raise ScheduleError(f"{where}: 'after' names transfer {earlier}, which does not stand before it")

    def _check_places(self, where: str, transfer: Transfer) -> None:
        if transfer.places == (0, 0):
            return
        read, written = transfer.places
        if not (0 <= read < MAX_PLACES and 0 <= written < MAX_PLACES):
            raise ScheduleError(f"{where}: reads place {read} and writes place {written}; 0..{MAX_PLACES - 1} exist")
        if self.collective.name != "all_reduce":
            raise ScheduleError(f"{where}: names places, which {self.collective.name} does not have; all_reduce does")
        if max(transfer.src, transfer.dst) >= self.topology.num_ranks:
            raise ScheduleError(f"{where}: names places, but a switch has one")
        if written and not transfer.reduce:
            raise ScheduleError(f"{where}: copies to place {written}; copies go to place 0, only sums to others")

    @cached_property
    def slots(self) -> Slots:
        """Where the transfers read and write, each place of each vertex under one number."""
        return Slots.of(self.columns if self.orbit is None else self.orbit.columns)

    @cached_property
    def has_places(self) -> bool:
        """Whether partners add each other's sums: some rank has several places for a chunk."""
        return self.orbit is None and self.columns.places is not None

    @cached_property
    def num_compute_vertices(self) -> int:
        """Ranks and, where transfers end in switches, those up to the last one used: places per chunk."""
        if self.orbit is not None:
            return self.collective.num_ranks
        last = (int(column.max(initial=0)) for column in (self.columns.src, self.columns.dst))
        return max(self.collective.num_ranks, *(vertex + 1 for vertex in last))

    # -- what it costs ------------------------------------------------------------------------------------

    @cached_property
    def link_load(self) -> dict[tuple[int, int], int]:
        """Units that cross each link, by ``(src, dst)`` vertex."""
        if self.orbit is not None:
            return self.orbit.link_load(self.topology)
        columns = self.columns
        # Sums of units may pass 64 bits where the array has very many.
        is_small = self.num_units * (len(columns) + 1) < 1 << 62
        units = np.array([chunk.num_units for chunk in self.chunks], dtype=np.int64 if is_small else object)
        carried = np.zeros(len(columns.paths), dtype=units.dtype)
        np.add.at(carried, columns.path, units[columns.chunk])
        load: dict[tuple[int, int], int] = {}
        for path, amount in zip(columns.paths, carried.tolist(), strict=True):
            for hop in pairwise(path) if amount else ():
                load[hop] = load.get(hop, 0) + amount
        return load

    @cached_property
    def algbw(self) -> Fraction:
        """Size over time when links are the only limit, in the topology's unit (exact).

        The size is that of the array, as everywhere; for all_to_all one rank's part of it, as nccl-tests counts.
        """
        capacity = self.topology.capacity
        slowest = max(Fraction(units, capacity[hop]) for hop, units in self.link_load.items())
        return self.num_units / slowest / self.collective.num_parts

    @cached_property
    def chunk_starts(self) -> IntArray:
        """First unit of each chunk; chunks of an orbit stand in the order of the array."""
        if self.orbit is not None:
            return np.concatenate([np.zeros(1, dtype=np.int64), self.chunk_stops[:-1]])
        return np.array([chunk.start for chunk in self.chunks], dtype=np.int64)

    @cached_property
    def chunk_stops(self) -> IntArray:
        """Unit at which each chunk ends."""
        if self.orbit is not None:
            return self.orbit.chunk_stops()
        return np.array([chunk.stop for chunk in self.chunks], dtype=np.int64)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Of each transfer, how many transfers must come before it, one after the other."""
        if self.orbit is not None:
            return tuple(np.repeat(self.orbit.columns.levels(), self.collective.num_ranks).tolist())
        return tuple(self.columns.levels().tolist())

    @cached_property
    def order_levels(self) -> tuple[int, ...]:
        """Like ``levels``, but what is added into a place also comes after what was added there before.

        Sums are formed in the schedule's order, which a schedule need not have sorted by depth. Programs send in the
        order of these levels; where all is added up they count from the end, and in a plan in time by channel.
        """
        if self.orbit is not None:
            return tuple(np.repeat(self.orbit.columns.order_levels(), self.collective.num_ranks).tolist())
        return tuple(self.columns.order_levels(is_timed=self.is_timed).tolist())

    @cached_property
    def depth(self) -> int:
        """Longest chain of transfers that wait for each other."""
        columns = self.columns if self.orbit is None else self.orbit.columns
        return 1 + int(columns.levels().max(initial=-1))

    @cached_property
    def is_from_one(self) -> bool:
        """Whether one rank sends everything, and waits for nothing: no transfer can be late."""
        return self.orbit is None and self.depth == 1 and len(set(self.columns.src.tolist())) == 1

    @cached_property
    def parts(self) -> Parts:
        """What each vertex sends and receives."""
        c, orbit = self.collective, self.orbit
        owner = np.full(len(self.chunks) if orbit is None else len(orbit.stops), -1, dtype=np.int64)
        if c.name == "reduce" and c.root is not None:
            owner[:] = c.root
        elif c.name == "reduce_scatter":  # a completed sum elsewhere is passed on, and its owner divides
            owner[:] = [self.block_of(chunk) for chunk in range(len(owner))]
        columns = self.columns if orbit is None else orbit.columns
        units = (self.chunk_stops - self.chunk_starts)[: len(owner)]
        return Parts(columns, orbit, c.num_ranks, owner if c.reduces else None, units, is_timed=self.is_timed)

    @cached_property
    def block_starts(self) -> tuple[int, ...]:
        """First unit of every block, and after them the end of the array."""
        unit = self.num_units // self.collective.total_weight
        return tuple(accumulate((weight * unit for weight in self.collective.block_weights), initial=0))

    @cached_property
    def block_bounds(self) -> IntArray:
        """``block_starts`` as an array."""
        if self.collective.weights is None:
            blocks = self.collective.num_blocks
            return np.arange(blocks + 1, dtype=np.int64) * (self.num_units // blocks)
        return np.array(self.block_starts, dtype=np.int64)

    def blocks_of(self, num_chunks: int) -> IntArray:
        """Block that each of the first chunks lies in, shape ``[num_chunks]``."""
        if self.num_units >= _MOST_COUNTED:
            return np.array([self.block_of(chunk) for chunk in range(num_chunks)], dtype=np.int64)
        found: IntArray = np.searchsorted(self.block_bounds, self.chunk_starts[:num_chunks], side="right") - 1
        return found

    def block_of(self, chunk: int) -> int:
        """Block that a chunk lies in."""
        if self.orbit is not None:
            return (int(self.chunk_stops[chunk]) - 1) // (self.num_units // self.collective.num_blocks)
        if self.collective.weights is None:
            return self.chunks[chunk].start // (self.num_units // self.collective.num_blocks)
        return bisect_right(self.block_starts, self.chunks[chunk].start) - 1

    # -- JSON form ----------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """A JSON object that ``from_json`` reads back to an equal schedule."""
        return self._json_head() | {
            "transfers": [
                [t.chunk, t.src, t.dst, "reduce" if t.reduce else "copy", list(t.path), list(t.after)]
                + ([list(t.places)] if any(t.places) else [])
                for t in self.transfers
            ],
        }

    def to_json_text(self) -> str:
        """What ``json.dumps`` makes of ``to_json``, with no Python object for any transfer."""
        if self.has_places:  # few transfers: exchanges move whole arrays
            return json.dumps(self.to_json())
        head = json.dumps(self._json_head())
        return f'{head[:-1]}, "transfers": [{self.columns.json_rows()}]}}'

    def _json_head(self) -> dict[str, Any]:
        return {
            "format": "mycel.schedule",
            "version": self.version,
            "method": self.method,
            "collective": {
                "name": self.collective.name,
                "num_ranks": self.collective.num_ranks,
                "root": self.collective.root,
                **({} if self.collective.weights is None else {"weights": list(self.collective.weights)}),
            },
            "topology": {
                "name": self.topology.name,
                "unit": self.topology.unit,
                "vertices": [
                    [v.kind, v.label, v.node, *([True] if v.computes else [])] for v in self.topology.vertices
                ],
                "links": [
                    [k.src, k.dst, k.capacity, k.latency_s, *([k.link_class] if k.link_class else [])]
                    for k in self.topology.links
                ],
                **({"link_classes": stated_to_json(stated)} if (stated := self.topology.link_classes) else {}),
            },
            **({"timed": True} if self.is_timed else {}),
            "num_units": self.num_units,
            "chunks": [[c.start, c.stop] for c in self.chunks],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule that ``to_json`` wrote.

        Raises:
            ScheduleError: not such an object, or a malformed schedule.
        """
        if not isinstance(data, Mapping) or data.get("format") != "mycel.schedule":
            raise ScheduleError('not a mycel schedule: expected an object with "format": "mycel.schedule"')
        try:
            spec, fabric = data["collective"], data["topology"]
            topology = Topology(
                name=text_of(fabric["name"]),
                unit=text_of(fabric["unit"]),
                vertices=tuple(
                    Vertex(
                        kind=k,
                        label=text_of(label),
                        node=None if box is None else text_of(box),
                        computes=is_marked(computes),
                    )
                    for k, label, box, *computes in fabric["vertices"]
                ),
                links=tuple(
                    Link(
                        src=whole(s),
                        dst=whole(d),
                        capacity=whole(c),
                        latency_s=float(lat),
                        link_class=text_of(*of) if of else None,
                    )
                    for s, d, c, lat, *of in fabric["links"]
                ),
                link_classes=stated_from_json(fabric.get("link_classes", {}), "schedule"),
            )
            root, weights = spec["root"], spec.get("weights")
            return cls(
                version=whole(data["version"]),
                method=text_of(data["method"]),
                collective=Collective(
                    name=spec["name"],
                    num_ranks=whole(spec["num_ranks"]),
                    root=None if root is None else whole(root),
                    weights=None if weights is None else tuple(map(whole, weights)),
                ),
                topology=topology,
                is_timed=claim(data.get("timed", False)),
                num_units=whole(data["num_units"]),
                chunks=tuple(Chunk(start=whole(a), stop=whole(b)) for a, b in data["chunks"]),
                transfers=tuple(
                    Transfer(
                        chunk=whole(chunk),
                        src=whole(src),
                        dst=whole(dst),
                        reduce=is_reduce(kind),
                        path=tuple(map(whole, path)),
                        after=tuple(map(whole, after)),
                        places=places_of(rest),
                    )
                    for chunk, src, dst, kind, path, after, *rest in data["transfers"]
                ),
            )
        except KeyError as error:
            raise ScheduleError(f"schedule JSON lacks the key {error}") from None
        except MycelError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ScheduleError(f"schedule JSON has a value of the wrong shape: {error}") from None

    def to_text(self) -> str:
        """A form for people: a line a vertex, link, chunk and transfer; ``from_text`` reads it back."""
        c = self.collective
        lines = [
            f"mycel.schedule {self.version}",
            f"collective {c.to_text()}",
            f"method {self.method}",
            f"topology {json.dumps(self.topology.name)} {self.topology.unit}",
        ]
        for i, v in enumerate(self.topology.vertices):
            box = "" if v.node is None else f" in {json.dumps(v.node)}"
            lines.append(f"{v.kind} {i} {json.dumps(v.label)}{box}{' computes' if v.computes else ''}")
        for k in self.topology.links:
            of = f" {k.link_class}" if k.link_class else ""
            lines.append(f"link {k.src} -> {k.dst} {k.capacity} {k.latency_s!r}{of}")
        if self.topology.link_classes:
            lines.append(f"link_classes {json.dumps(stated_to_json(self.topology.link_classes))}")
        lines += ["timed"] if self.is_timed else []
        lines.append(f"units {self.num_units}")
        lines += [f"chunk {i} {chunk.start}..{chunk.stop}" for i, chunk in enumerate(self.chunks)]
        for i, t in enumerate(self.transfers):
            after = f" after {','.join(map(str, t.after))}" if t.after else ""
            kind = "reduce" if t.reduce else "copy"
            via = ">".join(map(str, t.path))
            places = f" places {t.places[0]}>{t.places[1]}" if any(t.places) else ""
            lines.append(f"{i}: {kind} chunk {t.chunk} {t.src} -> {t.dst} via {via}{places}{after}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """The schedule that ``to_text`` wrote.

        Raises:
            ScheduleError: a line cannot be read; the message gives its number.
        """
        from mycel.collectives.schedule_text import parse_schedule

        return cls.from_json(parse_schedule(text))
