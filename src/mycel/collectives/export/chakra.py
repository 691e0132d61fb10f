"""Chakra execution traces: each rank's messages and sums as a graph, for ASTRA-sim and other readers of traces.

A file a rank holds messages of Protocol Buffers, each with its length before it: first ``GlobalMetadata``, then a
``Node`` for every send, receive, sum and copy of the rank's program. Two nodes of different ranks belong together
where source, destination and tag are the same. What a node must wait for is in ``data_deps``, the only dependencies
that the public feeder looks at.

Attributes have the types that the feeder reads them with: it takes a value of another type for zero.

References:
    S. Sridharan et al., "Chakra: Advancing performance benchmarking and co-design using standardized execution
    traces", arXiv 2305.14516, 2023. W. Won et al., "ASTRA-sim2.0", ISPASS 2023. Field numbers: mlcommons/chakra,
    ``schema/protobuf/et_def.proto``; types of attributes: ``src/feeder/et_feeder_node.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from mycel.collectives.cost import PIECE_BYTES
from mycel.collectives.lower import chunk_bounds, lower
from mycel.collectives.program import Instruction, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.errors import ScheduleError, UsageError

__all__ = ["COMPUTE", "RECEIVE", "SEND", "VERSION", "export"]

#: Version of the traces' schema.
VERSION = "0.0.4"
#: Into how many messages a chunk is cut at most: enough to keep a pipeline full, and few enough for a simulator.
_MAX_PIECES = 32
#: Types of nodes.
COMPUTE, SEND, RECEIVE = 4, 5, 6
#: Fields of an attribute by the type of its value.
_INT32, _INT64, _UINT64, _BOOL = 7, 9, 13, 27


def export(schedule: Schedule, num_bytes: int) -> tuple[bytes, ...]:
    """One trace a rank, for an array of ``num_bytes`` (rounded up to whole blocks; for all_to_all a rank's part).

    Raises:
        UsageError: no bytes.
        ScheduleError: some switch takes part.
    """
    c = schedule.collective
    if num_bytes <= 0:
        raise UsageError(f"a trace of {num_bytes} bytes; at least 1 is needed")
    if schedule.num_compute_vertices > c.num_ranks:
        raise ScheduleError("Chakra traces cannot express switches that copy and add; synthesize without 'computes'")
    whole = c.total_weight
    size = -(-num_bytes * c.num_parts // whole) * whole
    longest = max(int(stop - start) for start, stop in chunk_bounds(schedule, size))
    piece = max(PIECE_BYTES[-1], -(-longest // _MAX_PIECES))
    return tuple(_trace(program) for program in lower(schedule, size, piece_elements=piece))


def _tags(program: Program) -> dict[int, int]:
    """Of each row with a message, a number that it alone has at both ends among those between the two ranks.

    The k-th message of channel j of the m that share source and destination has k m + j.
    """
    pairs: dict[tuple[int, int], list[int]] = {}
    for number, channel in enumerate(program.channels):  # sorted: both ends have the paths in the same order
        pairs.setdefault((channel.src, channel.dst), []).append(number)
    place = {number: (at, len(same)) for same in pairs.values() for at, number in enumerate(same)}
    count = [0] * len(program.channels)
    tags: dict[int, int] = {}
    for row, i in enumerate(program.instructions):
        if i.op != Op.COPY:
            at, paths = place[i.channel]
            tags[row] = count[i.channel] * paths + at
            count[i.channel] += 1
    return tags


def _trace(program: Program) -> bytes:
    tags = _tags(program)
    nodes: list[bytes] = []
    last_of: dict[int, int] = {}  # of each instruction: its last node
    for row, i in enumerate(program.instructions):
        needs = [last_of[need] for need in i.needs]
        if i.op != Op.COPY:
            nodes.append(_message(len(nodes), i, program, tags[row], needs))
            needs = [len(nodes) - 1]
        if i.op in (Op.RECV_REDUCE, Op.COPY):
            nodes.append(_compute(len(nodes), i, needs))
        last_of[row] = len(nodes) - 1
    metadata = _string(1, VERSION)
    return b"".join(_delimited(message) for message in (metadata, *nodes))


def _message(number: int, i: Instruction, program: Program, tag: int, needs: Iterable[int]) -> bytes:
    channel, is_send = program.channels[i.channel], i.op == Op.SEND
    verb, peer = ("send to", channel.dst) if is_send else ("receive from", channel.src)
    return _node(
        number,
        f"{verb} {peer}, {i.buffer.name.lower()}[{i.offset}:{i.offset + i.count}]",
        SEND if is_send else RECEIVE,
        needs,
        [
            _attribute("is_cpu_op", _BOOL, 0),
            _attribute("comm_src", _INT32, channel.src),
            _attribute("comm_dst", _INT32, channel.dst),
            _attribute("comm_tag", _INT32, tag),
            _attribute("comm_size", _INT64, i.count),
        ],
    )


def _compute(number: int, i: Instruction, needs: Iterable[int]) -> bytes:
    what = "copy" if i.op == Op.COPY else "add"
    return _node(
        number,
        f"{what} {i.operand_buffer.name.lower()}[{i.operand_offset}:{i.operand_offset + i.count}] "
        f"to {i.buffer.name.lower()}[{i.offset}:{i.offset + i.count}]",
        COMPUTE,
        needs,
        [
            _attribute("is_cpu_op", _BOOL, 0),
            _attribute("num_ops", _INT64, i.count if i.op == Op.RECV_REDUCE else 0),
            _attribute("tensor_size", _UINT64, i.count),
        ],
    )


# -- Protocol Buffers: a field is its number and wire type, then a varint or a length and bytes --------------------


def _node(number: int, name: str, kind: int, needs: Iterable[int], attributes: Iterable[bytes]) -> bytes:
    dependencies = b"".join(_varint(need) for need in needs)
    return b"".join(
        [
            _number(1, number) if number else b"",  # zero is left out, as everywhere but in a oneof
            _string(2, name),
            _number(3, kind),
            _field(5, dependencies) if dependencies else b"",
            *(_field(10, attribute) for attribute in attributes),
        ]
    )


@lru_cache(maxsize=1 << 12)
def _attribute(name: str, field: int, value: int) -> bytes:
    return _string(1, name) + _number(field, value)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _string(field: int, text: str) -> bytes:
    return _field(field, text.encode())


def _field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _delimited(data)


def _delimited(data: bytes) -> bytes:
    return _varint(len(data)) + data


@lru_cache(maxsize=1 << 14)
def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
