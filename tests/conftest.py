"""What pytest must not collect, and what no test may leave behind for the next: tests run in any order."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

# The same examples in every run of ``make test``, so that what is red is red for everybody; others in each long run.
settings.register_profile("repeatable", derandomize=True)
if os.environ.get("MYCEL_TESTS") != "long":
    settings.load_profile("repeatable")

# Shells start what runs in the background with Ctrl-C ignored, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What other tests have left may, when it is collected, wait for threads that a forked child does not have.
os.register_at_fork(after_in_child=gc.disable)

# Programs that tests start on ranks, and modules that only ranks import.
collect_ignore_glob = ["distributed/checks/*", "distributed/programs/*"]

_ROOT = Path(__file__).resolve().parents[1]
_OURS = tuple(f"{_ROOT / folder}{os.sep}" for folder in ("src", "tests", "benchmarks", "examples"))
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD)


def _globals_of_process() -> dict[str, Any]:
    """What a test can change for those that come after it, by name."""
    # torch names its cache for compiled code when it first compiles; scikit-learn sets OpenMP up when imported.
    theirs = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
    environment = {k: v for k, v in os.environ.items() if k not in theirs}
    state: dict[str, Any] = {f"os.environ[{name!r}]": value for name, value in environment.items()}
    state["working directory"] = str(Path.cwd())
    state |= {f"handler of {s.name}": signal.getsignal(s) for s in _SIGNALS}
    state["logging.disable"] = logging.root.manager.disable
    state["level of the root logger"] = logging.root.level
    if (torch := sys.modules.get("torch")) is not None:
        state["torch default dtype"] = torch.get_default_dtype()
        state["torch default device"] = str(torch.get_default_device())
        state["torch threads"] = torch.get_num_threads()
        state["torch gradients"] = torch.is_grad_enabled()
    return state


@cache
def _no_namespaces() -> str:
    """Why no cluster can be emulated here; empty where one can."""
    from mycel.emulate import check_support
    from mycel.errors import EmulationError

    try:
        check_support()
    except EmulationError as error:
        return str(error)
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked ``namespaces`` where there are none."""
    if item.get_closest_marker("namespaces") is not None and (missing := _no_namespaces()):
        pytest.skip(missing)


def _is_ours(module: ModuleType) -> bool:
    return str(getattr(module, "__file__", "")).startswith(_OURS)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test after which the process is not as it was: the next one would depend on the order.

    Modules may be imported, but none of ours that were there may go or be exchanged: others hold their classes.
    """
    before, modules = _globals_of_process(), dict(sys.modules)
    yield
    after = _globals_of_process()
    torch_is_new = "torch" in sys.modules and "torch" not in modules
    names = {*before, *after} - ({n for n in after if n.startswith("torch")} if torch_is_new else set())
    changed = {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}
    exchanged = [n for n, m in modules.items() if sys.modules.get(n) is not m and _is_ours(m)]
    assert not changed, f"left behind, before and after: {changed}"
    assert not exchanged, f"modules that others use were removed or loaded anew: {exchanged}"
