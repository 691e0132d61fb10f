"""Threads that work on tensors when the interpreter ends: they finish what they are at, and begin nothing more."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import contextlib, sys, threading
import torch
from mycel.runtime.ending import at_work

context = at_work if sys.argv[1] == "at work" else contextlib.nullcontext()
begun = threading.Event()

def drop_tensors():
    while True:
        with context:
            tensors = [torch.zeros(64) for _ in range(512)]
            begun.set()
            del tensors

for _ in range(4):
    threading.Thread(target=drop_tensors, daemon=True).start()
begun.wait(60)
print("at the end")
"""


def ended(how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM, how]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("attempt", range(3))
def test_a_process_ends_well_while_threads_give_tensors_back(attempt: int) -> None:
    done = ended("at work")
    assert (done.returncode, done.stdout, done.stderr) == (0, "at the end\n", "")


_LATE = """
import threading, time
from mycel.runtime.ending import at_work

begun, last = threading.Event(), threading.Event()

def work():
    with at_work:
        begun.set()
        last.wait(60)
        print("what was begun is finished", flush=True)
    with at_work:
        print("nothing is begun afterwards", flush=True)

threading.Thread(target=work, daemon=True).start()
begun.wait(60)
threading.Thread(target=lambda: (time.sleep(0.2), last.set()), daemon=True).start()
"""


def test_what_is_begun_is_finished_and_nothing_begun_afterwards() -> None:
    done = subprocess.run([sys.executable, "-c", _LATE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "what was begun is finished\n", "")
