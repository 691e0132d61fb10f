"""Frameworks train over mycel what they train over Gloo, and their default group is mycel's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

from mycel.emulate import launch
from mycel.runtime import warm
from mycel.topology.builders import star

PROGRAM = Path(__file__).parent / "programs" / "framework.py"
LIMIT_S = 180.0
#: What a launcher sets and what says where mycel's ranks are: the test's own must not reach the program.
OURS = ("MYCEL_", "RANK", "WORLD_SIZE", "MASTER_")
FIRST_WORD = '{"framework"'
#: Frameworks that leave the default group to the program, and those that make it and have a launcher's processes.
OF_THE_PROGRAM, OF_THEIR_OWN = ("plain", "accelerate", "ignite"), ("lightning", "fabric")
MODULES = {"plain": "torch", "fabric": "lightning"}


def under_torchrun(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {key: value for key, value in os.environ.items() if not key.startswith(OURS)} | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, str(PROGRAM), *arguments], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return told(ended.stdout)


def told(output: str) -> list[dict[str, Any]]:
    """What each of two ranks said of each framework; the two may stand on one line."""
    decoder, found, at = json.JSONDecoder(), [], output.find(FIRST_WORD)
    while at >= 0:
        value, end = decoder.raw_decode(output, at)
        found.append(value)
        at = output.find(FIRST_WORD, end)
    assert found and len(found) % 2 == 0, output
    return found


def assert_trained(found: list[dict[str, Any]]) -> None:
    assert [(each["backend"], each["ranks"]) for each in found] == [("mycel", 2)] * 2
    for each in found:
        assert len(each["losses"]) == 8 and each["losses"][-1] < 0.7 * each["losses"][0]
    assert found[0]["state"] == found[1]["state"]
    assert found[0]["losses"] != found[1]["losses"], "each rank has rows of its own"


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(MODULES.get(name, name)) is not None


@pytest.fixture(scope="module")
def over_gloo() -> list[dict[str, Any]]:
    """What torch's own wrapper learns from the same rows over Gloo."""
    return by_losses(under_torchrun("plain:gloo"))


@pytest.fixture(scope="module")
def over_mycel() -> list[dict[str, Any]]:
    """What all frameworks learn that are installed: those of a kind one after the other in the same processes."""
    found = under_torchrun(*filter(is_installed, OF_THE_PROGRAM))
    theirs = tuple(filter(is_installed, OF_THEIR_OWN))
    return found + (under_torchrun(*theirs) if theirs else [])


@pytest.mark.parametrize("name", [*OF_THE_PROGRAM, *OF_THEIR_OWN])
def test_the_default_group_is_mycels_and_learns_what_gloos_learns(
    over_gloo: list[dict[str, Any]], over_mycel: list[dict[str, Any]], name: str
) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    found = [each for each in over_mycel if each["framework"] == name]
    assert_trained(found)
    for mine, other in zip(by_losses(found), over_gloo, strict=True):
        assert other["backend"] == "gloo"
        assert mine["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert mine["state"] == pytest.approx(other["state"], rel=1e-5)


def by_losses(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ranks write when they end, in any order."""
    return sorted(found, key=lambda each: each["losses"][0])


@pytest.mark.namespaces
@pytest.mark.parametrize("address", [pytest.param("127.0.0.1", marks=long), "127.0.1.1"])
def test_machines_whose_own_name_is_a_loopback_address(address: str, tmp_path: Path) -> None:
    """Two machines, each of which finds its own name at a loopback address, as Debian writes it, and no other."""
    script = f"""
        hostname machine$RANK
        printf '127.0.0.1 localhost\\n{address} machine%s\\n' $RANK > {tmp_path}/hosts$RANK
        mount --bind {tmp_path}/hosts$RANK /etc/hosts
        unset MYCEL_TOPOLOGY MYCEL_WIRING GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME
        exec {sys.executable} {PROGRAM} plain
    """
    lines: list[str] = []
    code = launch(
        star(num_ranks=2, bandwidth="1 Gbit/s"),
        ["unshare", "--uts", "--mount", "sh", "-ec", script],
        output=lambda rank, line: lines.append(line),
        timeout_s=LIMIT_S,
        warm=warm,
    )
    assert code == 0, "\n".join(lines)
    assert_trained(told("\n".join(lines)))
