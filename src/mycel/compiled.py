"""Compiled functions whose cached machine code is thrown away when anything that went into it has changed.

numba keeps machine code on disk beside a stamp of the source file of the function. But functions of other modules
that it calls are compiled into it, and a change there goes unnoticed: after an upgrade the old code would run. Here
the stamp covers the files of every compiled function that the function's module can see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.dispatcher import Dispatcher

__all__ = ["compiled", "compiled_without_lock"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """``numba.njit``, cached on disk; keeps the function's type for the type checker."""
    return _stamped(function, numba.njit(cache=True)(function))


def compiled_without_lock(function: _Function) -> _Function:
    """The same, running without the interpreter lock; divisions follow IEEE 754 and do not raise."""
    return _stamped(function, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def _stamped(function: _Function, dispatcher: Any) -> _Function:
    others = sorted(_files(function) - {function.__code__.co_filename})
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in others)).hexdigest()
    dispatcher.mycel_files = others
    cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if others and hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = (cache_file._source_stamp, digest)
    return cast(_Function, dispatcher)


def _files(function: Callable[..., Any]) -> set[str]:
    """Source files of the compiled functions among the globals of a function, and of those that they call."""
    files: set[str] = set()
    for value in function.__globals__.values():
        if isinstance(value, Dispatcher):
            files.add(value.py_func.__code__.co_filename)
            files.update(getattr(value, "mycel_files", ()))
    return files
