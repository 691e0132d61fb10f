"""MSCCL++ execution plans as programs of our engine: a plan that was made for GPUs runs on CPU ranks.

A verified plan gives the same result in every order in which its operations can happen. So one of these orders is
taken, and each operation becomes sends, receives, additions and copies of the ranks whose memory it touches: what a
thread block puts is sent by its rank and received by the other, what it reads elsewhere is sent by that other, what a
switch adds is received and added, one rank's after the other's. Instructions *need* those before them that touched
the same elements, which is all that signals, flags and semaphores were for. Since every rank follows the one order,
nothing can wait for itself.

Lengths need not divide into the plan's chunks. Where they do not, the arrays live in scratch, a little longer than
they are, and what is beyond their end is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from mycel.collectives.program import Channel, Program
from mycel.collectives.program_writer import Writer
from mycel.collectives.routes import shortest_routes
from mycel.collectives.spec import Collective
from mycel.collectives.verify.plan import verify_plan
from mycel.collectives.verify.plan_data import SUMS, TO_ALL, Chunks, ForeignPlan, Operation
from mycel.collectives.verify.plan_form import read_plan
from mycel.collectives.verify.plan_replay import Replay
from mycel.collectives.verify.plan_units import Size, in_units
from mycel.collectives.verify.program import verify_programs
from mycel.errors import ScheduleError, UsageError
from mycel.topology.builders import full_mesh
from mycel.topology.model import Topology

__all__ = ["PlanPart", "PlanTemplate", "load_plan", "programs_of"]

#: Elements are measured by this against the steps of pipelines, which are given in bytes.
_ITEM_BYTES = 4
#: Lengths whose programs are kept: each is made for all ranks.
_KEPT = 16
#: Of a pipeline: with more, messages are short, and the programs long.
_MOST_STEPS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanTemplate:
    """A verified plan, ready to be made into programs of any length.

    Attributes:
        plan: what it was made from.
        collective: what it carries out; a ``sendrecv`` is an all_to_all with one block a rank.
        topology: over which its ranks reach each other.
        digest: of the plan's content; the same on ranks that have the same plan.
    """

    plan: ForeignPlan
    collective: Collective
    topology: Topology
    digest: str
    _made: dict[tuple[int, int | None], tuple[Program, ...]] = field(default_factory=dict, repr=False)

    @property
    def method(self) -> str:
        """What it is called in reports."""
        return f"plan:{self.plan.name}"

    @property
    def least_elements(self) -> int:
        """Elements of the least array of which each thread block has a part: enough to see what it does."""
        parts = self.collective.num_ranks if self.collective.weights is not None else self.collective.total_weight
        return parts * _block_chunks(self.plan) * _least_units(self.plan)

    def expand(self, num_elements: int, piece_elements: int | None = None) -> tuple[Program, ...]:
        """All ranks' programs for one length of the collective's whole array.

        Args:
            num_elements: of the whole array, as ``Program.num_elements``.
            piece_elements: longest message; ``None``: as long as the plan's operations are.

        Raises:
            ScheduleError: the array does not divide into the ranks' blocks.
        """
        return tuple(_Lowering(self, num_elements, piece_elements).programs())

    def verified(self, num_elements: int, piece_elements: int | None = None) -> tuple[Program, ...]:
        """The same, verified together, and kept while they are among the last that were asked for."""
        key = (num_elements, piece_elements)
        found = self._made.get(key)
        if found is None:
            found = self.expand(num_elements, piece_elements)
            verify_programs(found)
            while len(self._made) >= _KEPT:
                self._made.pop(next(iter(self._made)), None)
            self._made[key] = found
        return found

    def channels(self, rank: int) -> tuple[Channel, ...]:
        """A rank's channels, whatever the length; one to and from each rank that it exchanges anything with."""
        return tuple(channel for channel in self._all_channels if rank in (channel.src, channel.dst))

    @cached_property
    def _all_channels(self) -> tuple[Channel, ...]:
        return tuple(Channel(src=src, dst=dst, path=self._path(src, dst)) for src, dst in sorted(_pairs(self.plan)))

    def _path(self, src: int, dst: int) -> tuple[int, ...]:
        path = _routes(self.topology).get((src, dst))
        if path is None:
            raise ScheduleError(
                f"{self.plan.title} ({self.plan.name}): rank {src} reaches rank {dst} of {self.topology.name} "
                "through other ranks only, and a plan's ranks send to each other directly"
            )
        return path


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanPart:
    """One rank's part of a plan, as runtimes prepare it.

    Attributes:
        template: the plan.
        rank: whose part.
    """

    template: PlanTemplate
    rank: int

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Of this rank."""
        return self.template.channels(self.rank)

    def expand(
        self, num_elements: int, piece_elements: int, *, block_elements: Sequence[int] | None = None
    ) -> Program:
        """The rank's program for one length; all ranks' are verified together, the first time.

        Raises:
            ScheduleError: blocks differ in length, or the array does not divide into them.
            VerificationError: the programs are wrong.
        """
        if block_elements is not None:
            raise ScheduleError(
                f"{self.template.plan.title} ({self.template.plan.name}): plans have equal blocks only"
            )
        return self.template.verified(num_elements, piece_elements)[self.rank]


def load_plan(data: Mapping[str, Any], topology: Topology | None = None) -> PlanTemplate:
    """The plan in a JSON object, verified.

    Args:
        data: an MSCCL++ execution plan, ours or another's.
        topology: over which ranks are to reach each other; direct links between all if not given.

    Raises:
        ScheduleError: malformed.
        VerificationError: it computes something wrong, or may.
        UsageError: the topology has another number of ranks.

    Examples:
        >>> import json
        >>> from mycel.collectives.export import export
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> ring = synthesize(load_topology("ring:ranks=3"), "all_gather", "ring")
        >>> load_plan(json.loads(export(ring, "mscclpp_json"))).collective.to_text()
        'all_gather 3'
    """
    plan = read_plan(data)
    verify_plan(plan)
    n = plan.collective.num_ranks
    if topology is not None and topology.num_ranks != n:
        raise UsageError(f"a plan for {n} ranks on {topology.name}, which has {topology.num_ranks}")
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return PlanTemplate(
        plan=plan,
        collective=_collective(plan),
        topology=full_mesh(num_ranks=n) if topology is None else topology,
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def programs_of(
    plan: PlanTemplate | Mapping[str, Any],
    num_elements: int,
    *,
    piece_elements: int | None = None,
    topology: Topology | None = None,
) -> list[Program]:
    """Programs of all ranks that do what a plan does, for one length.

    Args:
        plan: a JSON object, which is verified; or what ``load_plan`` gives.
        num_elements: of the collective's whole array, as ``lower`` takes it.
        piece_elements: longest message; ``None``: as long as the plan's operations are.
        topology: for a JSON object, as ``load_plan`` takes it.

    Returns:
        One program a rank, in rank order.

    Raises:
        ScheduleError: malformed, or the array does not divide into blocks.
        VerificationError: the plan is wrong.

    Examples:
        >>> import json
        >>> from mycel.collectives.export import export
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.collectives.verify import verify_programs
        >>> from mycel.topology import load_topology
        >>> tree = synthesize(load_topology("star:ranks=3"), "all_reduce", "tree")
        >>> programs = programs_of(json.loads(export(tree, "mscclpp_json")), 1000)
        >>> verify_programs(programs)
    """
    template = plan if isinstance(plan, PlanTemplate) else load_plan(plan, topology)
    return list(template.expand(num_elements, piece_elements))


def _pairs(plan: ForeignPlan) -> set[tuple[int, int]]:
    """Ranks between which something moves, from whom to whom."""
    pairs: set[tuple[int, int]] = set()
    for rank, blocks in enumerate(plan.blocks):
        given = [op for block in blocks for op in block]
        for op in (each for outer in given for each in outer.inner or (outer,)):
            sources, targets = ([span.rank for span in side] for side in (op.sources, op.targets))
            if op.name in SUMS:
                pairs |= {(source, rank) for source in sources} | {(rank, target) for target in targets}
            elif op.name in TO_ALL:
                pairs |= {(sources[0], target) for target in targets}
            else:
                pairs |= set(zip(sources, targets, strict=True))
    return {(a, b) for a, b in pairs if a != b}


@lru_cache(maxsize=64)
def _routes(topology: Topology) -> dict[tuple[int, int], tuple[int, ...]]:
    return {
        (src, dst): route.vertices
        for src in range(topology.num_ranks)
        for dst, route in shortest_routes(topology, src, relays=False).items()
    }


def _collective(plan: ForeignPlan) -> Collective:
    if not plan.is_sendrecv:
        return plan.collective
    replay = Replay(in_units(plan, Size(units=_least_units(plan), unit_bytes=_ITEM_BYTES)), is_sequence=True)
    replay.run()
    n = plan.collective.num_ranks
    weights = tuple(int(replay.senders[block % n] == block // n) for block in range(n * n))
    return Collective(name="all_to_all", num_ranks=n, weights=weights)


def _least_units(plan: ForeignPlan) -> int:
    return max((op.num_parts for blocks in plan.blocks for block in blocks for op in block), default=1)


def _block_chunks(plan: ForeignPlan) -> int:
    """Chunks of a block of the collective's array."""
    given = plan.chunks[0]["i"]
    is_whole = plan.collective.name in ("all_gather", "all_reduce") or plan.is_sendrecv
    return given if is_whole else given // plan.collective.num_ranks


