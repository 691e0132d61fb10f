"""The compiled engine over socket pairs inside one process: right results, and what it says when a run cannot go on.

Ranks are threads; the engine holds no interpreter lock while it runs. The plain-Python engine is the oracle of the
compiled one and speaks to it on the same wire.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from mycel.collectives.lower import RankTemplate
from mycel.collectives.program import Channel
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import synthesize
from mycel.runtime import engine as e
from mycel.runtime import job_fields as j
from mycel.runtime.arena import arena, empty
from mycel.runtime.forms import Form
from mycel.runtime.prepared import Job, Line, asking
from mycel.runtime.reduce_kernels import DType, ReduceOp
from mycel.runtime.ring import HEAD
from mycel.runtime.ring_memory import Ring
from mycel.topology.builders import ring, star
from mycel.topology.model import Topology
from reference_engine import execute_in_python

Execute = Callable[[Job], int]
LONG_S = 60.0
OVER = pytest.mark.parametrize("ring_bytes", [None, 1 << 12], ids=["sockets", "rings"])


def compiled(job: Job) -> int:
    """``execute`` until it neither waits for Python nor was interrupted."""
    status = e.execute(job.address)
    while status == j.INTERRUPTED:
        status = e.execute(job.address)
    return int(status)


@dataclass(frozen=True)
class Part:
    """One rank's part of a schedule, and the lengths for which it is to run."""

    plan: RankTemplate
    num_elements: int
    piece_elements: int
    block_elements: tuple[int, ...] | None = None

    @property
    def channels(self) -> tuple[Channel, ...]:
        return self.plan.channels


@dataclass
class Cluster:
    """Sockets of every channel of some programs, as small as the kernel allows if asked; or rings."""

    programs: tuple[Part, ...]
    sockets: dict[tuple[Channel, int], socket.socket] = field(default_factory=dict)
    rings: dict[tuple[Channel, int], Ring] = field(default_factory=dict)
    bells: list[int] = field(default_factory=list)

    def lines(self, rank: int) -> list[Line]:
        made = []
        for channel in self.programs[rank].channels:
            descriptor, ring = self.sockets[channel, rank].fileno(), self.rings.get((channel, rank))
            rest = (ring.address, ring.capacity, ring.bell, ring.own_bell, *ring.arena) if ring is not None else ()
            made.append(Line(descriptor, *rest))
        return made

    def share(self, channel: Channel, ring_bytes: int) -> None:
        """Make a ring of a channel."""
        given, taken = self.sockets[channel, channel.src], self.sockets[channel, channel.dst]
        own = arena()
        assert own is not None
        ring = Ring.offer(given, ring_bytes, self.bells[channel.src], own.descriptor)
        other = Ring.accept(taken, time.monotonic() + LONG_S, lambda: None)
        assert ring is not None and other is not None
        self.rings[channel, channel.src], self.rings[channel, channel.dst] = ring, other

    def job(
        self,
        rank: int,
        given: np.ndarray,
        result: np.ndarray,
        *,
        sequence: int = 1,
        seconds: float = LONG_S,
        op: ReduceOp = ReduceOp.SUM,
        divisor: int = 0,
        extras: tuple[int, ...] = (-1,),
    ) -> Job:
        dtype = {"float32": DType.FLOAT32, "float64": DType.FLOAT64, "int64": DType.INT64, "int32": DType.INT32}
        own = arena()
        assert own is not None
        shared = (own.address, own.num_bytes)
        part, patience = self.programs[rank], asking(len(self.programs), self.bells[rank], shared)
        form = Form(part.plan, self.lines(rank), np.array(extras, dtype=np.int64), patience)
        prepared = form.prepare(part.num_elements, part.piece_elements, given.itemsize, part.block_elements)
        return Job(
            prepared,
            bases=(given.ctypes.data, result.ctypes.data),
            dtype=int(dtype[str(given.dtype)]),
            reduce_op=int(op),
            divisor=divisor,
            header=(sequence, 77),
            limit_ns=int(seconds * 1e9),
            keep=(given, result),
        )


@contextmanager
def cluster(
    programs: tuple[Part, ...], *, buffer_bytes: int | None = None, ring_bytes: int | None = None
) -> Iterator[Cluster]:
    made = Cluster(programs=programs)
    try:
        made.bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in programs]
        for channel in {channel for program in programs for channel in program.channels}:
            pair = socket.socketpair()
            for sock, rank in zip(pair, (channel.src, channel.dst), strict=True):
                sock.setblocking(False)
                if buffer_bytes is not None:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
                made.sockets[channel, rank] = sock
            if ring_bytes is not None:
                made.share(channel, ring_bytes)
        yield made
    finally:
        for sock in made.sockets.values():
            sock.close()
        for ring in made.rings.values():
            ring.close()
        for bell in made.bells:
            os.close(bell)


