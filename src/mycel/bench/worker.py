"""What each rank of a bench runs: ``python -m mycel.bench.worker --cases JSON --backends gloo,mycel``.

All backends live in one process, each with its own process group, and their rounds alternate, so that a noisy
machine is equally noisy for all of them. Every result of every round is compared with the exact value. Rank 0
prints one JSON line a case and backend; nothing else is printed on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from mycel.bench.case import FROM_OR_TO_ROOT, Case, cases_from_text
from mycel.bench.operands import Operands, Work, prepare
from mycel.bench.start import Start
from mycel.collectives.spec import Collective, CollectiveName
from mycel.settings import read_launched

__all__ = ["Round", "main", "measure", "run_case"]

#: A warm-up at full size is skipped where it would take longer than this (Gloo over slow links).
WARM_UP_SECONDS = 2.0

#: Size of the first warm-up call.
WARM_UP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round took on this rank.

    Attributes:
        times_s: of each call.
        cpu_s: processor time of each call, of all threads.
        wrong: most wrong elements after a call.
    """

    times_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    wrong: int


def run_case(case: Case, groups: dict[str, dist.ProcessGroup], start: Start) -> list[dict[str, object]]:
    """Times one case over every backend, rounds alternating.

    Args:
        groups: backend name to its process group over all ranks.
        start: of every round; its control group also finds the maximum over ranks.

    Returns:
        A record a backend: ``case``, ``backend``, ``times_s`` (of the slowest rank), ``cpu_s`` (of all ranks
        together), ``wrong`` (elements of all ranks, in the worst round), and the ``method`` and ``piece_bytes`` that
        mycel chose (``None`` for other backends).
    """
    control = start.control
    rank, world_size = dist.get_rank(control), dist.get_world_size(control)
    _warm_up(case, groups, start, rank, world_size)
    operands = prepare(case, rank, world_size)
    rounds: dict[str, list[Round]] = {name: [] for name in groups}
    for _ in range(case.repeats):
        for name, group in groups.items():
            rounds[name].append(_round(case, operands, group, start))
    return [
        {
            "case": asdict(case),
            "backend": name,
            **_over_ranks(rounds[name], control),
            **_chosen(case, group, world_size),
        }
        for name, group in groups.items()
    ]


def measure(
    cases: Sequence[Case],
    backends: Sequence[str],
    timeout_s: float,
    emit: Callable[[dict[str, object]], None],
    schedules: Sequence[str] = (),
) -> None:
    """Times cases as one rank of a job that torchrun, mpirun, srun or one of our launchers has started.

    Args:
        backends: of ``torch.distributed``; rounds alternate between them.
        timeout_s: that one collective may take.
        emit: receives the records; called on rank 0 only.
        schedules: that serve mycel's calls; see ``mycel.bench.bench_cases``.

    Raises:
        UsageError: no launcher has said which rank this is.
    """
    launched = read_launched()
    torch.set_num_threads(1)
    if "mycel" in backends:
        import mycel.runtime  # noqa: F401  (registers the backend)
    timeout = timedelta(seconds=timeout_s)
    if launched.agent_store:  # torchrun's agent holds the store, and torch knows how to find it
        dist.init_process_group("gloo", timeout=timeout)
    else:
        where = f"tcp://{launched.master_address}:{launched.master_port}"
        dist.init_process_group(
            "gloo", init_method=where, rank=launched.rank, world_size=launched.world_size, timeout=timeout
        )
    try:
        control = dist.new_group(backend="gloo", timeout=timeout)
        groups = {name: dist.new_group(backend=name, timeout=timeout) for name in backends}
        if schedules and "mycel" in groups:
            _register(schedules, groups["mycel"])
        start = Start(control)
        for case in cases:
            for record in run_case(case, groups, start):
                if dist.get_rank() == 0:
                    emit(record)
        dist.barrier(group=control)
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", required=True, help="JSON list of cases")
    parser.add_argument("--backends", required=True, help="comma-separated torch.distributed backends")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds one collective may take")
    parser.add_argument("--schedule", action="append", default=[], help="serves mycel's calls; may be repeated")
    options = parser.parse_args(arguments)

    def emit(record: dict[str, object]) -> None:
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()

    measure(cases_from_text(options.cases), options.backends.split(","), options.timeout, emit, options.schedule)
    return 0


