"""Conversions, comparisons and the arithmetic of translated code; see ``kinds`` for what goes together."""

from __future__ import annotations

import ast
from typing import Any

from mycel.machine.kinds import BOOL, INT64, Array, Kind, Known, Scalar, Table, Value, llvm_type

__all__ = ["arithmetic", "compare", "convert", "truth", "unify"]

_COMPARED: dict[type, str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


def unify(one: Kind, other: Kind) -> Kind:
    """The kind of what is either of the one or of the other.

    Raises:
        TypeError: they do not go together.
    """
    if one == other and one is not None:
        return one
    if {one, other} == {BOOL, INT64}:
        return INT64
    raise TypeError(f"{one} and {other} do not go together; say which it is to be")


def convert(builder: Any, value: Value, kind: Kind, *, cuts: bool = False) -> Value:
    """The value as one of another kind: truths as whole numbers; others where somebody says so.

    Args:
        builder: LLVM's.
        value: what to convert.
        kind: into what.
        cuts: whether any number may become any other; whole ones are cut or extended, floats rounded to nearest.

    Raises:
        TypeError: that cannot be.
    """
    have = value.kind
    if have == kind:
        return value
    if not isinstance(have, Scalar) or not isinstance(kind, Scalar) or not (cuts or (have, kind) == (BOOL, INT64)):
        raise TypeError(f"{have} is no {kind}")
    number, wanted = value.number, llvm_type(kind)
    if have.is_float:
        if not kind.is_float:
            raise TypeError(f"{have} is no {kind}: which way is it to be rounded?")
        return Value(
            kind, (builder.fpext(number, wanted) if have.bits < kind.bits else builder.fptrunc(number, wanted),)
        )
    if kind.is_float:
        made = builder.sitofp(number, wanted) if have.is_signed else builder.uitofp(number, wanted)
    elif have.bits > kind.bits:
        made = builder.trunc(number, wanted)
    elif have.bits < kind.bits:
        made = builder.sext(number, wanted) if have.is_signed else builder.zext(number, wanted)
    else:
        made = number
    return Value(kind, (made,))


def truth(builder: Any, value: Value) -> Any:
    """Whether a number is not 0, as LLVM's value."""
    if value.kind == BOOL:
        return value.number
    if not isinstance(value.kind, Scalar) or value.kind.is_float:
        raise TypeError(f"{value.kind} is neither true nor false")
    return builder.icmp_signed("!=", value.number, llvm_type(value.kind)(0))


def _pair(builder: Any, one: Value, other: Value) -> tuple[Scalar, Any, Any]:
    kind = unify(one.kind, other.kind)
    if not isinstance(kind, Scalar):
        raise TypeError(f"{kind} is no number")
    return kind, convert(builder, one, kind).number, convert(builder, other, kind).number


def compare(builder: Any, op: ast.cmpop, one: Value, other: Value) -> Value:
    """A truth. Comparisons with NaN are false, but for ``!=``."""
    kind, x, y = _pair(builder, one, other)
    sign = _COMPARED.get(type(op))
    if sign is None:
        raise TypeError(f"{type(op).__name__} cannot be translated")
    if kind.is_float:
        made = builder.fcmp_unordered("!=", x, y) if sign == "!=" else builder.fcmp_ordered(sign, x, y)
    elif kind.is_signed:
        made = builder.icmp_signed(sign, x, y)
    else:
        made = builder.icmp_unsigned(sign, x, y)
    return Value(BOOL, (made,))


def arithmetic(builder: Any, op: ast.operator, one: Value, other: Value) -> Value:
    """What two numbers give.

    Raises:
        TypeError: they are of different kinds, or there is no such operation on them.
    """
    for value in (one, other):
        if value.kind is None or isinstance(value.kind, Array | Table | Known):
            raise TypeError(f"{value.kind} is no number")
    bitwise = {ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor"}.get(type(op))
    if one.kind == other.kind == BOOL and bitwise is None:  # Python counts with truths
        one, other = convert(builder, one, INT64), convert(builder, other, INT64)
    kind, x, y = _pair(builder, one, other)
    if kind.is_float:
        name = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}.get(type(op))
    elif isinstance(op, ast.FloorDiv | ast.Mod):
        if kind != INT64:
            raise TypeError(f"{kind} cannot be divided; say int(...)")
        return Value(kind, (_divide(builder, x, y)[isinstance(op, ast.Mod)],))
    else:
        shift = "ashr" if kind.is_signed else "lshr"
        name = bitwise or {
            ast.Add: "add",
            ast.Sub: "sub",
            ast.Mult: "mul",
            ast.LShift: "shl",
            ast.RShift: shift,
        }.get(type(op))
    if name is None:
        raise TypeError(f"{type(op).__name__} of {kind} cannot be translated")
    return Value(kind, (getattr(builder, name)(x, y),))


def _divide(builder: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Quotient, rounded down, and rest, which has the divisor's sign; both 0 where the divisor is."""
    zero, one = y.type(0), y.type(1)
    is_none = builder.icmp_signed("==", y, zero)
    y = builder.select(is_none, one, y)
    quotient, rest = builder.sdiv(x, y), builder.srem(x, y)
    is_off = builder.and_(builder.icmp_signed("!=", rest, zero), builder.icmp_signed("<", builder.xor(rest, y), zero))
    quotient = builder.select(is_off, builder.sub(quotient, one), quotient)
    rest = builder.select(is_off, builder.add(rest, y), rest)
    return builder.select(is_none, zero, quotient), builder.select(is_none, zero, rest)
