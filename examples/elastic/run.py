"""Trains over an emulated cluster, or on loopback, while ranks are killed and come back, and says what that costs.

    python examples/elastic/run.py examples/clusters/two_boxes.yaml --seconds 120 --every 20
    python examples/elastic/run.py examples/clusters/two_boxes.yaml --seconds 120 --every 20 --shards 4
    python examples/elastic/run.py 4 --seconds 30 --every 10

A cluster needs root, as ``mycel emulate`` does. The losses are compared with those of the same samples on one rank
that nobody disturbs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import train

import mycel
from mycel.emulate import Run, start

HERE = Path(__file__).resolve().parent
#: Seconds in which all ranks have to have started.
START_S = 180.0
#: How far a loss may be from that of the undisturbed run.
ALLOWED = 1e-5


class Log:
    """What the ranks have said."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.other: list[str] = []
        self.pids: dict[int, int] = {}
        self.kills: list[tuple[float, int]] = []
        self._lock = threading.Lock()

    def hear(self, rank: int, line: str) -> None:
        """A line of a rank's."""
        with self._lock:
            if line.startswith("pid "):
                self.pids[rank] = int(line.split()[1])
            elif line.startswith("{"):
                self.lines.append(json.loads(line))
            else:
                self.other.append(f"[{rank}] {line}")

    def of(self, key: str) -> list[dict[str, Any]]:
        """Lines with a key, in the order of their times."""
        with self._lock:
            return [line for line in self.lines if key in line]

    @property
    def losses(self) -> dict[int, float]:
        """Of each step that was taken."""
        return {int(line["step"]): float(line["loss"]) for line in self.of("step")}

    @property
    def times(self) -> dict[int, float]:
        """When the first rank had taken a step."""
        found: dict[int, float] = {}
        for line in self.of("step"):
            found[line["step"]] = min(line["at"], found.get(line["step"], float("inf")))
        return found


def main(arguments: list[str] | None = None) -> int:
    """0 if losses are those of the undisturbed run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", help="a topology file to emulate, or a number of ranks on loopback")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--away", type=float, default=5.0, help="seconds that a killed rank stays away")
    train.add_options(parser)
    options = parser.parse_args(arguments)
    log = Log()
    code = train_and_kill(options, log)
    if code:
        print("\n".join(log.other[-60:]), file=sys.stderr)
        return code
    return report(options, log)


def train_and_kill(options: argparse.Namespace, log: Log) -> int:
    """Run the job; the exit code of the rank that failed first, or 0."""
    cluster = int(options.cluster) if options.cluster.isdecimal() else mycel.load_topology(options.cluster)
    passed = ("shards", "length", "width", "learning_rate", "seed", "seconds", "patience")
    flags = [part for name in passed for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    command = [sys.executable, str(HERE / "place.py"), *flags]
    env = {"ELASTIC_AWAY_S": str(options.away), "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
    with start(cluster, command, env=env, output=log.hear, grace_s=20.0) as run:
        until = time.monotonic() + START_S
        while not log.of("step"):
            if time.monotonic() > until or run.wait(0.2) is not None:
                log.other.append("the job has not begun")
                return 1
        end = time.monotonic() + options.seconds - options.away - options.every / 2
        while time.monotonic() + options.every < end and run.wait(options.every) is None:
            kill_one(run, log, random.Random(options.seed + len(log.kills)))
        code = run.wait(options.seconds + options.patience * 6)  # forming gives up after four, and says why
    if code is None:
        log.other.append("the ranks have not ended: none of them found the others, or took the last step")
        return 1
    return code


def kill_one(run: Run, log: Log, chance: random.Random) -> None:
    """Kill a rank as a crash would, without warning."""
    rank = chance.randrange(len(run.pids))
    try:
        os.kill(log.pids[rank], signal.SIGKILL)
    except ProcessLookupError:  # it has ended by itself: the run's exit code, or its last lines, say why
        log.other.append(f"[{rank}] was to be killed and had ended")
    else:
        log.kills.append((time.time(), rank))


def report(options: argparse.Namespace, log: Log) -> int:
    """Print what it cost, and compare."""
    losses, times = log.losses, log.times
    last, steps = max(losses), sorted(times)
    usual = statistics.median(times[b] - times[a] for a, b in itertools.pairwise(steps))

    def pause_s(at: float) -> float:
        """Seconds without a step around a time, but for what a step takes."""
        before = [times[step] for step in steps if times[step] <= at]
        after = [times[step] for step in steps if times[step] > at]
        return max(0.0, after[0] - before[-1] - usual) if before and after else 0.0

    for at, rank in log.kills:
        lost = {line["lost"] for line in log.of("lost") if at <= line["at"] <= at + 3.0}
        print(f"rank {rank} killed: {len(lost)} step(s) begun again, {pause_s(at):.2f} s without a step")
    for line in log.of("round"):
        print(
            f"round {line['round']}: {line['size']} ranks, {pause_s(line['at']):.2f} s without a step: agreed in "
            f"{line['agreed_s']:.2f} s, formed in {line['formed_s']:.2f} s, {line['healed']} given the state and all "
            f"ready in {line['joined_s']:.2f} s"
        )
    right, said = compare(log.of("step"), train.reference(options, last))
    sizes = sorted({line["size"] for line in log.of("step")})
    print(
        f"{last} steps by {sizes} ranks, {usual * 1e3:.1f} ms each (median); loss {losses[min(losses)]:.4f} to "
        f"{losses[last]:.4f}, {said}"
    )
    return 0 if right and len(losses) >= last - len(log.kills) else 1


def compare(lines: Sequence[Mapping[str, Any]], truth: Sequence[float]) -> tuple[bool, str]:
    """Whether every loss that any rank has said is that of the undisturbed run, and in words how far they are apart.

    Args:
        lines: of steps.
        truth: loss of each step, from the first.
    """
    apart = {(line["step"], line["loss"]): abs(line["loss"] - truth[line["step"] - 1]) for line in lines}
    wrong = sorted(said for said, difference in apart.items() if not difference <= ALLOWED)  # what is no number, too
    if not wrong:
        return True, f"at most {max(apart.values()):.1e} from the undisturbed run"
    step, loss = wrong[0]
    steps = len({step for step, _ in wrong})
    return False, f"WRONG in {steps} steps, the first is {step}: {loss:.6g}, not {truth[step - 1]:.6g}"


if __name__ == "__main__":
    sys.exit(main())
