"""Functions of whole numbers as machine code of their own, which is loaded without numba and called by its address.

What a rank runs before its first sum is compiled code, and the compiler is much larger than that: importing numba and
telling it of everything that it knows takes a rank some tenths of a second of processor time, loading what it made of
a function milliseconds. So a *standalone* function is compiled once on a machine, into one object file with all that
it calls, and from then on needs of numba only the loader of llvmlite, the package below it.

How it goes:

1. Arguments and result are 64-bit integers. Such a function has the form that C gives it, and no trace of Python.
2. Other compiled functions call it as they call libc's, by its symbol. It is therefore compiled once, and not into
   each of its callers: compiling ``combine`` takes longer than all of the rest.
3. The file's name says what went into it: the source files of the function and of those that it calls, the numbers
   that they have from elsewhere, llvmlite's release and the processor. Nothing else is ever looked up in it, so files
   of other releases do not matter.
4. One process of a machine compiles and others wait, as for other compiled functions (``mycel.compile_lock``).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from mycel.compile_lock import take_turn
from mycel.compiled import announce, code_folder, compiled_into, linked

__all__ = ["Standalone", "standalone"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Symbols that numba's code for arrays mentions, and never comes to where no array owns its memory.
_NEVER_CALLED = ("NRT_MemInfo_call_dtor",)
_OPTIONS = {
    "nopython": True,
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
_loading = threading.RLock()
#: Loaders own the code that they loaded.
_loaders: list[Any] = []


def standalone(function: _Function) -> _Function:
    """Machine code of its own of a function of 64-bit integers, which gives one, or nothing; runs without the lock.

    From Python it is called with plain integers, and gives 0 where it gives nothing.
    """
    return cast(_Function, Standalone(function))


class Standalone:
    """A function that is loaded, or compiled, at its first call, or when code that calls it is loaded.

    Args:
        function: as it is written.

    Attributes:
        function: as given.
        symbol: by which other code is linked against it.
        was_compiled: whether it is this process that compiled it.
        is_linked: always true; what ``mycel.compiled.linked`` goes by.
    """

    is_linked = True

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.function = function
        self._num_arguments = function.__code__.co_argcount
        self.symbol = f"{function.__module__}.{function.__name__}".replace(".", "_")
        self.was_compiled = False

    def __call__(self, *arguments: int) -> int:
        return self._call(*arguments)

    @cached_property
    def _call(self) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * self._num_arguments)(self.address)

    @property
    def _numba_type_(self) -> Any:
        """What numba takes it for when compiled code calls it: a function of another library."""
        from numba import types

        if not self.address:
            raise RuntimeError(f"{self.symbol} has no code")
        return types.ExternalFunction(self.symbol, types.int64(*[types.int64] * self._num_arguments))

    @cached_property
    def address(self) -> int:
        """Where the code is; loads or compiles it, and all that it calls."""
        with _loading:
            if "address" in self.__dict__:
                return cast(int, self.__dict__["address"])
            return self._load(self._code())

    def _code(self) -> bytes:
        """The file: one line of JSON with the symbols that it needs, and the object."""
        from llvmlite import binding

        called = compiled_into(self.function)
        files = sorted({each.__code__.co_filename for each in called})
        what = [binding.get_default_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()]
        marks = hashlib.sha256(json.dumps([_llvm(), what, self.symbol]).encode())
        for file in files:
            marks.update(Path(file).read_bytes())
        marks.update(json.dumps(sorted(_constants(called).items())).encode())
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
        from llvmlite import binding

        head, _, content = code.partition(b"\n")
        _provide(json.loads(head)["needs"], self._called())
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

    def _called(self) -> dict[str, Standalone]:
        """Standalone functions that the code calls, by symbol."""
        return {each.symbol: each for each in linked(self.function)}

    def _compile(self) -> bytes:
        import numba
        from numba.core import compiler, registry
        from numba.core.compiler_lock import global_compiler_lock

        for each in self._called().values():
            each.address  # noqa: B018  # callers are linked against it
        flags = compiler.Flags()
        registry.cpu_target.options.parse_as_flags(flags, _OPTIONS)
        dispatcher = numba.njit(nogil=True, error_model="numpy")(self.function)
        typing, target = dispatcher.typingctx, dispatcher.targetctx
        arguments = (numba.types.int64,) * self._num_arguments
        with global_compiler_lock, announce(f"{self.function.__module__}.{self.function.__name__}"):
            typing.refresh()
            target.refresh()
            result = compiler.compile_extra(typing, target, self.function, arguments, None, flags, {})
            given = result.signature.return_type
            if given not in (numba.types.int64, numba.types.none):
                raise TypeError(f"{self.symbol} gives {given}; a standalone function gives int64, or nothing")
            library = result.library.codegen.create_library(self.symbol)
            library.add_linking_library(result.library)
            library.add_ir_module(self._entry(result.fndesc.llvm_func_name))
            library.enable_object_caching()
            library.finalize()
            needs = [each.name for each in library._final_module.functions if each.is_declaration]
            self.was_compiled = True
            head = {"needs": [name for name in needs if not name.startswith("llvm.")]}
            return json.dumps(head).encode() + b"\n" + cast(bytes, library._get_compiled_object())

    def _entry(self, native: str) -> Any:
        """The function as C has it, around numba's, which gives a status and takes places for result and error."""
        from llvmlite import ir

        integer, byte = ir.IntType(64), ir.IntType(8)
        module = ir.Module(f"{self.symbol}_entry")
        arguments = [integer] * self._num_arguments
        places = [integer.as_pointer(), byte.as_pointer().as_pointer()]
        inner = ir.Function(module, ir.FunctionType(ir.IntType(32), [*places, *arguments]), native)
        outer = ir.Function(module, ir.FunctionType(integer, arguments), self.symbol)
        builder = ir.IRBuilder(outer.append_basic_block())
        result, error = builder.alloca(integer), builder.alloca(byte.as_pointer())
        builder.store(integer(0), result)
        builder.call(inner, [result, error, *outer.args])
        builder.ret(builder.load(result))
        return module


def _constants(functions: list[Callable[..., Any]]) -> dict[str, int]:
    """Numbers that functions name, of their own modules and of others."""
    found: dict[str, int] = {}
    for function in functions:
        names, known = function.__code__.co_names, function.__globals__
        places = [(function.__module__, known)]
        places += [(name, vars(known[name])) for name in names if isinstance(known.get(name), ModuleType)]
        found |= {
            f"{where}.{name}": have[name] for where, have in places for name in names if type(have.get(name)) is int
        }
    return found


def _provide(symbols: list[str], own: dict[str, Standalone]) -> None:
    """Make sure that symbols can be found; a loader that misses one ends the process.

    Raises:
        RuntimeError: one cannot.
    """
    from llvmlite import binding

    process = ctypes.CDLL(None)
    for symbol in symbols:
        if symbol in own:
            known = own[symbol].address
        elif symbol in _NEVER_CALLED and not binding.address_of_symbol(symbol):
            known = ctypes.cast(process.abort, ctypes.c_void_p).value or 0
            binding.add_symbol(symbol, known)
        else:
            known = binding.address_of_symbol(symbol) or hasattr(process, symbol)
        if not known:
            raise RuntimeError(f"compiled code needs {symbol}, which neither libc nor mycel has")


@cache
def _llvm() -> str:
    import llvmlite

    return f"{llvmlite.__version__}"


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
