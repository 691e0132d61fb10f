"""Modelled time of a program: of its products, of what it reads and writes, and of its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from mycel.cost import makespan
from mycel.overlap.language.program import Node, Program
from mycel.overlap.rates import Exchange, Network, Products

__all__ = ["program_seconds"]

_EXCHANGES = get_args(Exchange)


def program_seconds(
    program: Program, products: Products, network: Network, *, num_ranks: int, item_bytes: int = 4
) -> float:
    """How long a program takes on every rank; a model that compares programs with each other.

    Nodes take their time one after the other. In a stage, what is done to rows that have just arrived reads them from
    cache, and with several tiles collectives go on beside products.

    Args:
        program: any.
        products: rates of a rank.
        network: times of collectives.
        num_ranks: of the group.
        item_bytes: of an element.

    Examples:
        >>> from mycel.overlap.language import Writer
        >>> write = Writer()
        >>> program = write.finish(y=write.local("x", 1000, 250).all_reduce())
        >>> products = Products(rows=(1,), flops=(1e9,), bytes_per_second=1e9)
        >>> network = Network(seconds=lambda exchange, num_bytes: num_bytes / 1e6, source="made up")
        >>> program_seconds(program, products, network, num_ranks=2)
        1.00015
    """
    model = _Model(program, products, network, num_ranks, item_bytes)
    alone = sum(model.node(node) for node in program.nodes if program.stage_of(node.name) is None)
    staged = sum(model.stage([program.node(name) for name in stage.nodes], stage.tiles) for stage in program.stages)
    return alone + staged


class _Model:
    def __init__(
        self, program: Program, products: Products, network: Network, num_ranks: int, item_bytes: int
    ) -> None:
        self.program, self.products, self.network = program, products, network
        self.num_ranks, self.item_bytes = num_ranks, item_bytes

    def node(self, node: Node) -> float:
        """Of one node by itself, all its inputs and its result in memory."""
        if node.operation == "input":
            return 0.0
        if node.operation in _EXCHANGES:
            return self.network.host_s + self.exchange(node)
        if node.operation == "matmul":
            return self.products.seconds(self.rows(node), self.program.node(node.inputs[0]).columns, node.columns)
        small = (
            self.network.host_s + self.network.seconds("all_reduce", self.item_bytes) if self.is_total(node) else 0.0
        )
        moved = self.num_bytes(node) + sum(self.num_bytes(self.program.node(name)) for name in node.inputs)
        return small + moved / self.products.bytes_per_second

    def stage(self, nodes: Sequence[Node], tiles: int) -> float:
        """Of nodes that run together, the host and the network side by side."""
        names = {node.name for node in nodes}
        before = after = 0.0
        exchanges: list[float] = []
        for node in nodes:
            if node.operation in _EXCHANGES:
                exchanges.append(self.exchange(node, tiles))
            elif node.operation == "matmul":
                inner = self.program.node(node.inputs[0]).columns
                seconds = tiles * self.products.seconds(max(1, self.rows(node) // tiles), inner, node.columns)
                before, after = (before, seconds) if exchanges else (seconds, after)
            else:
                moved = sum(self.num_bytes(self.program.node(i)) for i in node.inputs if i not in names)
                moved += self.num_bytes(node) if self.is_told(node, names) else 0
                after += moved / self.products.bytes_per_second
        steps = [(before / tiles + self.network.host_s, exchanges[0]), (after / tiles, 0.0)]
        if len(exchanges) > 1:
            steps[1] = (after / tiles + self.network.host_s, exchanges[1])
        return makespan(steps, tiles, hidden=self.network.hidden)

    def exchange(self, node: Node, tiles: int = 1) -> float:
        """Of a tile of a collective."""
        name: Exchange = node.operation  # type: ignore[assignment]  # one of _EXCHANGES
        moved = node.rows * node.columns * self.item_bytes // tiles
        return self.network.seconds(name, moved) + self.network.turn_s

    def rows(self, node: Node) -> int:
        """That one rank has."""
        return -(-node.rows // self.num_ranks) if node.layout == "sliced" else node.rows

    def num_bytes(self, node: Node) -> int:
        """That one rank has."""
        return self.rows(node) * node.columns * self.item_bytes

    def is_total(self, node: Node) -> bool:
        """Whether a small all_reduce belongs to it."""
        return node.operation == "total" and self.program.node(node.inputs[0]).layout == "sliced"

    def is_told(self, node: Node, names: set[str]) -> bool:
        """Whether a stage's result is written for others."""
        return self.program.is_output(node.name) or any(u.name not in names for u in self.program.users(node.name))
