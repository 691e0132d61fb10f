"""Functions that numba compiles when it pays, whose machine code on disk goes when what went into it changes.

How it goes:

1. Decorating a function costs nothing. Code is loaded or compiled at a call with much to do; small ones are
   interpreted, until a process has spent some tenths of a second so: loading what numba needs takes longer than that,
   and compiling some seconds. Most groups of ranks are planned without it.
2. numba keeps machine code on disk beside a stamp of the source file of the function. But functions of other modules
   that it calls are compiled into it, and a change there goes unnoticed: after an upgrade the old code would run.
   Here the stamp covers the files of every compiled function that the function's module can see.
3. Where the disk has none, compiling takes seconds, once for a machine: one process compiles, and others that need
   the same wait for its file (``mycel.compile_lock``). What is compiled is said to the logger ``mycel.compiled``, in
   one line a process, as a warning; the command line prints it.
4. Where neither the module's folder nor the user's can be written (a read-only image, a user without a home),
   a folder of the user's own among the temporary files is taken; where there is none, nothing is kept, which is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, cached_property, update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, TypeVar, cast

from mycel.compile_lock import Turn, turns

__all__ = [
    "Compiled",
    "announce",
    "code_folder",
    "compiled",
    "compiled_at_once",
    "compiled_without_lock",
    "interpreted_while_small",
]

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Innermost steps that a process interprets before it compiles, where the caller counts them. A step takes 3.5 to
#: 12 us interpreted, so these about 0.3 s; loading the first code from disk takes twice that, compiling some 3.5 s.
_MOST_INTERPRETED = 40_000
#: Where nobody counts: elements of all arrays of a call that is interpreted, and seconds of such calls in a process.
_MOST_ELEMENTS = 4096
_MOST_INTERPRETED_S = 0.3


def compiled(function: _Function) -> _Function:
    """``numba.njit``, cached on disk, and interpreted while there is little to do; keeps the function's type.

    For functions of integers and arrays of them, which compute the same either way.
    """
    return cast(_Function, Compiled(function, {}, is_patient=True))


def compiled_at_once(function: _Function) -> _Function:
    """The same, compiled whatever there is to do."""
    return cast(_Function, Compiled(function, {}))


def compiled_without_lock(function: _Function) -> _Function:
    """The same, running without the interpreter lock; divisions follow IEEE 754 and do not raise."""
    return cast(_Function, Compiled(function, {"nogil": True, "error_model": "numpy"}))


def interpreted_while_small(function: _Function, num_steps: int) -> _Function:
    """A compiled function; or, where little was asked so far, the same as it is written, which needs no numba.

    Both compute the same. Small plans are made, from start to end, in less time than numba takes to import.

    Args:
        function: decorated with ``compiled``.
        num_steps: about how many times its innermost loop will run now.
    """
    global _interpreted
    if not isinstance(function, Compiled):
        return function
    if not function.is_loaded:
        _interpreted += num_steps
        if _interpreted <= _MOST_INTERPRETED:
            return cast(_Function, function.interpreted)
    return cast(_Function, function.compiled)


_interpreted = 0
_interpreted_s = 0.0


class Compiled:
    """A function that is numba's from its first call, or from the first time that another such function calls it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], *, is_patient: bool = False) -> None:
        update_wrapper(self, function)
        self.function = function
        self._options = options
        self._is_patient = is_patient

    def __call__(self, *arguments: Any) -> Any:
        if not self._is_patient or self.is_loaded or not _is_little(arguments):
            return self._dispatcher(*arguments)
        global _interpreted_s
        begin = time.thread_time()
        try:
            return _plain(self.interpreted(*arguments))
        finally:
            _interpreted_s += time.thread_time() - begin

    @property
    def is_loaded(self) -> bool:
        """Whether this process has the function's machine code, or has asked numba for it."""
        return "_dispatcher" in self.__dict__

    @property
    def compiled(self) -> Callable[..., Any]:
        """numba's own function, whatever there is to do."""
        return cast(Callable[..., Any], self._dispatcher)

    def __getattr__(self, name: str) -> Any:
        """What numba's own object has: ``stats``, ``signatures``, and the type by which compiled code calls it."""
        if name.startswith("__"):  # asked by copying, pickling and doctest: no reason to import numba
            raise AttributeError(name)
        return getattr(self._dispatcher, name)

    @cached_property
    def _dispatcher(self) -> Any:
        import numba

        _say_what_is_compiled()
        dispatcher = _cached_on_disk(numba, self.function, self._options)
        others = sorted(self._files(set()) - {self.function.__code__.co_filename})
        digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in others)).hexdigest()
        cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
        if others and hasattr(cache_file, "_source_stamp"):
            cache_file._source_stamp = (cache_file._source_stamp, digest)
        if cache_file is not None:
            dispatcher._cache = _SharedCache(dispatcher._cache, f"{self.__module__}.{self.function.__name__}")
        return dispatcher

    @cached_property
    def interpreted(self) -> Callable[..., Any]:
        """The function with those that it calls as they are written too."""
        names = dict(self.function.__globals__)
        function = FunctionType(self.function.__code__, names, self.function.__name__)
        self.__dict__["interpreted"] = function  # before those that it calls are looked at: they may call it
        for name, value in names.items():
            if isinstance(value, Compiled):
                names[name] = value.interpreted
        return function

    def _files(self, seen: set[Compiled]) -> set[str]:
        """Source files of the function, of the compiled ones among its globals, and of those that they call."""
        files = {self.function.__code__.co_filename}
        seen.add(self)
        for value in self.function.__globals__.values():
            if isinstance(value, Compiled) and value not in seen:
                files |= value._files(seen)
        return files


