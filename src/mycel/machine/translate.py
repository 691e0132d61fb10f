"""From Python's syntax tree to LLVM's language, for functions that are simple enough.

A translated function may have whole numbers and truths, arrays of numbers in memory, assignments, ``if``, ``while``,
``for`` over a ``range``, and calls. All that it calls is written in its place, anew for each call: so what is given
may be known beforehand (a type, a function, a constant), results may be arrays, and LLVM sees everything at once.
Only ``mycel.standalone`` functions and libc's stay calls. There is no recursion, and nothing is made or owned.

Numbers are 64 bits wide where they come from Python, and wrap round. ``//`` and ``%`` are Python's, and give 0 for a
divisor of 0; slices end where arrays end; indices are not looked at and count from the front. A variable is of the
kind that it is first given. What is not understood is an error that names the line.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any, cast

from mycel.machine.arithmetic import arithmetic, compare, convert, truth, unify
from mycel.machine.callees import function_of, linked_symbol
from mycel.machine.kinds import (
    BOOL,
    FLOAT64,
    INT64,
    NOTHING,
    Array,
    Kind,
    Known,
    Scalar,
    Table,
    Value,
    element_of,
    llvm_type,
)
from mycel.machine.words import Word

__all__ = ["entry"]

_DEEPEST = 40
_BUILT_IN = {name: getattr(builtins, name) for name in ("len", "min", "max", "range", "int", "bool")}


class _UntranslatableError(TypeError):
    """Says where."""


def entry(module: Any, symbol: str, function: FunctionType) -> None:
    """Write a function of 64-bit integers that gives one, or nothing (then 0), into a module, in C's form.

    Args:
        module: of llvmlite's.
        symbol: its name there.
        function: as it is written.

    Raises:
        TypeError: there is something in it, or in what it calls, that cannot be translated; names the line.
    """
    from llvmlite import ir

    integer = llvm_type(INT64)
    names = list(inspect.signature(function).parameters)
    made = ir.Function(module, ir.FunctionType(integer, [integer] * len(names)), symbol)
    start, body = made.append_basic_block("entry"), made.append_basic_block("body")
    builder = ir.IRBuilder(body)
    arguments = {name: Value(INT64, (value,)) for name, value in zip(names, made.args, strict=True)}
    result = _Body(_Writer(builder, start), function, arguments).translate()
    if result.kind not in (None, INT64, BOOL):
        raise TypeError(f"{symbol} gives {result.kind}; a standalone function gives int64, or nothing")
    given = integer(0) if result.kind is None else convert(builder, result, INT64).number
    builder.ret(given)
    ir.IRBuilder(start).branch(body)


class _Writer:
    """Where code is written to; one a module.

    Args:
        builder: LLVM's.
        start: a block that runs once, before everything, in which variables are given their places.
    """

    def __init__(self, builder: Any, start: Any) -> None:
        from llvmlite import ir

        self.builder, self._start = builder, ir.IRBuilder(start)
        self.depth = 0

    def places(self, kind: Kind, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Places for a variable."""
        return tuple(self._start.alloca(part.type) for part in parts)

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Inside of a function that is written in place."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise TypeError("functions call each other in a circle, or too deep")
        yield
        self.depth -= 1


