"""One program that drives ranks: what its calls give, what goes wrong, and that training is that of torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("monarch") is None, reason="needs Monarch: pip install 'mycel[controller]'")
PROGRAM = Path(__file__).parent / "programs" / "controlled.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "controller"
#: The harness's own limit; imports of torch on a busy machine take most of it.
LIMIT_S = 240.0


def run(*words: str) -> Any:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    command = [sys.executable, *words]
    ended = subprocess.run(
        command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(next(line for line in reversed(ended.stdout.splitlines()) if line.startswith("{")))


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    return run(str(PROGRAM), "values", "clients", "slots", "failures", "killed")


def test_values_stay_move_and_come_back(said: dict[str, Any]) -> None:
    values = said["values"]
    assert values["total"] == [[3.0] * 4] * 2
    whole, left, right = values["where"]
    assert whole == [[0, 2, 0, 2.0], [1, 2, 1, 2.0]]
    assert (left, right) == ([[0, 1, 0, 1.0]], [[0, 1, 1, 1.0]])
    assert values["moved"] == values["back"] == [["x", [0.0, 0.0, 3.0]]]
    assert values["fetched"] == [1000]
    assert values["plain"] == [{"a": [1, "b"]}]
    assert all(fewer in (9, 10) for fewer in values["let go"]), "ten values that nobody holds any more"


def test_references_of_other_meshes_are_refused(said: dict[str, Any]) -> None:
    assert "is not on rank 1" in said["values"]["other mesh"] and "put()" in said["values"]["other mesh"]
    assert "to a mesh of 1 ranks, not of 2" in said["values"]["uneven"]


def test_clients_whose_programs_meet_in_opposite_orders_finish(said: dict[str, Any]) -> None:
    for name, totals in said["clients"].items():
        assert totals == [2.0 * (number + ord(which)) + 1 for number in range(20) for which in name]


def test_credits(said: dict[str, Any]) -> None:
    assert said["slots"]["values"] == list(range(6))
    assert "no call was issued that gives one back" in said["slots"]["never given"]


def test_a_program_that_fails_is_named_with_its_rank_and_others_go_on(said: dict[str, Any]) -> None:
    failures = said["failures"]
    assert "failed on rank 1, 1 of 2 ranks: ValueError: no luck" in failures["own"]
    assert "whose value this needs, failed: ValueError: no luck" in failures["follows"]
    assert failures["after"] == [3, 3]
    assert "unlucky" in failures["unasked"] and "rank 0" in failures["unasked"]
    assert "UsageError" in failures["not sent"] and "cannot be sent" in failures["not sent"]


def test_a_killed_rank_is_one_error_that_names_it(said: dict[str, Any]) -> None:
    killed = said["killed"]
    for what in ("waits", "later"):
        assert killed[what].startswith("PeerLostError: rank 1 (process ")
    assert killed["after_s"] < 10
    assert said["closed"].startswith(("UsageError", "PeerLostError"))


def test_losses_are_those_of_torchrun_bit_for_bit() -> None:
    ours = run(str(EXAMPLE / "run.py"), "ddp", "--ranks", "2", "--steps", "6")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    theirs = run(*torchrun, str(EXAMPLE / "torchrun.py"), "--steps", "6")
    assert ours == theirs
    assert ours["losses"][-1] != ours["losses"][0]


def test_two_programs_as_stages_learn_as_one_process_does() -> None:
    losses = run(str(EXAMPLE / "run.py"), "stages", "--steps", "6")["losses"]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_two_models_share_the_ranks() -> None:
    said = run(str(EXAMPLE / "run.py"), "search", "--ranks", "2", "--steps", "5")
    assert set(said["halves"]) == {"32", "256"} and said["best"] in (32, 256)