def programs_of(
    topology: Topology, name: CollectiveName, elements: int, piece: int, method: str = "forest"
) -> tuple[Part, ...]:
    root = 0 if name == "broadcast" else None
    collective = Collective(name=name, num_ranks=topology.num_ranks, root=root)
    schedule = synthesize(topology, collective, method=method)
    return parts_of(schedule, elements, piece)


def parts_of(
    schedule: Schedule, elements: int, piece: int, lengths: tuple[int, ...] | None = None
) -> tuple[Part, ...]:
    ranks = range(schedule.collective.num_ranks)
    return tuple(Part(RankTemplate(schedule, rank), elements, piece, lengths) for rank in ranks)


def run_together(jobs: list[Job], engines: list[Execute]) -> list[int]:
    """Status of every rank; each runs in a thread of its own."""
    statuses = [-1] * len(jobs)

    def be(rank: int) -> None:
        statuses[rank] = engines[rank](jobs[rank])

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG_S)
    assert not any(thread.is_alive() for thread in threads)
    return statuses


def all_reduced(
    topology: Topology,
    elements: int,
    piece: int,
    engines: list[Execute],
    *,
    buffer_bytes: int | None = None,
    ring_bytes: int | None = None,
) -> None:
    n = topology.num_ranks
    given = [np.random.default_rng(rank).integers(-99, 99, elements).astype(np.int64) for rank in range(n)]
    results = [part.copy() for part in given]
    programs = programs_of(topology, "all_reduce", elements, piece)
    with cluster(programs, buffer_bytes=buffer_bytes, ring_bytes=ring_bytes) as wired:
        jobs = [wired.job(rank, given[rank], results[rank]) for rank in range(n)]
        assert run_together(jobs, engines) == [j.DONE] * n
        assert all(job.done for job in jobs)
    for result in results:
        np.testing.assert_array_equal(result, np.sum(given, axis=0))


@pytest.mark.parametrize("elements", [1, 2, 3, 64, 1000, 40001])
@pytest.mark.parametrize("buffer_bytes", [1, None])
def test_all_reduce_through_buffers_of_any_size(elements: int, buffer_bytes: int | None) -> None:
    piece = 7 if elements <= 1000 else 4096
    all_reduced(ring(num_ranks=3), elements, piece, [compiled] * 3, buffer_bytes=buffer_bytes)


@pytest.mark.parametrize("elements", [1, 7, 8, 9, 1000, 40001])
@pytest.mark.parametrize("ring_bytes", [1 << 12, 1 << 19])
def test_all_reduce_through_rings_of_any_size(elements: int, ring_bytes: int) -> None:
    all_reduced(ring(num_ranks=3), elements, 7 if elements <= 1000 else 4096, [compiled] * 3, ring_bytes=ring_bytes)


@pytest.mark.parametrize("engines", [[execute_in_python] * 2, [compiled, execute_in_python]])
@pytest.mark.parametrize("elements", [1, 50, 30001])
def test_both_engines_speak_the_same_language(engines: list[Execute], elements: int) -> None:
    all_reduced(star(num_ranks=2), elements, 1 if elements < 100 else 999, engines, buffer_bytes=1)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
