"""What each way of attention takes and holds, forward and backward, from the wires and the kernels at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mycel.cost.overlap import makespan
from mycel.planning.sequence import Layout, Mask, work_by_rank
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax.delivery import needed
from mycel.sequence.softmax.fabric import Fabric
from mycel.sequence.softmax.kernels import row_type
from mycel.sequence.softmax.ways import Way, meeting_ranks

__all__ = ["Handling", "Kernels", "Prediction", "Shape", "candidates", "predict", "slices_for"]


#: How often what is given for heads is written to memory in a pass: packed, in one message, in another as it arrives,
#: taken out of it, in the order of tokens, and back.
_HEAD_COPIES = 6
#: How often a row of queries is written when it has met a block of keys: shrunk, and added to, with shares that are
#: worked out; backward, its gradient is added.
_ROW_WRITES_FORWARD, _ROW_WRITES_BACKWARD = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is attended to.

    Attributes:
        batch: rows.
        heads, key_heads: of queries, of keys and values.
        width, value_width: of a head.
        dtype: of the elements.
    """

    batch: int
    heads: int
    key_heads: int
    width: int
    value_width: int
    dtype: torch.dtype

    @property
    def key_bytes(self) -> int:
        """Of a token's keys and values."""
        return self.batch * self.key_heads * (self.width + self.value_width) * self.dtype.itemsize

    @property
    def query_bytes(self) -> int:
        """Of a token's queries."""
        return self.batch * self.heads * self.width * self.dtype.itemsize

    @property
    def out_bytes(self) -> int:
        """Of a token's output."""
        return self.batch * self.heads * self.value_width * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of a token's output while it is put together."""
        return self.batch * self.heads * self.value_width * row_type(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Seconds of all heads of the batch for one query and one key that see each other.

    Attributes:
        forward_s, backward_s: each way.
    """

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """What exchanges take of a rank's own time, which no topology says: the same thread computes.

    Attributes:
        start_s: of one exchange, beside what the wires take for it.
        byte_s: of a byte that is packed, unpacked or added up.
    """

    start_s: float = 0.0
    byte_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one way.

    Attributes:
        way: which.
        network_s: that the wires are busy.
        compute_s: that kernels of the busiest rank take.
        seconds: forward and backward, one beside the other as far as they can be.
        memory: most bytes beside a rank's own tokens, what travels and what has arrived.
    """

    way: Way
    network_s: float
    compute_s: float
    seconds: float
    memory: int


def slices_for(num_ranks: int, times: float) -> int:
    """Slices with which gathered keys take at most so many times the keys and values of one rank.

    Backward there are two slices of keys, the gradients of one, and a copy of those on its way: four times
    ``num_ranks`` over ``slices``, and the gradient of the rank's own.

    Examples:
        >>> slices_for(8, 2.5), slices_for(2, 2.5)
        (22, 6)
    """
    return -int(-4 * num_ranks // (times - 1))


def candidates(context: SequenceContext, shape: Shape, fabric: Fabric) -> Iterator[Way]:
    """Ways that serve these ranks and heads."""
    size = context.num_ranks
    for slices in sorted({1, 2, size, slices_for(size, 2.5)}):
        yield Way(between="gathered", slices=slices)
        yield Way(between="needed", slices=slices)
    yield Way(between="ring")
    for groups in _groups(size, fabric.nodes):
        if shape.heads % len(groups[0]) == 0:
            yield Way(between="needed", groups=groups)
            if len(groups) > 1 and len(groups[0]) > 1:
                yield Way(between="ring", groups=groups)


def _groups(size: int, nodes: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], ...]]:
    """Sets of ranks that may exchange heads: all; a node's; one of each node; of nodes nobody names, neighbours."""
    found: list[tuple[tuple[int, ...], ...]] = [(tuple(range(size)),)]
    if len({len(node) for node in nodes}) == 1 and 1 < len(nodes) < size:
        inside = tuple(map(tuple, nodes))
        found += [inside, tuple(zip(*inside, strict=True))]
    else:
        found += [
            tuple(tuple(range(first, first + degree)) for first in range(0, size, degree))
            for degree in range(2, size)
            if size % degree == 0
        ]
    return found


