"""``examples/long_context``: ranks that share a sequence learn what one process does; short windows lose nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybrid
import long_context
import one_rank
import packs
import pytest
import torch
from tests.distributed.checks.long_context import losses

from mycel.memory import needs_of

RunRanks = Callable[..., list[Any]]
SMALL = ["--context", "384", "--held-out", "1", "--text", "1"]


def test_two_ranks_learn_what_one_process_does(run_ranks: RunRanks) -> None:
    """With filtering, and without on windows of a third; held-out bytes cost the same then."""
    cases = [SMALL, [*SMALL, "--no-filtering", "--seen", "128"]]
    alone = losses(0, 1, cases, 3)
    for found in run_ranks(2, "long_context", "losses", cases, 3):
        for (ours, seen), (wanted, held_out) in zip(found, alone, strict=True):
            assert wanted[0] > wanted[-1]
            assert ours == pytest.approx(wanted, abs=2e-5)
            assert [part["bytes"] for part in seen] == [part["bytes"] for part in held_out]
            assert [part["nats"] for part in seen] == pytest.approx([part["nats"] for part in held_out], abs=2e-4)


def test_packs_are_whole_files_that_fit() -> None:
    pieces = packs.load(2048, held_out=False, max_bytes=1 << 19)
    made, total = [], 0
    for files in packs.packs(pieces, 2048, seed=3):
        made.append(files)
        total += len(files)
        if total == len(pieces):
            break
    assert sorted(file for files in made for file in files) == sorted(pieces)
    tokens = [sum(len(file) - 1 for file in files) for files in made]
    assert max(tokens) <= 2048 and sum(tokens) > 0.9 * 2048 * (len(tokens) - 1)


def test_windows_count_every_byte_once_and_leave_most_of_a_window_before() -> None:
    files = next(packs.packs(packs.load(2048, held_out=False, max_bytes=1 << 19), 2048, seed=3))
    whole, cut, windows = packs.whole(files, 2048), packs.whole(files, 256), packs.windows(files, 256, 64)
    assert cut.tokens.equal(whole.tokens) and cut.targets.equal(whole.targets) and cut.before.equal(whole.before)
    assert max(cut.documents) == 256 and sum(cut.documents) == sum(whole.documents)
    counted = windows.is_counted
    for name in ("tokens", "targets"):
        assert getattr(windows, name)[:, counted].equal(getattr(whole, name))
    assert windows.before[counted].equal(whole.before)
    into = torch.cat([torch.arange(length) for length in windows.documents])
    assert sum(windows.documents) == windows.tokens.shape[1] and max(windows.documents) == 256
    assert bool((into[counted] >= windows.before[counted].clamp(max=256 - 64)).all())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example with one layer, whose needs are found sooner."""

    def make(options: Any) -> tuple[hybrid.Hybrid, torch.optim.Optimizer]:
        model = hybrid.Hybrid(hybrid.Sizes(width=24, head_width=8, num_layers=1), seed=options.seed)
        return model, torch.optim.AdamW(model.parameters())

    monkeypatch.setattr(one_rank, "make", make)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)


def ways_out(*arguments: str) -> str:
    """What is said in the third step, with 7 MiB taken until then."""
    seen = one_rank.Seen(first=one_rank.MIB, most=8 * one_rank.MIB, steps=2)
    said: str = one_rank.ways_out(one_rank.parse_arguments(arguments), None, seen)
    return said


