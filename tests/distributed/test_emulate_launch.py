"""Programs on an emulated cluster: environment, output, exit codes, signals, and no process left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mycel.emulate import EmulatedCluster, launch, start
from mycel.emulate.support import can_make_user_namespace
from mycel.errors import UsageError
from mycel.topology import load_topology, to_json
from mycel.topology.builders import star, two_boxes
from mycel.topology.wiring import read_wiring

pytestmark = pytest.mark.namespaces

DEADLINE_S = 30.0
FOREVER = "import signal; print('ready'); signal.pause()"


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-u", "-c", code]


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmulatedCluster]:
    """Three ranks on one switch, up for the whole module: a run must leave it as it was."""
    with EmulatedCluster(star(num_ranks=3, bandwidth="100 Mbit/s")) as cluster:
        yield cluster


class Lines:
    """Collects output; ``wait_for`` blocks until so many lines are there."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, str]] = []
        self._changed = threading.Condition()

    def __call__(self, rank: int, line: str) -> None:
        with self._changed:
            self.heard.append((rank, line))
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.heard) >= count, DEADLINE_S), self.heard
            return [line for _, line in self.heard]


def has_ended(pid: int) -> bool:
    """Whether a process of anybody ends within the deadline (or has ended already)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], DEADLINE_S)[0])
    finally:
        os.close(descriptor)


def children(pid: int) -> list[int]:
    """Process numbers of the children of every thread of a process."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text(encoding="ascii").split()]


def test_all_well(cluster: EmulatedCluster) -> None:
    lines = Lines()
    code = launch(cluster, python("import sys; print('out'); print('err', file=sys.stderr)"), output=lines)
    assert code == 0
    assert sorted(lines.heard) == [(rank, text) for rank in range(3) for text in ("err", "out")]


