"""MSCCL++ plans: every limit of the format, runs on numbers in hostile orders, and mutants that must be refused."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.collectives.export import export
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import check_plan
from mycel.errors import ScheduleError, VerificationError
from mycel.topology import load_topology
from mycel.topology.builders import full_mesh, ring, star, torus, two_boxes
from mycel.topology.model import Topology

Json = dict[str, Any]
DATA = Path(__file__).resolve().parents[1] / "data" / "topologies"
NAMES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def made(topology: Topology, name: CollectiveName, method: str) -> Schedule:
    return synthesize(topology, Collective(name=name, num_ranks=topology.num_ranks), method)


def plan_of(topology: Topology, name: CollectiveName, method: str) -> Json:
    return json.loads(export(made(topology, name, method), "mscclpp_json"))


def cases() -> Iterator[tuple[Topology, CollectiveName, str]]:
    for topology in (star(num_ranks=3), two_boxes(num_ranks=4), ring(num_ranks=4), torus(dims=(2, 3))):
        for name in NAMES:
            for method in ("direct",) if name == "all_to_all" else ("ring", "tree", "forest"):
                yield topology, name, method


# -- every limit ----------------------------------------------------------------------------------------------

TOP = {
    "name", "collective", "protocol", "inplace", "reuse_resources", "num_threads_per_block", "gpus",
    "use_double_scratch_buffer", "buffer_alignment", "min_message_size", "max_message_size",
}  # fmt: skip
GPU = {
    "id", "input_chunks", "output_chunks", "scratch_chunks", "threadblocks", "channels", "remote_buffers",
    "semaphores",
}  # fmt: skip


def check_structure(plan: Json) -> None:
    """Keys that the loader asks for, the lengths of its arrays, and indices that it does not look at."""
    assert set(plan) == TOP
    assert plan["protocol"] == "Simple" and plan["num_threads_per_block"] <= 1024
    lengths = [{key[0]: gpu[f"{key}_chunks"] for key in ("input", "output", "scratch")} for gpu in plan["gpus"]]
    whole = max(max(mine["i"], mine["o"]) for mine in lengths)
    largest = max(max(mine.values()) for mine in lengths)
    assert 0 < plan["max_message_size"] // whole * largest < 1 << 32
    connected: Counter[tuple[int, int, str]] = Counter()
    for rank, gpu in enumerate(plan["gpus"]):
        assert set(gpu) == GPU and gpu["id"] == rank
        assert lengths[rank]["i"] and lengths[rank]["o"]
        kinds = {entry["channel_type"]: entry["connected_to"] for entry in gpu["channels"]}
        for kind, peers in kinds.items():
            connected.update((rank, peer, kind) for peer in peers)
        assert len(gpu["threadblocks"]) <= 104
        for number, block in enumerate(gpu["threadblocks"]):
            assert block["id"] == number and 0 < len(block["ops"]) <= 64
            ids = [index for entry in block["channels"] for index in entry["channel_ids"]]
            assert len(ids) <= 16
            assert all(i < len(kinds[entry["channel_type"]]) for entry in block["channels"] for i in ids)
            remote = [index for entry in block["remote_buffer_refs"] for index in entry["remote_buffer_ids"]]
            assert len(remote) <= 16 and all(index < len(gpu["remote_buffers"]) for index in remote)
            for op in block["ops"]:
                assert len(op.get("channel_ids", ())) <= 8
                assert all(index < len(ids) for index in op.get("channel_ids", ()))
                assert len(op.get("semaphore_ids", ())) <= 16
                assert all(index < len(gpu["semaphores"]) for index in op.get("semaphore_ids", ()))
                for span in (*op.get("src_buff", ()), *op.get("dst_buff", ())):
                    owner, letter = rank, span.get("type")
                    if letter is None:
                        buffer = gpu["remote_buffers"][remote[span["buffer_id"]]]
                        owner, letter = buffer["rank"], buffer["type"]
                    assert 0 <= span["index"] <= lengths[owner][letter] - span["size"] < lengths[owner][letter]
    assert all(count == connected[b, a, kind] for (a, b, kind), count in connected.items())


# -- on numbers -----------------------------------------------------------------------------------------------


class Machine:
    """Runs a plan on numbers in an order that a random number generator picks, as late as a GPU may do things.

    What a thread block does to data happens at any time until its threads meet; what is put on a port, until the
    signal after it arrives. Written without looking at the verifier.
    """

    def __init__(self, plan: Json, seed: int) -> None:
        self.plan, self.random = plan, random.Random(seed)
        self.memory: list[dict[str, list[int]]] = []
        for rank, gpu in enumerate(plan["gpus"]):
            mine = {key[0]: [-1] * gpu[f"{key}_chunks"] for key in ("input", "output", "scratch")}
            mine["i"] = [self.value(rank, index) for index in range(len(mine["i"]))]
            if plan["inplace"]:
                assert plan["collective"] == "allreduce"
                mine["o"] = mine["i"]
            self.memory.append(mine)
        ends: dict[tuple[int, int, str], list[int]] = {}
        for rank, gpu in enumerate(plan["gpus"]):
            for entry in gpu["channels"]:
                for number, peer in enumerate(entry["connected_to"]):
                    ends.setdefault((rank, peer, entry["channel_type"]), []).append(number)
        self.other = {
            (a, kind, ours): (b, kind, theirs)
            for (a, b, kind), numbers in ends.items()
            for ours, theirs in zip(numbers, ends[b, a, kind], strict=True)
        }
        self.count: Counter[Any] = Counter()
        self.late: dict[Any, list[Callable[[], None]]] = {}
        self.ports: dict[Any, deque[Callable[[], None]]] = {}

    def value(self, rank: int, index: int) -> int:
        """Sums of different contributions differ."""
        return 8**rank * (1 + index if self.plan["collective"] not in ("allreduce", "reducescatter") else 1)

    def run(self) -> list[list[int]]:
        at = {(r, b): 0 for r, gpu in enumerate(self.plan["gpus"]) for b in range(len(gpu["threadblocks"]))}
        todo = set(at)
        while todo:
            ready = [key for key in sorted(todo) if self.may_go(key, at[key])]
            moving = [queue for queue in self.ports.values() if queue]
            assert ready or moving, "blocks wait for ever"
            if moving and (not ready or self.random.random() < 0.2):
                self.random.choice(moving).popleft()()
                continue
            key = self.random.choice(ready)
            self.step(key, at[key])
            at[key] += 1
            if at[key] == len(self.ops(key)):
                self.meet(key)
                todo.remove(key)
        for queue in self.ports.values():
            while queue:
                queue.popleft()()
        return [mine["o"] for mine in self.memory]

    def block(self, key: tuple[int, int]) -> Json:
        return self.plan["gpus"][key[0]]["threadblocks"][key[1]]

    def ops(self, key: tuple[int, int]) -> list[Json]:
        return self.block(key)["ops"]

    def ends(self, key: tuple[int, int], op: Json) -> list[Any]:
        known = [
            i
            for e in self.block(key)["channels"]
            if e["channel_type"] == op["channel_type"]
            for i in e["channel_ids"]
        ]
        return [(key[0], op["channel_type"], known[index]) for index in op["channel_ids"]]

    def may_go(self, key: tuple[int, int], at: int) -> bool:
        op = self.ops(key)[at]
        if op["name"] == "wait":
            return all(self.count[end] > 0 for end in self.ends(key, op))
        if op["name"] == "sem_acquire":
            return all(self.count[key[0], number] > 0 for number in op["semaphore_ids"])
        return True

    def meet(self, key: tuple[int, int]) -> None:
        late = self.late.pop(key, [])
        self.random.shuffle(late)
        for action in late:
            action()

    def step(self, key: tuple[int, int], at: int) -> None:
        rank, op = key[0], self.ops(key)[at]
        name = op["name"]
        if name == "nop":
            self.meet(key)
        elif name == "wait":
            for end in self.ends(key, op):
                self.count[end] -= 1
        elif name == "sem_acquire":
            for number in op["semaphore_ids"]:
                self.count[rank, number] -= 1
        elif name == "sem_release":
            self.count.update((rank, number) for number in op["semaphore_ids"])
        elif name == "signal":
            for end in self.ends(key, op):
                self.signal(end)
        elif name == "pws":
            (end,) = self.ends(key, op)
            self.ports.setdefault(end, deque()).append(self.mover(key, op))
            self.signal(end)
        else:
            assert name in ("put", "copy", "re")
            self.late.setdefault(key, []).append(self.mover(key, op))
            if self.random.random() < 0.5:
                self.late[key].pop()()

    def signal(self, end: Any) -> None:
        def arrive() -> None:
            self.count[self.other[end]] += 1

        if end[1] == "port":
            self.ports.setdefault(end, deque()).append(arrive)
        else:
            arrive()

    def mover(self, key: tuple[int, int], op: Json) -> Callable[[], None]:
        rank = key[0]
        refs = [i for entry in self.block(key)["remote_buffer_refs"] for i in entry["remote_buffer_ids"]]

        def place(span: Json) -> tuple[list[int], int]:
            if "type" in span:
                return self.memory[rank][span["type"]], span["index"]
            buffer = self.plan["gpus"][rank]["remote_buffers"][refs[span["buffer_id"]]]
            return self.memory[buffer["rank"]][buffer["type"]], span["index"]

        def move() -> None:
            columns = []
            for span in op["src_buff"]:
                memory, start = place(span)
                columns.append(memory[start : start + span["size"]])
            data = [sum(values) if -1 not in values else -1 for values in zip(*columns, strict=True)]
            for span in op["dst_buff"]:
                memory, start = place(span)
                memory[start : start + span["size"]] = data

        return move

    def expected(self, rank: int) -> list[int]:
        gpus, n = self.plan["gpus"], len(self.plan["gpus"])
        given, got = gpus[rank]["input_chunks"], gpus[rank]["output_chunks"]
        if self.plan["collective"] == "allgather":
            return [self.value(r, index) for r in range(n) for index in range(given)]
        if self.plan["collective"] == "alltoall":
            size = got // n
            return [self.value(r, rank * size + index) for r in range(n) for index in range(size)]
        return [sum(8**r for r in range(n))] * got


def is_right(plan: Json, seed: int) -> bool:
    machine = Machine(plan, seed)
    return machine.run() == [machine.expected(rank) for rank in range(len(plan["gpus"]))]


@pytest.mark.parametrize(
    ("topology", "name", "method"), list(cases()), ids=lambda value: getattr(value, "name", value)
)
def test_plans_are_within_limits_verified_and_right_on_numbers(
    topology: Topology, name: CollectiveName, method: str
) -> None:
    plan = plan_of(topology, name, method)
    check_structure(plan)
    facts = check_plan(plan)
    assert facts["collective"] == name and facts["num_ranks"] == topology.num_ranks
    assert all(is_right(plan, seed) for seed in range(3))


@pytest.mark.parametrize("name", ["a100_x1", "dgx1_v100", "random12"])
def test_plans_of_suite_fabrics(name: str) -> None:
    topology = load_topology(DATA / f"{name}.json")
    for collective in ("all_gather", "all_reduce"):
        plan = plan_of(topology, collective, "forest")
        check_structure(plan)
        assert is_right(plan, 0)


def test_memory_channels_within_a_node_and_ports_between() -> None:
    plan = plan_of(two_boxes(num_ranks=4), "all_to_all", "direct")
    for rank, gpu in enumerate(plan["gpus"]):
        kinds = {entry["channel_type"]: set(entry["connected_to"]) for entry in gpu["channels"]}
        assert kinds == {"memory": {rank ^ 1}, "port": {0, 1, 2, 3} - {rank, rank ^ 1}}


# -- what cannot be written -----------------------------------------------------------------------------------


def in_chunks(number: int) -> Schedule:
    """Two ranks that send each other their blocks in so many chunks."""
    return Schedule(
        collective=Collective(name="all_gather", num_ranks=2),
        topology=full_mesh(num_ranks=2),
        method="direct",
        num_units=2 * number,
        chunks=tuple(Chunk(start=i, stop=i + 1) for i in range(2 * number)),
        transfers=tuple(
            Transfer(chunk=i, src=i // number, dst=1 - i // number, reduce=False, path=(i // number, 1 - i // number))
            for i in range(2 * number)
        ),
    )


def test_limits_are_met_or_named() -> None:
    check_structure(json.loads(export(in_chunks(700), "mscclpp_json")))
    with pytest.raises(ScheduleError, match=r"rank 0 needs \d+ thread blocks of 64 operations; 104 .*-k 1"):
        export(in_chunks(900), "mscclpp_json")
    topology = star(num_ranks=3)
    with pytest.raises(ScheduleError, match="cannot express broadcast; they can: all_reduce"):
        export(synthesize(topology, Collective(name="broadcast", num_ranks=3, root=0), "tree"), "mscclpp_json")


# -- mutants --------------------------------------------------------------------------------------------------


def places(plan: Json) -> Iterator[tuple[int, int, int, Json]]:
    for g, gpu in enumerate(plan["gpus"]):
        for b, block in enumerate(gpu["threadblocks"]):
            for k, op in enumerate(block["ops"]):
                yield g, b, k, op


def changed(plan: Json, g: int, b: int, change: Callable[[list[Json]], object]) -> Json:
    mutant = copy.deepcopy(plan)
    change(mutant["gpus"][g]["threadblocks"][b]["ops"])
    return mutant


def deadly_mutants(plan: Json) -> Iterator[tuple[str, Json]]:
    """Each of them computes something wrong, may do so, waits for ever, or leaves memory."""
    for g, b, k, op in places(plan):
        name = op["name"]
        if name not in ("nop", "barrier"):
            yield f"delete {name}", changed(plan, g, b, lambda ops, k=k: ops.pop(k))
            yield f"repeat {name}", changed(plan, g, b, lambda ops, k=k: ops.insert(k, copy.deepcopy(ops[k])))
        for side in ("src_buff", "dst_buff"):
            for x, span in enumerate(op.get(side, ())):
                for shift in (1, -1, 1000):

                    def moved(ops: list[Json], k: int = k, side: str = side, x: int = x, shift: int = shift) -> None:
                        ops[k][side][x]["index"] += shift

                    yield f"shift {name} {side}", changed(plan, g, b, moved)
                for letter in {"i", "o", "s"} - {span.get("type")} if "type" in span else ():
                    if plan["inplace"] and letter + span["type"] in ("io", "oi"):
                        continue  # the same memory

                    def renamed(
                        ops: list[Json], k: int = k, side: str = side, x: int = x, letter: str = letter
                    ) -> None:
                        ops[k][side][x]["type"] = letter

                    yield f"buffer of {name} {side}", changed(plan, g, b, renamed)
        for number in range(len(op.get("semaphore_ids", ()))):
            for shift in (1, -1):

                def other(ops: list[Json], k: int = k, number: int = number, shift: int = shift) -> None:
                    ops[k]["semaphore_ids"][number] += shift

                yield f"semaphore of {name}", changed(plan, g, b, other)
    for g, gpu in enumerate(plan["gpus"]):
        for peer in range(len(plan["gpus"])):
            for x, buffer in enumerate(gpu["remote_buffers"]):
                if peer != buffer["rank"]:
                    mutant = copy.deepcopy(plan)
                    mutant["gpus"][g]["remote_buffers"][x]["rank"] = peer
                    yield "remote rank", mutant
            for c, entry in enumerate(gpu["channels"]):
                for x, old in enumerate(entry["connected_to"]):
                    if peer != old:
                        mutant = copy.deepcopy(plan)
                        mutant["gpus"][g]["channels"][c]["connected_to"][x] = peer
                        yield "connection", mutant


MUTATED = (
    (two_boxes(num_ranks=4), "all_reduce", "tree"),
    (star(num_ranks=3), "all_reduce", "ring"),
    (ring(num_ranks=4), "reduce_scatter", "tree"),
    (two_boxes(num_ranks=4), "all_gather", "forest"),
    (star(num_ranks=3), "all_to_all", "direct"),
)


def refused(plan: Json) -> bool:
    try:
        check_plan(plan)
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize(("topology", "name", "method"), MUTATED, ids=lambda value: getattr(value, "name", value))
def test_every_deadly_mutant_is_refused(topology: Topology, name: CollectiveName, method: str) -> None:
    plan = plan_of(topology, name, method)
    seen = Counter(kind for kind, _ in deadly_mutants(plan))
    passed = Counter(kind for kind, mutant in deadly_mutants(plan) if not refused(mutant))
    assert not passed, f"{passed} of {seen}"
    assert sum(seen.values()) > 150 and {"delete wait", "delete signal"} <= set(seen)


@pytest.mark.parametrize(("topology", "name", "method"), MUTATED, ids=lambda value: getattr(value, "name", value))
def test_exchanged_neighbours_and_missing_nops_are_refused_or_right_in_every_order(
    topology: Topology, name: CollectiveName, method: str
) -> None:
    """Operations between the same meetings have no order, and some meetings order nothing that matters.

    Whatever passes must be right on numbers, however late things are done.
    """
    plan = plan_of(topology, name, method)
    num_refused = Counter[str]()
    for g, b, k, op in places(plan):
        mine = plan["gpus"][g]["threadblocks"][b]["ops"]
        mutants = []
        if k + 1 < len(mine) and mine[k + 1] != op:
            mutants.append(("exchange", changed(plan, g, b, lambda ops, k=k: ops.insert(k, ops.pop(k + 1)))))
        if op["name"] == "nop":
            mutants.append(("delete nop", changed(plan, g, b, lambda ops, k=k: ops.pop(k))))
        for kind, mutant in mutants:
            if refused(mutant):
                num_refused[kind] += 1
            else:
                assert all(is_right(mutant, seed) for seed in range(3)), (kind, g, b, k)
    num_nops = sum(op["name"] == "nop" for *_, op in places(plan))
    assert num_refused["exchange"] and num_refused["delete nop"] >= 0.8 * num_nops


def test_matched_deletions_leave_no_wait_or_signal_behind_and_are_refused_all_the_same() -> None:
    """Counting alone would pass these: the handshake at the start is missing at both ends, or a whole message."""
    plan = plan_of(star(num_ranks=3), "all_gather", "ring")
    for first in (True, False):
        mutant = copy.deepcopy(plan)
        for gpu in mutant["gpus"]:
            for block in gpu["threadblocks"]:
                ops = block["ops"]
                for name in ("wait", "signal"):
                    # A sender begins with a wait and ends with one; a receiver begins and ends with a signal.
                    if ops[0]["name"] == name:
                        ops.pop(0 if first else -1)
        problem = "before it begins" if first else "after it has ended"
        with pytest.raises(VerificationError, match=f"{problem}.*no fixed order"):
            check_plan(mutant)


# -- messages -------------------------------------------------------------------------------------------------


def broken(kind: str, keep: Callable[[str], bool] = lambda text: True) -> str:
    plan = plan_of(two_boxes(num_ranks=4), "all_reduce", "tree")
    for found, mutant in deadly_mutants(plan):
        if found == kind:
            with pytest.raises(ScheduleError) as caught:
                check_plan(mutant)
            if keep(str(caught.value)):
                return f"{caught.value}\n{getattr(caught.value, 'grid', '')}"
    raise AssertionError(kind)


def test_messages_say_where_and_what() -> None:
    assert "waits for ever for a signal from rank" in broken("delete signal")
    assert "the plan's next run would take the rest for its own" in broken("delete wait", lambda t: "signals" in t)
    plan = tiny()
    ops(plan).pop(2)
    with pytest.raises(VerificationError, match=r"before it begins.*touch it in no fixed order") as caught:
        check_plan(plan)
    assert caught.value.grid == (
        "rank.block  op 0      op 1    op 2     op 3     op 4      op 5\n"
        "0.0         signal>1  wait<1  [rres]!  barrier  signal>1  wait<1\n"
        "rank.block; wait<r and signal>r by peer   [..]! here it goes wrong"
    )
    assert "which has" in broken("shift put dst_buff", lambda text: "chunks 10" in text)
    twice = broken("repeat re")
    assert "]!" in twice and "rank.block" in twice


def tiny() -> Json:
    """Two ranks read each other's input: a plan by hand, with operations that our exports do not use."""

    def gpu(rank: int) -> Json:
        sync = [
            {"name": "signal", "channel_ids": [0], "channel_type": "memory"},
            {"name": "wait", "channel_ids": [0], "channel_type": "memory"},
            {"name": "nop"},
        ]
        chunk = {"index": rank, "size": 1}
        return {
            "id": rank,
            "input_chunks": 2,
            "output_chunks": 2,
            "scratch_chunks": 0,
            "threadblocks": [
                {
                    "id": 0,
                    "ops": [
                        *sync,
                        {
                            "name": "rres",
                            "src_buff": [{"type": "i", **chunk}, {"buffer_id": 0, **chunk}],
                            "dst_buff": [{"type": "i", **chunk}, {"buffer_id": 0, **chunk}],
                            "channel_type": "memory",
                            "reduce_op": "sum",
                        },
                        {"name": "barrier", "barrier_id": 0, "num_threadblocks": 1},
                        *sync[:2],
                    ],
                    "channels": [{"channel_type": "memory", "channel_ids": [0]}],
                    "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": [0]}],
                }
            ],
            "channels": [{"channel_type": "memory", "connected_to": [1 - rank]}],
            "remote_buffers": [{"rank": 1 - rank, "type": "i", "access_channel_types": ["memory"]}],
            "semaphores": [],
        }  # fmt: skip

    plan = {"name": "t", "collective": "allreduce", "protocol": "Simple", "inplace": True, "gpus": [gpu(0), gpu(1)]}
    return json.loads(json.dumps(plan))  # no two operations are one object


