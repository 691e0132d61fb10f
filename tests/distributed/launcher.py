"""Forks the ranks of distributed tests from one process that has imported torch already.

Importing torch and loading compiled code takes each rank seconds; a fork of a process that has done both takes
milliseconds. The launcher itself never makes a process group, an autograd graph or a thread, so that forking is safe.

A request is one line of JSON on standard input, the answer one line on standard output; see ``conftest.py``. Either a
function is to run on ranks, or a program is to become a process of its own (``forked_programs.py``).
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

# Some are not used here: imported once, they need not be imported by every rank.
import pytest  # noqa: F401
import torch
import torch._dynamo
import torch._functorch._aot_autograd
import torch._numpy
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.testing
import torch.utils._device

import mycel.runtime

sys.path.append(str(Path(__file__).parents[2]))  # what ranks run imports from ``tests``

from tests.distributed.forked_programs import Become, fork_program

#: Seconds the other ranks get after the first has failed.
GRACE_S = 15.0


@cache
def load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def be_rank(request: dict[str, Any], checks: ModuleType, rank: int, directory: Path) -> None:
    """The life of one rank; never returns."""
    code = 1
    try:
        output = os.open(directory / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        faulthandler.dump_traceback_later(request["timeout_s"] * 0.95)
        os.environ.update(request["env"])
        if request["strict"]:
            warnings.simplefilter("error")
        size = request["world_size"]
        if request["backend"] is not None:
            store = dist.FileStore(str(directory / "store"), size)
            dist.init_process_group(
                request["backend"],
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=request["timeout_s"] * 0.8),
            )
        else:
            os.environ["STORE_FILE"] = str(directory / "store")
        result = getattr(checks, request["function"])(rank, size, *request["args"])
        if dist.is_initialized():
            dist.destroy_process_group()
        (directory / f"result{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks, wait for them, kill what is left at the deadline."""
    for module in request.get("preload", ()):
        importlib.import_module(module)
    checks = load(request["file"])
    gc.freeze()  # collections in ranks would copy every page of what all of them share
    directory = Path(request["directory"])
    waiting: dict[int, tuple[int, int]] = {}  # pidfd: pid, rank
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            be_rank(request, checks, rank, directory)
        waiting[os.pidfd_open(pid)] = (pid, rank)
    poller = select.poll()
    for descriptor in waiting:
        poller.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + request["timeout_s"]
    codes: dict[int, int | None] = {}
    timed_out = False
    while waiting:
        for descriptor, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            pid, rank = waiting.pop(descriptor)
            poller.unregister(descriptor)
            os.close(descriptor)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if codes[rank] != 0:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() >= deadline and waiting and not timed_out:
            timed_out = True
            for descriptor in waiting:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            deadline = time.monotonic() + 60.0
    return {"codes": [codes[rank] for rank in range(request["world_size"])], "timed_out": timed_out}


def main() -> None:
    # What torch tells mycel's own code to do otherwise is an error in every rank; what mycel tells its users is not.
    for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
        warnings.filterwarnings("error", category=category, module=r"mycel(\.|$)")
    torch.set_num_threads(1)
    mycel.runtime.warm()
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(fork_program(request) if "program" in request else run(request)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Become as become:
        program = become.program
    else:
        sys.exit()
    program.run()  # in no frame but this one, as an interpreter that was started for it