@cache
def _tree(function: FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function, with the lines of its file."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        raise TypeError(f"{function.__name__} is not a function with a name of its own, which could be translated")
    return found


class _Variable:
    def __init__(self, kind: Kind, places: tuple[Any, ...]) -> None:
        self.kind, self.places = kind, places


class _Body:
    """One call of a function, written in place.

    Args:
        writer: where to.
        function: as it is written.
        arguments: by name.
    """

    def __init__(self, writer: _Writer, function: FunctionType, arguments: dict[str, Value]) -> None:
        self.writer, self.b = writer, writer.builder
        self.function = function
        self._variables: dict[str, _Variable] = {}
        self._known: dict[str, Value] = {}
        self._result: _Variable | None = None
        self._end = self.b.append_basic_block(f"{function.__name__}_end")
        self._loops: list[tuple[Any, Any]] = []  # where continue and break go
        self._where: ast.AST = ast.Pass()
        for name, value in arguments.items():
            self._assign_name(name, value)

    def translate(self) -> Value:
        """Write it; what it gives. The builder stands behind it then."""
        try:
            with self.writer.deeper():
                self._run(_tree(self.function).body)
        except _UntranslatableError:
            raise
        except TypeError as error:
            line = getattr(self._where, "lineno", self.function.__code__.co_firstlineno)
            raise _UntranslatableError(f"{self.function.__code__.co_filename}:{line}: {error}") from None
        if not self.b.block.is_terminated:
            self.b.branch(self._end)
        self.b.position_at_end(self._end)
        return NOTHING if self._result is None else self._load(self._result)

    # -- variables ----------------------------------------------------------------------------------------

    def _load(self, variable: _Variable) -> Value:
        return Value(variable.kind, tuple(self.b.load(place) for place in variable.places))

    def _store(self, variable: _Variable | None, value: Value) -> _Variable:
        if value.kind is None:
            raise TypeError("nothing is given that could be kept")
        if variable is None:
            variable = _Variable(value.kind, self.writer.places(value.kind, value.parts))
        for place, part in zip(variable.places, convert(self.b, value, variable.kind).parts, strict=True):
            self.b.store(part, place)
        return variable

    def _assign_name(self, name: str, value: Value) -> None:
        if isinstance(value.kind, Known):
            self._known[name] = value
        else:
            self._variables[name] = self._store(self._variables.get(name), value)

    def _look_up(self, name: str) -> Value:
        if name in self._variables:
            return self._load(self._variables[name])
        if name in self._known:
            return self._known[name]
        free = self.function.__code__.co_freevars
        if name in free:
            return _constant((self.function.__closure__ or ())[free.index(name)].cell_contents)
        for names in (self.function.__globals__, _BUILT_IN):
            if name in names:
                return _constant(names[name])
        raise TypeError(f"{name} is not known here")

    # -- statements ---------------------------------------------------------------------------------------

    def _run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            if self.b.block.is_terminated:  # behind a return: nobody comes here
                return
            self._where = statement
            run = getattr(self, f"_run_{type(statement).__name__}", None)
            if run is None:
                raise TypeError(f"{type(statement).__name__} cannot be translated")
            run(statement)

    def _run_Pass(self, node: ast.Pass) -> None:  # noqa: N802 (names of Python's syntax tree, here and below)
        pass

    def _run_Expr(self, node: ast.Expr) -> None:  # noqa: N802
        if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
            self._value(node.value)

    def _run_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        if len(node.targets) != 1:
            raise TypeError("one thing is assigned at a time")
        target = node.targets[0]
        if isinstance(target, ast.Tuple):
            if not isinstance(node.value, ast.Tuple) or len(target.elts) != len(node.value.elts):
                raise TypeError("several names take as many values")
            values = [self._value(each) for each in node.value.elts]
            for name, value in zip(target.elts, values, strict=True):
                self._assign(name, value)
        else:
            self._assign(target, self._value(node.value))

    def _assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._assign_name(target.id, value)
        elif isinstance(target, ast.Subscript):
            self._put(*self._element(target), value)
        else:
            raise TypeError(f"{ast.unparse(target)} cannot be assigned to")

    def _put(self, element: Scalar, place: Any, value: Value) -> None:
        """Write a number to memory; whole numbers are cut to the width that is there."""
        if not isinstance(value.kind, Scalar) or value.kind.is_float != element.is_float:
            raise TypeError(f"{value.kind} cannot stand where {element} does")
        self.b.store(convert(self.b, value, element, cuts=not element.is_float).number, place)

    def _run_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        if isinstance(node.target, ast.Name):
            before = self._look_up(node.target.id)
            self._assign_name(node.target.id, arithmetic(self.b, node.op, before, self._value(node.value)))
        elif isinstance(node.target, ast.Subscript):
            element, place = self._element(node.target)
            before = Value(element, (self.b.load(place),))
            self._put(element, place, arithmetic(self.b, node.op, before, self._value(node.value)))
        else:
            raise TypeError(f"{ast.unparse(node.target)} cannot be assigned to")

    def _run_Return(self, node: ast.Return) -> None:  # noqa: N802
        if node.value is not None:
            self._result = self._store(self._result, self._value(node.value))
        self.b.branch(self._end)

    def _run_If(self, node: ast.If) -> None:  # noqa: N802
        test = truth(self.b, self._value(node.test))
        yes, no, end = (self.b.append_basic_block(name) for name in ("then", "else", "endif"))
        self.b.cbranch(test, yes, no)
        reaches_end = False
        for block, statements in ((yes, node.body), (no, node.orelse)):
            self.b.position_at_end(block)
            self._run(statements)
            if not self.b.block.is_terminated:
                reaches_end = True
                self.b.branch(end)
        self.b.position_at_end(end)
        if not reaches_end:
            self.b.unreachable()

    def _run_While(self, node: ast.While) -> None:  # noqa: N802
        if node.orelse:
            raise TypeError("a loop has no else")
        test, body, end = (self.b.append_basic_block(name) for name in ("while", "loop", "endwhile"))
        self.b.branch(test)
        self.b.position_at_end(test)
        self.b.cbranch(truth(self.b, self._value(node.test)), body, end)
        self._loop(node.body, body, test, end)

    def _loop(self, statements: list[ast.stmt], body: Any, again: Any, end: Any) -> None:
        self.b.position_at_end(body)
        self._loops.append((again, end))
        self._run(statements)
        self._loops.pop()
        if not self.b.block.is_terminated:
            self.b.branch(again)
        self.b.position_at_end(end)

    def _run_For(self, node: ast.For) -> None:  # noqa: N802
        over = node.iter
        if (
            node.orelse
            or not isinstance(over, ast.Call)
            or self._value(over.func).kind != Known(range)
            or over.keywords
        ):
            raise TypeError("a loop goes over a range, and has no else")
        given = [convert(self.b, self._value(each), INT64).number for each in over.args]
        start, stop, step = {1: (_number(0), *given, _number(1)), 2: (*given, _number(1)), 3: tuple(given)}[
            len(given)
        ]
        if not isinstance(getattr(step, "constant", None), int) or step.constant == 0:
            raise TypeError("the step of a range is a number that is written there")
        counter = _Variable(INT64, self.writer.places(INT64, (start,)))
        self.b.store(start, counter.places[0])
        test, body, following, end = (self.b.append_basic_block(name) for name in ("for", "loop", "next", "endfor"))
        self.b.branch(test)
        self.b.position_at_end(test)
        now = self._load(counter)
        self.b.cbranch(self.b.icmp_signed("<" if step.constant > 0 else ">", now.number, stop), body, end)
        self.b.position_at_end(following)
        self.b.store(self.b.add(self._load(counter).number, step), counter.places[0])
        self.b.branch(test)
        self.b.position_at_end(body)
        self._assign(node.target, now)
        self._loop(node.body, self.b.block, following, end)

    def _run_Break(self, node: ast.Break) -> None:  # noqa: N802
        self.b.branch(self._loops[-1][1])

    def _run_Continue(self, node: ast.Continue) -> None:  # noqa: N802
        self.b.branch(self._loops[-1][0])

    # -- expressions --------------------------------------------------------------------------------------

    def _value(self, node: ast.expr) -> Value:
        give = getattr(self, f"_give_{type(node).__name__}", None)
        if give is None:
            raise TypeError(f"{ast.unparse(node)} cannot be translated")
        return cast(Value, give(node))

    def _give_Constant(self, node: ast.Constant) -> Value:  # noqa: N802
        return _constant(node.value)

    def _give_Name(self, node: ast.Name) -> Value:  # noqa: N802
        return self._look_up(node.id)

    def _give_Attribute(self, node: ast.Attribute) -> Value:  # noqa: N802
        owner = self._value(node.value).kind
        if not isinstance(owner, Known) or not isinstance(owner.what, ModuleType):
            raise TypeError(f"{ast.unparse(node)}: only modules have attributes here")
        return _constant(getattr(owner.what, node.attr))

    def _give_Tuple(self, node: ast.Tuple) -> Value:  # noqa: N802
        raise TypeError(f"{ast.unparse(node)}: there are no tuples")

    def _give_UnaryOp(self, node: ast.UnaryOp) -> Value:  # noqa: N802
        value = self._value(node.operand)
        if isinstance(node.op, ast.Not):
            return Value(BOOL, (self.b.not_(truth(self.b, value)),))
        if isinstance(node.op, ast.USub) and isinstance(value.kind, Scalar) and value.kind.is_float:
            return Value(value.kind, (self.b.fneg(value.number),))
        number = convert(self.b, value, INT64).number
        if isinstance(getattr(number, "constant", None), int) and isinstance(node.op, ast.USub):
            return _constant(-number.constant)
        return Value(INT64, (self.b.not_(number) if isinstance(node.op, ast.Invert) else self.b.neg(number),))

    def _give_BinOp(self, node: ast.BinOp) -> Value:  # noqa: N802
        return arithmetic(self.b, node.op, self._value(node.left), self._value(node.right))

    def _give_Compare(self, node: ast.Compare) -> Value:  # noqa: N802
        if len(node.ops) != 1:
            raise TypeError(f"{ast.unparse(node)}: two things are compared at a time")
        (op,), (other,) = node.ops, node.comparators
        one = self._value(node.left)
        if not isinstance(op, ast.In | ast.NotIn):
            return compare(self.b, op, one, self._value(other))
        if not isinstance(other, ast.Tuple):
            raise TypeError(f"{ast.unparse(node)}: what stands behind in is written as a tuple")
        found = llvm_type(BOOL)(0)
        for each in other.elts:
            found = self.b.or_(found, compare(self.b, ast.Eq(), one, self._value(each)).number)
        return Value(BOOL, (found if isinstance(op, ast.In) else self.b.not_(found),))

    def _give_BoolOp(self, node: ast.BoolOp) -> Value:  # noqa: N802
        return self._joined(node.values, isinstance(node.op, ast.And))

    def _joined(self, values: list[ast.expr], is_and: bool) -> Value:
        """Truths joined by ``and``, or by ``or``; those behind the one that decides are not asked."""
        first = self._value(values[0])
        if first.kind != BOOL:
            raise TypeError(f"{ast.unparse(values[0])}: and, or take truths")
        if len(values) == 1:
            return first
        decided = _constant(not is_and)
        following = partial(self._joined, values[1:], is_and)
        ways = (following, lambda: decided) if is_and else (lambda: decided, following)
        return self._one_of(first.number, *ways)

    def _give_IfExp(self, node: ast.IfExp) -> Value:  # noqa: N802
        test = truth(self.b, self._value(node.test))
        return self._one_of(test, lambda: self._value(node.body), lambda: self._value(node.orelse))

    def _one_of(self, test: Any, one: Callable[[], Value], other: Callable[[], Value]) -> Value:
        """What is given by one of two, of which the other is not run."""
        yes, no, end = (self.b.append_basic_block(name) for name in ("yes", "no", "chosen"))
        self.b.cbranch(test, yes, no)
        made = []
        for block, give in ((yes, one), (no, other)):
            self.b.position_at_end(block)
            made.append((give(), self.b.block))
        kind = unify(made[0][0].kind, made[1][0].kind)
        ready = []
        for value, block in made:
            self.b.position_at_end(block)
            ready.append((convert(self.b, value, kind).parts, block))
            self.b.branch(end)
        self.b.position_at_end(end)
        joined = []
        for pair in zip(*(parts for parts, _ in ready), strict=True):
            phi = self.b.phi(pair[0].type)
            for part, (_, block) in zip(pair, ready, strict=True):
                phi.add_incoming(part, block)
            joined.append(phi)
        return Value(kind, tuple(joined))

    # -- memory -------------------------------------------------------------------------------------------

    def _element(self, node: ast.Subscript) -> tuple[Scalar, Any]:
        """A number in memory: of what kind, and where."""
        owner = self._value(node.value)
        if isinstance(owner.kind, Table) and isinstance(node.slice, ast.Tuple):
            row, field = (convert(self.b, self._value(each), INT64).number for each in node.slice.elts)
            index = self.b.add(self.b.mul(row, owner.parts[2]), field)
            return INT64, self.b.gep(owner.parts[0], [index], inbounds=True)
        if not isinstance(owner.kind, Array) or isinstance(node.slice, ast.Slice | ast.Tuple):
            raise TypeError(f"{ast.unparse(node)} is no number in memory")
        index = convert(self.b, self._value(node.slice), INT64).number
        if isinstance(getattr(index, "constant", None), int) and index.constant < 0:
            raise TypeError(f"{ast.unparse(node)}: indices count from the front")
        return owner.kind.element, self.b.gep(owner.parts[0], [index], inbounds=True)

    def _give_Subscript(self, node: ast.Subscript) -> Value:  # noqa: N802
        owner = self._value(node.value)
        if isinstance(owner.kind, Array) and isinstance(node.slice, ast.Slice):
            return self._slice(owner, node.slice)
        if isinstance(owner.kind, Table) and not isinstance(node.slice, ast.Tuple | ast.Slice):
            row = convert(self.b, self._value(node.slice), INT64).number
            first = self.b.gep(owner.parts[0], [self.b.mul(row, owner.parts[2])], inbounds=True)
            return Value(Array(INT64), (first, owner.parts[2]))
        element, place = self._element(node)
        return Value(element, (self.b.load(place),))

    def _slice(self, owner: Value, node: ast.Slice) -> Value:
        if node.step is not None:
            raise TypeError("slices have no step")
        pointer, length = owner.parts
        start = _number(0) if node.lower is None else convert(self.b, self._value(node.lower), INT64).number
        stop = length
        if node.upper is not None:
            stop = convert(self.b, self._value(node.upper), INT64).number
            stop = self.b.select(self.b.icmp_signed("<", stop, length), stop, length)
        count = self.b.sub(stop, start)
        count = self.b.select(self.b.icmp_signed(">", count, _number(0)), count, _number(0))
        return Value(owner.kind, (self.b.gep(pointer, [start], inbounds=True), count))

    # -- calls --------------------------------------------------------------------------------------------

    def _give_Call(self, node: ast.Call) -> Value:  # noqa: N802
        callee = self._value(node.func).kind
        if not isinstance(callee, Known):
            raise TypeError(f"{ast.unparse(node.func)} cannot be called")
        given = [self._value(each) for each in node.args]
        named = {str(each.arg): self._value(each.value) for each in node.keywords}
        what = callee.what
        function, symbol = function_of(what), linked_symbol(what)
        if function is not None:
            bound = inspect.signature(function).bind(*given, **named)
            bound.apply_defaults()
            values = {
                name: value if isinstance(value, Value) else _constant(value)
                for name, value in bound.arguments.items()
            }
            return _Body(self.writer, function, values).translate()
        if named:
            raise TypeError(f"{ast.unparse(node)}: arguments go by their place")
        if symbol is not None:
            return self._call_symbol(symbol, given)
        if isinstance(what, Word):
            return what.write(self.b, *given)
        if what is len and len(given) == 1 and isinstance(given[0].kind, Array | Table):
            return Value(INT64, (given[0].parts[1],))
        if what in (min, max) and given:
            return self._least(given, ast.Lt() if what is min else ast.Gt())
        kind = element_of(what)
        if kind == BOOL and len(given) == 1:
            return Value(BOOL, (truth(self.b, given[0]),))
        if kind is not None and len(given) == 1:
            return convert(self.b, given[0], kind, cuts=True)
        raise TypeError(f"{ast.unparse(node)} cannot be translated")

    def _call_symbol(self, symbol: str, given: list[Value]) -> Value:
        from llvmlite import ir

        integer = llvm_type(INT64)
        function = self.b.module.globals.get(symbol)
        if function is None:
            function = ir.Function(self.b.module, ir.FunctionType(integer, [integer] * len(given)), symbol)
        return Value(INT64, (self.b.call(function, [convert(self.b, each, INT64).number for each in given]),))

    def _least(self, given: list[Value], op: ast.cmpop) -> Value:
        best = convert(self.b, given[0], INT64)
        for each in given[1:]:
            other = convert(self.b, each, INT64)
            best = Value(INT64, (self.b.select(compare(self.b, op, other, best).number, other.number, best.number),))
        return best


def _number(value: int) -> Any:
    return llvm_type(INT64)(value)


def _constant(what: object) -> Value:
    """Something of Python's, as translated code sees it."""
    if isinstance(what, bool):
        return Value(BOOL, (llvm_type(BOOL)(int(what)),))
    if isinstance(what, int):
        return Value(INT64, (llvm_type(INT64)(int(what)),))
    if isinstance(what, float):
        return Value(FLOAT64, (llvm_type(FLOAT64)(what),))
    return Value(Known(what))