def _register(schedules: Sequence[str], group: dist.ProcessGroup) -> None:
    from mycel.collectives.language import load_written
    from mycel.runtime import register

    for one in schedules:
        register(load_written(one) if ".py" in one else one, group=group)


def _warm_up(case: Case, groups: dict[str, dist.ProcessGroup], start: Start, rank: int, world_size: int) -> None:
    """As many calls as the case says; else small ones, for connections, and one of full size if it is quick."""
    if case.warm_up is not None:
        operands = prepare(replace(case, calls=1, mode="blocking"), rank, world_size)
        for group in groups.values():
            for _ in range(case.warm_up):
                _round(replace(case, calls=1, mode="blocking"), operands, group, start)
        return
    small = replace(case, num_bytes=min(case.num_bytes, WARM_UP_BYTES), calls=1, mode="blocking")
    operands = prepare(small, rank, world_size)
    skipped = set()
    for name, group in groups.items():
        for _ in range(2):
            seconds = _round(small, operands, group, start).times_s
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=start.control)
        if slowest.item() * case.num_bytes / small.num_bytes > WARM_UP_SECONDS:
            skipped.add(name)
    if case.num_bytes == small.num_bytes:
        return
    operands = prepare(replace(case, calls=1, mode="blocking"), rank, world_size)
    for name, group in groups.items():
        if name not in skipped:
            _round(replace(case, calls=1, mode="blocking"), operands, group, start)


def _round(case: Case, operands: Operands, group: dist.ProcessGroup, start: Start) -> Round:
    """Calls of one round.

    Every call starts from fresh inputs. With one call a round, that is before the common start; with several, the
    inputs are small and resetting them between calls takes a microsecond or two that is not timed.
    """
    operands.reset()
    start()
    seconds, cpu, wrong = [], [], 0
    for call in range(case.calls):
        if call:
            operands.reset()
        cpu_begin = time.process_time()
        begin = time.perf_counter()
        work = operands.call(group, case.mode == "blocking")
        if case.mode == "busy":
            _spin_until_done(work)
        elif work is not None:
            work.wait()
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
        if case.check:
            wrong = max(wrong, operands.num_wrong())
    return Round(times_s=tuple(seconds), cpu_s=tuple(cpu), wrong=wrong)


def _chosen(case: Case, group: dist.ProcessGroup, world_size: int) -> dict[str, object]:
    """What the group's communicator runs for a case; nothing where the backend has none."""
    communicator = getattr(group, "communicator", None)
    if communicator is None or case.collective == "sendrecv":  # messages follow no schedule
        return {"method": None, "piece_bytes": None}
    name = cast(CollectiveName, case.collective)
    collective = Collective(name=name, num_ranks=world_size, root=case.root if name in FROM_OR_TO_ROOT else None)
    num_bytes = case.num_elements(world_size) * case.element_bytes * collective.num_parts
    choice = communicator.planner.choice(name, collective.root, num_bytes)
    return {"method": choice.method, "piece_bytes": choice.piece_bytes}


def _spin_until_done(work: Work | None) -> None:
    """Keep the interpreter busy, as a training loop does, until the collective has finished by itself."""
    if work is None:
        return
    count = 0
    while not work.is_completed():
        for _ in range(100):
            count += 1
    work.wait()


def _over_ranks(rounds: Sequence[Round], control: dist.ProcessGroup) -> dict[str, object]:
    slowest = torch.tensor([t for one in rounds for t in one.times_s], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=control)
    cpu = torch.tensor([t for one in rounds for t in one.cpu_s], dtype=torch.float64)
    dist.all_reduce(cpu, group=control)
    wrong = torch.tensor([one.wrong for one in rounds], dtype=torch.int64)
    dist.all_reduce(wrong, group=control)
    return {"times_s": slowest.tolist(), "cpu_s": cpu.tolist(), "wrong": int(wrong.max())}


if __name__ == "__main__":
    status = main()
    # The interpreter's own tear-down of torch takes longer than many a bench; everything is closed already.
    sys.stdout.flush()
    os._exit(status)
