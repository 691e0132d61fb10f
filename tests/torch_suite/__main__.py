"""Torch's own distributed test-suite, run over a backend.

    python -m tests.torch_suite --backend mycel --world-size 4 [-k PART ...] [--as mpi] [--json FILE]
    python -m tests.torch_suite --compare gloo.json mycel.json

The tests are those of ``torch.testing._internal.distributed.distributed_test`` for CPU tensors, unchanged. They ask
in many places whether the backend is Gloo, and skip much of what others could do; so they are imported as if the
backend were Gloo, and every group is then made with the backend at hand. Ranks are forked, not spawned: starting an
interpreter for every rank of every test would take most of an hour. Some tests are for MPI alone, which nobody need
have: ``--as mpi -k test_all_to_all`` runs them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["compare", "main", "run_suite"]

#: Seconds a test may take; a backend that hangs should not hold the others up.
TEST_SECONDS = 60


def _prepare(backend: str, world_size: int, guise: str = "gloo") -> Any:
    """Import the suite, with the tests that are for ``guise``; the groups it makes will be of ``backend``."""
    os.environ.update(
        BACKEND=guise,
        MYCEL_SUITE_BACKEND=backend,
        WORLD_SIZE=str(world_size),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_SECONDS),
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed.distributed_c10d as c10d

    torch.set_num_threads(1)  # before anything is computed: threads do not survive the fork
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    distributed_test.BACKEND = "gloo"  # what is skipped has been decided by the import
    common_distributed.TIMEOUT_DEFAULT = TEST_SECONDS
    if backend != "gloo":
        import mycel.runtime

        mycel.runtime.warm()
        make = c10d._new_process_group_helper

        def make_ours(group_size: int, group_rank: int, ranks: list[int], name: str, *rest: Any, **named: Any) -> Any:
            return make(group_size, group_rank, ranks, backend if str(name) == "gloo" else name, *rest, **named)

        c10d._new_process_group_helper = make_ours  # type: ignore[assignment]
        # torch's own function is for groups that say they are Gloo's; ours has the same contract.
        distributed_test.dist.monitored_barrier = mycel.runtime.monitored_barrier
    return distributed_test


def _suite(module: Any, parts: Sequence[str]) -> Iterator[unittest.TestCase]:
    import torch

    class TestDistBackendWithFork(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def test_get_backend(self) -> None:
            module.BACKEND = os.environ["MYCEL_SUITE_BACKEND"]
            super().test_get_backend()

    for name in unittest.defaultTestLoader.getTestCaseNames(TestDistBackendWithFork):
        if not parts or any(part in name for part in parts):
            yield TestDistBackendWithFork(name)


def run_suite(backend: str, world_size: int, parts: Sequence[str] = (), guise: str = "gloo") -> dict[str, str]:
    """Run the tests whose names contain a part; what became of each, by name: passed, skipped or the failure."""
    outcomes: dict[str, str] = {}
    for case in _suite(_prepare(backend, world_size, guise), parts):
        name = case._testMethodName
        result = unittest.TestResult()
        started = time.monotonic()
        case.run(result)
        problems = [text for _, text in (*result.errors, *result.failures)]
        outcomes[name] = problems[0] if problems else ("skipped" if result.skipped else "passed")
        shown = "FAILED" if problems else outcomes[name]
        print(f"{shown:8} {time.monotonic() - started:6.1f} s  {name}", file=sys.stderr, flush=True)
    return outcomes


def compare(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """Tests that passed there and did not here."""
    return [name for name, outcome in theirs.items() if outcome == "passed" and ours.get(name) != "passed"]


def main() -> int:
    """Exit status: 1 if a test failed, or if one that passed in the first file did not in the second."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("-k", dest="parts", action="append", default=[], help="only tests whose names contain this")
    parser.add_argument("--as", dest="guise", choices=("gloo", "mpi"), default="gloo", help="whose tests to run")
    parser.add_argument("--json", dest="output", type=Path, help="write the outcomes here")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("GLOO", "MYCEL"), help="compare two such files")
    options = parser.parse_args()
    if options.compare:
        theirs, ours = (json.loads(file.read_text(encoding="utf-8")) for file in options.compare)
        lost = compare(theirs, ours)
        print(f"passed: {_count(theirs)} there, {_count(ours)} here; passed there only: {', '.join(lost) or 'none'}")
        return bool(lost)
    outcomes = run_suite(options.backend, options.world_size, options.parts, options.guise)
    if options.output:
        options.output.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, outcome in outcomes.items() if outcome not in ("passed", "skipped")]
    for name in failed:
        print(f"\n{name}\n{outcomes[name]}")
    skipped = sum(outcome == "skipped" for outcome in outcomes.values())
    print(f"{_count(outcomes)} passed, {skipped} skipped, {len(failed)} failed: {', '.join(failed)}")
    return bool(failed)


def _count(outcomes: dict[str, str]) -> int:
    return sum(outcome == "passed" for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
