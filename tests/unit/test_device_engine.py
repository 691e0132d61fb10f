"""The engine for devices inside one process: ranks are threads, a group of messages is over when all of it has met.

On a machine with a GPU the same runs there, every rank on a stream of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycel.collectives.lower import RankTemplate
from mycel.collectives.program import Op
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, ROOTED, UNEVEN, Collective, CollectiveName
from mycel.collectives.synth import methods_for, synthesize
from mycel.errors import CommunicationError, ScheduleError
from mycel.runtime.communicator import Call
from mycel.runtime.device import choice
from mycel.runtime.device.choice import PIECE_BYTES, STEP_S, choose_for_steps, estimate_steps, with_classics
from mycel.runtime.device.engine import DeviceEngine
from mycel.runtime.device.group import DeviceGroup, make_nccl
from mycel.runtime.device.lane import CudaLane, lane_of
from mycel.runtime.device.steps import Prepared, prepare
from mycel.runtime.device.transport import End
from mycel.runtime.device.work import DeviceWork
from mycel.runtime.planner import Planner
from mycel.runtime.proof import Proofs
from mycel.runtime.reduce_kernels import DType, ReduceOp
from mycel.settings import NCCL_BELOW, read_settings
from mycel.topology.builders import ring, star, torus, two_boxes
from mycel.topology.model import Topology

LONG_S = 60.0
FABRICS: dict[str, Topology] = {
    "star_2": star(num_ranks=2),
    "ring_3": ring(num_ranks=3),
    "two_boxes_4": two_boxes(num_ranks=4, inside="100 Gbit/s", between="10 Gbit/s"),
    "ring_5": ring(num_ranks=5),
    "star_5": star(num_ranks=5),
    "torus_6": torus(dims=(2, 3)),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and a torch made for it"),
        ],
    ),
]


@cache
def schedules(fabric: str, name: CollectiveName, root: int | None) -> dict[str, Schedule]:
    topology = FABRICS[fabric]
    collective = Collective(name=name, num_ranks=topology.num_ranks, root=root)
    return {method: synthesize(topology, collective, method) for method in methods_for(name)}


# -- steps --------------------------------------------------------------------------------------------------------


def prepared_of(schedule: Schedule, elements: int, piece: int, blocks: Sequence[int] | None = None) -> list[Prepared]:
    plans = [RankTemplate(schedule, rank) for rank in range(schedule.collective.num_ranks)]
    return [
        prepare(
            plan.expand(elements, piece, block_elements=blocks), plan.steps(elements, piece, block_elements=blocks), 4
        )
        for plan in plans
    ]


def comes_to_an_end(ranks: Sequence[Prepared]) -> bool:
    """Whether all get through their groups, which are over once each message has met its end; and the right ends."""
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    awaited: dict[tuple[int, int], list[tuple[int, int]]] = {}
    at = [-1] * len(ranks)
    needed: list[list[tuple[tuple[int, int], int]]] = [[] for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank, prepared in enumerate(ranks):
            over = all(min(len(sent.get(p, ())), len(awaited.get(p, ()))) >= count for p, count in needed[rank])
            if at[rank] == len(prepared.steps) or not over:
                continue
            moved = True
            at[rank] += 1
            if at[rank] == len(prepared.steps):
                continue
            step = prepared.steps[at[rank]]
            needed[rank] = []
            for posted, messages, outgoing in ((sent, step.sends, True), (awaited, step.receives, False)):
                for m in messages:
                    pair = (rank, m.peer) if outgoing else (m.peer, rank)
                    posted.setdefault(pair, []).append((step.number, m.stop - m.start))
                    needed[rank].append((pair, len(posted[pair])))
    return sent == awaited and all(a == len(r.steps) for a, r in zip(at, ranks, strict=True))


cases = st.tuples(
    st.sampled_from(sorted(FABRICS)), st.sampled_from(COLLECTIVES), st.integers(1, 40), st.integers(1, 9), st.data()
)


def drawn(case: Any) -> tuple[Schedule, list[Prepared]]:
    fabric, name, per_block, piece, data = case
    root = data.draw(st.integers(0, FABRICS[fabric].num_ranks - 1)) if name in ROOTED else None
    made = schedules(fabric, name, root)
    schedule = made[data.draw(st.sampled_from(sorted(made)))]
    blocks = None
    if name in UNEVEN and data.draw(st.booleans()):
        number = schedule.collective.num_blocks
        blocks = data.draw(st.lists(st.integers(0, per_block), min_size=number, max_size=number))
    elements = sum(blocks) if blocks else per_block * schedule.collective.num_blocks
    return schedule, prepared_of(schedule, elements, piece, blocks if blocks and sum(blocks) else None)


@settings(max_examples=120, deadline=None)
@given(cases)
def test_both_ends_of_every_message_have_it_in_the_same_step(case: Any) -> None:
    _, ranks = drawn(case)
    for outgoing, incoming in (("sends", "receives"), ("receives", "sends")):
        for rank, prepared in enumerate(ranks):
            for step in prepared.steps:
                for peer in {m.peer for m in getattr(step, outgoing)}:
                    ours = [m.stop - m.start for m in getattr(step, outgoing) if m.peer == peer]
                    at_peer = next((s for s in ranks[peer].steps if s.number == step.number), None)
                    assert at_peer is not None
                    assert ours == [m.stop - m.start for m in getattr(at_peer, incoming) if m.peer == rank]
    assert comes_to_an_end(ranks)


@pytest.mark.parametrize("fabric", ["star_2", "ring_3", "two_boxes_4", "ring_5", "torus_6"])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_the_judge_sees_a_rank_with_another_order_of_steps(fabric: str, name: CollectiveName) -> None:
    n = FABRICS[fabric].num_ranks
    ranks = prepared_of(schedules(fabric, name, None)["forest"], 60 * n, 4)
    assert comes_to_an_end(ranks)
    for rank, prepared in enumerate(ranks):
        turned = replace(prepared, steps=prepared.steps[::-1])
        assert not comes_to_an_end([*ranks[:rank], turned, *ranks[rank + 1 :]])
        missing = replace(prepared, steps=prepared.steps[1:])
        assert not comes_to_an_end([*ranks[:rank], missing, *ranks[rank + 1 :]])


def test_steps_that_do_not_follow_needs_are_refused() -> None:
    plan = RankTemplate(schedules("ring_3", "all_reduce", None)["forest"], 0)
    program, steps = plan.expand(12, 2), plan.steps(12, 2)
    with pytest.raises(ScheduleError, match="expected an earlier step"):
        prepare(program, np.zeros_like(steps), 4)
    with pytest.raises(ScheduleError, match=r"steps given for \d+ instructions"):
        prepare(program, steps[:-1], 4)


# -- the whole engine ---------------------------------------------------------------------------------------------


class Meeting:
    """Messages between ranks of one process, as NCCL has them: no group is over before all of it has met."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], queue.Queue[Any]] = {}
        self._making = threading.Lock()

    def between(self, src: int, dst: int) -> queue.Queue[Any]:
        with self._making:
            return self._sent.setdefault((src, dst), queue.Queue())

    def of(self, rank: int) -> Any:
        def exchange(sends: Sequence[End], receives: Sequence[End]) -> None:
            assert sends or receives
            posted = []
            for memory, peer in sends:
                answer: queue.Queue[Any] = queue.Queue()
                self.between(rank, peer).put((memory, mark(memory), answer))
                posted.append((memory, answer))
            for memory, peer in receives:
                theirs, ready, answer = self.between(peer, rank).get(timeout=LONG_S)
                follow(memory, ready)
                assert memory.numel() == theirs.numel()
                memory.copy_(theirs)
                answer.put(mark(memory))
            for memory, answer in posted:
                follow(memory, answer.get(timeout=LONG_S))

        return SimpleNamespace(exchange=exchange)