def _cached_on_disk(numba: Any, function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """numba's function, whose machine code is kept where that can be written, or else nowhere."""
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
    # Neither beside the module nor in the user's folder, nor where NUMBA_CACHE_DIR says.
    folder = _private_folder()
    if folder is None:
        return numba.njit(**options)(function)
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)
    finally:
        numba.config.CACHE_DIR = before


@cache
def code_folder(source: str, name: str) -> Path | None:
    """Where a file of machine code is, or else is to be kept, by numba's rule; ``None`` where nothing can be written.

    Args:
        source: file that the code was made of.
        name: of the file.
    """
    named = os.environ.get("NUMBA_CACHE_DIR")
    candidates = [Path(named)] if named else [Path(source).parent / "__pycache__", _cache_of_the_user()]
    folders = [folder for folder in candidates if folder is not None]
    for folder in folders:  # an image that nobody may write to may have brought it along
        if (folder / name).exists():
            return folder
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return folder
        except OSError:
            continue
    return _private_folder()


def _cache_of_the_user() -> Path | None:
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "mycel"
    try:
        return Path("~/.cache/mycel").expanduser()
    except RuntimeError:  # a container's user without a home
        return None


@cache
def _private_folder() -> Path | None:
    """A folder among the temporary files that nobody else can write to: what is in it will be run."""
    name = f"mycel-compiled-{os.geteuid()}"
    try:
        folder = Path(tempfile.gettempdir()) / name
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            tempfile.TemporaryFile(dir=folder).close()
            return folder
        reason = "it belongs to somebody else, or others may write to it"
    except OSError as error:
        reason = error.strerror or str(error)
    _log.warning(
        "compiled code cannot be kept among the temporary files, as %s: %s; every process compiles for some seconds, "
        "unless NUMBA_CACHE_DIR names a folder",
        name,
        reason,
    )
    return None


def _is_little(arguments: tuple[Any, ...]) -> bool:
    elements = sum(getattr(each, "size", 1) for each in arguments)
    return elements <= _MOST_ELEMENTS and _interpreted_s < _MOST_INTERPRETED_S


def _plain(result: Any) -> Any:
    """As compiled code gives it: Python's own numbers."""
    if isinstance(result, tuple):
        return tuple(map(_plain, result))
    return result.item() if hasattr(result, "item") and getattr(result, "ndim", 1) == 0 else result


class _SharedCache:
    """A function's cache of numba's. What it lacks is compiled by one process, while others wait to read it.

    Args:
        cache: numba's.
        name: of the function.
    """

    def __init__(self, cache: Any, name: str) -> None:
        self._cache, self._name = cache, name
        folder = Path(cache.cache_path)
        self._turn = turns.setdefault(folder, Turn(folder))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The code, or ``None``: then it is this process's turn to compile it."""
        found = self._cache.load_overload(signature, target_context)
        if found is None:
            self._turn.take(self._name)
            found = self._cache.load_overload(signature, target_context)
            if found is not None:
                self._turn.give()
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        """Keep it, and let others go on."""
        try:
            with contextlib.suppress(OSError):  # a full disk is no reason to fail
                self._cache.save_overload(signature, data)
        finally:
            self._turn.give(wholly=_Announcing.depth == 0)


class _Announcing:
    """How deep in functions that are compiled inside of others numba is, and whether anything has been said."""

    depth = 0
    has_spoken = False


@contextlib.contextmanager
def announce(name: str) -> Iterator[None]:
    """Say that something is being compiled: in one line, the first time in this process.

    Args:
        name: of the function.
    """
    if not _Announcing.depth:
        level = logging.DEBUG if _Announcing.has_spoken else logging.WARNING
        _log.log(level, "compiling for this machine, once, for some seconds: %s and what follows", name)
        _Announcing.has_spoken = True
    _Announcing.depth += 1
    try:
        yield
    finally:
        _Announcing.depth -= 1


@cache
def _say_what_is_compiled() -> None:
    """Have numba announce what it does not find on disk."""
    from numba.core import event

    class Announcer(event.Listener):  # type: ignore[misc]  # numba is untyped
        open: ClassVar[list[Any]] = []

        def on_start(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            name = f"{function.__module__}.{function.__name__}"
            is_ours = name.startswith("mycel.")
            self.open.append(announce(name) if is_ours else contextlib.nullcontext())
            self.open[-1].__enter__()

        def on_end(self, event: Any) -> None:
            self.open.pop().__exit__(None, None, None)
            if not self.open and sys.exc_info()[0] is not None:  # nothing is going to be saved
                for turn in turns.values():
                    turn.give(wholly=True)

    event.register("numba:compile", Announcer())
