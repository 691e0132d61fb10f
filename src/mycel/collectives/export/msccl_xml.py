"""MSCCL XML: the schedule's programs as thread blocks, one a channel and direction.

A block runs its steps in order, as a channel does, and a step may wait for one step of another block; where an
instruction waits for several, empty steps (``nop``) before it wait for the others. Offsets and counts are in the
schedule's units, which the runtimes scale to the size at hand.

The limits are those that the runtimes' parsers have: ``cnt`` below 72, at most 256 steps a block (64 in RCCL; the
reader of this format says which runtimes take a file), 4,095 elements read for a rank, offsets below 32,768, 32
channels, and 32 blocks of a channel that send, or receive. ``outofplace``, ``minBytes`` and ``maxBytes`` are
required.

References:
    M. Cowan, S. Maleki, M. Musuvathi, O. Saarikivi, Y. Xiong, "MSCCLang: Microsoft collective communication
    language", ASPLOS 2023, section 5 (the instructions and the interpreter).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from mycel.collectives.lower import lower
from mycel.collectives.program import Buffer, Instruction, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.errors import ScheduleError

__all__ = ["COLLECTIVE_NAMES", "MAX_COUNT", "MAX_ELEMENTS", "MAX_STEPS", "export"]

#: Names of collectives in the format; it has no attribute for a root.
COLLECTIVE_NAMES = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter"}
#: ``(inplace, outofplace)``: an all_reduce program works on one array; an all_gather serves both.
_PLACES = {"all_reduce": (1, 0), "all_gather": (1, 1), "reduce_scatter": (0, 1)}
MAX_COUNT = 71
MAX_STEPS = 256
#: Elements that a runtime reads for a rank: ``<algo>``, every ``<gpu>``, and the rank's blocks and steps.
MAX_ELEMENTS = 4095
#: Channels, and blocks of one channel that send, or receive.
MAX_CHANNELS = 32
#: Chunks that an offset can reach.
MAX_CHUNKS = 32768
#: Largest size a file is offered for; the attribute is required and none means all.
_MAX_BYTES = 1 << 40
_LETTERS = {Buffer.INPUT: "i", Buffer.OUTPUT: "o", Buffer.SCRATCH: "s"}
_TYPES = {Op.SEND: "s", Op.RECV: "r", Op.RECV_REDUCE: "rrc", Op.COPY: "cpy"}


@dataclass(slots=True, kw_only=True)
class _Block:
    """One thread block; a step is its attributes."""

    send: int
    recv: int
    chan: int
    steps: list[dict[str, str]] = field(default_factory=list)


def export(schedule: Schedule, num_bytes: int) -> str:
    """XML text. ``num_bytes`` plays no part.

    Raises:
        ScheduleError: the collective has no name in the format, or a limit is exceeded.
    """
    name = schedule.collective.name
    if name not in COLLECTIVE_NAMES:
        raise ScheduleError(f"MSCCL XML cannot express {name}; it can: {', '.join(COLLECTIVE_NAMES)}")
    if schedule.num_compute_vertices > schedule.collective.num_ranks:
        raise ScheduleError(
            "MSCCL XML cannot express switches that copy and add; synthesize for the same fabric without 'computes'"
        )
    programs = lower(schedule, schedule.num_units, piece_elements=MAX_COUNT)
    if (longest := max(schedule.num_units, *(program.scratch_elements for program in programs))) >= MAX_CHUNKS:
        raise ScheduleError(f"MSCCL XML: a buffer has {longest} chunks; fewer than {MAX_CHUNKS} are allowed")
    blocks = [_blocks(program) for program in programs]
    num_channels = 1 + max(block.chan for mine in blocks for block in mine)
    if num_channels > MAX_CHANNELS:
        raise ScheduleError(
            f"MSCCL XML: {num_channels} channels between two ranks; at most {MAX_CHANNELS} are allowed; a schedule "
            "with fewer paths (forest with -k 1, tree, ring) may fit"
        )
    inplace, outofplace = _PLACES[name]
    algo = ET.Element(
        "algo",
        {
            "name": f"mycel_{schedule.method}_{COLLECTIVE_NAMES[name]}",
            "proto": "Simple",
            "nchannels": str(num_channels),
            "nchunksperloop": str(schedule.num_units),
            "ngpus": str(schedule.collective.num_ranks),
            "coll": COLLECTIVE_NAMES[name],
            "inplace": str(inplace),
            "outofplace": str(outofplace),
            "minBytes": "0",
            "maxBytes": str(_MAX_BYTES),
        },
    )
    for program, mine in zip(programs, blocks, strict=True):
        _add_gpu(algo, program, mine)
    ET.indent(algo)
    return ET.tostring(algo, encoding="unicode") + "\n"


def _add_gpu(algo: ET.Element, program: Program, blocks: list[_Block]) -> None:
    total = 1 + program.collective.num_ranks + len(blocks) + sum(len(block.steps) for block in blocks)
    if total > MAX_ELEMENTS:
        raise ScheduleError(
            f"MSCCL XML: rank {program.rank} has {total} elements (blocks, steps and ranks); at most {MAX_ELEMENTS} "
            "are read"
        )
    for side in ("send", "recv"):
        used = Counter(block.chan for block in blocks if getattr(block, side) >= 0)
        if used and (crowd := max(used.values())) > MAX_CHANNELS:
            raise ScheduleError(
                f"MSCCL XML: {crowd} thread blocks of rank {program.rank} {side} on one channel; at most "
                f"{MAX_CHANNELS} are allowed"
            )
    # In place, INPUT is empty in our programs and the same memory as OUTPUT for the runtimes.
    given = program.length(Buffer.INPUT) or program.length(Buffer.OUTPUT)
    gpu = ET.SubElement(
        algo,
        "gpu",
        {
            "id": str(program.rank),
            "i_chunks": str(given),
            "o_chunks": str(program.length(Buffer.OUTPUT)),
            "s_chunks": str(program.scratch_elements),
        },
    )
    for number, block in enumerate(blocks):
        if len(block.steps) > MAX_STEPS:
            raise ScheduleError(
                f"MSCCL XML: rank {program.rank} needs {len(block.steps)} steps in one thread block; at most "
                f"{MAX_STEPS} are allowed; a schedule with fewer chunks (forest with -k 1, tree, ring) may fit"
            )
        tb = ET.SubElement(
            gpu,
            "tb",
            {"id": str(number), "send": str(block.send), "recv": str(block.recv), "chan": str(block.chan)},
        )
        for at, step in enumerate(block.steps):
            ET.SubElement(tb, "step", {"s": str(at), **step})


def _blocks(program: Program) -> list[_Block]:
    """The rank's thread blocks: the sending or receiving end of each channel, and one for copies."""
    blocks: list[_Block] = []
    met: dict[tuple[int, int], int] = {}
    for channel in program.channels:  # sorted, so that both ends number the paths between two ranks alike
        pair = (channel.src, channel.dst)
        met[pair] = met.get(pair, -1) + 1
        sends = channel.src == program.rank
        blocks.append(_Block(send=channel.dst if sends else -1, recv=-1 if sends else channel.src, chan=met[pair]))
    if (program.columns["op"] == Op.COPY).any():
        blocks.append(_Block(send=-1, recv=-1, chan=0))
    where: dict[int, tuple[int, int]] = {}
    for row, instruction in enumerate(program.instructions):
        number = instruction.channel if instruction.channel >= 0 else len(blocks) - 1
        block = blocks[number]
        if late := [need for need in instruction.needs if need not in where]:
            raise ScheduleError(
                f"MSCCL XML: rank {program.rank}, instruction {row} waits for {late[0]}, which stands after it"
            )
        # What stands before it in its own block is waited for anyway.
        waits = [where[need] for need in instruction.needs if where[need][0] != number]
        for depid, deps in waits[:-1]:
            block.steps.append(_nop(depid, deps))
        block.steps += _steps(instruction, waits[-1] if waits else (-1, -1))
        for depid, deps in waits:
            blocks[depid].steps[deps]["hasdep"] = "1"
        where[row] = (number, len(block.steps) - 1)
    return blocks


def _nop(depid: int, deps: int) -> dict[str, str]:
    return {
        "type": "nop", "srcbuf": "i", "srcoff": "-1", "dstbuf": "o", "dstoff": "-1", "cnt": "0",
        "depid": str(depid), "deps": str(deps), "hasdep": "0",
    }  # fmt: skip


def _steps(instruction: Instruction, wait: tuple[int, int]) -> list[dict[str, str]]:
    """One step, or several for a copy that is longer than a step may be."""
    i = instruction
    reads_operand = i.op in (Op.RECV_REDUCE, Op.COPY)
    source, start = (i.operand_buffer, i.operand_offset) if reads_operand else (i.buffer, i.offset)
    return [
        {
            "type": _TYPES[i.op],
            "srcbuf": _LETTERS[source],
            "srcoff": str(start + done),
            "dstbuf": _LETTERS[i.buffer],
            "dstoff": str(i.offset + done),
            "cnt": str(min(MAX_COUNT, i.count - done)),
            "depid": str(-1 if done else wait[0]),
            "deps": str(-1 if done else wait[1]),
            "hasdep": "0",
        }
        for done in range(0, i.count, MAX_COUNT)
    ]
