"""Runs functions on ranks: ``run_ranks(world_size, "collectives", "all_reduce")`` calls a function of ``checks/``."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.warm import started_warm

HERE = Path(__file__).resolve().parent
#: Seconds for the launcher to import torch and to load, or once on a machine compile, the engine.
START_S = 240.0


class Launcher:
    """The process that forks ranks; started at first use."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        env = {k: v for k, v in os.environ.items() if not k.startswith("MYCEL_") and k not in ("RANK", "WORLD_SIZE")}
        # Threads of a BLAS library would make forking unsafe, and two cores slower.
        self.environment = env | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.be_there()
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], START_S + request.get("timeout_s", 0.0))
        line = process.stdout.readline() if ready else ""
        if not line:
            self.stop()
            pytest.fail("the launcher of ranks ended or did not answer")
        return json.loads(line)  # type: ignore[no-any-return]

    def be_there(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "launcher.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process.stdout.close()
            self.process = None


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.stop()


@pytest.fixture
def warm_ranks(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``mycel.emulate`` starts in this test is forked from the launcher, where that makes no difference."""
    launcher.be_there()  # not for the first time in a thread that is in a network namespace of its own
    module = sys.modules["mycel.emulate.launch"]  # the package has a function of the same name
    monkeypatch.setattr(module, "start_process", started_warm(launcher.ask, launcher.environment))


@pytest.fixture
def run_ranks(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """``run_ranks(world_size, module, function, *args, backend="mycel", env={}, preload=(), timeout_s=240)``.

    With ``strict=True``, every warning is an error in every rank, as under ``python -W error``.

    The results by rank.

    Every rank calls ``function(rank, world_size, *args)`` of ``checks/<module>.py`` inside an initialised process
    group (``backend=None``: without one; ``STORE_FILE`` then names a file for a store). The modules of ``preload``
    are imported once, before ranks are forked. A rank that raises, dies
    or takes too long fails the test with the output of all ranks.
    """

    def run(
        world_size: int,
        module: str,
        function: str,
        *args: Any,
        backend: str | None = "mycel",
        env: Mapping[str, str] | None = None,
        preload: Sequence[str] = (),
        timeout_s: float = 240.0,
        strict: bool = False,
    ) -> list[Any]:
        directory = tmp_path_factory.mktemp(function)
        request = {
            "world_size": world_size,
            "file": str(HERE / "checks" / f"{module}.py"),
            "function": function,
            "args": args,
            "backend": backend,
            "env": dict(env or {}),
            "preload": list(preload),
            "timeout_s": timeout_s,
            "strict": strict,
            "directory": str(directory),
        }
        answer = launcher.ask(request)
        if answer["timed_out"] or any(answer["codes"]):
            outputs = [
                f"--- rank {rank}, exit code {code}\n{(directory / f'output{rank}').read_text(errors='replace')}"
                for rank, code in enumerate(answer["codes"])
            ]
            late = " (out of time; the rest was killed)" if answer["timed_out"] else ""
            pytest.fail(
                f"{function} on {world_size} ranks over {backend}{late}\n" + "\n".join(outputs), pytrace=False
            )
        return [pickle.loads((directory / f"result{rank}").read_bytes()) for rank in range(world_size)]

    return run