def test_plans_of_others_are_understood() -> None:
    plan = tiny()
    assert check_plan(plan)["num_operations"] == 14
    for kind, mutant in deadly_mutants(plan):
        assert refused(mutant), kind


def test_a_relaxed_signal_says_that_a_rank_has_begun_and_no_more() -> None:
    plan = tiny()
    for gpu in plan["gpus"]:
        for op in gpu["threadblocks"][0]["ops"][:2]:
            op["name"] = "rlx" + op["name"]
    assert check_plan(plan)
    for gpu in plan["gpus"]:
        for op in gpu["threadblocks"][0]["ops"][-2:]:
            op["name"] = "rlx" + op["name"]
    with pytest.raises(VerificationError, match=r"\(rres\) and rank \d's caller after it has ended"):
        check_plan(plan)


def ports() -> Json:
    """An all_gather of two ranks in place, through ports, by each kind of put."""

    def on(name: str, **more: Any) -> Json:
        return {"name": name, "channel_ids": [0], "channel_type": "port", **more}

    def gpu(rank: int, last: list[Json]) -> Json:
        hello = [on("signal"), on("wait"), {"name": "nop"}]
        return {
            "id": rank,
            "input_chunks": 1,
            "output_chunks": 2,
            "scratch_chunks": 0,
            "threadblocks": [
                {
                    "id": 0,
                    "ops": [*hello, *last, on("wait")],
                    "channels": [{"channel_type": "port", "channel_ids": [0]}],
                    "remote_buffer_refs": [{"access_channel_type": "port", "remote_buffer_ids": [0]}],
                }
            ],
            "channels": [{"channel_type": "port", "connected_to": [1 - rank]}],
            "remote_buffers": [{"rank": 1 - rank, "type": "o", "access_channel_types": ["memory", "port"]}],
        }

    def moved(rank: int, source: str) -> Json:
        target = {"buffer_id": 0, "index": rank, "size": 1}
        return {
            "src_buff": [{"type": source, "index": rank if source == "o" else 0, "size": 1}],
            "dst_buff": [target],
        }

    gpus = [gpu(0, [on("put", **moved(0, "o")), on("signal"), on("flush")]), gpu(1, [on("pwsf", **moved(1, "i"))])]
    plan = {"name": "p", "collective": "allgather", "protocol": "Simple", "inplace": True, "gpus": gpus}
    return json.loads(json.dumps(plan))


