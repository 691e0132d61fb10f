"""Chakra execution traces: each rank's messages and sums as a graph, for ASTRA-sim and other readers of traces.

A file a rank holds messages of Protocol Buffers, each with its length before it: first ``GlobalMetadata``, then a
``Node`` for every send, receive, sum and copy of the rank's program. Two nodes of different ranks belong together
where source, destination and tag are the same. What a node must wait for is in ``data_deps``: the feeder of version 1
of the schema looks at nothing else, that of version 3, which ASTRA-sim uses, at ``ctrl_deps`` too.

A simulator starts all nodes that wait for nothing at once, and serves a link's messages first come, first served: a
rank's own pieces would all enter the queue before those that it is to pass on. So a send waits for an earlier one of
its channel as well (``_window``), where a piece lasts longer than it is on its way. Where it does not, such a wait
would leave the link idle, for a send is over when it has arrived.

Attributes have the types that the feeder reads them with: it takes a value of another type for zero.

References:
    S. Sridharan et al., "Chakra: Advancing performance benchmarking and co-design using standardized execution
    traces", arXiv 2305.14516, 2023. W. Won et al., "ASTRA-sim2.0", ISPASS 2023. Field numbers: mlcommons/chakra,
    ``schema/protobuf/et_def.proto``; types of attributes: ``src/feeder/et_feeder_node.cpp``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from mycel.collectives.lower import chunk_bounds, lower
from mycel.collectives.program import Instruction, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.cost import bytes_per_second
from mycel.errors import ScheduleError, UsageError
from mycel.topology.model import Topology

__all__ = ["COMPUTE", "RECEIVE", "SEND", "VERSION", "export", "fitting_piece", "system_file"]

#: Version of the traces' schema.
VERSION = "0.0.4"
#: Into how many messages a chunk is cut at most: enough to keep a pipeline full, and few enough for a simulator.
_MAX_PIECES = 32
#: A piece lasts as long as this part of the longest path's latency, unless that would be too many or too short ones:
#: shorter ones would not make the pipeline's fill, which is latency then, any shorter.
_OF_LATENCY = 1 / 8
#: Shortest piece by default, in bytes. ASTRA-sim stops at a message that passes a link in less than a nanosecond.
_LEAST_PIECE = 1 << 11
#: Collectives whose implementation a system file of ASTRA-sim can name.
_SYSTEM_KEYS = {
    "all_reduce": "all-reduce-implementation-custom",
    "all_gather": "all-gather-implementation-custom",
    "reduce_scatter": "reduce-scatter-implementation-custom",
    "all_to_all": "all-to-all-implementation-custom",
}
#: Types of nodes.
COMPUTE, SEND, RECEIVE = 4, 5, 6
#: Fields of an attribute by the type of its value.
_INT32, _INT64, _UINT64, _BOOL = 7, 9, 13, 27


def export(schedule: Schedule, num_bytes: int, piece_bytes: int | None = None) -> tuple[bytes, ...]:
    """One trace a rank, for an array of ``num_bytes`` (rounded up to whole blocks; for all_to_all a rank's part).

    Args:
        schedule: a verified schedule.
        num_bytes: of the array.
        piece_bytes: longest message; what ``fitting_piece`` says if not given.

    Raises:
        UsageError: no bytes, in the array or in a piece.
        ScheduleError: some switch takes part.
    """
    c = schedule.collective
    if num_bytes <= 0:
        raise UsageError(f"a trace of {num_bytes} bytes; at least 1 is needed")
    if schedule.num_compute_vertices > c.num_ranks:
        raise ScheduleError("Chakra traces cannot express switches that copy and add; synthesize without 'computes'")
    if piece_bytes is not None and piece_bytes <= 0:
        raise UsageError(f"pieces of {piece_bytes} bytes; at least 1 is needed")
    whole = c.total_weight
    size = -(-num_bytes * c.num_parts // whole) * whole
    longest = max(int(stop - start) for start, stop in chunk_bounds(schedule, size))
    piece = piece_bytes or max(fitting_piece(schedule.topology), -(-longest // _MAX_PIECES))
    topology = schedule.topology
    return tuple(_trace(program, topology) for program in lower(schedule, size, piece_elements=piece))


def fitting_piece(topology: Topology) -> int:
    """Bytes of a message that fit a fabric: as long on its slowest link as an eighth of the longest link's latency.

    Examples:
        >>> from mycel.topology import load_topology
        >>> fitting_piece(load_topology("star:ranks=4,bandwidth=50 GB/s,latency=1us"))
        6250
    """
    rate, latency_s = bytes_per_second(topology), max((link.latency_s for link in topology.links), default=0.0)
    slowest = min(link.capacity for link in topology.links) * rate
    return max(_LEAST_PIECE, int(slowest * latency_s * _OF_LATENCY))


def system_file(schedule: Schedule, prefix: str) -> str | None:
    """What a system file of ASTRA-sim says so that a collective runs as these traces; ``None`` where it cannot.

    Args:
        schedule: what was exported.
        prefix: of the traces' names, before the rank's number.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> print(system_file(synthesize(load_topology("ring:ranks=4"), "all_gather"), "traces"), end="")
        {
          "all-gather-implementation-custom": ["traces"],
          "preferred-dataset-splits": 1
        }
    """
    key = _SYSTEM_KEYS.get(schedule.collective.name)
    if key is None:
        return None
    return f'{{\n  "{key}": [{json.dumps(prefix)}],\n  "preferred-dataset-splits": 1\n}}\n'


def _window(topology: Topology, path: tuple[int, ...], piece: int) -> int | None:
    """How many sends of a channel may be under way at once; ``None``: any number.

    As many as fill the slowest link of the path while one is on its way, store and forward at each switch, and one.
    """
    hops, rate = list(pairwise(path)), bytes_per_second(topology)
    latency_s = sum(topology.latency_s[hop] for hop in hops)
    on_links = [piece / (topology.capacity[hop] * rate) for hop in hops]
    if max(on_links) <= latency_s:
        return None
    return 1 + int((latency_s + sum(on_links)) / max(on_links))


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
        if not i.op.is_local:
            at, paths = place[i.channel]
            tags[row] = count[i.channel] * paths + at
            count[i.channel] += 1
    return tags


def _trace(program: Program, topology: Topology) -> bytes:
    tags = _tags(program)
    nodes: list[bytes] = []
    last_of: dict[int, int] = {}  # of each instruction: its last node
    sent: list[list[int]] = [[] for _ in program.channels]
    for row, i in enumerate(program.instructions):
        needs = [last_of[need] for need in i.needs]
        if i.op == Op.SEND:
            window = _window(topology, program.channels[i.channel].path, i.count)
            if window is not None and len(sent[i.channel]) >= window:
                needs = sorted({*needs, sent[i.channel][-window]})
            sent[i.channel].append(len(nodes))
        if not i.op.is_local:
            nodes.append(_message(len(nodes), i, program, tags[row], needs))
            needs = [len(nodes) - 1]
        if i.op >= Op.RECV_REDUCE:
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
            # A copy has one, so that a roofline model, which divides by them, finds that memory binds.
            _attribute("num_ops", _INT64, 1 if i.op == Op.COPY else i.count),
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