class _Lowering:
    """One length."""

    def __init__(self, template: PlanTemplate, num_elements: int, piece_elements: int | None) -> None:
        plan, n = template.plan, template.collective.num_ranks
        self.template, self.plan = template, plan
        parts = template.collective.total_weight if template.collective.weights is None else n
        if num_elements % parts or num_elements <= 0:
            raise ScheduleError(f"{plan.title}: {num_elements} elements do not divide into {parts} blocks")
        #: Elements of a block, and chunks of it.
        self.block = num_elements // parts
        self.block_chunks = _block_chunks(plan)
        units = max(-(-self.block // self.block_chunks), _least_units(plan))
        self.is_padded = units * self.block_chunks != self.block
        self.size = Size(units=units, unit_bytes=_ITEM_BYTES, most_steps=_MOST_STEPS)
        self.num_elements = num_elements
        flat = in_units(plan, self.size)
        replay = Replay(flat, is_sequence=True)
        replay.run()
        self.flat, self.done = flat, replay.done
        self.writer = Writer(
            template.collective,
            num_elements,
            channels=[template.channels(rank) for rank in range(n)],
            piece_elements=piece_elements,
        )
        written = {(t.rank, t.buffer) for _, op in self.done for t in op.targets}
        self.places = [self._places(rank, written) for rank in range(n)]

    def _places(self, rank: int, written: set[tuple[int, str]]) -> dict[str, tuple[str, int]]:
        """Where the plan's buffers are among the program's: letter and first element; what has to be copied, is."""
        name, chunks, writer = self.template.collective.name, self.flat.chunks[rank], self.writer
        places: dict[str, tuple[str, int]] = {"s": ("s", writer.reserve(rank, chunks["s"]))}
        in_place = self.plan.in_place
        source = "o" if name == "all_reduce" else "i"
        longer = "o" if name == "all_gather" else "i"
        if in_place:
            stays = name in ("all_gather", "all_reduce", "all_to_all") and not self.is_padded
            base = ("o", 0) if stays else ("s", writer.reserve(rank, chunks[longer]))
            block = self.block_chunks * self.size.units
            own = {"all_gather": "i", "reduce_scatter": "o"}.get(name, "")
            for letter in "io":
                places[letter] = (base[0], base[1] + (rank * block if letter == own else 0))
        else:
            direct = name != "all_reduce" and not self.is_padded and (rank, "i") not in written
            places["i"] = ("i", 0) if direct else ("s", writer.reserve(rank, chunks["i"]))
            places["o"] = ("s", writer.reserve(rank, chunks["o"])) if self.is_padded else ("o", 0)
        for first, start in self._blocks(rank, "i"):
            writer.copy(rank, (source, first), _moved(places["i"], start), self.block)
        return places

    def _blocks(self, rank: int, letter: str) -> list[tuple[int, int]]:
        """Blocks of a rank's input or output: first element in the program's buffer, and in the plan's."""
        length = self.flat.chunks[rank][letter]
        virtual = self.block_chunks * self.size.units
        return [(k * self.block, k * virtual) for k in range(length // virtual)]

    def programs(self) -> list[Program]:
        """One a rank."""
        for rank, op in self.done:
            self._do(rank, op)
        for rank in range(self.plan.collective.num_ranks):
            for first, start in self._blocks(rank, "o"):
                self.writer.copy(rank, _moved(self.places[rank]["o"], start), ("o", first), self.block)
        return self.writer.programs()

    def _do(self, rank: int, op: Operation) -> None:
        writer = self.writer
        if op.name in SUMS:
            where = next(at for at, target in enumerate(op.targets) if target.rank == rank)
            total = op.targets[where]
            writer.add([self._at(source) for source in op.sources], self._at(total), total.size)
            rest = [target for at, target in enumerate(op.targets) if at != where]
            pairs = [(total, target) for target in rest]
        elif op.name in TO_ALL:
            pairs = [(op.sources[0], target) for target in op.targets]
        else:
            pairs = list(zip(op.sources, op.targets, strict=True))
        for source, target in pairs:
            writer.move(self._at(source), self._at(target), target.size)

    def _at(self, chunks: Chunks) -> tuple[int, str, int]:
        letter, start = self.places[chunks.rank][chunks.buffer]
        return chunks.rank, letter, start + chunks.index


def _moved(place: tuple[str, int], by: int) -> tuple[str, int]:
    return place[0], place[1] + by
