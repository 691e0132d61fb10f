"""Words that two processes share, read and written by compiled code in an order that both see.

An ordinary load in a loop that waits is moved out of it, and an ordinary store may become visible after later ones.
"""

from __future__ import annotations

import platform
from typing import Any

from mycel.machine.kinds import INT64, NOTHING, Value, llvm_type
from mycel.machine.words import external, word

__all__ = ["exchange", "fetch", "publish", "relax", "yield_processor"]

#: A hint to the processor, between two looks at a word, that this is a loop that waits.
_HINTS = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}
_HINT = _HINTS.get(platform.machine())

yield_processor = external("sched_yield", 32)


def _pointer(builder: Any, address: Value) -> Any:
    return builder.inttoptr(address.number, llvm_type(INT64).as_pointer())


@word
def fetch(builder: Any, address: Value) -> Value:
    """The word at an address; what was written before it was published is seen from here on."""
    return Value(INT64, (builder.load_atomic(_pointer(builder, address), "acquire", 8),))


@word
def publish(builder: Any, address: Value, value: Value) -> Value:
    """Write a word: who fetches it sees all that was written before."""
    builder.store_atomic(value.number, _pointer(builder, address), "release", 8)
    return NOTHING


@word
def exchange(builder: Any, address: Value, value: Value) -> Value:
    """Write a word and return what was there; everything before is done before everything after."""
    return Value(INT64, (builder.atomic_rmw("xchg", _pointer(builder, address), value.number, "seq_cst"),))


@word
def relax(builder: Any) -> Value:
    """Tell the processor that this is a loop that waits."""
    from llvmlite import ir

    if _HINT is not None:
        hint = builder.module.globals.get(_HINT)
        if hint is None:
            hint = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), []), _HINT)
        builder.call(hint, [])
    return NOTHING
