"""``mycel plan sequences`` and ``mycel plan memory``: what they print, what they refuse, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.errors import MycelError, UsageError
from mycel.planning.grouping import SequenceInstance, SequencePlan
from mycel.planning.grouping import check_plan as check_sequences
from mycel.planning.residency import MemoryInstance, MemoryPlan
from mycel.planning.residency import check_plan as check_memory

pytest.importorskip("ortools")

DATA = Path(__file__).parents[1] / "data" / "planning"
SEQUENCES: dict[str, Any] = {
    each["name"]: each for each in json.loads((DATA / "sequence_instances.json").read_text())["instances"]
}
MEMORY: dict[str, Any] = {
    each["name"]: each for each in json.loads((DATA / "memory_instances.json").read_text())["instances"]
}
#: No search of these ends by itself in a minute.
MANY_BLOCKS: dict[str, Any] = {
    "blocks": [
        {"forward_us": 7 + k % 13, "backward_us": 20 + k % 7, "saved": 50 + k % 31, "input": 5} for k in range(150)
    ],
    "capacity": 2000,
    "out_bytes_per_us": 1.5,
    "in_bytes_per_us": 1.5,
}
MANY_SEQUENCES: dict[str, Any] = SEQUENCES["wiki_16"] | {
    "num_ranks": 32,
    "lengths": [3000 + 977 * k % 20_011 for k in range(45)],
    "max_micro_batches": 3,
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def put(data: Any) -> str:
        file = tmp_path / "instance.json"
        file.write_text(data if isinstance(data, str) else json.dumps(data))
        return str(file)

    return put


def run(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_sequences_in_words_and_as_json(write: Any) -> None:
    file = write(SEQUENCES["accumulate_2_of_4"])
    words = run("sequences", file, "--limit", "60")
    assert "8 sequences, 50400 tokens, on 4 ranks in 2 micro-batches: 4930.800 ms" in words
    assert "no plan is better" in words
    assert "micro-batch 0, ranks 0 to 3: 1 sequence, 26000 tokens" in words
    record = json.loads(run("sequences", file, "--json"))
    assert record["proved"] is True
    assert record["total_us"] == pytest.approx(4930800.0)
    one = SequenceInstance.from_json(SEQUENCES["accumulate_2_of_4"])
    assert check_sequences(one, SequencePlan.from_json(record)) == pytest.approx(4930800.0)
    assert json.loads(run("sequences", file, "--limit", "0", "--json"))["groups"]


def test_memory_in_words_and_as_json(write: Any) -> None:
    file = write(MEMORY["random_8_1"])
    words = run("memory", file)
    assert "1637 us, 8.1% above memory without end; bound 1637 us: no plan is better" in words
    assert "recompute all: 2016 us, 1.23 times as long" in words
    record = json.loads(run("memory", file, "--json"))
    assert (record["iteration_us"], record["lower_bound_us"], record["proved"]) == (1637, 1637, True)
    one = MemoryInstance.from_json(MEMORY["random_8_1"])
    assert check_memory(one, MemoryPlan.from_json(record)) <= one.capacity


@pytest.mark.parametrize("command", ["sequences", "memory"])
@pytest.mark.parametrize(
    ("text", "says"), [("{", "not JSON"), ("[]", "expected a JSON object"), ("{}", "there is no|comp")]
)
def test_what_cannot_be_read(command: str, text: str, says: str, write: Any) -> None:
    with pytest.raises(UsageError, match=says):
        run(command, write(text))
    with pytest.raises(UsageError, match="--limit -1"):
        run(command, write(SEQUENCES["wiki_16"] if command == "sequences" else MEMORY["uniform_9"]), "--limit=-1")
    with pytest.raises(MycelError, match="cannot be read"):
        run(command, "/nowhere/at/all.json")


def interrupted(package: str, function: str, command: list[str]) -> dict[str, Any]:
    """The record that is printed when Ctrl-C comes at a function's first call, in a search of minutes."""
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"from mycel.planning.{package} import search\n"
        f"real = search.{function}\n"
        "def said(*a, **k):\n"
        "    print('searching', file=sys.stderr, flush=True)\n"
        "    return real(*a, **k)\n"
        f"search.{function} = said\n"
        "sys.argv = ['mycel', *sys.argv[1:]]\n"
        "from mycel.cli import main\n"
        "main()\n"
    )
    arguments = [sys.executable, "-c", program, "plan", *command, "--limit", "600", "--json"]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        watch = threading.Timer(120, process.kill)
        watch.start()
        try:
            assert process.stderr is not None
            assert any("searching" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate()
        finally:
            watch.cancel()
    assert process.returncode == 0, errors
    record: dict[str, Any] = json.loads(out)
    assert record["interrupted"] is True
    return record


def test_ctrl_c_keeps_the_best_plan_of_memory(write: Any) -> None:
    record = interrupted("residency", "anneal", ["memory", write(MANY_BLOCKS)])
    assert record["lower_bound_us"] <= record["iteration_us"]
    check_memory(MemoryInstance.from_json(MANY_BLOCKS), MemoryPlan.from_json(record))


def test_ctrl_c_keeps_the_best_plan_of_sequences(write: Any) -> None:
    record = interrupted("grouping", "polish", ["sequences", write(MANY_SEQUENCES)])
    assert 0 < record["lower_bound_us"] <= record["total_us"]
    check_sequences(SequenceInstance.from_json(MANY_SEQUENCES), SequencePlan.from_json(record))