def predict(
    way: Way,
    context: SequenceContext,
    shape: Shape,
    mask: Mask,
    fabric: Fabric,
    kernels: Kernels,
    handling: Handling,
) -> Prediction:
    """What one way takes.

    Args:
        way: which.
        context: the ranks and what each holds.
        shape: of queries, keys and values.
        mask: inside documents.
        fabric: what exchanges take.
        kernels: what blocks take.
        handling: what exchanges take besides the wires.
    """
    size, start_s = context.num_ranks, handling.start_s
    heads_s, handled_s, heads_memory, share = 0.0, 0.0, 0, 1
    layout, key_bytes = context.layout, shape.key_bytes
    places: Sequence[Sequence[int]] = [range(size)]
    if way.groups:
        there, back, most = _head_exchanges(way, layout, shape)
        heads_s = 2 * (fabric.exchange(there) + fabric.exchange(back))
        given = max(context.layout.tokens) * (shape.query_bytes + shape.key_bytes + shape.out_bytes)
        handled_s = 4 * start_s + 2 * _HEAD_COPIES * given * handling.byte_s
        share, heads_memory = way.degree, 2 * most
        layout, places = meeting_ranks(context, way.groups, mask).layout, list(zip(*way.groups, strict=True))
        key_bytes = -(-key_bytes // min(share, shape.key_heads))
    pairs = int(work_by_rank(layout, mask).max()) / share
    forward_s, backward_s = kernels.forward_s * pairs, kernels.backward_s * pairs
    if handling.byte_s:
        met_s = _rows_met(context, way, mask, shape) * shape.row_bytes / share * handling.byte_s
        forward_s += _ROW_WRITES_FORWARD * met_s
        backward_s += _ROW_WRITES_BACKWARD * met_s
    network, seconds, memory = heads_s, heads_s + handled_s, 0
    tokens = layout.tokens
    most_bytes = max(tokens, default=0) * key_bytes
    packed_s = most_bytes * handling.byte_s
    if len(tokens) == 1:
        seconds += forward_s + backward_s
    elif way.between == "gathered":
        gather = fabric.gather(size * most_bytes // way.slices)
        scatter = fabric.scatter(size * most_bytes // way.slices)
        network += way.slices * (2 * gather + scatter)
        # The gradients of all keys are made room for and put there; the own keys are packed twice.
        forward_s, backward_s = forward_s + packed_s, backward_s + (2 * size + 1) * packed_s
        seconds += _overlapped(way.slices, gather, scatter, forward_s, backward_s, start_s)
        memory = (4 if way.slices > 1 else 3) * size * most_bytes // way.slices + most_bytes
    elif way.between == "needed":
        matrix = _needed_bytes(context, way, mask, places, key_bytes)
        part = [[count // way.slices for count in row] for row in matrix]
        gather, scatter = fabric.exchange(part), fabric.exchange([list(column) for column in zip(*part, strict=True)])
        network += way.slices * (2 * gather + scatter)
        arriving = max(sum(column) for column in zip(*matrix, strict=True))
        arrived_s = arriving * handling.byte_s
        forward_s, backward_s = forward_s + packed_s, backward_s + packed_s + 2 * arrived_s
        seconds += _overlapped(way.slices, gather, scatter, forward_s, backward_s, start_s)
        memory = (4 if way.slices > 1 else 3) * arriving // way.slices + most_bytes
    else:
        # Rings beside each other pass on more or fewer key heads, and no rank knows how many the others do.
        step = (fabric.exchange if way.groups else fabric.permute)(_round(size, places, most_bytes))
        count = len(tokens)
        network += step * (3 * count - 2)
        # Each step of the forward pass computes and passes on; each of the backward pass passes on twice.
        # So it does with what a rank has to do for it: there gradients are put together and added up besides.
        step += start_s
        forward_s, backward_s = forward_s / count, backward_s / count + 2 * start_s + 2 * packed_s
        seconds += (count - 1) * max(step, forward_s + start_s) + forward_s + packed_s
        seconds += (count - 1) * max(2 * step, backward_s) + backward_s + step + packed_s
        memory = 5 * most_bytes
    return Prediction(
        way=way,
        network_s=network,
        compute_s=(kernels.forward_s + kernels.backward_s) * pairs,
        seconds=seconds,
        memory=memory + heads_memory,
    )


def _rows_met(context: SequenceContext, way: Way, mask: Mask, shape: Shape) -> int:
    """Queries of the rank that has most, one for each block of keys that they meet."""
    blocks = meeting_ranks(context, way.groups, mask).blocks
    most = max(sum(block.num_queries for each in of for block in each) for of in blocks)
    # Slices are of key heads, and where those are too few of tokens: then there are more blocks.
    return most * -(-way.slices // shape.key_heads)


def _overlapped(slices: int, there: float, back: float, forward_s: float, backward_s: float, start_s: float) -> float:
    """Slices that come and go while others are computed. A start keeps the wires waiting and the rank busy."""
    arrives, leaves = there + start_s, back + start_s
    # Who is alone with one slice waits for it anyway.
    beside = start_s if slices > 1 else 0.0
    forward = makespan([(0.0, arrives), (forward_s / slices + beside, 0.0)], slices)
    return forward + makespan([(0.0, arrives), (backward_s / slices + 2 * beside, leaves)], slices)


def _head_exchanges(way: Way, layout: Layout, shape: Shape) -> tuple[list[list[int]], list[list[int]], int]:
    """Bytes from each rank to each for queries, keys and values, for the output back; and what a rank has then."""
    size, degree = layout.num_ranks, way.degree
    there = [[0] * size for _ in range(size)]
    back = [[0] * size for _ in range(size)]
    # Where there are fewer key heads than ranks each goes to several.
    each = shape.query_bytes // degree + shape.key_bytes // min(degree, shape.key_heads)
    for group in way.groups:
        for src in group:
            for dst in group:
                if src != dst:
                    there[src][dst] = layout.tokens[src] * each
                    back[src][dst] = layout.tokens[dst] * (shape.out_bytes // degree)
    most = max(sum(layout.tokens[rank] for rank in group) for group in way.groups)
    return there, back, most * (each + shape.out_bytes // degree)


def _needed_bytes(
    context: SequenceContext, way: Way, mask: Mask, places: Sequence[Sequence[int]], key_bytes: int
) -> list[list[int]]:
    blocks = meeting_ranks(context, way.groups, mask).blocks
    size = context.num_ranks
    matrix = [[0] * size for _ in range(size)]
    for peers in places:
        for a, dst in enumerate(peers):
            for b, src in enumerate(peers):
                if a != b:
                    matrix[src][dst] = sum(stop - start for start, stop in needed(blocks[a][b])) * key_bytes
    return matrix


def _round(size: int, places: Sequence[Sequence[int]], num_bytes: int) -> list[list[int]]:
    matrix = [[0] * size for _ in range(size)]
    for peers in places:
        for i, src in enumerate(peers):
            matrix[src][peers[(i + 1) % len(peers)]] = num_bytes
    return matrix
