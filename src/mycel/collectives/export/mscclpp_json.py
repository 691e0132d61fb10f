"""MSCCL++ execution plans: the schedule's programs as thread blocks of puts, waits and sums.

Every message of the programs becomes a put. One that overwrites goes where the receiver wants it; one that is added
goes to a place of its own in the receiver's scratch, from where the receiver adds it. The messages of a channel are
dealt out to *lanes*: a lane is a channel of the plan, with a thread block that puts at one end and one that waits at
the other, and holds as many messages as the operations of a thread block allow.

- The receiver signals at the start, and nothing is put before: its memory was its caller's until then.
- After each put follows a signal; the receiver waits for it. A put through a port reads its source later, so ports
  end with a signal back.
- What an instruction needs from another thread block of its rank is handed over by a semaphore of its own.

Ranks that the topology places in one node share memory channels; all others, port channels. Schedules in which
switches add become plans with switch channels (``switch_plan``).

References:
    A. Shah, A. Jangda, B. Li, et al., "MSCCL++: Rethinking GPU communication abstractions for cutting-edge AI
    applications", arXiv 2504.09014, 2025, sections 4 and 5. Limits: microsoft/mscclpp, ``execution_common.hpp``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mycel.collectives.export.switch_plan import switch_plan
from mycel.collectives.lower import lower
from mycel.collectives.plan_text import plan_text
from mycel.collectives.program import Buffer, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.collectives.verify import check_plan
from mycel.errors import ScheduleError

__all__ = ["COLLECTIVE_NAMES", "MAX_OPERATIONS", "MAX_THREAD_BLOCKS", "export"]

#: Names of collectives in the format, and whether the plan is for one array in place; it has no place for a root.
COLLECTIVE_NAMES = {
    "all_reduce": ("allreduce", True),
    "all_gather": ("allgather", False),
    "reduce_scatter": ("reducescatter", False),
    "all_to_all": ("alltoall", False),
}
MAX_OPERATIONS = 64
#: Thread blocks wait for each other, so all must run at once: one a compute unit of an MI250's half, which has least.
MAX_THREAD_BLOCKS = 104
_SEMAPHORES_AN_OPERATION = 16
_THREADS = 1024
_ALIGNMENT = 16
#: Offsets in bytes are 32 bits wide.
_ADDRESSABLE = (1 << 32) - 1
_LETTERS = {Buffer.INPUT: "i", Buffer.OUTPUT: "o", Buffer.SCRATCH: "s"}
_FEWER = "a schedule with fewer chunks (forest with -k 1, tree, ring) may fit"

#: An instruction: its rank, and its row in the rank's program.
_Row = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class _Block:
    """One thread block as it is written; ``remote`` are the buffers of its peer that it puts to."""

    kind: str
    channel: int = -1
    ops: list[dict[str, Any]] = field(default_factory=list)
    remote: list[int] = field(default_factory=list)
    has_met: bool = True  # whether its threads have met since what the next operation must come after


@dataclass(slots=True, kw_only=True)
class _Lane:
    """Messages of one channel that share thread blocks: rows of sends and, at the other end, of receives."""

    src: int
    dst: int
    sends: list[int] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)


def export(schedule: Schedule, num_bytes: int) -> str:
    """JSON text; the plan is verified before it is given. ``num_bytes`` plays no part.

    Raises:
        ScheduleError: the collective has no name in the format, switches take part in another way than a switch
            channel can, or a limit is exceeded.
    """
    c = schedule.collective
    if c.name not in COLLECTIVE_NAMES:
        raise ScheduleError(f"MSCCL++ plans cannot express {c.name}; they can: {', '.join(COLLECTIVE_NAMES)}")
    if schedule.num_compute_vertices > c.num_ranks:
        return switch_plan(schedule).to_text()
    plan = _Writer(schedule).plan()
    check_plan(plan)
    return plan_text(plan)


class _Writer:
    """Builds one plan."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.programs = lower(schedule, schedule.num_units, piece_elements=schedule.num_units)
        self.needed_by = [_needed_by(program) for program in self.programs]
        self.lanes = self._lanes()
        n = schedule.collective.num_ranks
        self.blocks: list[list[_Block]] = [[] for _ in range(n)]
        self.peers: list[dict[str, list[int]]] = [{"memory": [], "port": []} for _ in range(n)]
        self.remote: list[dict[tuple[int, str, str], int]] = [{} for _ in range(n)]
        self.num_semaphores = [0] * n
        self.scratch = [program.scratch_elements for program in self.programs]
        #: Where the sum that an instruction takes in is put before: in scratch.
        self.landing: dict[_Row, int] = {}
        self.block_of: dict[_Row, int] = {}
        self.acquired: dict[_Row, list[int]] = {}
        self.released: dict[_Row, list[int]] = {}

    def plan(self) -> dict[str, Any]:
        """The JSON object."""
        self._check_sources()
        name, in_place = COLLECTIVE_NAMES[self.schedule.collective.name]
        self._place()
        self._assign_semaphores()
        self._write()
        chunks = [self._chunks(program) for program in self.programs]
        size = self.schedule.num_units // self.schedule.collective.num_parts
        most = max(max(mine.values()) for mine in chunks)
        return {
            "name": f"mycel_{self.schedule.method}_{name}",
            "collective": name,
            "protocol": "Simple",
            "inplace": in_place,
            "reuse_resources": False,
            "num_threads_per_block": _THREADS,
            "use_double_scratch_buffer": False,
            "buffer_alignment": _ALIGNMENT,
            "min_message_size": 0,
            "max_message_size": _ADDRESSABLE // most * size,
            "gpus": [self._gpu(rank, mine) for rank, mine in enumerate(chunks)],
        }

    def _check_sources(self) -> None:
        """Refuse programs that overwrite what a port may still read, as where partners add each other's sums."""
        for program in self.programs:
            for row, i in enumerate(program.instructions):
                sends = (other for n in i.needs if (other := program.instructions[n]).op == Op.SEND)
                ends = ((program.channels[s.channel].src, program.channels[s.channel].dst) for s in sends)
                if i.op != Op.SEND and any(self._kind(*pair) == "port" for pair in ends):
                    raise ScheduleError(
                        f"MSCCL++ plan: rank {program.rank}, instruction {row} puts a sum where an earlier one was "
                        "sent from, and a port reads what it sends at any time before the end; between ranks of one "
                        "node the plan can say it, and tree and forest need no such thing"
                    )

    # -- lanes --------------------------------------------------------------------------------------------

    def _lanes(self) -> list[_Lane]:
        """The messages of every channel, in order, with as many in a lane as fit a thread block at both ends."""
        rows: dict[tuple[Any, bool], list[int]] = {}
        for program in self.programs:
            for row, i in enumerate(program.instructions):
                if i.op != Op.COPY:
                    channel = program.channels[i.channel]
                    rows.setdefault((channel, i.op == Op.SEND), []).append(row)
        lanes: list[_Lane] = []
        for channel in sorted({channel for channel, _ in rows}):
            used = [MAX_OPERATIONS, MAX_OPERATIONS]
            for send, receive in zip(rows[channel, True], rows[channel, False], strict=True):
                cost = [self._most_operations(channel.src, send), self._most_operations(channel.dst, receive)]
                if any(a + b > MAX_OPERATIONS - 3 for a, b in zip(used, cost, strict=True)):
                    lanes.append(_Lane(src=channel.src, dst=channel.dst))
                    used = [0, 0]
                used = [a + b for a, b in zip(used, cost, strict=True)]
                lanes[-1].sends.append(send)
                lanes[-1].receives.append(receive)
        return lanes

    def _most_operations(self, rank: int, row: int) -> int:
        """Operations that an instruction becomes at most: put or sum, what announces it, and what it waits for."""
        acquires = -(-len(self.programs[rank].instructions[row].needs) // _SEMAPHORES_AN_OPERATION)
        releases = -(-len(self.needed_by[rank].get(row, ())) // _SEMAPHORES_AN_OPERATION)
        return 4 + acquires + releases

    # -- places -------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Thread blocks: the two of each lane, and one for a rank's copies; channels; where sums land."""
        for lane in self.lanes:
            kind = self._kind(lane.src, lane.dst)
            for rank, peer, rows in ((lane.src, lane.dst, lane.sends), (lane.dst, lane.src, lane.receives)):
                self.block_of |= {(rank, row): len(self.blocks[rank]) for row in rows}
                self.blocks[rank].append(_Block(kind=kind, channel=len(self.peers[rank][kind])))
                self.peers[rank][kind].append(peer)
            for row in lane.receives:
                i = self.programs[lane.dst].instructions[row]
                if i.op == Op.RECV_REDUCE:
                    self.landing[lane.dst, row] = self.scratch[lane.dst]
                    self.scratch[lane.dst] += i.count
        for rank, program in enumerate(self.programs):
            copies = [row for row, i in enumerate(program.instructions) if i.op == Op.COPY]
            for start in range(0, len(copies), MAX_OPERATIONS // 4):
                mine = copies[start : start + MAX_OPERATIONS // 4]
                self.block_of |= {(rank, row): len(self.blocks[rank]) for row in mine}
                self.blocks[rank].append(_Block(kind=""))
            if len(self.blocks[rank]) > MAX_THREAD_BLOCKS:
                raise ScheduleError(
                    f"MSCCL++ plan: rank {rank} needs {len(self.blocks[rank])} thread blocks of {MAX_OPERATIONS} "
                    f"operations; {MAX_THREAD_BLOCKS} are sure to run at once; {_FEWER}"
                )

    def _kind(self, a: int, b: int) -> str:
        vertices, ranks = self.schedule.topology.vertices, self.schedule.topology.ranks
        node = vertices[ranks[a]].node
        return "memory" if node is not None and node == vertices[ranks[b]].node else "port"

    def _assign_semaphores(self) -> None:
        """One for each pair of an instruction and another thread block that waits for it, the first time it does."""
        for rank, program in enumerate(self.programs):
            known: dict[tuple[int, int], int] = {}  # waiting and awaited block: the last row awaited
            for row, i in enumerate(program.instructions):
                mine = self.block_of[rank, row]
                for need in sorted(i.needs, reverse=True):
                    other = self.block_of[rank, need]
                    # What stands before a row in its block is complete when the row is.
                    if i.op == Op.RECV or other == mine or known.get((mine, other), -1) >= need:
                        continue
                    known[mine, other] = need
                    self.acquired.setdefault((rank, row), []).append(self.num_semaphores[rank])
                    self.released.setdefault((rank, need), []).append(self.num_semaphores[rank])
                    self.num_semaphores[rank] += 1

    # -- operations ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        for lane in self.lanes:
            self._write_sender(lane)
            self._write_receiver(lane)
        for rank, program in enumerate(self.programs):
            for row, i in enumerate(program.instructions):
                if i.op == Op.COPY:
                    block = self.blocks[rank][self.block_of[rank, row]]
                    self._await(block, rank, row)
                    block.ops.append(
                        {
                            "name": "copy",
                            "src_buff": [self._span(i.operand_buffer, i.operand_offset, i.count)],
                            "dst_buff": [self._span(i.buffer, i.offset, i.count)],
                        }
                    )
                    block.has_met = False
                    self._announce(block, rank, row)

    def _write_sender(self, lane: _Lane) -> None:
        block = self.blocks[lane.src][self.block_of[lane.src, lane.sends[0]]]
        self._wait(block)
        for send, receive in zip(lane.sends, lane.receives, strict=True):
            i, target = self.programs[lane.src].instructions[send], self.programs[lane.dst].instructions[receive]
            self._await(block, lane.src, send)
            is_sum = target.op == Op.RECV_REDUCE
            where = self.landing[lane.dst, receive] if is_sum else target.offset
            buffer = Buffer.SCRATCH if is_sum else target.buffer
            reference = self._reference(block, lane, self._letter(buffer))
            through_port = block.kind == "port"
            block.ops.append(
                {
                    "name": "pws" if through_port else "put",
                    "src_buff": [self._span(i.buffer, i.offset, i.count)],
                    "dst_buff": [{"buffer_id": reference, "index": where, "size": i.count}],
                    "channel_ids": [0],
                    "channel_type": block.kind,
                }
            )
            if not through_port:
                block.has_met = False
                self._signal(block)
            self._announce(block, lane.src, send)
        if block.kind == "port":
            self._wait(block)

    def _write_receiver(self, lane: _Lane) -> None:
        block = self.blocks[lane.dst][self.block_of[lane.dst, lane.receives[0]]]
        self._signal(block)
        for row in lane.receives:
            self._wait(block)
            i = self.programs[lane.dst].instructions[row]
            if i.op == Op.RECV_REDUCE:
                self._await(block, lane.dst, row)
                landed = {"type": "s", "index": self.landing[lane.dst, row], "size": i.count}
                block.ops.append(
                    {
                        "name": "re",
                        "src_buff": [self._span(i.operand_buffer, i.operand_offset, i.count), landed],
                        "dst_buff": [self._span(i.buffer, i.offset, i.count)],
                        "reduce_op": "sum",
                    }
                )
                block.has_met = False
            self._announce(block, lane.dst, row)
        if block.kind == "port":
            # It says that the puts are over: a sum after the last of them need not be.
            block.has_met |= block.ops[-1]["name"] == "re"
            self._signal(block)

    def _await(self, block: _Block, rank: int, row: int) -> None:
        """Wait for what a row needs from other thread blocks; then all threads of this one may go on."""
        for ids in _groups(self.acquired.get((rank, row), [])):
            block.ops.append({"name": "sem_acquire", "semaphore_ids": ids})
            block.has_met = False
        self._meet(block)

    def _announce(self, block: _Block, rank: int, row: int) -> None:
        """Tell other thread blocks that wait for a row that all threads of this one are through with it."""
        if ids := self.released.get((rank, row), []):
            self._meet(block)
            block.ops += [{"name": "sem_release", "semaphore_ids": group} for group in _groups(ids)]

    def _meet(self, block: _Block) -> None:
        if not block.has_met:
            block.ops.append({"name": "nop"})
            block.has_met = True

    def _signal(self, block: _Block) -> None:
        self._meet(block)
        block.ops.append({"name": "signal", "channel_ids": [0], "channel_type": block.kind})

    def _wait(self, block: _Block) -> None:
        block.ops.append({"name": "wait", "channel_ids": [0], "channel_type": block.kind})
        block.has_met = False

    def _reference(self, block: _Block, lane: _Lane, letter: str) -> int:
        """The number by which a thread block knows a buffer of its peer."""
        known = self.remote[lane.src]
        number = known.setdefault((lane.dst, letter, block.kind), len(known))
        if number not in block.remote:
            block.remote.append(number)
        return block.remote.index(number)

    def _letter(self, buffer: Buffer) -> str:
        in_place = COLLECTIVE_NAMES[self.schedule.collective.name][1]
        return "i" if in_place and buffer is Buffer.OUTPUT else _LETTERS[buffer]

    def _span(self, buffer: Buffer, index: int, size: int) -> dict[str, Any]:
        return {"type": self._letter(buffer), "index": index, "size": size}

    # -- GPUs ---------------------------------------------------------------------------------------------

    def _chunks(self, program: Program) -> dict[str, int]:
        got = program.length(Buffer.OUTPUT)
        in_place = COLLECTIVE_NAMES[self.schedule.collective.name][1]
        return {
            "input_chunks": got if in_place else program.length(Buffer.INPUT),
            "output_chunks": got,
            "scratch_chunks": self.scratch[program.rank],
        }

    def _gpu(self, rank: int, chunks: dict[str, int]) -> dict[str, Any]:
        return {
            "id": rank,
            **chunks,
            "threadblocks": [_block_json(number, block) for number, block in enumerate(self.blocks[rank])],
            "channels": [
                {"channel_type": kind, "connected_to": peers} for kind, peers in self.peers[rank].items() if peers
            ],
            "remote_buffers": [
                {"rank": peer, "type": letter, "access_channel_types": [kind]}
                for peer, letter, kind in self.remote[rank]
            ],
            "semaphores": [{"init_value": 0}] * self.num_semaphores[rank],
        }


def _needed_by(program: Program) -> dict[int, list[int]]:
    """Of each instruction, those that need it."""
    needed_by: dict[int, list[int]] = {}
    for row, i in enumerate(program.instructions):
        for need in i.needs:
            needed_by.setdefault(need, []).append(row)
    return needed_by


def _groups(ids: list[int]) -> list[list[int]]:
    """Semaphores, as many at once as an operation can name."""
    return [ids[start : start + _SEMAPHORES_AN_OPERATION] for start in range(0, len(ids), _SEMAPHORES_AN_OPERATION)]


def _block_json(number: int, block: _Block) -> dict[str, Any]:
    channels = [{"channel_type": block.kind, "channel_ids": [block.channel]}] if block.kind else []
    remote = [{"access_channel_type": block.kind, "remote_buffer_ids": block.remote}] if block.remote else []
    return {"id": number, "ops": block.ops, "channels": channels, "remote_buffer_refs": remote}
