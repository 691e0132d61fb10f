"""A short run of random collectives; ``python -m tests.soak`` runs a hundred thousand."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.effort import long
from tests.soak.__main__ import KINDS, Draw
from tests.soak.unrest import run_unrest

ROOT = Path(__file__).resolve().parents[2]


def test_random_collectives_are_right() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.soak", "--count", "700", "--seed", "7"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert run.stdout.count("collectives right") == 4, run.stdout + run.stderr[-4000:]


@long
@pytest.mark.namespaces
def test_unrest_raises_no_alarm() -> None:
    assert run_unrest(30.0, seed=3) == 0


def test_every_kind_is_drawn_and_alike_on_every_rank() -> None:
    groups = [[0, 1, 2], [1, 2]]
    one, other = random.Random(3), random.Random(3)
    draws = [Draw.of(one, groups) for _ in range(1000)]
    assert {draw.kind for draw in draws} == set(KINDS)
    assert draws == [Draw.of(other, groups) for _ in range(1000)]
