"""Written collectives out of files: ``FILE.py``, or ``FILE.py:name`` where a file has several."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import ModuleType

from mycel.collectives.language.written import Written
from mycel.errors import MycelError, UsageError
from mycel.names import nearest

__all__ = ["load_written"]


def load_written(text: str) -> Written:
    """The written collective in a Python file, which is run for that.

    Args:
        text: the file, and after a colon the name of the function where it has several.

    Raises:
        UsageError: there is no such file or function, or the file cannot be run; the message names the line.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        path, name = text, ""
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise UsageError(f"{text}: no such file; a Python file, such as ring.py or ring.py:ring, is needed")
    module = _run(file)
    found = {key: value for key, value in vars(module).items() if isinstance(value, Written)}
    own = {key: value for key, value in found.items() if Path(value.where.file) == file}
    if name:
        if name not in found:
            known = ", ".join(found) or "none"
            raise UsageError(f"{path}: no collective {name!r}{nearest(name, found)}; it has: {known}")
        return found[name]
    chosen = own or found
    if not chosen:
        raise UsageError(
            f'{path}: no collective in it; put @collective("all_reduce") of mycel.collectives.language on a function'
        )
    if len(chosen) > 1:
        raise UsageError(f"{path}: has several collectives; say which, as {path}:{next(iter(chosen))}")
    return next(iter(chosen.values()))


def _run(file: Path) -> ModuleType:
    """The file as a module whose code knows the file by the name that the user gave, as messages do."""
    module = ModuleType(f"_mycel_written_{file.stem}")
    module.__file__ = str(file)
    sys.path.insert(0, str(file.resolve().parent))  # what stands beside it is found, as when Python runs the file
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    except MycelError:
        raise
    except SyntaxError as error:
        raise UsageError(f"{file}:{error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = f":{frames[-1].lineno}" if frames else ""
        raise UsageError(f"{file}{line}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module