@pytest.mark.parametrize("method", ["forest", "tree"])
@pytest.mark.parametrize(("op", "divisor"), [(ReduceOp.SUM, 0), (ReduceOp.SUM, 3), (ReduceOp.MAX, 0)])
def test_the_compiled_engine_gives_the_bits_of_the_plain_one(
    name: CollectiveName, method: str, op: ReduceOp, divisor: int
) -> None:
    elements, n = 3 * 333, 3
    programs = programs_of(star(num_ranks=n), name, elements, 50, method)
    seen = []
    for engine, ring_bytes in ((compiled, None), (execute_in_python, None), (compiled, 1 << 12)):
        given = [np.random.default_rng(rank).normal(size=elements).astype(np.float32) for rank in range(n)]
        inputs = [part[:333] if name == "all_gather" else part for part in given]
        before = [part.copy() for part in inputs]
        results = [np.zeros(333 if name == "reduce_scatter" else elements, dtype=np.float32) for _ in range(n)]
        if name in ("all_reduce", "broadcast"):
            results = [part.copy() for part in given]
        with cluster(programs, ring_bytes=ring_bytes) as wired:
            jobs = [wired.job(r, inputs[r], results[r], op=op, divisor=divisor) for r in range(n)]
            assert run_together(jobs, [engine] * n) == [j.DONE] * n
        seen.append([result.tobytes() for result in results])
        assert all(np.array_equal(a, b) for a, b in zip(before, inputs, strict=True)), "INPUT is never written"
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("engine", [compiled, execute_in_python])
@pytest.mark.parametrize("method", ["flow", "direct"])
def test_all_to_all_of_any_lengths(engine: Execute, method: str) -> None:
    """Some ranks exchange nothing, and one gives nothing to anybody."""
    fabric, n = ring(num_ranks=4), 4
    table = np.random.default_rng(5).integers(0, 900, (n, n))
    table[2], table[0, 1], table[3, 3] = 0, 0, 1
    schedule = synthesize(fabric, Collective(name="all_to_all", num_ranks=n), method=method)
    lengths = table.ravel().tolist()
    programs = parts_of(schedule, sum(lengths), 100, tuple(lengths))
    given = [1000 * rank + np.arange(table[rank].sum()) for rank in range(n)]
    results = [np.full(table[:, rank].sum(), -1) for rank in range(n)]
    with cluster(programs, buffer_bytes=1) as wired:
        jobs = [wired.job(rank, given[rank], results[rank]) for rank in range(n)]
        assert run_together(jobs, [engine] * n) == [j.DONE] * n
    rows = [np.split(part, np.cumsum(table[rank])[:-1]) for rank, part in enumerate(given)]
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result, np.concatenate([row[rank] for row in rows]))


@OVER
def test_a_prepared_program_runs_again_and_again(ring_bytes: int | None) -> None:
    programs = programs_of(star(num_ranks=2), "all_reduce", 100, 9)
    with cluster(programs, ring_bytes=ring_bytes) as wired:
        values = [np.ones(100, dtype=np.int64), np.full(100, 2, dtype=np.int64)]
        for sequence in range(1, 6):
            jobs = [wired.job(rank, values[rank], values[rank], sequence=sequence) for rank in range(2)]
            assert run_together(jobs, [compiled] * 2) == [j.DONE] * 2
        assert (values[0] == 3 * 2**4).all()
        assert (values[1] == 3 * 2**4).all()


# -- arrays that ranks share ------------------------------------------------------------------------------------


def shared(array: np.ndarray) -> np.ndarray:
    """The same in memory that others read where it lies."""
    made: np.ndarray = empty(array.nbytes, dtype=torch.uint8).numpy().view(array.dtype)
    made[:] = array
    return made