def test_ranks_find_their_fabric() -> None:
    topology, lines = two_boxes(num_ranks=4), Lines()
    code = "import json, os, signal; print(json.dumps(dict(os.environ))); signal.pause()"
    with start(topology, python(code), output=lines, env={"COLOUR": "green"}) as run:
        lines.wait_for(4)
        found = {rank: json.loads(line) for rank, line in lines.heard}
        for env in found.values():
            assert to_json(load_topology(env["MYCEL_TOPOLOGY"])) == to_json(topology)
            assert read_wiring(Path(env["MYCEL_WIRING"])) == run.cluster.wiring
    assert [found[rank]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert all(env["WORLD_SIZE"] == "4" and env["COLOUR"] == "green" for env in found.values())
    assert not Path(found[0]["MYCEL_TOPOLOGY"]).parent.exists()


def test_the_first_failure_decides_and_the_others_are_ended(cluster: EmulatedCluster) -> None:
    code = "import os, signal, sys; sys.exit(3) if os.environ['RANK'] == '1' else signal.pause()"
    with start(cluster, python(code), grace_s=0.1) as run:
        assert run.wait(DEADLINE_S) == 3
        assert run.exit_codes == (128 + signal.SIGTERM, 3, 128 + signal.SIGTERM)


def test_the_others_may_finish_within_the_grace(cluster: EmulatedCluster, tmp_path: Path) -> None:
    gates = [tmp_path / f"gate{rank}" for rank in range(3)]
    for gate in gates:
        os.mkfifo(gate)
    lines = Lines()
    code = f"import os; open({str(tmp_path / 'gate')!r} + os.environ['RANK']).read(); print('finished')"
    with start(cluster, python(code), output=lines, grace_s=DEADLINE_S) as run:
        run.kill(1)
        assert has_ended(run.pids[1])
        for rank in (0, 2):
            gates[rank].write_text("go", encoding="ascii")
        assert run.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert sorted(lines.heard) == [(0, "finished"), (2, "finished")]


def test_whoever_ignores_the_end_is_killed(cluster: EmulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycel.emulate.processes.KILL_DELAY_S", 0.2)
    lines = Lines()
    code = (
        "import signal, os, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready')\n"
        "while True: signal.pause()\n"
    )
    with start(cluster, python(code), output=lines, grace_s=0.0) as run:
        lines.wait_for(3)
        run.kill(2)
        assert run.wait(DEADLINE_S) == 128 + signal.SIGKILL
        assert run.exit_codes == (128 + signal.SIGKILL,) * 3


def test_a_stopped_rank_is_ended_too(cluster: EmulatedCluster) -> None:
    lines = Lines()
    with start(cluster, python(FOREVER), output=lines, grace_s=0.0) as run:
        lines.wait_for(3)
        run.kill(0, signal.SIGSTOP)
        run.kill(1, signal.SIGKILL)
        assert run.wait(DEADLINE_S) == 128 + signal.SIGKILL
        assert run.exit_codes == (128 + signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGTERM)


def test_time_is_over(cluster: EmulatedCluster) -> None:
    assert launch(cluster, python("import signal; signal.pause()"), timeout_s=0.3) == 124


def test_closing_ends_everything() -> None:
    lines = Lines()
    with start(star(num_ranks=2), python(FOREVER), output=lines) as run:
        lines.wait_for(2)
        pids = run.pids
        assert run.wait(0.0) is None
    assert all(has_ended(pid) for pid in pids)
    with pytest.raises(UsageError, match="no rank 2 among 2"):
        run.kill(2)


def test_what_a_rank_leaves_running_is_killed(cluster: EmulatedCluster) -> None:
    lines = Lines()
    assert launch(cluster, ["sh", "-c", "sleep 1000 & echo $!"], output=lines) == 0
    assert len(lines.heard) == 3
    assert all(has_ended(int(line)) for _, line in lines.heard)


def test_output_arrives_whole(cluster: EmulatedCluster) -> None:
    lines = Lines()
    launch(cluster, python("import sys; sys.stdout.write('a\\r\\n\\n' + 'b' * 50_000 + '\\nend')"), output=lines)
    for rank in range(3):
        assert [line for r, line in lines.heard if r == rank] == ["a", "", "b" * 50_000, "end"]


def test_a_failing_receiver_is_heard_of(cluster: EmulatedCluster) -> None:
    def refuse(rank: int, line: str) -> None:
        raise ValueError("cannot read this")

    with pytest.raises(ValueError, match="cannot read this"):
        launch(cluster, python(FOREVER), output=refuse)


def test_lines_carry_the_rank(cluster: EmulatedCluster, capfd: pytest.CaptureFixture[str]) -> None:
    code = python("import sys; print('out'); print('err', file=sys.stderr)")
    launch(cluster, code)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank0]: out", "[rank1]: out", "[rank2]: out"]
    assert sorted(err.splitlines()) == ["[rank0]: err", "[rank1]: err", "[rank2]: err"]
    launch(cluster, code, prefix=False)
    assert capfd.readouterr().out == "out\n" * 3


def test_warming_comes_first(cluster: EmulatedCluster, tmp_path: Path) -> None:
    code = f"import pathlib, sys; sys.exit(not pathlib.Path({str(tmp_path)!r}, 'warm').exists())"
    assert launch(cluster, python(code), warm=(tmp_path / "warm").touch) == 0


# -- the launcher as a process of its own -----------------------------------------------------------------


def _heed_signals() -> None:
    """As in a terminal: ``nohup`` makes the tests ignore some, and so do shells for what is in the background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Launcher:
    """``mycel emulate`` on a star of two ranks, in a process of its own."""

    def __init__(
        self, tmp_path: Path, *command: str, options: tuple[str, ...] = (), through: tuple[str, ...] = ()
    ) -> None:
        file = tmp_path / "star.json"
        file.write_text(json.dumps(to_json(star(num_ranks=2))), encoding="utf-8")
        main = "from mycel.cli import main; main()"
        self.temporary = tmp_path / "temporary"
        self.temporary.mkdir()
        self.process = subprocess.Popen(
            [*through, sys.executable, "-W", "error", "-c", main, "emulate", *options, str(file), "--", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            preexec_fn=_heed_signals,
        )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def read_lines(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline().rstrip() for _ in range(count)]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


def test_the_command_line_runs_and_returns_the_exit_code(tmp_path: Path) -> None:
    code = "import os, sys; print('hello'); sys.exit(5 * int(os.environ['RANK']))"
    with Launcher(tmp_path, *python(code)) as launcher:
        status, out, err = launcher.end()
    assert (status, sorted(out.splitlines()), err) == (5, ["[rank0]: hello", "[rank1]: hello"], "")


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ((), (), "no command to run"),
        (("no-such-program-here",), (), "no program 'no-such-program-here'"),
        (("true",), ("--timeout", "-1"), "--timeout -1 must be positive"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(
    tmp_path: Path, command: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    with Launcher(tmp_path, *command, options=options) as launcher:
        status, out, err = launcher.end()
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


#: Gives up NET_ADMIN and SYS_ADMIN for good (PR_CAPBSET_DROP), then becomes the given command.
GIVE_UP_PRIVILEGES = """
import ctypes, os, sys
for capability in (12, 21):
    if ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) != 0:
        sys.exit("cannot give up a capability")
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(not can_make_user_namespace(), reason="this machine lets nobody make user namespaces")
def test_a_user_namespace_makes_up_for_missing_privileges(tmp_path: Path) -> None:
    with Launcher(tmp_path, "sh", "-c", "exit 4", through=tuple(python(GIVE_UP_PRIVILEGES))) as launcher:
        assert launcher.end() == (4, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: (print('received'), sys.exit(9)))\n"
        "print('ready')\n"
        "while True: signal.pause()\n"
    )
    with Launcher(tmp_path, *python(code), options=("--no-prefix",)) as launcher:
        assert launcher.read_lines(2) == ["ready", "ready"]
        launcher.process.send_signal(number)
        status, out, err = launcher.end()
    assert (status, out, err) == (9, "received\n" * 2, "")
    assert not list(launcher.temporary.iterdir())


