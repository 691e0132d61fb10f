"""A search over rewrites: which program of those that compute the same is modelled to be the quickest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.overlap.language.cost import program_seconds
from mycel.overlap.language.program import Node, Program, row_wise
from mycel.overlap.language.rewrites import fuse, overlap, reorder, split
from mycel.overlap.rates import Network, Products
from mycel.units import format_seconds

__all__ = ["Searched", "search"]

_TILES = (2, 4, 8, 16)
#: Programs that are looked at before stages are chosen, at most; those of the papers have some dozens.
_MOST = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search found.

    Attributes:
        program: the quickest by the model.
        seconds: of it.
        plain_s: of the program that was given.
        steps: the rewrites, in words, in order.
        tried: how many programs were weighed.

    Examples:
        On every rank, with the rates of its group::

            found = search(program, products, network, num_ranks=8)
            print(found.explain())
            results = run(found.program, inputs)
    """

    program: Program
    seconds: float
    plain_s: float
    steps: tuple[str, ...]
    tried: int

    __repr__ = brief

    def explain(self) -> str:
        """The rewrites and what they are modelled to gain, a line each."""
        before, after = format_seconds(self.plain_s), format_seconds(self.seconds)
        steps = self.steps or ("nothing to be gained",)
        return "\n".join((f"{before} -> {after}, the best of {self.tried} programs", *steps))


def search(
    program: Program, products: Products, network: Network, *, num_ranks: int, item_bytes: int = 4
) -> Searched:
    """The quickest program that rewrites come to.

    All programs that ``split`` and ``reorder`` come to are looked at; in each, stages are chosen one after the other,
    fused or in 2 to 16 tiles, as long as one gains. The same on all ranks where rates are.

    Args:
        program: without stages.
        products: rates of a rank.
        network: times of collectives.
        num_ranks: of the group.
        item_bytes: of an element.

    Examples:
        >>> from mycel.overlap.language import Writer
        >>> write = Writer()
        >>> x, w = write.local("x", 1024, 512), write.local("w", 512, 1024)
        >>> program = write.finish(y=(x @ w).all_reduce().relu())
        >>> products = Products(rows=(1,), flops=(5e10,), bytes_per_second=5e9)
        >>> network = Network(seconds=lambda exchange, num_bytes: num_bytes / 5e7, source="made up")
        >>> found = search(program, products, network, num_ranks=2)
        >>> found.seconds < 0.9 * found.plain_s, found.steps[-1].split("(")[0]
        (True, 'overlap')
    """

    def seconds(candidate: Program) -> float:
        return program_seconds(candidate, products, network, num_ranks=num_ranks, item_bytes=item_bytes)

    plain_s = seconds(program)
    best = Searched(program=program, seconds=plain_s, plain_s=plain_s, steps=(), tried=1)
    tried = 0
    reached: dict[str, tuple[Program, tuple[str, ...]]] = {program.to_text(): (program, ())}
    queue = list(reached.values())
    while queue:
        candidate, steps = queue.pop(0)
        for step, rewritten in _rewritten(candidate):
            text = rewritten.to_text()
            if text not in reached and len(reached) < _MOST:
                reached[text] = (rewritten, (*steps, step))
                queue.append(reached[text])
        current, current_s = candidate, seconds(candidate)
        while True:
            options = [(seconds(staged), step, staged) for step, staged in _staged(current)]
            tried += len(options) + 1
            gain = min(options, key=lambda option: option[0], default=None)
            if gain is None or gain[0] >= current_s:
                break
            current_s, current, steps = gain[0], gain[2], (*steps, gain[1])
        if current_s < best.seconds:
            best = Searched(program=current, seconds=current_s, plain_s=plain_s, steps=steps, tried=1)
    return Searched(
        program=best.program, seconds=best.seconds, plain_s=plain_s, steps=best.steps, tried=max(1, tried)
    )


def _rewritten(program: Program) -> Iterator[tuple[str, Program]]:
    for node in program.nodes:
        for name, rewrite in (("split", split), ("reorder", reorder)):
            try:
                yield f"{name}({node.name})", rewrite(program, node.name)
            except UsageError:  # it does not hold here
                continue


def _staged(program: Program) -> Iterator[tuple[str, Program]]:
    for names in _stages(program):
        try:
            yield f"fuse({', '.join(names)})", fuse(program, names)
        except UsageError:
            continue
        for tiles in _TILES:
            yield f"overlap({', '.join(names)}) in {tiles} tiles", overlap(program, names, tiles)


def _stages(program: Program) -> Iterator[tuple[str, ...]]:
    """Nodes that might run together, from each collective that is in no stage yet."""
    for node in program.nodes:
        if program.stage_of(node.name) is not None:
            continue
        if node.operation == "all_gather":
            for user in program.users(node.name):
                if user.operation == "matmul":
                    yield node.name, user.name
        elif node.operation == "all_reduce":
            yield node.inputs[0], node.name
        elif node.operation == "reduce_scatter":
            yield from _with_slices(program, node)


def _with_slices(program: Program, scatter: Node) -> Iterator[tuple[str, ...]]:
    """A reduce_scatter with its product, with more and more of what is done to its slices, and with a gather."""
    producer = program.node(scatter.inputs[0])
    heads = [(scatter.name,)] + ([(producer.name, scatter.name)] if producer.operation == "matmul" else [])
    inside, arrived = [], {scatter.name}
    for node in program.nodes:
        if node.layout == "sliced" and row_wise(node.operation) and arrived & set(node.inputs):
            arrived.add(node.name)
            inside.append(node.name)
    slices = [
        node.name
        for node in program.nodes
        if node.operation == "slice" and any(user.name in arrived for user in program.users(node.name))
    ]
    gathers = [n.name for n in program.nodes if n.operation == "all_gather" and n.inputs[0] in arrived]
    for head in heads:
        if len(head) > 1:
            yield head
        if inside:
            yield (*head, *slices, *inside)
        for gather in gathers:
            yield (*head, *slices, *inside, gather)