def mark(memory: Tensor) -> Any:
    if not memory.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(memory.device))
    return event


def follow(memory: Tensor, event: Any) -> None:
    if event is not None:
        torch.cuda.current_stream(memory.device).wait_event(event)


@dataclass
class Case:
    """Buffers of one rank, and what OUTPUT must be."""

    output: Tensor
    given: Tensor | None
    expected: Tensor | None


def cases_of(collective: Collective, arrays: list[Tensor], blocks: Sequence[int]) -> list[Case]:
    """Of every rank, where rank r's whole array is ``arrays[r]``."""
    n, name, root, whole = collective.num_ranks, collective.name, collective.root, arrays[0]
    starts = np.concatenate([[0], np.cumsum(blocks)]).tolist()

    def block(array: Tensor, number: int) -> Tensor:
        return array[starts[number] : starts[number + 1]]

    total = torch.stack(arrays).sum(dim=0, dtype=whole.dtype)
    made = []
    for r in range(n):
        if name in ("all_reduce", "reduce"):
            made.append(Case(arrays[r].clone(), None, total if root in (None, r) else None))
        elif name == "broadcast":
            made.append(Case(arrays[r].clone(), None, arrays[root or 0]))
        elif name == "all_gather":
            made.append(Case(torch.zeros_like(whole), block(whole, r).clone(), whole))
        elif name == "reduce_scatter":
            made.append(Case(torch.zeros_like(block(whole, r)), arrays[r].clone(), block(total, r)))
        elif name == "all_to_all":
            came = torch.cat([block(whole, s * n + r) for s in range(n)])
            made.append(Case(torch.zeros_like(came), whole[starts[r * n] : starts[(r + 1) * n]].clone(), came))
        elif name == "gather":
            output = torch.zeros_like(whole) if r == root else whole[:0].clone()
            made.append(Case(output, block(whole, r).clone(), whole if r == root else None))
        else:
            source = whole.clone() if r == root else whole[:0].clone()
            made.append(Case(torch.zeros_like(block(whole, r)), source, block(whole, r)))
    return made