def test_a_second_signal_kills(tmp_path: Path) -> None:
    code = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('no'))\n"
        "print('ready')\n"
        "while True: signal.pause()\n"
    )
    with Launcher(tmp_path, *python(code), options=("--no-prefix",)) as launcher:
        assert launcher.read_lines(2) == ["ready", "ready"]
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.read_lines(2) == ["no", "no"]
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.end()[0] == 128 + signal.SIGKILL


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    # Ranks with children of their own, which no signal of the kernel would reach.
    with Launcher(tmp_path, "sh", "-c", "sleep 1000 & echo $!; wait", options=("--no-prefix",)) as launcher:
        grandchildren = [int(line) for line in launcher.read_lines(2)]
        everything = [*children(launcher.process.pid), *grandchildren]
        assert len(everything) == 5, "two ranks, their children, and the keeper"
        assert list(launcher.temporary.iterdir())
        launcher.process.kill()
        assert all(has_ended(pid) for pid in everything)
    assert not list(launcher.temporary.iterdir())


# -- torch ------------------------------------------------------------------------------------------------

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((100_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print(x.unique().tolist(), flush=True)
dist.destroy_process_group()
os._exit(0)  # Gloo's threads abort a Python process now and then while it ends (pytorch #190489)
"""


def test_gloo_runs_over_the_shaped_links() -> None:
    lines = Lines()
    with EmulatedCluster(star(num_ranks=4)) as cluster:
        before = cluster.counters()
        assert launch(cluster, [sys.executable, "-c", ALL_REDUCE], output=lines, timeout_s=120) == 0, lines.heard
        sent = [now.num_bytes - before[link].num_bytes for link, now in cluster.counters().items()]
    assert sorted(lines.heard) == [(rank, "[10.0]") for rank in range(4)]
    # A ring all-reduce sends 2 (n-1)/n of the array over each link.
    assert all(num_bytes > 1.4 * 400_000 for num_bytes in sent)
