"""A rank whose main thread holds the interpreter is not taken for dead: its kernel answers for its machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.effort import long

from mycel.emulate import launch
from mycel.topology.builders import star

PROGRAM = Path(__file__).resolve().parent / "programs" / "holding.py"


@pytest.mark.namespaces
@pytest.mark.parametrize(
    "words",
    [
        ("5", "1.4", "1.6", "1.8"),  # twice 2.5 s, of which 1.8 s of silence would be too many
        pytest.param(("120",), marks=long),  # twice a minute, with the seconds that are in use
    ],
    ids=["short", "a minute"],
)
def test_a_rank_that_holds_its_interpreter_is_waited_for(words: tuple[str, ...]) -> None:
    lines: list[str] = []
    status = launch(
        star(num_ranks=3, bandwidth="1 Gbit/s"),
        [sys.executable, "-W", "ignore", str(PROGRAM), *words],
        env={"OMP_NUM_THREADS": "1"},
        output=lambda rank, line: lines.append(line),
        timeout_s=300.0,
    )
    assert status == 0, "\n".join(lines)
    assert sorted(line for line in lines if line.endswith("through")) == [f"rank {r} is through" for r in range(3)]
