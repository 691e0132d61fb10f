"""Functions of whole numbers as machine code of their own, which is loaded and called by its address.

What a rank runs before its first sum is compiled code, and a compiler is much larger than that: importing numba and
telling it of everything that it knows takes a rank some tenths of a second of processor time, and compiling the
engine took it tens. So a *standalone* function is translated by ``mycel.machine``, which knows just what such
functions are made of, and compiled by LLVM once on a machine, into one object file with all that it calls. From then
on a rank needs the loader of llvmlite, which takes milliseconds.

How it goes:

1. Arguments and result are 64-bit integers. Such a function has the form that C gives it, and no trace of Python.
2. ``inlined`` functions are written into those that call them, standalone ones are called by their symbols, as libc's
   are.
3. The file's name says what went into it: the source files of the function and of those that it calls, the values of
   their constants, the translation, llvmlite's release and the processor. Nothing else is ever looked up in it, so
   files of other releases do not matter.
4. One process of a machine compiles and others wait, as for other compiled functions (``mycel.compile_lock``).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
from collections.abc import Callable
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import Any, TypeVar, cast

from llvmlite import __version__ as llvmlite_version
from llvmlite import binding

from mycel.compile_lock import take_turn
from mycel.compiled import announce, code_folder
from mycel.machine.callees import ingredients, linked

__all__ = ["Inlined", "Standalone", "inlined", "standalone"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_loading = threading.RLock()
#: Loaders own the code that they loaded.
_loaders: list[Any] = []


def standalone(function: _Function) -> _Function:
    """Machine code of its own of a function of 64-bit integers, which gives one, or nothing; runs without the lock.

    From Python it is called with plain integers, and gives 0 where it gives nothing.
    """
    return cast(_Function, Standalone(function))


def inlined(function: _Function) -> _Function:
    """A part of standalone functions, written into each that calls it; called from Python it is one itself."""
    return cast(_Function, Inlined(function))


class Standalone:
    """A function that is loaded, or compiled, at its first call, or when code that calls it is loaded.

    Args:
        function: as it is written.

    Attributes:
        function: as given.
        symbol: by which other code is linked against it.
        was_compiled: whether it is this process that compiled it.
        is_linked: always true; what ``mycel.machine.callees`` goes by.
    """

    is_linked = True

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.function: Any = function
        self._num_arguments = self.function.__code__.co_argcount
        self.symbol = f"{function.__module__}.{function.__name__}".replace(".", "_")
        self.was_compiled = False

    def __call__(self, *arguments: int) -> int:
        return self._call(*arguments)

    @cached_property
    def _call(self) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * self._num_arguments)(self.address)

    @cached_property
    def address(self) -> int:
        """Where the code is; loads or compiles it, and all that it calls."""
        with _loading:
            if "address" in self.__dict__:
                return cast(int, self.__dict__["address"])
            return self._load(self._code())

    def _code(self) -> bytes:
        """The file: one line of JSON with the symbols that it needs, and the object."""
        what = [binding.get_default_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()]
        marks = hashlib.sha256(json.dumps([llvmlite_version, what, self.symbol]).encode())
        for each in ingredients(self.function):
            marks.update(each)
        name = f"{self.symbol}-{marks.hexdigest()[:24]}.code"
        folder = code_folder(self.function.__code__.co_filename, name)
        if folder is None:
            return self._compile()
        if (found := _read(folder / name)) is not None:
            return found
        with take_turn(folder, self.symbol):
            if (found := _read(folder / name)) is not None:
                return found
            code = self._compile()
            _write(folder / name, code)
            return code

    def _load(self, code: bytes) -> int:
        head, _, content = code.partition(b"\n")
        _provide(json.loads(head)["needs"], linked(self.function))
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_default_triple().create_target_machine()
        loader = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        loader.add_object_file(binding.ObjectFileRef.from_data(content))
        loader.finalize_object()
        _loaders.append(loader)
        address = int(loader.get_function_address(self.symbol))
        binding.add_symbol(self.symbol, address)
        return address

    def _compile(self) -> bytes:
        from mycel.machine.emit import emit

        with announce(f"{self.function.__module__}.{self.function.__name__}"):
            needs, content = emit(self.symbol, self.function)
        self.was_compiled = True
        return json.dumps({"needs": needs}).encode() + b"\n" + content


class Inlined:
    """A function that is written into others.

    Args:
        function: as it is written.

    Attributes:
        function: as given.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.function: Any = function

    def __call__(self, *arguments: int) -> int:
        return self._alone(*arguments)

    @cached_property
    def _alone(self) -> Standalone:
        return Standalone(self.function)


def _provide(symbols: list[str], own: dict[str, Standalone]) -> None:
    """Make sure that symbols can be found; a loader that misses one ends the process.

    Raises:
        RuntimeError: one cannot.
    """
    process = ctypes.CDLL(None)
    for symbol in symbols:
        known = (
            own[symbol].address if symbol in own else binding.address_of_symbol(symbol) or hasattr(process, symbol)
        )
        if not known:
            raise RuntimeError(f"compiled code needs {symbol}, which neither libc nor mycel has")


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _write(file: Path, code: bytes) -> None:
    """Put it there in one piece. A disk that is full is no reason to fail."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_bytes(code)
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