def run(engines: list[DeviceEngine], calls: list[Call], results: list[Tensor]) -> list[DeviceWork]:
    with ThreadPoolExecutor(len(engines)) as pool:
        started = [pool.submit(e.start, c, [r]) for e, c, r in zip(engines, calls, results, strict=True)]
        works = [future.result(LONG_S) for future in started]
    for work in works:
        assert work.wait()
    return works


def refuse(kind: str, message: str) -> CommunicationError:
    return CommunicationError(message)


def engines_on(device: str, fabric: str, method: str, piece_bytes: int) -> list[DeviceEngine]:
    meeting, n = Meeting(), FABRICS[fabric].num_ranks
    proofs = Proofs(0, refuse)  # in one process, one proof serves all ranks
    return [
        DeviceEngine(
            size=n,
            planner=Planner(
                rank,
                lambda name, root: {method: schedules(fabric, name, root)[method]},
                partial(choose_for_steps, piece_bytes=piece_bytes),
                proofs.require,
            ),
            transport=meeting.of(rank),
            lane=lane_of(torch.device(device, 0)),
        )
        for rank in range(n)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective(device: str, fabric: str, name: CollectiveName) -> None:
    """Even and uneven, in pieces of any length; sums of integers, so that the order does not matter."""
    n = FABRICS[fabric].num_ranks
    root = n - 1 if name in ROOTED else None
    collective = Collective(name=name, num_ranks=n, root=root)
    random = np.random.default_rng(7)
    for method in schedules(fabric, name, root):
        for piece_bytes, per_block, uneven in ((8, 3, False), (56, 40, False), (40, 25, True), (1 << 20, 333, False)):
            if uneven and name not in UNEVEN:
                continue
            lengths = [per_block] * collective.num_blocks
            if uneven:
                lengths = random.integers(0, per_block, collective.num_blocks).tolist()
            elements = sum(lengths)
            arrays = [torch.from_numpy(random.integers(-99, 99, elements)).to(device) for _ in range(n)]
            made = cases_of(collective, arrays, lengths)
            kept = [None if case.given is None else case.given.clone() for case in made]
            calls = [
                Call(
                    name=name,
                    root=root,
                    num_elements=elements,
                    item_bytes=8,
                    output_address=0,
                    dtype=DType.INT64,
                    block_elements=tuple(lengths) if uneven else None,
                    keep=(case.output,) if case.given is None else (case.output, case.given),
                )
                for case in made
            ]
            run(engines_on(device, fabric, method, piece_bytes), calls, [case.output for case in made])
            for rank, (case, before) in enumerate(zip(made, kept, strict=True)):
                where = (method, piece_bytes, lengths, rank)
                if case.expected is not None:
                    assert torch.equal(case.output, case.expected), where
                if before is not None and case.given is not None:
                    assert torch.equal(case.given, before), "inputs belong to the caller"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool]
)
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX", "MIN", "PRODUCT"])
def test_reductions_by_every_operation(device: str, dtype: torch.dtype, op: str) -> None:
    """Two ranks add in one order only: exactly what torch gives."""
    one, other = (torch.randn(1000, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    parts = [((part > 0) if dtype == torch.bool else (part * 9)).to(dtype).to(device) for part in (one, other)]
    combine = {"MAX": torch.maximum, "MIN": torch.minimum, "PRODUCT": torch.mul}.get(op, torch.add)
    expected = combine(parts[0], parts[1])
    if op == "AVG" and dtype != torch.bool:
        expected = expected / 2 if dtype.is_floating_point else expected.div(2, rounding_mode="trunc")
    outputs = [part.clone() for part in parts]
    calls = [
        Call(
            name="all_reduce",
            num_elements=1000,
            item_bytes=output.element_size(),
            output_address=0,
            reduce_op=ReduceOp.SUM if op == "AVG" else ReduceOp[op],
            average=op == "AVG",
            keep=(output,),
        )
        for output in outputs
    ]
    run(engines_on(device, "star_2", "forest", 256), calls, outputs)
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("device", DEVICES)
def test_averages_are_divided_not_multiplied(device: str) -> None:
    """Three ranks: a third of a sum, correctly rounded, is not the sum times a rounded third."""
    outputs = [torch.arange(1.0, 4001.0, device=device) for _ in range(3)]
    calls = [
        Call(name="all_reduce", num_elements=4000, item_bytes=4, output_address=0, average=True, keep=(output,))
        for output in outputs
    ]
    expected = outputs[0].clone()
    run(engines_on(device, "ring_3", "forest", 4096), calls, outputs)
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("device", DEVICES)
def test_works_and_futures(device: str) -> None:
    """What the caller queued before counts as input, what it queues after the work sees the result."""
    outputs = [torch.ones(5, device=device) for _ in range(2)]
    engines = engines_on(device, "star_2", "tree", 1024)
    settled: list[int] = []

    def be(rank: int) -> list[float]:
        outputs[rank].mul_(rank + 1)
        call = Call(name="all_reduce", num_elements=5, item_bytes=4, output_address=0, keep=(outputs[rank],))
        work = engines[rank].start(call, [outputs[rank]], lambda: settled.append(rank))
        work.synchronize()
        doubled = (outputs[rank] * 2).tolist()
        assert work.is_completed() and work.is_success()
        assert (work.exception(),) == (None,)  # type: ignore[func-returns-value]
        assert work.get_future() is work.get_future()
        assert work.get_future().then(lambda f: f.value()[0].sum()).wait().item() == 15.0
        assert work.result()[0] is outputs[rank]
        nothing = Call(name="all_reduce", num_elements=0, item_bytes=4, output_address=0, keep=(outputs[rank][:0],))
        assert engines[rank].start(nothing, [outputs[rank][:0]]).wait()
        return doubled

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(be, range(2), timeout=LONG_S)) == [[6.0] * 5] * 2
    assert sorted(settled) == [0, 1]


# -- lanes --------------------------------------------------------------------------------------------------------


def test_a_stream_waits_and_is_waited_for_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: which stream waits for which event, and when memory is marked as in use."""
    heard: list[str] = []

    class Stream:
        def __init__(self, device: object = None, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            heard.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Event) -> None:
            heard.append(f"{self.name} waits for event of {event.on}")

    class Event:
        on = ""

        def record(self, stream: Stream) -> None:
            self.on = stream.name
            heard.append(f"event on {stream.name}")

        def query(self) -> bool:
            return False

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        heard.append(f"on {stream.name}")
        yield
        heard.append(f"off {stream.name}")

    users = Stream(name="user")
    for name, fake in (("Stream", Stream), ("Event", Event), ("current_stream", lambda d: users), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, fake)
    tensor: Any = SimpleNamespace(record_stream=lambda stream: heard.append(f"tensor in use on {stream.name}"))
    lane = CudaLane(torch.device("cuda", 0))
    with lane.enter([tensor]):
        heard.append("work")
        end = lane.mark()
    assert not lane.reached(end)
    lane.join(end)
    assert heard == [
        "side waits for user",
        "tensor in use on side",
        "on side",
        "work",
        "event on side",
        "off side",
        "user waits for event of side",
    ]


# -- choices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fabric", "name", "method"),
    [
        ("ring_3", "all_reduce", "ring"),
        ("star_5", "all_gather", "tree"),
        ("star_5", "reduce_scatter", "ring"),
        ("two_boxes_4", "all_reduce", "rabenseifner"),
        ("two_boxes_4", "all_gather", "ring"),
    ],
)
@pytest.mark.parametrize("pieces", [1, 2, 3, 40])
def test_the_model_knows_what_each_step_moves(
    monkeypatch: pytest.MonkeyPatch, fabric: str, name: CollectiveName, method: str, pieces: int
) -> None:
    """Against the bytes that the programs of all ranks put on every link in every step."""
    topology = FABRICS[fabric]
    collective = Collective(name=name, num_ranks=topology.num_ranks)
    schedule = synthesize(topology, collective, method)
    assert len({chunk.num_units for chunk in schedule.chunks}) == 1
    elements = pieces * 50_000 * len(schedule.chunks)
    moved: dict[tuple[int, tuple[int, int]], float] = {}
    for rank in range(topology.num_ranks):
        plan = RankTemplate(schedule, rank)
        program, steps = plan.expand(elements, 50_000), plan.steps(elements, 50_000)
        for i, step in zip(program.instructions, steps.tolist(), strict=True):
            if i.op is Op.SEND:
                for hop in pairwise(program.channels[i.channel].path):
                    moved[step, hop] = moved.get((step, hop), 0.0) + 4 * i.count / topology.capacity[hop]
    numbers = {step for step, _ in moved}
    unit = float(topology.bytes_per_second_per_unit or 1e9)
    links_s = sum(max(load for (s, _), load in moved.items() if s == step) for step in numbers) / unit
    monkeypatch.setattr(choice, "MESSAGE_S", 0.0)
    seconds = estimate_steps(schedule, elements * 4, 200_000)
    assert seconds == pytest.approx(links_s + len(numbers) * STEP_S)
    monkeypatch.setattr(choice, "MESSAGE_S", 1.0)
    most = max(sum(rank in (t.src, t.dst) for t in schedule.transfers) for rank in range(topology.num_ranks))
    assert estimate_steps(schedule, elements * 4, 200_000) == most * pieces


def test_classics_are_candidates_where_they_exist() -> None:
    def methods(topology: Topology, name: CollectiveName) -> set[str]:
        return set(with_classics({}, topology, Collective(name=name, num_ranks=topology.num_ranks)))

    assert methods(star(num_ranks=4), "all_reduce") >= {"ring", "recursive_doubling", "double_binary_tree"}
    assert "recursive_doubling" not in methods(ring(num_ranks=6), "all_reduce"), "partners have no path"
    assert methods(star(num_ranks=33), "all_gather") == set(), "too many to try"
    ours = schedules("star_5", "all_gather", None)
    both = with_classics(ours, FABRICS["star_5"], Collective(name="all_gather", num_ranks=5))
    assert list(both)[: len(ours)] == list(ours) and all(both[m] is ours[m] for m in ours)


def test_more_pieces_for_longer_arrays() -> None:
    candidates = schedules("ring_5", "all_gather", None)
    chosen = [choose_for_steps(candidates, 1 << power) for power in range(10, 33, 2)]
    pieces = [(1 << power) / 5 / c.piece_bytes for power, c in zip(range(10, 33, 2), chosen, strict=True)]
    assert pieces[-1] > 1 > pieces[0]
    assert all(a.seconds < b.seconds for a, b in pairwise(chosen))
    assert choose_for_steps(candidates, 1 << 20, piece_bytes=777).piece_bytes == 777
    assert {c.piece_bytes for c in chosen} <= set(PIECE_BYTES)
    with pytest.raises(ValueError, match="no candidate"):
        choose_for_steps({}, 1)


def test_which_calls_run_over_schedules() -> None:
    large, small = torch.zeros(NCCL_BELOW // 4), torch.zeros(NCCL_BELOW // 4 - 1)
    relayed: Any = SimpleNamespace(exchanges_directly=False)
    direct: Any = SimpleNamespace(exchanges_directly=True)

    def takes(tensors: list[Tensor], communicator: Any = relayed, **options: Any) -> bool:
        exchange = options.pop("exchange", False)
        usual = {"described": True, "least_bytes": read_settings({}).nccl_below}
        return DeviceGroup(None, communicator, **{**usual, **options}).takes(tensors, exchange=exchange)

    assert takes([small, large])
    assert not takes([small, small])
    assert takes([small], least_bytes=0)
    assert not takes([large], described=False), "nobody said what the fabric looks like"
    assert not takes([large], None), "a group of one rank"
    assert not takes([large, large.to("meta")])
    assert not takes([large.to_sparse()])
    assert takes([small], exchange=True), "ranks relay, and know no common size"
    assert not takes([large], direct, exchange=True), "the backend does the same"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_nccl_where_there_is_no_gpu() -> None:
    assert make_nccl(dist.HashStore(), 0, 1, timedelta(seconds=1), [0], "") is None
