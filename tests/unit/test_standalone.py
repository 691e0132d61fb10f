"""Machine code of its own: compiled once, found again, linked by symbol, and made anew when its source changes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mycel.machine.callees import ingredients, linked
from mycel.runtime import engine, forms, job_fields, job_ring, libc, reduce_kernels
from mycel.runtime.reduce_kernels import DType, ReduceOp, combine, scale
from mycel.standalone import Standalone, _provide, standalone

ENGINE = [engine.execute, engine.again, job_ring.serve, job_ring.submit, combine, scale]

INNER = """
from mycel.standalone import inlined, standalone

@inlined
def inner(x):
    return x + {}

@standalone
def other(x):
    return x * 100
"""
OUTER = """
import sys
from inner_module import inner, other
from mycel.standalone import standalone

@standalone
def outer(x, y):
    return other(inner(x)) + y

@standalone
def nothing(x):
    other(x)

if __name__ == "__main__":
    sys.stdin.readline()
    print(outer(1, -7), nothing(1), outer.was_compiled, other.was_compiled, "numba" in sys.modules)
"""


def run(folder: Path, num_processes: int = 1) -> list[str]:
    """What processes print that find nothing but source files, in a folder for code of their own."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "code")}
    command = [sys.executable, str(folder / "outer.py")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        for _ in range(num_processes)
    ]
    said = [process.communicate("\n")[0].strip() for process in processes]
    assert not any(process.returncode for process in processes)
    return said


def test_it_is_compiled_once_then_loaded_without_numba_and_made_anew_after_a_change(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(OUTER, encoding="utf-8")
    (tmp_path / "inner_module.py").write_text(INNER.format(1), encoding="utf-8")
    first = sorted(run(tmp_path, 2))
    assert first[1] == "193 0 True True False", "one of both compiles"
    assert first[0] in ("193 0 False False False", "193 0 False True False"), first
    assert run(tmp_path) == ["193 0 False False False"]
    (tmp_path / "inner_module.py").write_text(INNER.format(2), encoding="utf-8")
    assert run(tmp_path) == ["293 0 True True False"], "both stand in the file that has changed, or call into it"


@pytest.mark.parametrize("function", ENGINE, ids=lambda function: function.__name__)
def test_the_engine_needs_libc_and_itself_alone(function: Standalone) -> None:
    own = set(linked(function.function))
    needs = set(json.loads(function._code().partition(b"\n")[0])["needs"])
    assert needs - own <= {
        *("memmove", "recv", "send", "sendmsg", "poll", "read", "write", "sched_yield"),
        *("__errno_location", "clock_gettime"),
    }


def test_what_is_called_by_symbol() -> None:
    names = set(linked(engine.execute.function))  # type: ignore[attr-defined]
    assert names == {"mycel_runtime_reduce_kernels_combine", "mycel_runtime_reduce_kernels_scale"}
    served = linked(job_ring.serve.function)  # type: ignore[attr-defined]
    assert set(served) == {"mycel_runtime_engine_execute"}


def test_python_calls_it_with_plain_numbers() -> None:
    ones, twos = np.ones(100, dtype=np.int32), np.full(100, 2, dtype=np.int32)
    code = int(DType.INT32), int(ReduceOp.SUM)
    assert combine(*code, ones.ctypes.data, ones.ctypes.data, twos.ctypes.data, 100) == 0  # type: ignore[func-returns-value]
    assert (ones == 3).all()
    with pytest.raises(ctypes.ArgumentError):
        combine(*code, 1.5, 0, 0, 0)  # type: ignore[arg-type]
    assert libc.EINTR == 4 and reduce_kernels.ITEM_SIZE[DType.INT32] == 4


def test_a_result_that_is_no_integer_is_refused() -> None:
    @standalone
    def half(x: int) -> float:
        return np.float64(x)

    with pytest.raises(TypeError, match="half gives float64"):
        half(1)


def test_a_symbol_that_nobody_has_is_an_error_and_not_the_end_of_the_process() -> None:
    _provide(["memmove"], {})
    with pytest.raises(RuntimeError, match="needs numba_no_such_function"):
        _provide(["numba_no_such_function"], {})


def test_numbers_of_other_modules_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that was compiled for other places of fields is no code for these."""
    function = forms.lay_out.function  # type: ignore[attr-defined]  # of a standalone function
    before = list(ingredients(function))
    assert list(ingredients(function)) == before
    monkeypatch.setattr(job_fields, "CHANNEL_FIELDS", job_fields.CHANNEL_FIELDS + 1)
    assert list(ingredients(function)) != before
