"""Programs written as expressions."""

from __future__ import annotations

from dataclasses import dataclass

from mycel.errors import UsageError
from mycel.overlap.language.program import NORMS, Layout, Node, Program, result_of

__all__ = ["Value", "Writer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A result of a program that is being written; expressions of it are more nodes.

    Attributes:
        node: what makes it.
        writer: of the program.

    Examples:
        >>> write = Writer()
        >>> x = write.local("x", 4, 2)
        >>> (x * 0.5 + x).all_reduce().node.layout
        'replicated'
    """

    node: Node
    writer: Writer

    def __matmul__(self, other: Value) -> Value:
        return self.writer.make("matmul", self, other)

    def __add__(self, other: Value | float) -> Value:
        return self.writer.binary("add", self, other)

    def __sub__(self, other: Value | float) -> Value:
        return self.writer.binary("sub", self, other)

    def __mul__(self, other: Value | float) -> Value:
        return self.writer.binary("mul", self, other)

    def __truediv__(self, other: Value | float) -> Value:
        return self.writer.binary("div", self, other)

    def relu(self) -> Value:
        """What is above 0."""
        return self.writer.make("relu", self)

    def gelu(self) -> Value:
        """The Gaussian error linear unit."""
        return self.writer.make("gelu", self)

    def sqrt(self) -> Value:
        """Square roots."""
        return self.writer.make("sqrt", self)

    def square(self) -> Value:
        """Squares."""
        return self.writer.make("square", self)

    def total(self) -> Value:
        """The sum of all elements, on all ranks if they are slices of one array."""
        return self.writer.make("total", self)

    def slice(self) -> Value:
        """This rank's rows of what all have alike."""
        return self.writer.make("slice", self)

    def all_reduce(self) -> Value:
        """The ranks' sum, on all of them."""
        return self.writer.make("all_reduce", self)

    def reduce_scatter(self) -> Value:
        """Rows of the ranks' sum."""
        return self.writer.make("reduce_scatter", self)

    def all_gather(self) -> Value:
        """All rows, on all ranks."""
        return self.writer.make("all_gather", self)


class Writer:
    """Takes down what expressions say.

    Examples:
        >>> write = Writer()
        >>> x, w = write.local("x", 8, 4), write.local("w", 4, 6)
        >>> print(write.finish(y=(x @ w).all_reduce().relu()).to_text())
        x = input: local 8 x 4
        w = input: local 4 x 6
        matmul_1 = matmul(x, w): local 8 x 6
        all_reduce_1 = all_reduce(matmul_1): replicated 8 x 6
        relu_1 = relu(all_reduce_1): replicated 8 x 6
        -> y = relu_1
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._counts: dict[str, int] = {}

    def local(self, name: str, rows: int, columns: int) -> Value:
        """An input that is different on every rank.

        Args:
            name: by which it is given to ``run``.
            rows, columns: of it.
        """
        return self._input(name, "local", rows, columns)

    def replicated(self, name: str, rows: int, columns: int) -> Value:
        """An input that all ranks have alike.

        Args:
            name: by which it is given to ``run``.
            rows, columns: of it; one row is added to, or multiplied with, every row of others.
        """
        return self._input(name, "replicated", rows, columns)

    def sliced(self, name: str, rows: int, columns: int) -> Value:
        """An input of which each rank has some rows, as ``torch.chunk`` divides them.

        Args:
            name: by which it is given to ``run``.
            rows, columns: of all of it.
        """
        return self._input(name, "sliced", rows, columns)

    def dropout(self, value: Value, share: float, *, seed: int) -> Value:
        """Some elements become zero, by a mask that all ranks have alike, also of slices.

        Args:
            value: of what.
            share: of elements that are dropped.
            seed: of the mask.
        """
        if not 0 <= share < 1:
            raise UsageError(f"dropout is {share!r}: a share from 0 to below 1")
        return self.make("dropout", value, number=share, seed=seed)

    def norm(self, kind: str, value: Value, weight: Value | None = None, *, eps: float = 1e-5) -> Value:
        """A norm of each row.

        Args:
            kind: ``rms_norm`` or ``layer_norm``.
            value: of what.
            weight: a row that the result is multiplied with.
            eps: added to the mean square or variance.
        """
        if kind not in NORMS:
            raise UsageError(f"unknown norm {kind!r}; known: {', '.join(NORMS)}")
        return self.make(kind, value, *([] if weight is None else [weight]), number=eps)

    def finish(self, **outputs: Value) -> Program:
        """The program.

        Args:
            outputs: what it is for, by the names under which ``run`` gives it.
        """
        return Program(
            nodes=tuple(self._nodes.values()), outputs=tuple((name, v.node.name) for name, v in outputs.items())
        )

    def binary(self, operation: str, left: Value, right: Value | float) -> Value:
        """Of two values, or a value and a number."""
        if isinstance(right, Value):
            return self.make(operation, left, right)
        return self.make(operation, left, number=float(right))

    def make(self, operation: str, *inputs: Value, number: float = 0.0, seed: int = 0) -> Value:
        """One more node."""
        self._counts[operation] = self._counts.get(operation, 0) + 1
        name = f"{operation}_{self._counts[operation]}"
        taken = [value.node for value in inputs]
        drafted = Node(
            name=name,
            operation=operation,
            inputs=tuple(n.name for n in taken),
            layout="local",
            rows=0,
            columns=0,
            number=number,
            seed=seed,
        )
        layout, rows, columns = result_of(operation, taken, drafted)
        return self._add(
            Node(
                name=name,
                operation=operation,
                inputs=drafted.inputs,
                layout=layout,
                rows=rows,
                columns=columns,
                number=number,
                seed=seed,
            )
        )

    def _input(self, name: str, layout: Layout, rows: int, columns: int) -> Value:
        return self._add(Node(name=name, operation="input", layout=layout, rows=rows, columns=columns))

    def _add(self, node: Node) -> Value:
        if node.name in self._nodes:
            raise UsageError(f"two inputs are called {node.name}")
        self._nodes[node.name] = node
        return Value(node=node, writer=self)
