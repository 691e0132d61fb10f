"""Words that translated code has beyond Python's own: memory by its address, libc's functions, the processor's steps.

A *word* is told LLVM's builder and the values it is given, and writes what is to be done. Called from Python it is an
error: it is nothing that Python could do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mycel.machine.kinds import INT64, Array, Known, Scalar, Table, Value, element_of, llvm_type

__all__ = ["External", "Word", "array_at", "bits_as", "external", "select", "table_at", "truncating_divide", "word"]


class Word:
    """Something that translated code may say.

    Args:
        write: gets LLVM's builder and the arguments, ``Value``s, and returns one.
        name: for messages.
    """

    def __init__(self, write: Callable[..., Value], name: str) -> None:
        self.write, self.__name__ = write, name

    def __call__(self, *arguments: object) -> NoReturn:
        raise TypeError(f"{self.__name__} is for compiled code (mycel.standalone)")

    def __repr__(self) -> str:
        return self.__name__


def word(write: Callable[..., Value]) -> Any:
    """Make a word of a function that writes it."""
    return Word(write, write.__name__)


class External(Word):
    """A function of libc's, found by its name when the code is loaded.

    Args:
        name: libc's.
        bits: of the result and of each argument, which are integers; what is given is cut, what comes is extended.
    """

    def __init__(self, name: str, *bits: int) -> None:
        super().__init__(self._call, name)
        self._bits = bits

    def _call(self, builder: Any, *arguments: Value) -> Value:
        from llvmlite import ir

        result, *expected = [ir.IntType(bits) for bits in self._bits]
        if len(arguments) != len(expected) or any(each.kind != INT64 for each in arguments):
            raise TypeError(f"{self.__name__} takes {len(expected)} numbers of 64 bits")
        function = builder.module.globals.get(self.__name__)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(result, expected), self.__name__)
        given = [
            each.number if wanted.width == 64 else builder.trunc(each.number, wanted)
            for each, wanted in zip(arguments, expected, strict=True)
        ]
        came = builder.call(function, given)
        return Value(INT64, (came if result.width == 64 else builder.sext(came, llvm_type(INT64)),))


def external(name: str, *bits: int) -> Any:
    """A function of libc's; see ``External``."""
    return External(name, *bits)


def _type(value: Value) -> Scalar:
    found = element_of(value.kind.what) if isinstance(value.kind, Known) else None
    if found is None:
        raise TypeError(f"a type of numbers is needed, not {value.kind}")
    return found


@word
def array_at(builder: Any, address: Value, element: Value, length: Value) -> Value:
    """``length`` numbers of a type at an address."""
    kind = _type(element)
    return Value(Array(kind), (builder.inttoptr(address.number, llvm_type(kind).as_pointer()), length.number))


@word
def table_at(builder: Any, address: Value, rows: Value, fields: Value) -> Value:
    """Rows of 64-bit integers at an address."""
    pointer = builder.inttoptr(address.number, llvm_type(INT64).as_pointer())
    return Value(Table(), (pointer, rows.number, fields.number))


@word
def bits_as(builder: Any, value: Value, wanted: Value) -> Value:
    """The number of a type that has the same bits."""
    kind = _type(wanted)
    return Value(kind, (builder.bitcast(value.number, llvm_type(kind)),))


@word
def select(builder: Any, condition: Value, one: Value, other: Value) -> Value:
    """``one if condition else other`` with both computed beforehand; as a branch it would keep loops scalar."""
    if one.kind != other.kind:
        raise TypeError(f"one of {one.kind} and {other.kind} is to be selected; they must be of one kind")
    return Value(one.kind, (builder.select(condition.number, one.number, other.number),))


@word
def truncating_divide(builder: Any, numerator: Value, divisor: Value) -> Value:
    """Integer division as C has it: towards zero."""
    return Value(INT64, (builder.sdiv(numerator.number, divisor.number),))
