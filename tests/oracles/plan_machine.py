"""A machine that runs MSCCL++ plans on numbers, in an order that a random number generator picks, as late as it may.

Written without looking at the verifier. What a thread block does to data happens at any time until its threads meet,
piece by piece; what is put on a port, later, in turn. A packet can be read once it has the flag of the run. Ranks go
on to their next run as soon as they are through with one, with other numbers, and give their memory away between.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any

Json = dict[str, Any]
PRIME = (1 << 61) - 1
GARBAGE = -1
PACKET_SIDES = {
    "ppkt": (99, 0), "rppkt": (0, 0), "cpkt": (99, 0), "upkt": (0, 99), "repkt": (1, 99), "respkt": (1, 1),
    "recpkt": (1, 1), "recspkt": (1, 1), "gstorepkt": (0, 0),
}  # fmt: skip
SUMS = ("re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt", "glre", "glres")
ONE_TO_ALL = ("rppkt", "gstore", "gstorepkt")


class Machine:
    """Some runs of a plan.

    Args:
        plan: JSON object.
        seed: of the order, and of the numbers.
        units: pieces of a chunk.
        unit_bytes: of a piece, for pipelines.
        fold: pieces of a chunk of scratch, if it is shorter.
        runs: how often each rank runs the plan.
    """

    def __init__(
        self, plan: Json, seed: int, *, units: int = 1, unit_bytes: int = 16, fold: int | None = None, runs: int = 2
    ) -> None:
        self.plan, self.random, self.runs = plan, random.Random(seed), runs
        self.units, self.unit_bytes, self.fold = units, unit_bytes, fold or units
        self.n = len(plan["gpus"])
        self.halves = 2 if plan.get("use_double_scratch_buffer") else 1
        self.numbers: dict[Hashable, int] = {}
        self.memory: list[dict[str, list[int]]] = []
        self.scratch: list[list[list[int]]] = []
        self.flags: list[list[list[int]]] = []
        self.offset: list[dict[str, int]] = []
        for rank, gpu in enumerate(plan["gpus"]):
            given, got = gpu["input_chunks"] * units, gpu["output_chunks"] * units
            mine = {"i": [GARBAGE] * given, "o": [GARBAGE] * got}
            offset = {"i": 0, "o": 0, "s": 0}
            if plan["inplace"] and plan["collective"] == "allgather":
                mine["i"], offset["i"] = mine["o"], rank * given
            elif plan["inplace"]:
                mine["o"], offset["o"] = mine["i"], rank * got if plan["collective"] == "reducescatter" else 0
            self.memory.append(mine)
            self.offset.append(offset)
            length = gpu["scratch_chunks"] * self.fold
            self.scratch.append([[GARBAGE] * length for _ in range(self.halves)])
            self.flags.append([[0] * length for _ in range(self.halves)])
        ends: dict[tuple[int, int, str], list[int]] = {}
        self.groups: list[list[tuple[list[int], str]]] = [[] for _ in plan["gpus"]]
        for rank, gpu in enumerate(plan["gpus"]):
            for entry in gpu["channels"]:
                if entry["channel_type"] == "switch":
                    self.groups[rank] += [(group["ranks"], entry["buffer_type"]) for group in entry["rank_groups"]]
                    continue
                known = [key for key in ends if key[0] == rank and key[2] == entry["channel_type"]]
                number = sum(len(ends[key]) for key in known)
                for peer in entry["connected_to"]:
                    ends.setdefault((rank, peer, entry["channel_type"]), []).append(number)
                    number += 1
        self.other = {
            (a, kind, ours): (b, kind, theirs)
            for (a, b, kind), numbers in ends.items()
            for ours, theirs in zip(numbers, ends.get((b, a, kind), []), strict=False)
        }
        self.code = [[self.flat(r, block) for block in gpu["threadblocks"]] for r, gpu in enumerate(plan["gpus"])]
        self.count: Counter[Any] = Counter()
        for rank, gpu in enumerate(plan["gpus"]):
            for number, entry in enumerate(gpu.get("semaphores", ())):
                self.count[rank, number] = entry["init_value"]
        #: Of each block, what it has begun and may still do: the packets that it waits for, and the rest.
        self.late: dict[Any, list[tuple[list[Any], Callable[[], None]]]] = {}
        self.ports: dict[Any, deque[Callable[[], None]]] = {}
        self.at = {(r, b): 0 for r, blocks in enumerate(self.code) for b in range(len(blocks))}
        self.arrived: dict[Any, set[Any]] = {}
        self.run_of = [0] * self.n
        self.wrong: str | None = None

    # -- the plan, flat ---------------------------------------------------------------------------------------

    def flat(self, rank: int, block: Json) -> list[Json]:
        ops: list[Json] = []
        for op in block["ops"]:
            if op["name"] != "pipeline":
                ops.append({**op, "first": 0, "length": None})
                continue
            step = max(1, op["iter_context"]["unit_size"] // self.unit_bytes)
            total = op["iter_context"]["num_chunks"] * self.units
            for first in range(0, total, step):
                ops += [{**inner, "first": first, "length": min(step, total - first)} for inner in op["ops"]]
        return ops

    def value(self, rank: int, run: int, at: int) -> int:
        key = (rank, run, at)
        if key not in self.numbers:
            self.numbers[key] = random.Random(hash((key, 17))).randrange(1, PRIME)
        return self.numbers[key]

    # -- runs -------------------------------------------------------------------------------------------------

    def play(self) -> str | None:
        """What is wrong, or ``None``."""
        self.idle = set(range(self.n))
        for _ in range(1_000_000):
            if self.wrong:
                return self.wrong
            choices: list[tuple[str, Any]] = [("begin", rank) for rank in self.idle if self.run_of[rank] < self.runs]
            choices += [("step", key) for key in self.at if self.may_go(key)]
            for key, todo in self.late.items():
                run = self.run_of[key[0]]
                choices += [("late", (key, job)) for job in todo if all(self.is_there(cell, run) for cell in job[0])]
            choices += [("port", end) for end, queue in self.ports.items() if queue]
            if not choices:
                done = all(run == self.runs for run in self.run_of) and self.idle == set(range(self.n))
                return None if done else "waits for ever"
            what, key = self.random.choice(choices)
            if what == "begin":
                self.begin(key)
            elif what == "port":
                self.ports[key].popleft()()
            elif what == "late":
                block, job = key
                self.late[block].remove(job)
                job[1]()
                self.finish_if_done(block[0])
            else:
                self.step(key)
        return "goes on for ever"

    def begin(self, rank: int) -> None:
        self.idle.discard(rank)
        run, gpu = self.run_of[rank], self.plan["gpus"][rank]
        given, offset = self.memory[rank]["i"], self.offset[rank]["i"]
        for at in range(gpu["input_chunks"] * self.units):
            given[offset + at] = self.value(rank, run, at)
        for block in range(len(self.code[rank])):
            self.at[rank, block] = 0
        self.finish_if_done(rank)

    def finish_if_done(self, rank: int) -> None:
        blocks = range(len(self.code[rank]))
        if rank in self.idle or any(
            self.at[rank, b] < len(self.code[rank][b]) or self.late.get((rank, b)) for b in blocks
        ):
            return
        memory, first = self.memory[rank]["o"], self.offset[rank]["o"]
        length = self.plan["gpus"][rank]["output_chunks"] * self.units
        if not self.is_expected(rank, self.run_of[rank], memory[first : first + length]):
            self.wrong = f"rank {rank} ends run {self.run_of[rank]} with wrong numbers"
        for mine in self.memory[rank].values():
            mine[:] = [GARBAGE] * len(mine)
        self.run_of[rank] += 1
        self.idle.add(rank)

    def is_expected(self, rank: int, run: int, got: list[int]) -> bool:
        gpu, name = self.plan["gpus"][rank], self.plan["collective"]
        given = gpu["input_chunks"] * self.units
        ranks, size = range(self.n), len(got)
        if name == "allgather":
            return got == [self.value(r, run, at) for r in ranks for at in range(given)]
        if name == "alltoall":
            part = size // self.n
            return got == [self.value(r, run, rank * part + at) for r in ranks for at in range(part)]
        if name == "sendrecv":
            return any(got == [self.value(r, run, at) for at in range(size)] for r in ranks if r != rank)
        first = rank * size if name == "reducescatter" else 0
        return got == [sum(self.value(r, run, first + at) for r in ranks) % PRIME for at in range(size)]

    # -- steps ------------------------------------------------------------------------------------------------

    def block(self, key: Any) -> Json:
        found: Json = self.plan["gpus"][key[0]]["threadblocks"][key[1]]
        return found

    def ends(self, key: Any, op: Json) -> list[Any]:
        known = [
            i
            for e in self.block(key)["channels"]
            if e["channel_type"] == op["channel_type"]
            for i in e["channel_ids"]
        ]
        return [(key[0], op["channel_type"], known[index]) for index in op["channel_ids"]]

    def may_go(self, key: Any) -> bool:
        rank, number = key
        code = self.code[rank][number]
        if rank in self.idle or self.at[key] >= len(code):
            return False
        op = code[self.at[key]]
        if op["name"] in ("wait", "rlxwait"):
            return all(self.count[end] > 0 for end in self.ends(key, op))
        if op["name"] == "sem_acquire":
            return all(self.count[rank, s] > 0 for s in op["semaphore_ids"])
        if op["name"] == "flush":
            return not any(self.ports.get(end) for end in self.ends(key, op))
        if op["name"] in ("nop", "barrier"):
            if self.late.get(key):
                return False
            here = self.arrived.setdefault((rank, op.get("barrier_id")), set()) if op["name"] == "barrier" else set()
            return op["name"] == "nop" or key not in here
        return not (op["name"] == "rppkt" and op["channel_type"] == "port" and not self.has_come(key, op))

    def has_come(self, key: Any, op: Json) -> bool:
        if self.late.get(key):
            return False
        (cells,) = [self.cells(key, op, "src_buff", x, span) for x, span in enumerate(op["src_buff"])]
        return all(self.is_there(cell, self.run_of[key[0]]) for cell in cells)

    def step(self, key: Any) -> None:
        rank, number = key
        op = self.code[rank][number][self.at[key]]
        name = op["name"]
        if name in ("wait", "rlxwait"):
            self.count.subtract(self.ends(key, op))
        elif name == "sem_acquire":
            self.count.subtract((rank, s) for s in op["semaphore_ids"])
        elif name == "sem_release":
            self.count.update((rank, s) for s in op["semaphore_ids"])
        elif name in ("signal", "rlxsignal"):
            for end in self.ends(key, op):
                self.signal(end)
        elif name == "barrier":
            here = self.arrived[rank, op["barrier_id"]]
            here.add(key)
            if len(here) == op["num_threadblocks"]:
                for each in here:
                    self.at[each] += 1
                here.clear()
                self.finish_if_done(rank)
            return
        elif name not in ("nop", "flush"):
            self.data(key, op)
        self.at[key] += 1
        self.finish_if_done(rank)

    def signal(self, end: Any) -> None:
        if end[1] == "port":
            self.ports.setdefault(end, deque()).append(lambda: self.count.update([self.other[end]]))
        else:
            self.count[self.other[end]] += 1

    # -- data -------------------------------------------------------------------------------------------------

    def cells(self, key: Any, op: Json, side: str, x: int, span: Json) -> list[Any]:
        """Of one operand: (owner, letter, index, half or -1) of each piece, of a switch for each rank behind it."""
        rank = key[0]
        owners = [(rank, span.get("type"))]
        if "buffer_id" in span:
            refs = [
                i
                for entry in self.block(key)["remote_buffer_refs"]
                if entry["access_channel_type"] == op["channel_type"]
                for i in entry["remote_buffer_ids"]
            ]
            buffer = self.plan["gpus"][rank]["remote_buffers"][refs[span["buffer_id"]]]
            owners = [(buffer["rank"], buffer["type"])]
        elif "switch_channel_id" in span:
            known = [
                i for e in self.block(key)["channels"] if e["channel_type"] == "switch" for i in e["channel_ids"]
            ]
            ranks, letter = self.groups[rank][known[span["switch_channel_id"]]]
            owners = [(r, letter) for r in sorted(ranks)]
        total = span["size"] * self.units
        first, stop = 0, total
        if "tbg_info" in op:
            part, parts = op["tbg_info"]["tb_id"], op["tbg_info"]["tbg_size"]
            least, rest = divmod(total, parts)
            first, stop = (p * least + min(p, rest) for p in (part, part + 1))
        if op["length"] is not None:
            first, stop = op["first"], op["first"] + op["length"]
        packed = x >= PACKET_SIDES.get(op["name"], (99, 99))[side == "dst_buff"]
        half = self.run_of[rank] % self.halves
        made = []
        for owner, letter in owners:
            width = self.fold if letter == "s" else self.units
            base = span["index"] * width + self.offset[owner].get(letter, 0)
            made.append(
                [
                    (owner, letter, base + (at % width if op["length"] is not None else at), half, packed)
                    for at in range(first, stop)
                ]
            )
        if len(made) == 1:
            return made[0]
        return list(zip(*made, strict=True))

    def bank(self, cell: Any) -> list[int]:
        owner, letter, _, half, _ = cell
        return self.scratch[owner][half] if letter == "s" else self.memory[owner][letter]

    def is_there(self, cell: Any, run: int) -> bool:
        owner, _, at, half, packed = cell
        return not packed or self.flags[owner][half][at] == run + 1

    def read(self, cell: Any) -> int:
        return self.bank(cell)[cell[2]]

    def write(self, cell: Any, value: int, run: int) -> None:
        owner, _, at, half, packed = cell
        self.bank(cell)[at] = value
        if packed:
            self.flags[owner][half][at] = run + 1

    def data(self, key: Any, op: Json) -> None:
        run = self.run_of[key[0]]
        sides = []
        for side in ("src_buff", "dst_buff"):
            operands: list[list[Any]] = []
            for x, span in enumerate(op[side]):
                cells = self.cells(key, op, side, x, span)
                if "switch_channel_id" in span:
                    operands += [list(column) for column in zip(*cells, strict=True)]
                else:
                    operands.append(cells)
            sides.append(operands)
        sources, targets = sides
        name = op["name"]
        if op.get("channel_type") == "port":
            for x, (end, target) in enumerate(zip(self.ends(key, op), targets, strict=True)):
                source = sources[0] if name == "rppkt" else sources[x]
                for a, b in zip(source, target, strict=True):
                    self.ports.setdefault(end, deque()).append(lambda a=a, b=b: self.write(b, self.read(a), run))
                if name != "put" and name != "rppkt":
                    self.signal(end)
            if name == "pwsf":  # stands for its flush: nothing in the block goes on before
                for end in self.ends(key, op):
                    while self.ports[end]:
                        self.ports[end].popleft()()
            return
        jobs: list[tuple[list[Any], list[Any]]] = []
        for k in range(len(targets[0])):
            if name in SUMS or name in ONE_TO_ALL:
                jobs.append(([s[k] for s in sources], [t[k] for t in targets]))
            else:
                jobs += [([s[k]], [t[k]]) for s, t in zip(sources, targets, strict=True)]
        for reads, writes in jobs:
            waited = [cell for cell in reads if cell[4]]
            self.late.setdefault(key, []).append((waited, self.piece(key, reads, writes, run, name in SUMS)))

    def piece(self, key: Any, reads: list[Any], writes: list[Any], run: int, adds: bool) -> Callable[[], None]:
        def act() -> None:
            values = [self.read(cell) for cell in reads]
            value = GARBAGE if GARBAGE in values else sum(values) % PRIME
            for cell in writes:
                if adds or cell[:4] != reads[0][:4]:
                    self.late[key].append(([], lambda cell=cell: self.write(cell, value, run)))

        return act


def defect(plan: Json, seeds: range = range(3), **options: Any) -> str | None:
    """What some of several runs find wrong, or ``None``."""
    for seed in seeds:
        found = Machine(plan, seed, **options).play()
        if found:
            return found
    return None