@pytest.mark.usefixtures("small")
def test_what_does_not_fit_is_said_with_what_it_needs() -> None:
    """Needs that are known from short sequences are those of the long one."""
    says = ways_out("--context", "1024", "--limit", "5")
    needed, over, least, again, longest = (
        int(number) for number in re.findall(r"(\d+)(?: MiB[, ]| ranks| or less)", says)
    )
    pack = packs.blank(1024)
    model, _ = one_rank.make(one_rank.parse_arguments([]))
    exact = needs_of(model, (pack.tokens, one_rank.context_of(pack)), loss=one_rank.of_zeros).peak
    assert abs(needed - exact / one_rank.MIB) < 1 + 0.02 * needed and over == needed - 5
    assert least == -(-1024 // longest) and again < needed and longest < 1024 * 6 / needed


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("limit", "more"), [("300", []), ("20", ["--plan"])])
def test_what_should_have_fit_is_said_to_have_grown(limit: str, more: list[str]) -> None:
    """Nobody knows by how much then: no figure says so, least of all a negative one."""
    says = ways_out("--context", "1024", "--limit", limit, *more)
    foreseen = (
        "plan keeps what torch allocates below 16 MiB" if more else r"1024 bytes of a sequence need about \d+ MiB"
    )
    assert re.search(rf"in step 3 with a limit of {limit} MiB, .*{foreseen}.*At most 7 MiB were seen", says)
    assert ("; --plan;" in says) is not bool(more) and "too little" not in says
    assert not re.search(r"-\d", says)


@pytest.mark.usefixtures("small")
def test_a_limit_below_the_model_is_said() -> None:
    says = ways_out("--context", "1024", "--limit", "0")
    assert re.fullmatch(
        r"no step fits: model and optimizer alone need about \d+ MiB, .* 0: \d+ MiB too little. .*", says
    )


@pytest.mark.usefixtures("small")
def test_a_budget_without_a_plan_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_rank.main(["--context", "4096", "--steps", "1", "--text", "1", "--limit", "24", "--plan"]) == 2
    said = capsys.readouterr().err.strip()
    assert re.fullmatch(r"one_rank.py: --plan: a budget of \d+ bytes: nothing fits; nearest is .*", said)


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_a_plan_of_memory_learns_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit, and under a real limit below what a step takes without a plan."""
    ends = []
    for more in ([], ["--limit", "38", "--plan"]):
        assert one_rank.main(["--context", "4096", "--steps", "2", "--text", "1", *more]) == 0
        ends.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    free, planned = ends
    assert planned["losses"] == free["losses"] and len(free["losses"]) == 2
    assert "* " in planned["plan"] and "* keep" not in planned["plan"]


def test_tables_say_what_rows_say(tmp_path: Path) -> None:
    parts = [{"start": 0, "bytes": 30.0, "nats": 2.0}, {"start": 512, "bytes": 10.0, "nats": 1.0}]
    done = {"ranks": 1, "taken_mib": 412.0, "step_s": 2.5, "losses": [3.0, 2.5]}
    rows = {
        "one process, no limit": done,
        "one rank": {"ranks": 1, "refused": "a step does not fit"},
        "four ranks": done | {"ranks": 4, "losses": [3.0, 2.5 + 1e-6], "held_out": parts},
    }
    lines = long_context.table(rows).splitlines()
    assert lines[2] == "| one process, no limit | 412 | 2.50 | 2.5000 |  |  |  |"
    assert lines[3].startswith("| one rank | does not fit |")
    assert lines[4] == "| four ranks | 412 | 2.50 | 2.5000 | 1.0e-06 | 1.7500 | 1.0000 |"
    long_context.draw(rows, 300, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 20_000


@pytest.mark.long
def test_one_command(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MYCEL_")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(long_context.__file__)), "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert list(rows) == list(long_context.ROWS)
    assert re.search(r"\d+ MiB too little. Three ways out: \d+ ranks", rows["one rank"]["refused"])
    reference = rows["one process, no limit"]
    assert long_context.off(rows["one rank, a plan"], reference) == 0.0
    assert 0.0 < long_context.off(rows["four ranks"], reference) < 1e-4
    assert reference["taken_mib"] > 80 > rows["one rank, a plan"]["taken_mib"]
    for name, row in rows.items():
        assert "refused" in row or f"| {name} | {row['taken_mib']:.0f} |" in done.stdout
    assert (tmp_path / "long_context.png").stat().st_size > 20_000
