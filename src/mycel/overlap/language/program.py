"""A program as data: nodes in an order in which they can run, and stages, which are nodes that run together.

Every tensor is a matrix with a layout: *local*, where ranks have different whole ones, *replicated*, where all have
the same, and *sliced*, where each has some consecutive rows of one. What a node makes follows from what it takes, and
is checked when a program is made, so that no rewrite can leave a program without meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["BINARY", "NORMS", "POINTWISE", "UNARY", "Layout", "Node", "Program", "Stage", "row_wise"]

Layout = Literal["local", "replicated", "sliced"]

UNARY = ("relu", "gelu", "sqrt", "square", "neg")
BINARY = ("add", "sub", "mul", "div")
NORMS = ("rms_norm", "layer_norm")
#: What looks at one element, or at one row, at a time.
POINTWISE = (*UNARY, *BINARY, "dropout", *NORMS)
_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
_KNOWN = ("input", "matmul", *POINTWISE, "total", "slice", *_COLLECTIVES)

_VERSION = 1


def row_wise(operation: str) -> bool:
    """Whether rows of the result need no other rows."""
    return operation in POINTWISE


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation and its result.

    Attributes:
        name: of the result.
        operation: ``input``, ``matmul``, one of pointwise operations and norms, ``total`` (the sum of all elements),
            ``slice`` (this rank's rows of what all have alike), or a collective.
        inputs: names of what it takes.
        layout: of the result.
        rows, columns: of the whole result; of sliced ones, of all ranks' rows together.
        number: of ``dropout`` the share that is dropped, of norms what is added to the variance, of binary
            operations with one input the other one; otherwise 0.
        seed: of ``dropout``.

    Raises:
        UsageError: an operation that does not exist, or a negative size.

    Examples:
        >>> Node(name="x", operation="input", layout="local", rows=4, columns=2)
        Node(x = input: local 4 x 2)
    """

    name: str
    operation: str
    inputs: tuple[str, ...] = ()
    layout: Layout
    rows: int
    columns: int
    number: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.operation not in _KNOWN:
            raise UsageError(f"{self.name}: unknown operation {self.operation!r}; known: {', '.join(_KNOWN)}")
        if self.layout not in ("local", "replicated", "sliced"):
            raise UsageError(f"{self.name}: unknown layout {self.layout!r}; known: local, replicated, sliced")
        if not self.name.isidentifier() or self.rows < 0 or self.columns < 0:
            raise UsageError(f"{self.name!r} of {self.rows} x {self.columns}: a name, and sizes from 0")

    def __repr__(self) -> str:
        return f"Node({self.to_text()[:200]})"

    def to_text(self) -> str:
        """As a line of a program."""
        taken = ", ".join((*self.inputs, *self._extra()))
        call = f"{self.operation}({taken})" if taken else self.operation
        return f"{self.name} = {call}: {self.layout} {self.rows} x {self.columns}"

    def _extra(self) -> tuple[str, ...]:
        if self.operation == "dropout":
            return (f"{self.number:g}", f"seed={self.seed}")
        return (f"{self.number:g}",) if self.operation in BINARY and len(self.inputs) == 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Nodes that run together, tile by tile.

    Attributes:
        nodes: their names, in the program's order.
        tiles: in how many; one is fused and not overlapped.

    Raises:
        UsageError: fewer than two nodes, or no tile.

    Examples:
        >>> Stage(nodes=("matmul_1", "all_reduce_1"), tiles=4).tiles
        4
    """

    nodes: tuple[str, ...]
    tiles: int = 1

    __repr__ = brief

    def __post_init__(self) -> None:
        if len(self.nodes) < 2 or self.tiles < 1:
            raise UsageError(
                f"a stage of {len(self.nodes)} nodes in {self.tiles} tiles: two nodes and a tile at least"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Nodes, results, and stages.

    Attributes:
        nodes: each behind what it takes.
        outputs: names of what the program is for, with the nodes that they are, in pairs.
        stages: of nodes; no node is in two.

    Raises:
        UsageError: a node takes what is not there, a layout does not follow, or a stage is not one.

    Examples:
        >>> x = Node(name="x", operation="input", layout="local", rows=4, columns=2)
        >>> y = Node(name="y", operation="all_reduce", inputs=("x",), layout="replicated", rows=4, columns=2)
        >>> program = Program(nodes=(x, y), outputs=(("sum", "y"),))
        >>> print(program.to_text())
        x = input: local 4 x 2
        y = all_reduce(x): replicated 4 x 2
        -> sum = y
        >>> Program.from_json(program.to_json()) == program
        True
    """

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    stages: tuple[Stage, ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        known: dict[str, Node] = {}
        for node in self.nodes:
            if node.name in known:
                raise UsageError(f"two nodes are called {node.name}")
            missing = [name for name in node.inputs if name not in known]
            if missing:
                raise UsageError(f"{node.to_text()}: {missing[0]} is not there yet")
            expected = result_of(node.operation, [known[name] for name in node.inputs], node)
            if (node.layout, node.rows, node.columns) != expected:
                layout, rows, columns = expected
                raise UsageError(f"{node.to_text()}; expected {layout} {rows} x {columns}")
            known[node.name] = node
        for name, of in self.outputs:
            if of not in known:
                raise UsageError(f"output {name} is {of}, which no node makes")
        staged = [name for stage in self.stages for name in stage.nodes]
        if len(set(staged)) != len(staged) or not set(staged) <= set(known):
            raise UsageError(f"stages of {', '.join(staged)}: each of them a node, in one stage")

    def node(self, name: str) -> Node:
        """By its name.

        Raises:
            UsageError: there is none.
        """
        found = next((node for node in self.nodes if node.name == name), None)
        if found is None:
            raise UsageError(f"no node {name!r}; there are {', '.join(n.name for n in self.nodes)}")
        return found

    def users(self, name: str) -> list[Node]:
        """Nodes that take a result."""
        return [node for node in self.nodes if name in node.inputs]

    def is_output(self, name: str) -> bool:
        """Whether the program is for it."""
        return any(of == name for _, of in self.outputs)

    def stage_of(self, name: str) -> Stage | None:
        """The stage that a node is in."""
        return next((stage for stage in self.stages if name in stage.nodes), None)

    def to_text(self) -> str:
        """For people: a line a node, then what the program is for, then stages."""
        lines = [node.to_text() for node in self.nodes]
        lines += [f"-> {name} = {of}" for name, of in self.outputs]
        lines += [
            f"{'overlap' if stage.tiles > 1 else 'fuse'}({', '.join(stage.nodes)})"
            + (f" in {stage.tiles} tiles" if stage.tiles > 1 else "")
            for stage in self.stages
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """All of it."""
        fields = ("name", "operation", "layout", "rows", "columns", "number", "seed")
        return json.dumps(
            {
                "format": "mycel.overlap.program",
                "version": _VERSION,
                "nodes": [{**{f: getattr(n, f) for f in fields}, "inputs": list(n.inputs)} for n in self.nodes],
                "outputs": [list(pair) for pair in self.outputs],
                "stages": [{"nodes": list(s.nodes), "tiles": s.tiles} for s in self.stages],
            }
        )

    @staticmethod
    def from_json(text: str) -> Program:
        """What ``to_json`` gave.

        Raises:
            UsageError: it is something else.
        """
        try:
            data: Mapping[str, Any] = json.loads(text)
            if data["format"] != "mycel.overlap.program" or data["version"] != _VERSION:
                raise UsageError(
                    f"format {data['format']!r}, version {data['version']!r}; expected version {_VERSION}"
                )
            return Program(
                nodes=tuple(Node(**{**n, "inputs": tuple(n["inputs"])}) for n in data["nodes"]),
                outputs=tuple((name, of) for name, of in data["outputs"]),
                stages=tuple(Stage(nodes=tuple(s["nodes"]), tiles=s["tiles"]) for s in data["stages"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"no program of overlapped operators: {error}; expected what to_json gives") from None


def result_of(operation: str, inputs: list[Node], node: Node) -> tuple[Layout, int, int]:
    """Layout, rows and columns of a result.

    Args:
        operation: what is done.
        inputs: what it takes.
        node: for inputs of a program, which say so themselves, and for messages.

    Raises:
        UsageError: the operation does not take such inputs.
    """
    if operation == "input":
        return node.layout, node.rows, node.columns
    if not inputs:
        raise UsageError(f"{node.name}: {operation} of nothing")
    first = inputs[0]
    if operation == "matmul":
        return _product(node, inputs)
    if operation in BINARY:
        return _together(node, inputs)
    if operation in (*UNARY, "dropout", *NORMS):
        if any(other.layout != "replicated" or other.rows != 1 for other in inputs[1:]):
            raise UsageError(f"{node.name}: {operation} takes a row that all ranks have alike as its weight")
        return first.layout, first.rows, first.columns
    if operation == "total":  # of slices, the ranks' sum
        return ("local" if first.layout == "local" else "replicated"), 1, 1
    wanted: dict[str, tuple[Layout, Layout]] = {
        "slice": ("replicated", "sliced"),
        "all_reduce": ("local", "replicated"),
        "reduce_scatter": ("local", "sliced"),
        "all_gather": ("sliced", "replicated"),
    }
    takes, gives = wanted[operation]
    if first.layout != takes:
        raise UsageError(f"{node.name}: {operation} takes what is {takes}; {first.name} is {first.layout}")
    return gives, first.rows, first.columns


def _product(node: Node, inputs: list[Node]) -> tuple[Layout, int, int]:
    if len(inputs) != 2 or inputs[0].columns != inputs[1].rows:
        sizes = " @ ".join(f"{i.rows} x {i.columns}" for i in inputs)
        raise UsageError(f"{node.name}: a product of {sizes}")
    left, right = inputs
    if right.layout == "sliced" or (left.layout == "sliced" and right.layout == "local"):
        raise UsageError(
            f"{node.name}: {left.layout} {left.name} times {right.layout} {right.name} has no layout; gather one"
        )
    layouts = {left.layout, right.layout}
    layout: Layout = "sliced" if left.layout == "sliced" else "local" if "local" in layouts else "replicated"
    return layout, left.rows, right.columns


def _together(node: Node, inputs: list[Node]) -> tuple[Layout, int, int]:
    if len(inputs) > 2:
        raise UsageError(f"{node.name}: {node.operation} of {len(inputs)} inputs; two, or one and a number")
    large = max(inputs, key=lambda i: (i.rows, i.columns))
    for other in inputs:
        if other.rows not in (1, large.rows) or other.columns not in (1, large.columns):
            raise UsageError(
                f"{node.name}: {node.operation} of {large.rows} x {large.columns} and {other.rows} x {other.columns}"
            )
    layouts = {i.layout for i in inputs if i.rows == large.rows or i.layout != "replicated"}
    if layouts == {"local", "replicated"}:
        layouts = {"local"}
    if len(layouts) != 1:
        told = " and ".join(f"{i.layout} {i.name}" for i in inputs)
        raise UsageError(
            f"{node.name}: {node.operation} of {told}: slice what is replicated, or gather what is sliced"
        )
    return layouts.pop(), large.rows, large.columns
