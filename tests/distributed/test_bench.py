"""Benches with real processes: on an emulated star, on loopback, and when a rank fails."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mycel.bench.case import ALWAYS_IN_PLACE, BENCH_COLLECTIVES, EITHER_WAY, Case
from mycel.bench.measurement import Measurement
from mycel.bench.ranks import run_ranks as launch_ranks
from mycel.bench.run import bench_cases
from mycel.cli import build_app
from mycel.collectives.cost import LOCAL_PIECE_BYTES, WHOLE_BYTES
from mycel.collectives.synth import methods_for
from mycel.errors import CommunicationError, TopologyError, UsageError
from mycel.topology import to_json
from mycel.topology.builders import star


def _ignore(rank: int, record: dict[str, Any]) -> None:
    pass


def _run_mycel(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from mycel.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.namespaces
def test_bench_on_an_emulated_star(tmp_path: Path) -> None:
    topology = star(num_ranks=3, bandwidth="400 Mbit/s")
    file = tmp_path / "star.json"
    file.write_text(json.dumps(to_json(topology)), encoding="utf-8")
    result = _run_mycel("bench", str(file), "--collective", "all", "--sizes", "3000", "--repeats", "2", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["unit"], document["world_size"], document["emulated"]) == ("Mbit/s", 3, True)
    rows = [Measurement.from_json(row) for row in document["rows"]]
    assert [(m.collective, m.bytes, m.in_place, m.backend) for m in rows] == [
        (collective, size, in_place, backend)
        for collective in BENCH_COLLECTIVES
        for size in (3000,)
        for in_place in ((False, True) if collective in EITHER_WAY else (collective in ALWAYS_IN_PLACE,))
        for backend in ("gloo", "mycel")
    ]
    for m in rows:
        assert m.correct
        assert m.wrong == 0
        assert m.cpu_s_per_gb is not None and m.cpu_s_per_gb > 0
        assert m.repeats == 2 * 20
        assert 0 < m.p10_s <= m.median_s <= m.p90_s
        assert m.algbw == pytest.approx(m.bytes * 8 / m.median_s / 1e6)
        assert m.fraction_of_bound is not None
        assert m.fingerprint == topology.fingerprint
        if m.backend == "gloo" or m.collective == "sendrecv":
            assert (m.method, m.piece_bytes) == (None, None)
        else:
            assert m.method in methods_for(m.collective)
            assert m.piece_bytes in (*LOCAL_PIECE_BYTES, WHOLE_BYTES)


@pytest.mark.usefixtures("warm_ranks")
def test_bench_on_loopback_over_gloo() -> None:
    cases = [Case(collective=c, num_bytes=1000, repeats=1, calls=3) for c in BENCH_COLLECTIVES]
    cases.append(Case(collective="all_reduce", num_bytes=4096, repeats=2, mode="busy"))
    seen: list[Measurement] = []
    rows = bench_cases(2, cases, backends=("gloo",), timeout_s=120, progress=seen.append)
    assert rows == seen
    assert [m.collective for m in rows] == [*BENCH_COLLECTIVES, "all_reduce"]
    assert [m.repeats for m in rows] == [3] * len(BENCH_COLLECTIVES) + [2]
    assert rows[-1].mode == "busy"
    assert all(m.correct and m.fraction_of_bound is None and not m.emulated for m in rows)
    assert {m.unit for m in rows} == {"GB/s"}


def test_a_sweep_under_torchrun_in_the_columns_of_nccl_tests() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    bench = ["bench", "--here", "--collective", "reduce_scatter", "-b", "1KB", "-e", "10KB", "-f", "3", "-n", "1"]
    program = "import sys; from mycel.cli import main; sys.argv[0] = 'mycel'; main()"
    command += ["--no-python", sys.executable, "-c", program, *bench]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [(line[0], line[1]) for line in lines] == 2 * [("1024", "128"), ("3072", "384"), ("9216", "1152")]
    for line in lines:
        assert line[2:5] == ["float", "sum", "-1"]
        assert (line[8], line[12]) == ("0", "0")
        assert float(line[5]) > 0 and float(line[9]) > 0
    assert "reduce_scatter over gloo" in result.stdout and "reduce_scatter over mycel" in result.stdout
    assert "Not measured: nccl" in result.stdout


@pytest.mark.usefixtures("warm_ranks")
def test_types_operations_roots_and_a_csv_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    asked = ["--collective", "all_reduce,broadcast,sendrecv", "-d", "half,torch.int64", "-o", "max,avg", "-r", "all"]
    sizes = ["-b", "1KB", "-e", "3KB", "-i", "1KB", "-n", "1", "-w", "1"]
    result = CliRunner().invoke(build_app(), ["bench", "--loopback", "2", *asked, *sizes, "-F", str(file)])
    assert result.exit_code == 0, result.stderr
    assert f"written to {file}" in result.stderr
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    half, whole = ("half", "max"), ("int64", "max")
    kinds = [(row["type"], row["redop"]) for row in rows if row["collective"] == "all_reduce"]
    assert set(kinds) == {half, ("half", "avg"), whole}  # whole numbers have no exact average
    assert len(kinds) == 3 * 3 * 2
    assert {(row["type"], row["root"]) for row in rows if row["collective"] == "broadcast"} == {
        (kind, root) for kind in ("half", "int64") for root in ("0", "1")
    }
    assert [row["size_bytes"] for row in rows if row["collective"] == "sendrecv"] == 2 * [
        *("1024", "1024", "2048", "2048", "3072", "3072")
    ]
    assert {row["wrong"] for row in rows} == {"0"}
    table = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert len(table) == len(rows)  # out of place or in place, never both here
    assert {tuple(line[2:5]) for line in table} >= {("half", "avg", "-1"), ("int64", "none", "1")}


@pytest.mark.usefixtures("warm_ranks")
def test_results_that_are_not_checked_are_not_called_right() -> None:
    asked = ["bench", "--loopback", "2", "--sizes", "1KB", "-n", "1", "-c", "0", "-F", "-"]
    result = CliRunner().invoke(build_app(), asked)
    assert result.exit_code == 0, result.stderr
    assert [row["wrong"] for row in csv.DictReader(result.stdout.splitlines())] == ["", ""]


def test_interrupted_it_shows_the_rows_so_far_and_leaves_no_rank(tmp_path: Path) -> None:
    """On a terminal it says what it measures; after Ctrl-C come the tables and one line, and no process is left."""
    mark, file = f"MYCEL_TEST_MARK={uuid.uuid4()}", tmp_path / "rows.csv"
    terminal, line = pty.openpty()
    arguments = ["bench", "--loopback", "2", "-b", "4KB", "-e", "256MB", "-n", "30", "-F", str(file)]
    process = subprocess.Popen(
        [sys.executable, "-c", "from mycel.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=line,
        text=True,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", **dict([mark.split("=")])},
    )
    os.close(line)
    shown = b""
    try:
        while b"2 of 34" not in shown:  # both backends have had the smallest of 17 sizes
            assert select.select([terminal], [], [], 120)[0], shown
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        reader = threading.Thread(target=_drain, args=(terminal, found := bytearray()))
        reader.start()
        printed, _ = process.communicate(timeout=120)
        reader.join(60)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    said = found.decode()
    assert process.returncode == 130, said
    ended = re.search(r"mycel: interrupted; (\d+) of 34 rows were measured and written to (\S+)", said)
    assert ended is not None and 2 <= int(ended[1]) < 34 and ended[2] == str(file), said
    assert "Traceback" not in said + printed
    rows = [text.split() for text in printed.splitlines() if not text.startswith("#")]
    assert len(rows) == int(ended[1])
    assert rows[0][0] == "4096"
    assert len(file.read_text().splitlines()) == 1 + len(rows)
    deadline = time.monotonic() + 60
    while alive := _marked(mark):
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def _drain(terminal: int, found: bytearray) -> None:
    try:
        while some := os.read(terminal, 4096):
            found += some
    except OSError:  # nobody has the other end
        pass


def _marked(mark: str) -> list[int]:
    """Processes that have a variable in their environment."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdecimal() and mark.encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench",), "either a topology file, or --loopback"),
        (("bench", "--here"), "no rank: RANK and WORLD_SIZE are not set"),
        (("bench", "--loopback", "2", "--here"), "either a topology file, or --loopback"),
        (("bench", "--loopback", "2", "-b", "2MB", "-e", "1MB"), "from 2MB to 1MB has no sizes"),
        (("bench", "--loopback", "1"), "at least 2"),
        (("bench", "--loopback", "2", "--collective", "all_to_some"), "unknown collective to bench 'all_to_some'"),
        (("bench", "--loopback", "2", "--sizes", "big"), "cannot read 'big' as a size"),
        (("bench", "no-such-cluster.yaml"), "no-such-cluster"),
        (("bench", "--loopback", "2", "-d", "flot"), "unknown type 'flot' (did you mean 'float'?)"),
        (("bench", "--loopback", "2", "-o", "mean"), "unknown op 'mean'"),
        (("bench", "--loopback", "2", "-o", "avg", "-d", "int32"), "-o avg has no exact answer in -d int32"),
        (("bench", "--loopback", "2", "--collective", "broadcast", "-o", "max"), "broadcast adds nothing up"),
        (("bench", "--loopback", "2", "-r", "all"), "all_reduce has no root"),
        (("bench", "--loopback", "2", "--collective", "broadcast", "-r", "2"), "expected a rank, 0 to 1"),
        (("bench", "--loopback", "2", "-f", "4"), "-f is for a sweep"),
        (("bench", "--loopback", "2", "-b", "1KB", "-f", "4", "-i", "1KB"), "-f multiplies and -i adds"),
        (("bench", "--loopback", "2", "-F", "no/such/folder.csv"), "there is no such folder"),
        (("bench", "--loopback", "2", "-F", "-", "--json"), "both want standard output"),
    ],
)
def test_wrong_command_lines(arguments: tuple[str, ...], message: str) -> None:
    """Each is refused in one process; what that comes to on a terminal, the test after this one sees."""
    result = CliRunner().invoke(build_app(), arguments)
    assert isinstance(result.exception, UsageError | TopologyError), result.output
    assert message in str(result.exception)
    assert result.stdout == ""