def put_through(wired: Cluster) -> int:
    """Bytes that have gone through all rings."""
    return sum(int(ring._words[HEAD // 8]) for (channel, rank), ring in wired.rings.items() if rank == channel.src)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
@pytest.mark.parametrize("sharing", [(0, 1, 2), (1,), ()])
def test_what_is_shared_is_read_where_it_lies(name: CollectiveName, sharing: tuple[int, ...]) -> None:
    """Each rank's arrays may be shared or not: the same bits; and no more than what is not shared goes round."""
    elements, n = 3 * 40_000, 3
    programs = programs_of(star(num_ranks=n), name, elements, 9_000)
    given = [np.random.default_rng(rank).normal(size=elements) for rank in range(n)]
    seen, went = [], []
    for ranks in ((), sharing):
        place = [shared if rank in ranks else np.array for rank in range(n)]
        inputs = [place[r](part[:40_000] if name == "all_gather" else part) for r, part in enumerate(given)]
        results = [place[r](np.zeros(40_000 if name == "reduce_scatter" else elements)) for r in range(n)]
        if name in ("all_reduce", "broadcast"):
            results = [place[r](part) for r, part in enumerate(given)]
        with cluster(programs, ring_bytes=1 << 15) as wired:
            jobs = [wired.job(r, inputs[r], results[r]) for r in range(n)]
            assert run_together(jobs, [compiled] * n) == [j.DONE] * n
            went.append(put_through(wired))
        seen.append([result.tobytes() for result in results])
    assert seen[0] == seen[1]
    if len(sharing) == n:
        # What is added up on its way to a rank that is not its owner is in memory of the group's.
        assert went[1] < (went[0] if name == "reduce_scatter" else 20_000)
    elif not sharing:
        assert went[1] == went[0]


def reference_of_rank_0(wired: Cluster) -> tuple[list[Job], list[np.ndarray]]:
    """Jobs of a broadcast of a shared array, that of rank 0 as far as it gets alone."""
    elements = wired.programs[0].num_elements
    values = [shared(np.full(elements, rank + 1, dtype=np.int64)) for rank in range(2)]
    jobs = [wired.job(rank, values[rank], values[rank], seconds=0.2 if rank == 0 else LONG_S) for rank in range(2)]
    assert compiled(jobs[0]) == j.TIMED_OUT
    return jobs, values


def test_who_shares_an_array_waits_until_it_has_been_read() -> None:
    with cluster(programs_of(star(num_ranks=2), "broadcast", 5_000, 5_000), ring_bytes=1 << 15) as wired:
        jobs, values = reference_of_rank_0(wired)
        assert jobs[0].waiting_for() == (1,)
        assert compiled(jobs[1]) == j.DONE
        assert (values[1] == 1).all()
        jobs[0].fields[j.J_DEADLINE_NS] += int(LONG_S * 1e9)
        assert compiled(jobs[0]) == j.DONE


def test_what_a_rank_that_has_failed_had_shared_is_not_used() -> None:
    """Its caller may write to the array again, so nobody may take that for the result."""
    with cluster(programs_of(star(num_ranks=2), "broadcast", 5_000, 5_000), ring_bytes=1 << 15) as wired:
        jobs, values = reference_of_rank_0(wired)
        for (channel, rank), ring in wired.rings.items():
            if rank == channel.src == 0:
                ring.revoke()
        values[0][:] = 99
        assert compiled(jobs[1]) == j.CLOSED
        assert not jobs[1].done


def test_a_place_outside_of_what_is_shared_is_refused() -> None:
    with cluster(programs_of(star(num_ranks=2), "broadcast", 5_000, 5_000), ring_bytes=1 << 15) as wired:
        jobs, values = reference_of_rank_0(wired)
        jobs[1].prepared.channel_rows[:, j.C_ARENA_BYTES] = values[0].nbytes // 2
        assert compiled(jobs[1]) == j.CLOSED
        assert (values[1] == 2).all()


# -- trouble --------------------------------------------------------------------------------------------------


def pair_of_jobs(wired: Cluster, **different: object) -> tuple[list[Job], list[np.ndarray]]:
    """Two ranks' jobs; rank 1's differs as asked."""
    elements = wired.programs[0].num_elements
    values = [np.full(elements, rank + 1, dtype=np.int64) for rank in range(2)]
    first = wired.job(0, values[0], values[0])
    return [first, wired.job(1, values[1], values[1], **different)], values  # type: ignore[arg-type]


EITHER = pytest.mark.parametrize(
    ("engine", "ring_bytes"), [(compiled, None), (execute_in_python, None), (compiled, 1 << 13)]
)


@EITHER
def test_a_different_header_is_noticed_before_a_byte_is_written(engine: Execute, ring_bytes: int | None) -> None:
    with cluster(programs_of(star(num_ranks=2), "broadcast", 500, 50), ring_bytes=ring_bytes) as wired:
        jobs, values = pair_of_jobs(wired, sequence=2)
        statuses = run_together(jobs, [engine] * 2)
        assert statuses[1] == j.MISMATCHED
        assert (values[1] == 2).all()
    if engine is compiled:
        failed = int(jobs[1].fields[j.J_FAILED_CHANNEL])
        header = jobs[1].prepared.channel_rows[failed, j.C_HEADER : j.C_HEADER + 4]
        assert header.tolist() == [j.HEADER_MAGIC, 1, 77, 4000]


@EITHER
def test_a_closed_connection_is_noticed(engine: Execute, ring_bytes: int | None) -> None:
    with cluster(programs_of(star(num_ranks=2), "all_reduce", 500, 50), ring_bytes=ring_bytes) as wired:
        jobs, _ = pair_of_jobs(wired)
        for channel in wired.programs[1].channels:
            wired.sockets[channel, 1].close()
        assert engine(jobs[0]) == j.CLOSED
        assert not jobs[0].done


def test_a_connection_that_closes_in_the_middle_of_a_message_is_noticed() -> None:
    with cluster(programs_of(star(num_ranks=2), "broadcast", 500, 500)) as wired:
        jobs, _ = pair_of_jobs(wired)
        (channel,) = wired.programs[1].channels
        header = jobs[1].fields[j.J_HEADER : j.J_HEADER + 4].tobytes()
        wired.sockets[channel, 0].sendall(header + bytes(123))
        wired.sockets[channel, 0].close()
        assert compiled(jobs[1]) == j.CLOSED
        assert int(jobs[1].fields[j.J_FAILED_CHANNEL]) == 0


def test_what_was_put_into_a_ring_before_its_end_arrives() -> None:
    with cluster(programs_of(star(num_ranks=2), "broadcast", 500, 500), ring_bytes=1 << 13) as wired:
        jobs, values = pair_of_jobs(wired)
        (channel,) = wired.programs[1].channels
        assert compiled(jobs[0]) == j.DONE  # all of it fits
        wired.sockets[channel, 0].close()
        assert compiled(jobs[1]) == j.DONE
        assert (values[1] == 1).all()


def test_who_sleeps_at_a_ring_is_woken() -> None:
    with cluster(programs_of(star(num_ranks=2), "all_reduce", 5000, 50), ring_bytes=1 << 12) as wired:
        for pause_s in (0.0, 0.05):
            jobs, values = pair_of_jobs(wired)
            sleeper = threading.Thread(target=compiled, args=(jobs[0],))
            sleeper.start()
            time.sleep(pause_s)
            assert compiled(jobs[1]) == j.DONE
            sleeper.join(LONG_S)
            assert not sleeper.is_alive()
            assert all((value == 3).all() for value in values)


@OVER
def test_a_deadline_ends_the_wait_and_the_run_can_go_on(ring_bytes: int | None) -> None:
    programs = programs_of(star(num_ranks=2), "all_reduce", 5000, 50)
    with cluster(programs, buffer_bytes=1, ring_bytes=ring_bytes) as wired:
        jobs, values = pair_of_jobs(wired)
        jobs[0].fields[j.J_LIMIT_NS] = 20_000_000
        assert compiled(jobs[0]) == j.TIMED_OUT
        assert jobs[0].waiting_for() == (1,)
        assert not jobs[0].done
        jobs[0].fields[j.J_DEADLINE_NS] = time.monotonic_ns() + int(LONG_S * 1e9)
        assert run_together(jobs, [compiled] * 2) == [j.DONE] * 2
        assert all((value == 3).all() for value in values)


@OVER
def test_a_word_on_a_control_connection_ends_the_wait(ring_bytes: int | None) -> None:
    here, there = socket.socketpair()
    programs = programs_of(star(num_ranks=2), "all_reduce", 50, 50)
    with here, there, cluster(programs, ring_bytes=ring_bytes) as wired:
        values = [np.full(50, rank + 1, dtype=np.int64) for rank in range(2)]
        waiting = wired.job(0, values[0], values[0], extras=(-1, here.fileno()))
        there.send(b"!")
        assert compiled(waiting) == j.CONTROL
        assert here.recv(1) == b"!"
        other = wired.job(1, values[1], values[1])
        assert run_together([waiting, other], [compiled] * 2) == [j.DONE] * 2
        assert (values[0] == 3).all()


def test_before_it_begins_a_job_waits_for_nobody() -> None:
    with cluster(programs_of(star(num_ranks=2), "all_reduce", 50, 50)) as wired:
        jobs, _ = pair_of_jobs(wired)
        assert jobs[0].waiting_for() == ()
        assert not jobs[0].done


def test_the_plain_engine_gives_up_at_its_deadline() -> None:
    with cluster(programs_of(star(num_ranks=2), "all_reduce", 50, 50)) as wired:
        jobs, _ = pair_of_jobs(wired)
        jobs[0].fields[j.J_LIMIT_NS] = 20_000_000
        assert execute_in_python(jobs[0]) == j.TIMED_OUT


def test_the_engine_runs_while_python_is_busy() -> None:
    """A main thread that never gives the lock away voluntarily does not keep two engine threads from finishing."""
    programs = programs_of(star(num_ranks=2), "all_reduce", 50000, 500)
    with cluster(programs, buffer_bytes=1) as wired:
        jobs, values = pair_of_jobs(wired)
        threads = [threading.Thread(target=compiled, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        spins = 0
        while any(thread.is_alive() for thread in threads):
            spins += 1
        assert all(job.done for job in jobs)
        assert all((value == 3).all() for value in values)