def test_what_is_on_a_port_is_over_when_it_is_flushed_and_there_when_it_is_waited_for() -> None:
    plan = ports()
    assert check_plan(plan)["num_chunks"] == 2
    ops(plan).pop(5)
    with pytest.raises(VerificationError, match=r"op 3 \(put\) and rank 0's caller after it has ended"):
        check_plan(plan)
    plan = ports()
    plan["gpus"][1]["threadblocks"][0]["ops"][3]["name"] = "pws"
    with pytest.raises(VerificationError, match=r"op 3 \(pws\) and rank 1's caller after it has ended"):
        check_plan(plan)
    plan = ports()
    plan["gpus"][0]["remote_buffers"][0]["access_channel_types"] = ["memory"]
    with pytest.raises(ScheduleError, match="remote buffer 0 is not open to port channels"):
        check_plan(plan)
    for kind, mutant in deadly_mutants(ports()):
        # A second flush finds nothing, and input is the rank's own part of the output.
        if kind != "repeat flush" and not kind.startswith("buffer of"):
            assert refused(mutant), kind


def test_broken_json_gives_an_error_line_and_nothing_else() -> None:
    """Any value put in place of any other, or left out."""
    source = random.Random(7)
    junk: tuple[Any, ...] = (None, True, -1, 0, 1, 3, 1 << 40, 1.5, "", "o", "port", [], [0], [[]], {}, {"id": 0})
    original = plan_of(two_boxes(num_ranks=4), "all_reduce", "tree")
    for _ in range(300):
        plan = copy.deepcopy(original)
        for _ in range(source.choice((1, 1, 2))):
            at: Any = plan
            while True:
                keys = list(at) if isinstance(at, dict) else list(range(len(at)))
                key = source.choice(keys)
                if not isinstance(at[key], dict | list) or not at[key] or source.random() < 0.15:
                    break
                at = at[key]
            if source.random() < 0.2:
                del at[key]
            else:
                at[key] = source.choice(junk)
            if not plan:
                break
        try:
            check_plan(plan)
        except ScheduleError as error:
            assert "\n" not in str(error)