def test_a_refusal_is_one_line_and_exit_code_2() -> None:
    result = _run_mycel("bench", "--loopback", "2", "--collective", "all_to_some")
    assert result.returncode == 2
    assert result.stderr.startswith("mycel: unknown collective to bench 'all_to_some'")
    assert result.stderr.count("\n") == 1 and result.stdout == ""


def test_records_and_what_a_failing_rank_said() -> None:
    code = (
        "import os, sys, json; r = os.environ['RANK']; print(json.dumps({'rank': r}), flush=True)\n"
        "print('{not json', flush=True); sys.exit('my disk is full' if r == '1' else 0)"
    )
    records: list[tuple[int, dict[str, Any]]] = []
    with pytest.raises(CommunicationError, match=r"exit code 1; .*rank 1: my disk is full"):
        launch_ranks(
            2, [sys.executable, "-c", code], sink=lambda rank, record: records.append((rank, record)), timeout_s=60
        )
    assert (1, {"rank": "1"}) in records


def test_a_sink_that_fails_is_heard() -> None:
    def broken(rank: int, record: dict[str, Any]) -> None:
        raise UsageError("cannot take this")

    with pytest.raises(UsageError, match="cannot take this"):
        launch_ranks(2, [sys.executable, "-c", "print('{}')"], sink=broken, timeout_s=60)


