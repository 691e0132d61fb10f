"""Functions that numba compiles at their first call, whose cached machine code goes when what went into it changes.

How it goes:

1. Decorating a function costs nothing: numba is imported, and code loaded or compiled, at the first call. Plans that
   need no compiled code never wait for it (importing numba alone takes longer than the bound of a small fabric).
2. numba keeps machine code on disk beside a stamp of the source file of the function. But functions of other modules
   that it calls are compiled into it, and a change there goes unnoticed: after an upgrade the old code would run.
   Here the stamp covers the files of every compiled function that the function's module can see.
3. Where the disk has none, compiling takes seconds, once for a machine. What is compiled is then said to the logger
   ``mycel.compiled``: as a warning where somebody looks at a terminal, and as information elsewhere, so that ranks of
   a job do not fill a log. The command line prints it either way.
4. Where neither the module's folder nor the user's can be written (a read-only image, a user without a home),
   a folder of the user's own among the temporary files is taken; where there is none, nothing is kept, which is said.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

__all__ = ["compiled", "compiled_without_lock", "interpreted_while_small"]

_log = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Innermost steps that a process interprets before it compiles. A step takes 3.5 to 12 us interpreted, so these about
#: 0.3 s; importing numba and loading code from disk takes twice that, and compiling it some 3.5 s.
_MOST_INTERPRETED = 40_000


def compiled(function: _Function) -> _Function:
    """``numba.njit``, cached on disk; keeps the function's type for the type checker."""
    return cast(_Function, _Compiled(function, {}))


def compiled_without_lock(function: _Function) -> _Function:
    """The same, running without the interpreter lock; divisions follow IEEE 754 and do not raise."""
    return cast(_Function, _Compiled(function, {"nogil": True, "error_model": "numpy"}))


def interpreted_while_small(function: _Function, num_steps: int) -> _Function:
    """A compiled function; or, where little was asked so far, the same as it is written, which needs no numba.

    Both compute the same. Small plans are made, from start to end, in less time than numba takes to import.

    Args:
        function: decorated with ``compiled``.
        num_steps: about how many times its innermost loop will run now.
    """
    global _interpreted
    if not isinstance(function, _Compiled) or "numba" in sys.modules:
        return function
    _interpreted += num_steps
    return function if _interpreted > _MOST_INTERPRETED else cast(_Function, function.interpreted)


_interpreted = 0


class _Compiled:
    """A function that is numba's from its first call, or from the first time that another such function calls it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._options = options

    def __call__(self, *arguments: Any) -> Any:
        return self._dispatcher(*arguments)

    def __getattr__(self, name: str) -> Any:
        """What numba's own object has: ``stats``, ``signatures``, and the type by which compiled code calls it."""
        if name.startswith("__"):  # asked by copying, pickling and doctest: no reason to import numba
            raise AttributeError(name)
        return getattr(self._dispatcher, name)

    @cached_property
    def _dispatcher(self) -> Any:
        import numba

        _say_what_is_compiled()
        dispatcher = _cached_on_disk(numba, self._function, self._options)
        others = sorted(self._files(set()) - {self._function.__code__.co_filename})
        digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in others)).hexdigest()
        cache_file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
        if others and hasattr(cache_file, "_source_stamp"):
            cache_file._source_stamp = (cache_file._source_stamp, digest)
        return dispatcher

    @cached_property
    def interpreted(self) -> Callable[..., Any]:
        """The function with those that it calls as they are written too."""
        names = dict(self._function.__globals__)
        function = FunctionType(self._function.__code__, names, self._function.__name__)
        self.__dict__["interpreted"] = function  # before those that it calls are looked at: they may call it
        for name, value in names.items():
            if isinstance(value, _Compiled):
                names[name] = value.interpreted
        return function

    def _files(self, seen: set[_Compiled]) -> set[str]:
        """Source files of the function, of the compiled ones among its globals, and of those that they call."""
        files = {self._function.__code__.co_filename}
        seen.add(self)
        for value in self._function.__globals__.values():
            if isinstance(value, _Compiled) and value not in seen:
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


@cache
def _say_what_is_compiled() -> None:
    """Have numba announce what it does not find on disk; of functions that call others, the outermost."""
    from numba.core import event

    class Announcer(event.Listener):  # type: ignore[misc]  # numba is untyped
        depth = 0

        def on_start(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            if not self.depth and str(function.__module__).startswith("mycel."):
                level = logging.WARNING if sys.stderr is not None and sys.stderr.isatty() else logging.INFO
                _log.log(level, "compiling for this machine, once: %s.%s", function.__module__, function.__name__)
            self.depth += 1

        def on_end(self, event: Any) -> None:
            self.depth -= 1

    event.register("numba:compile", Announcer())