def block(plan: Json) -> Json:
    return plan["gpus"][0]["threadblocks"][0]


def ops(plan: Json) -> list[Json]:
    return block(plan)["ops"]


REFUSALS: tuple[tuple[Callable[[Json], object], str], ...] = (
    (lambda p: p.pop("gpus"), "plan: lacks the key 'gpus'"),
    (lambda p: p.update(gpus={}), "gpus is no list"),
    (lambda p: p.update(collective="broadcast"), "collective 'broadcast' is not understood"),
    (lambda p: p.update(protocol="LL128"), "protocol 'LL128' is not understood; known: Simple, LL"),
    (lambda p: p.update(inplace=1), "expected true or false"),
    (lambda p: p.update(buffer_alignment=8), "no multiple of 16"),
    (lambda p: p.update(num_threads_per_block=2048), "2048 threads a block"),
    (lambda p: p.update(min_message_size=9, max_message_size=8), "is above"),
    (lambda p: p["gpus"][1].update(id=0), "GPU 1: id is 0"),
    (lambda p: p["gpus"][1].update(output_chunks=3), "GPU 1: 2 input_chunks and 3 output_chunks"),
    (lambda p: p["gpus"][0]["channels"][0].update(connected_to=[0]), "from rank 0 to itself"),
    (lambda p: p["gpus"][0]["channels"][0].update(connected_to=[7]), "whole number from 0 to 1"),
    (lambda p: p["gpus"][0]["channels"][0].update(channel_type="switch"), "lacks the key 'buffer_type'"),
    (lambda p: block(p).update(id=3), "thread block 0: id is 3"),
    (lambda p: block(p)["channels"][0].update(channel_ids=[0] * 17), "17 channel_ids"),
    (
        lambda p: block(p)["channels"].append({"channel_type": "memory", "channel_ids": [0] * 16}),
        "17 memory channels; at most 16",
    ),
    (lambda p: ops(p).extend([{"name": "nop"}] * 58), "65 ops; at most 64"),
    (lambda p: ops(p).append({"name": "sing"}), "op 7: operation 'sing' is not"),
    (lambda p: ops(p).append({"name": "upkt"}), "packets need protocol LL"),
    (lambda p: ops(p)[0].update(channel_ids=[0] * 9), "9 channel_ids; at most 8"),
    (lambda p: ops(p)[0].update(channel_ids=[0, 0]), "name one channel twice"),
    (lambda p: ops(p)[0].update(channel_ids=[True]), "is True; expected a whole"),
    (lambda p: ops(p)[3].update(tbg_info={}), "tbg_info: lacks the key 'tbg_size'"),
    (lambda p: ops(p)[3].update(tbg_info={"tb_id": 4, "tbg_size": 4}), "tb_id is 4; expected a whole number from 0"),
    (lambda p: ops(p)[0].update(tbg_info={"tb_id": 0, "tbg_size": 4}), "can be shared by a group"),
    (lambda p: ops(p)[3].update(channel_type="port"), "does not work over port"),
    (lambda p: ops(p)[3]["src_buff"].pop(), "needs at least two sources"),
    (lambda p: ops(p)[3]["src_buff"][0].update(size=2), "differ in size"),
    (lambda p: ops(p)[3]["src_buff"][0].update(type="z"), "unknown buffer 'z'"),
    (lambda p: ops(p)[3]["src_buff"][1].update(buffer_id=1), "from 0 to 0"),
    (lambda p: ops(p)[4].update(barrier_id=16), "whole number from 0 to 15"),
    (lambda p: ops(p)[4].update(num_threadblocks=2), "is for 2 thread blocks, but 1"),
    (lambda p: ops(p).append({"name": "sem_acquire", "semaphore_ids": [0]}), "none to name"),
    (lambda p: p["gpus"][0]["threadblocks"].append({**block(p), "id": 1}), "waits for the same as thread"),
    (lambda p: p["gpus"][1].update(channels=[]), "from 0 to|there is none|has no other end"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_malformed_plans_are_refused_with_their_place(change: Callable[[Json], object], message: str) -> None:
    plan = tiny()
    change(plan)
    with pytest.raises(ScheduleError, match=message):
        check_plan(plan)


def test_a_signal_that_any_of_two_blocks_may_have_sent_orders_nothing() -> None:
    """A second block that signals on the channel could stand in for the first, whose write may still be under way."""
    plan = tiny()
    plan["gpus"][0]["scratch_chunks"] = 1
    span = {"index": 1, "size": 1}
    copy_out = {
        "name": "copy",
        "src_buff": [{"type": "i", **span}],
        "dst_buff": [{"type": "s", "index": 0, "size": 1}],
    }
    ops(plan).extend([{"name": "nop"}, copy_out])
    assert check_plan(plan)
    early = copy.deepcopy(plan["gpus"][1]["threadblocks"][0])
    early.update(id=1, ops=[early["ops"][0]])
    plan["gpus"][1]["threadblocks"].append(early)
    wait = {"name": "wait", "channel_ids": [0], "channel_type": "memory"}
    ops(plan).append(wait)
    with pytest.raises(VerificationError, match=r"op 3 \(rres\) and rank 0, thread block 0, op 8 \(copy\)"):
        check_plan(plan)
    ops(plan).insert(7, ops(plan).pop())  # all three are waited for before the copy, so all have been sent
    assert check_plan(plan)


def test_the_commands_write_and_verify_plans(tmp_path: Path) -> None:
    source, target = tmp_path / "ring.json", tmp_path / "ring.plan.json"
    source.write_text(json.dumps(made(star(num_ranks=3), "all_gather", "ring").to_json()))
    runner, app = CliRunner(), build_app()
    assert runner.invoke(app, ["export", str(source), "-o", str(target)]).exit_code == 0
    done = runner.invoke(app, ["verify", str(target)])
    assert done.exit_code == 0 and "all_gather over 3 ranks, out of place, 3 chunks" in done.stdout
    plan = json.loads(target.read_text())
    plan["gpus"][0]["threadblocks"][1]["ops"] = [
        op for op in plan["gpus"][0]["threadblocks"][1]["ops"] if op["name"] != "wait"
    ]
    target.write_text(json.dumps(plan))
    failed = runner.invoke(app, ["verify", str(target)])
    assert failed.exit_code == 1 and failed.stdout.startswith("wrong: all_gather over 3 ranks is wrong at rank")