def test_ranks_that_hang_are_ended(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal; "
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid())); signal.pause()"
    )
    with pytest.raises(CommunicationError, match="time is over"):
        launch_ranks(2, [sys.executable, "-c", code], sink=_ignore, timeout_s=1.0)
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.namespaces
def test_a_failing_rank_of_a_cluster_is_heard() -> None:
    code = "import os, sys; sys.exit('out of memory' if os.environ['RANK'] == '0' else 0)"
    with pytest.raises(CommunicationError, match="rank 0: out of memory"):
        launch_ranks(star(num_ranks=2), [sys.executable, "-c", code], sink=_ignore, timeout_s=60)


@pytest.mark.parametrize("foreign", [False, True], ids=["one clock", "two clocks"])
def test_nobody_begins_a_round_before_the_last_has_come(run_ranks: Callable[..., list[Any]], foreign: bool) -> None:
    found = run_ranks(3, "bench_start", "starts", foreign, backend="gloo")
    assert {shares for shares, _ in found} == {not foreign}
    for turns in zip(*(times for _, times in found), strict=True):
        last_came, first_gone = max(came for came, _ in turns), min(gone for _, gone in turns)
        assert first_gone >= last_came
        if not foreign:
            assert first_gone - last_came > 0.001  # the moment lies ahead of all
