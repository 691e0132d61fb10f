"""Words that two processes share, read and written by compiled code in an order that both see.

An ordinary load in a loop that waits is moved out of it, and an ordinary store may become visible after later ones.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["exchange", "fetch", "publish", "relax", "yield_processor"]

_WORD = ir.IntType(64)
#: A hint to the processor, between two looks at a word, that this is a loop that waits.
_HINTS = {"x86_64": "llvm.x86.sse2.pause", "AMD64": "llvm.x86.sse2.pause"}
_HINT = _HINTS.get(platform.machine())

yield_processor = types.ExternalFunction("sched_yield", types.int32())


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


def _fetch_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)


def _publish_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
    return context.get_dummy_value()


def _exchange_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.atomic_rmw("xchg", _pointer(builder, args[0]), args[1], "seq_cst")


def _relax_codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    if _HINT is not None:
        hint = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), _HINT)
        builder.call(hint, [])
    return context.get_dummy_value()


@intrinsic  # type: ignore[untyped-decorator]
def fetch(typingctx: Any, address: Any) -> Any:
    """The word at an address; what was written before it was published is seen from here on."""
    return types.int64(types.int64), _fetch_codegen


@intrinsic  # type: ignore[untyped-decorator]
def publish(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a word: who fetches it sees all that was written before."""
    return types.void(types.int64, types.int64), _publish_codegen


@intrinsic  # type: ignore[untyped-decorator]
def exchange(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a word and return what was there; everything before is done before everything after."""
    return types.int64(types.int64, types.int64), _exchange_codegen


@intrinsic  # type: ignore[untyped-decorator]
def relax(typingctx: Any) -> Any:
    """Tell the processor that this is a loop that waits."""
    return types.void(), _relax_codegen
