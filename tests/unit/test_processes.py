"""Processes of this machine, followed to their end."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from dataclasses import replace

import pytest

from mycel.runtime.processes import follow, own_identity


def test_this_process_can_be_followed_and_one_with_its_number_is_another() -> None:
    own = own_identity()
    assert own is not None and own.pid == os.getpid()
    descriptor = follow(own)
    assert descriptor is not None and descriptor >= 0
    os.close(descriptor)
    assert follow(replace(own, started=own.started + 1)) == -1, "its number has been given again"
    assert follow(replace(own, boot="another machine")) is None
    assert follow(replace(own, namespace=own.namespace + 1)) is None


@pytest.mark.parametrize("is_over", [False, True])
def test_the_end_of_a_process_is_seen(is_over: bool) -> None:
    code = "from mycel.runtime.processes import own_identity as o; i = o(); print(i.pid, i.started); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdin is not None
    pid, started = map(int, child.stdout.readline().split())
    own = own_identity()
    assert own is not None and pid == child.pid
    identity = replace(own, pid=pid, started=started)
    descriptor = None if is_over else follow(identity)
    child.communicate("\n", timeout=60)
    if is_over:
        assert follow(identity) == -1
        return
    assert descriptor is not None and descriptor >= 0
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    assert poller.poll(10_000)
    os.close(descriptor)
