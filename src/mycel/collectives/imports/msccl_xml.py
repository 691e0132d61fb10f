"""MSCCL XML: thread blocks and steps, from any tool, read as MSCCL's runtimes read them, and verified.

What no runtime accepts is refused: a step kind or buffer that does not exist, an index out of range, counts of 72
chunks or more, more than 256 steps in a block, 4,095 elements for a rank, 32 channels or 32 blocks of a channel that
send, or receive; a wait for a step that does not announce its end (``hasdep``). What some accept is said: RCCL takes
64 steps a block, and every runtime asks for ``outofplace``, ``minBytes`` and ``maxBytes``, which the public
generator leaves out. A missing ``outofplace`` is taken to be the opposite of ``inplace``.

Three rules come from how the runtimes fuse steps: empty steps pass what they wait for on to the next step that does
something, which must itself wait; an empty step can neither be waited for nor stand there for nothing; and
additions (``re``) to one place in a row become one, with the count of the last.

References:
    M. Cowan, S. Maleki, M. Musuvathi, O. Saarikivi, Y. Xiong, "MSCCLang: Microsoft collective communication
    language", ASPLOS 2023, sections 4 and 5; the parsers of MSCCL and RCCL.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Any

from mycel.collectives.blocks import (
    BUFFERS,
    READS_SOURCE,
    RECEIVES,
    SENDS,
    STEP_KINDS,
    WRITES_TARGET,
    Block,
    BlockPlan,
    Place,
    RankBlocks,
    Step,
)
from mycel.collectives.imports.content import Content
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.verify.blocks import verify_blocks
from mycel.errors import ScheduleError, TopologyError
from mycel.topology.formats.xml_nodes import Element, parse_elements

__all__ = ["check", "is_mine", "parse"]

_COLLECTIVES: dict[str, CollectiveName] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
_WITHOUT_ROOT = ("broadcast", "reduce", "gather", "scatter")
#: Messages that a connection of NCCL holds, at least: its 8 slots, of which protocol Simple takes 4 for a message.
_SLOTS = {"Simple": 2, "LL": 8, "LL128": 8}
_MAX_COUNT = 71
_MAX_STEPS = 256
_MAX_STEPS_RCCL = 64
_MAX_ELEMENTS = 4095
_MAX_CHANNELS = 32
_MAX_BLOCKS_OF_A_CHANNEL = 32
_MAX_OFFSET = 32767
#: Attributes that the runtimes require and the public generator leaves out.
_OFTEN_MISSING = ("outofplace", "minBytes", "maxBytes")


def is_mine(content: Content) -> bool:
    """Whether a file is XML."""
    return content.text.lstrip().startswith("<")


def check(content: Content) -> dict[str, Any]:
    """Facts of a right plan; ``loads_in`` says for each runtime whether it takes the file, ``notes`` why not.

    Raises:
        ScheduleError: malformed, with the line, or more than any runtime takes.
        VerificationError: wrong.
    """
    root = _root(content.text)
    plan = _Reader(root).plan()
    needed = verify_blocks(plan)
    missing = [name for name in _OFTEN_MISSING if name not in root.attributes]
    longest = max((len(block.steps) for mine in plan.ranks for block in mine.blocks), default=0)
    notes = []
    if missing:
        notes.append(f"no runtime loads it as it is: <algo> lacks {', '.join(missing)}")
    if longest > _MAX_STEPS_RCCL:
        notes.append(f"RCCL does not load it: a block has {longest} steps, {_MAX_STEPS_RCCL} are allowed")
    loads_in = {"msccl": not missing, "rccl": not missing and longest <= _MAX_STEPS_RCCL}
    num_blocks = sum(len(mine.blocks) for mine in plan.ranks)
    num_steps = sum(len(block.steps) for mine in plan.ranks for block in mine.blocks)
    where = " and ".join(["in place"] * plan.in_place + ["out of place"] * plan.out_of_place)
    name, n = plan.collective.name, plan.collective.num_ranks
    takers = [runtime for runtime, takes in (("MSCCL", loads_in["msccl"]), ("RCCL", loads_in["rccl"])) if takes]
    within = f"; within the limits of {' and '.join(takers)}" if takers else ""
    return {
        "summary": f"{name} over {n} ranks {where}, {num_steps} steps in {num_blocks} thread blocks{within}",
        "collective": name,
        "num_ranks": n,
        "num_chunks": plan.num_chunks,
        "num_blocks": num_blocks,
        "num_steps": num_steps,
        "longest_block": longest,
        "in_place": plan.in_place,
        "out_of_place": plan.out_of_place,
        "messages_in_flight": needed,
        "loads_in": loads_in,
        "notes": notes,
    }


def parse(text: str) -> BlockPlan:
    """The plan in a file, not yet verified.

    Raises:
        ScheduleError: malformed, with the line, or more than any runtime takes.
    """
    return _Reader(_root(text)).plan()


def _root(text: str) -> Element:
    try:
        return parse_elements(text.lstrip(), source="line")
    except TopologyError as error:
        raise ScheduleError(str(error)) from None


class _Reader:
    def __init__(self, root: Element) -> None:
        self._root = root
        self._num_ranks = 0
        self._chunks: dict[str, int] = {}

    def plan(self) -> BlockPlan:
        """All of it."""
        root = self._root
        if root.tag != "algo":
            raise self._error(root, f"<{root.tag}> where MSCCL XML begins with <algo>")
        n = self._num_ranks = self._int(root, "ngpus", 2, 1 << 16)
        collective = self._collective()
        num_chunks = self._int(root, "nchunksperloop", 1, _MAX_OFFSET)
        if collective.name != "all_reduce" and num_chunks % n:
            raise self._error(root, f"nchunksperloop {num_chunks} does not divide among {n} ranks")
        protocol = self._text(root, "proto")
        if protocol not in _SLOTS:
            raise self._error(root, f"proto {protocol!r}; the runtimes know {', '.join(_SLOTS)}")
        num_channels = self._int(root, "nchannels", 1, _MAX_CHANNELS)
        in_place = bool(self._int(root, "inplace", 0, 1))
        out_of_place = bool(self._int(root, "outofplace", 0, 1)) if "outofplace" in root.attributes else not in_place
        if not in_place and not out_of_place:
            raise self._error(root, "serves neither in place nor out of place")
        smallest, largest = (
            self._int(root, name, 0, 1 << 62) if name in root.attributes else 0 for name in ("minBytes", "maxBytes")
        )
        if largest and smallest > largest:
            raise self._error(root, f"minBytes {smallest} is more than maxBytes {largest}")
        by_rank: dict[int, Element] = {}
        for gpu in root.children:
            self._expect(gpu, "gpu")
            self._once(by_rank, gpu, n - 1)
        if len(by_rank) != n:
            absent = next(rank for rank in range(n) if rank not in by_rank)
            raise self._error(root, f"{len(by_rank)} <gpu> for ngpus {n}: {absent} is missing")
        lengths = BlockPlan(
            collective=collective, num_chunks=num_chunks, ranks=(), in_place=True, out_of_place=True, slots=1
        )
        return BlockPlan(
            collective=collective,
            num_chunks=num_chunks,
            ranks=tuple(self._rank(rank, by_rank[rank], lengths, num_channels) for rank in range(n)),
            in_place=in_place,
            out_of_place=out_of_place,
            slots=_SLOTS[protocol],
        )

    def _collective(self) -> Collective:
        name = self._text(self._root, "coll")
        if name in _COLLECTIVES:
            return Collective(name=_COLLECTIVES[name], num_ranks=self._num_ranks)
        plain = re.sub(r"[_\- ]", "", name).lower()
        if plain in _COLLECTIVES:
            raise self._error(self._root, f"coll {name!r}; the runtimes know it as {plain!r}")
        if name in _WITHOUT_ROOT:
            raise self._error(self._root, f"coll {name!r} cannot be verified: the format does not name its root")
        raise self._error(self._root, f"coll {name!r}; can be verified: {', '.join(_COLLECTIVES)}")

    def _rank(self, rank: int, gpu: Element, lengths: BlockPlan, num_channels: int) -> RankBlocks:
        for buffer in "io":
            most = lengths.length(rank, buffer)
            self._chunks[buffer] = self._int(gpu, f"{buffer}_chunks", 0, _MAX_OFFSET)
            if self._chunks[buffer] > most:
                raise self._error(gpu, f"{buffer}_chunks {self._chunks[buffer]}; the buffer has {most} chunks")
        scratch = self._chunks["s"] = self._int(gpu, "s_chunks", 0, _MAX_OFFSET)
        num_elements = 1 + self._num_ranks + len(gpu.children) + sum(len(tb.children) for tb in gpu.children)
        if num_elements > _MAX_ELEMENTS:
            raise self._error(gpu, f"{num_elements} elements are read for rank {rank}; at most {_MAX_ELEMENTS}")
        by_id: dict[int, Element] = {}
        for tb in gpu.children:
            self._expect(tb, "tb")
            self._once(by_id, tb, _MAX_CHANNELS * _MAX_BLOCKS_OF_A_CHANNEL - 1)
        if missing := [number for number in range(len(by_id)) if number not in by_id]:
            raise self._error(gpu, f"thread block {missing[0]} is missing")
        ordered = [by_id[number] for number in range(len(by_id))]
        blocks = tuple(self._block(rank, tb, num_channels) for tb in ordered)
        for side in ("send", "recv"):
            used = Counter(block.channel for block in blocks if getattr(block, side) >= 0)
            if used and used.most_common(1)[0][1] > _MAX_BLOCKS_OF_A_CHANNEL:
                channel, number = used.most_common(1)[0]
                raise self._error(
                    gpu, f"{number} blocks {side} on channel {channel}; at most {_MAX_BLOCKS_OF_A_CHANNEL}"
                )
        self._check_waits(ordered, blocks)
        return RankBlocks(scratch=scratch, blocks=blocks)

    def _block(self, rank: int, tb: Element, num_channels: int) -> Block:
        send, recv = (self._int(tb, side, -1, self._num_ranks - 1) for side in ("send", "recv"))
        if rank in (send, recv):
            raise self._error(tb, f"rank {rank} exchanges with itself")
        channel = self._int(tb, "chan", 0, num_channels - 1)
        if len(tb.children) > _MAX_STEPS:
            raise self._error(tb, f"{len(tb.children)} steps in a thread block; at most {_MAX_STEPS}")
        for position, element in enumerate(tb.children):
            self._expect(element, "step")
            if (given := self._int(element, "s", 0, _MAX_OFFSET)) != position:
                raise self._error(element, f"step {given} where step {position} was expected")
        steps = tuple(self._step(element, send, recv) for element in tb.children)
        self._check_fusion(tb, steps)
        return Block(send=send, recv=recv, channel=channel, steps=steps)

    def _step(self, element: Element, send: int, recv: int) -> Step:
        name = self._text(element, "type")
        kind = next((known for known in STEP_KINDS if known == name), None)
        if kind is None:
            raise self._error(element, f"step type {name!r}; known: {', '.join(STEP_KINDS)}")
        places = {side: self._place(element, side) for side in ("src", "dst")}
        count = self._int(element, "cnt", 0, 1 << 30)
        if count > _MAX_COUNT:
            raise self._error(element, f"cnt {count}; the runtimes take at most {_MAX_COUNT}")
        if kind != "nop" and not count:
            raise self._error(element, "cnt 0 in a step that moves data")
        for side, kinds in (("src", READS_SOURCE), ("dst", WRITES_TARGET)):
            place = places[side]
            length = self._chunks[place.buffer]
            if kind in kinds and not 0 <= place.offset <= length - count:
                span = f"{place.buffer}[{place.offset} .. {place.offset + count - 1}]"
                raise self._error(element, f"{side} {span} is out of range: the buffer has {length} chunks")
        if kind in SENDS and send < 0:
            raise self._error(element, f"{kind!r} in a block that sends to nobody")
        if kind in RECEIVES and recv < 0:
            raise self._error(element, f"{kind!r} in a block that receives from nobody")
        depid, deps = (self._int(element, key, -1, _MAX_OFFSET) for key in ("depid", "deps"))
        if (depid < 0) != (deps < 0):
            raise self._error(element, f"depid {depid} and deps {deps}: both name a step, or neither")
        if kind == "nop" and depid < 0:
            raise self._error(element, "an empty step that waits for nothing would shift the numbers of others")
        self._int(element, "hasdep", 0, 1)
        waits = None if depid < 0 else (depid, deps)
        return Step(kind=kind, source=places["src"], target=places["dst"], count=count, waits=waits)

    def _check_fusion(self, tb: Element, steps: tuple[Step, ...]) -> None:
        for position, (step, after) in enumerate(pairwise(steps)):
            element = tb.children[position + 1]
            if step.kind == "nop" and after.waits is None:
                raise self._error(element, "after an empty step comes one that waits too; the runtimes ask for that")
            one = step.kind == after.kind == "re" and after.waits is None and step.target == after.target
            announced = tb.children[position].attributes.get("hasdep") == "1"
            if one and step.source.buffer == after.source.buffer and not announced and step.count != after.count:
                raise self._error(
                    element,
                    f"cnt {after.count} after cnt {step.count}: additions to one place in a row become one in the "
                    "runtimes, so their counts must be equal",
                )
        if steps and steps[-1].kind == "nop":
            raise self._error(tb.children[-1], "an empty step at the end of a block, where nothing waits")

    def _check_waits(self, elements: list[Element], blocks: tuple[Block, ...]) -> None:
        for tb, block in zip(elements, blocks, strict=True):
            for element, step in zip(tb.children, block.steps, strict=True):
                if step.waits is None:
                    continue
                other, number = step.waits
                if other >= len(blocks) or number >= len(blocks[other].steps):
                    raise self._error(element, f"waits for step {number} of block {other}, which does not exist")
                if blocks[other].steps[number].kind == "nop":
                    raise self._error(element, f"waits for step {number} of block {other}, which is empty")
                awaited = elements[other].children[number]
                if awaited.attributes.get("hasdep") != "1":
                    raise self._error(awaited, f'hasdep must be "1": line {element.line} waits for this step')

    # -- attributes ---------------------------------------------------------------------------------------

    def _error(self, element: Element, what: str) -> ScheduleError:
        return ScheduleError(f"line {element.line}: {what}")

    def _expect(self, element: Element, tag: str) -> None:
        if element.tag != tag:
            raise self._error(element, f"<{element.tag}> where <{tag}> was expected")

    def _once(self, known: dict[int, Element], element: Element, most: int) -> None:
        number = self._int(element, "id", 0, most)
        if number in known:
            raise self._error(element, f"<{element.tag}> {number} again, after line {known[number].line}")
        known[number] = element

    def _text(self, element: Element, key: str) -> str:
        if key not in element.attributes:
            raise self._error(element, f"<{element.tag}> lacks {key!r}")
        return element.attributes[key]

    def _int(self, element: Element, key: str, least: int, most: int) -> int:
        text = self._text(element, key)
        if not re.fullmatch(r"-?[0-9]{1,20}", text):
            raise self._error(element, f"{key}={text[:40]!r} is not a whole number")
        value = int(text)
        if not least <= value <= most:
            raise self._error(element, f"{key} {value} is not in {least} .. {most}")
        return value

    def _place(self, element: Element, side: str) -> Place:
        buffer = self._text(element, f"{side}buf")
        letter = next((known for known in BUFFERS if known == buffer), None)
        if letter is None:
            raise self._error(element, f"{side}buf {buffer!r}; known: {', '.join(BUFFERS)}")
        return Place(letter, self._int(element, f"{side}off", -1, _MAX_OFFSET))
