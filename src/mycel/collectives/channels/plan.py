"""Plans in the making: ranks, what they have, and the JSON that comes of it, verified."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from mycel.collectives.channels.blocks import PLACED, Block, Semaphore
from mycel.collectives.channels.ends import MemoryEnd, PortEnd, SwitchEnd, group_of
from mycel.collectives.channels.parts import BUFFERS, Buffer
from mycel.collectives.plan_text import plan_text
from mycel.collectives.verify import check_plan
from mycel.errors import ScheduleError, UsageError, VerificationError
from mycel.names import spelled

__all__ = ["ChannelPlan", "Group", "Rank"]

Json = dict[str, Any]
#: Collectives by our names, and by those in plans.
COLLECTIVES = {
    "all_gather": "allgather",
    "all_reduce": "allreduce",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "sendrecv": "sendrecv",
}
PROTOCOLS = ("Simple", "LL")
_ADDRESSABLE = (1 << 32) - 1
#: Meetings that are tried, times operations of the plan: some seconds.
_MOST_TRIED = 1 << 14
#: Of a place in a message of the verifier: rank, thread block and operation.
_PLACE = re.compile(r"rank (\d+), thread block (\d+), op (\d+)")


class Group:
    """Thread blocks of one rank that share work: each does its part of every operation on data.

    Attributes:
        blocks: in order; ``for block in group.blocks: block.copy(a, b)`` copies a part each. What is not data
            (signals, waits, barriers) is for one of them, or for each.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)


class Rank:
    """One rank of a plan.

    Attributes:
        number: from 0.
        input, output, scratch: its buffers.
        blocks: its thread blocks so far.
    """

    def __init__(self, number: int, given: int, got: int) -> None:
        self.number = number
        self.input, self.output = Buffer(number, "i", given), Buffer(number, "o", got)
        self.scratch = Buffer(number, "s", None)
        self.blocks: list[Block] = []
        self.semaphores: list[int] = []
        self.connected: dict[str, list[int]] = {"memory": [], "port": []}
        self.switches: list[tuple[tuple[int, ...], str]] = []
        self._barriers: dict[tuple[int, ...], int] = {}

    def block(self) -> Block:
        """A new thread block."""
        made = Block(self.number, len(self.blocks))
        self.blocks.append(made)
        return made

    def group(self, num_blocks: int) -> Group:
        """New thread blocks that share their work."""
        if num_blocks < 1:
            raise UsageError(f"rank {self.number}: a group of {num_blocks} thread blocks; at least one is needed")
        first = len(self.blocks)
        made = [Block(self.number, first + part, part=part, num_parts=num_blocks) for part in range(num_blocks)]
        self.blocks += made
        return Group(made)

    def semaphore(self, initial: int = 0) -> Semaphore:
        """A new counter between thread blocks of this rank."""
        self.semaphores.append(initial)
        return Semaphore(self.number, len(self.semaphores) - 1)

    def barrier(self, *blocks: Block) -> None:
        """Have thread blocks meet: none of them goes on before all have come."""
        if any(block.rank != self.number for block in blocks) or not blocks:
            raise UsageError(f"rank {self.number}: a barrier is between thread blocks of one rank")
        known = self._barriers.setdefault(tuple(sorted(block.number for block in blocks)), len(self._barriers))
        for block in blocks:
            block.barrier(known, len(blocks))


class ChannelPlan:
    """An MSCCL++ execution plan, written operation by operation.

    Args:
        collective: ``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all`` or ``sendrecv``.
        num_ranks: at least 2.
        name: of the plan.
        chunks: into which a rank's block of the array is cut: its part, or the whole array of an all_reduce.
        in_place: input and output are one array.
        protocol: ``LL`` where packets are used.
        has_two_scratches: runs use two halves of scratch in turns, so that packets of one run can be read while
            those of the next arrive.
        reuses_scratch: scratch is of a fixed length for all sizes.
        message_bytes: least and greatest length that the plan is for.
        num_threads: of a thread block.

    Attributes:
        ranks: with what they have.

    Raises:
        UsageError: an unknown collective or protocol.

    Examples:
        >>> plan = ChannelPlan("all_gather", 2, name="pair", in_place=True)
        >>> blocks = [rank.block() for rank in plan.ranks]
        >>> for rank, end in zip(plan.ranks, plan.memory(*blocks)):
        ...     end.signal(is_relaxed=True)
        ...     end.wait(is_relaxed=True)
        ...     end.put(rank.output[rank.number], plan.ranks[end.peer].output[rank.number])
        ...     end.signal()
        ...     end.wait()
        >>> [op["name"] for op in plan.build()["gpus"][0]["threadblocks"][0]["ops"]]
        ['rlxsignal', 'rlxwait', 'nop', 'put', 'nop', 'signal', 'wait']
    """

    def __init__(
        self,
        collective: str,
        num_ranks: int,
        *,
        name: str = "plan",
        chunks: int = 1,
        in_place: bool = False,
        protocol: str = "Simple",
        has_two_scratches: bool = False,
        reuses_scratch: bool = False,
        message_bytes: tuple[int, int] | None = None,
        num_threads: int = 1024,
    ) -> None:
        self.collective = spelled(collective, COLLECTIVES, "collective of plans")
        self.protocol = spelled(protocol, PROTOCOLS, "protocol")
        if num_ranks < 2 or chunks < 1:
            raise UsageError(f"a plan for {num_ranks} ranks in {chunks} chunks: at least 2 and 1 are needed")
        self.name, self.in_place = name, in_place
        self._flags = {"use_double_scratch_buffer": has_two_scratches, "reuse_resources": reuses_scratch}
        self._message_bytes, self._num_threads = message_bytes, num_threads
        many = chunks * num_ranks
        given, got = {
            "all_gather": (chunks, many),
            "reduce_scatter": (many, chunks),
            "all_to_all": (many, many),
        }.get(self.collective, (chunks, chunks))
        self.ranks = tuple(Rank(number, given, got) for number in range(num_ranks))

    def memory(self, first: Block, second: Block) -> tuple[MemoryEnd, MemoryEnd]:
        """The two ends of a new memory channel between blocks of two ranks."""
        numbers = self._connect("memory", first, second)
        return MemoryEnd(first, second.rank, numbers[0]), MemoryEnd(second, first.rank, numbers[1])

    def port(self, first: Block, second: Block) -> tuple[PortEnd, PortEnd]:
        """The two ends of a new port channel between blocks of two ranks."""
        numbers = self._connect("port", first, second)
        return PortEnd(first, second.rank, numbers[0]), PortEnd(second, first.rank, numbers[1])

    def switch(self, blocks: Sequence[Block], buffer: str) -> tuple[SwitchEnd, ...]:
        """The ends of a new switch channel, one for each block, in the order of the blocks.

        Args:
            blocks: of different ranks, all those behind the switch.
            buffer: ``input``, ``output`` or ``scratch``: which of each rank's.
        """
        letter = {word: letter for letter, word in BUFFERS.items()}[spelled(buffer, BUFFERS.values(), "buffer")]
        ranks = group_of(blocks)
        ends = []
        for block in blocks:
            mine = self.ranks[block.rank].switches
            mine.append((ranks, letter))
            ends.append(SwitchEnd(block, ranks, letter, len(mine) - 1))
        return tuple(ends)

    def _connect(self, kind: str, first: Block, second: Block) -> tuple[int, int]:
        if first.rank == second.rank:
            raise UsageError(f"a {kind} channel from rank {first.rank} to itself; blocks of a rank have semaphores")
        numbers = []
        for block, other in ((first, second), (second, first)):
            mine = self.ranks[block.rank].connected[kind]
            mine.append(other.rank)
            numbers.append(len(mine) - 1)
        return numbers[0], numbers[1]

    # -- what comes of it ---------------------------------------------------------------------------------

    def build(self) -> Json:
        """The plan as a JSON object, which is verified first.

        Meetings of threads (``nop``) that were placed, and without which the plan is just as right, are left out; of
        plans too long to try each, those stay that the order of a block's operations asks for.

        Raises:
            ScheduleError: it is beyond a limit of the runtime.
            VerificationError: it computes something wrong, or may; the message names the statements.
        """
        plan: Json = deepcopy(self._json())
        try:
            check_plan(plan)
            _thin_out(plan)
        except VerificationError as error:
            raise VerificationError(str(error) + self._statements(str(error)), grid=error.grid) from None
        except ScheduleError as error:
            raise ScheduleError(str(error) + self._statements(str(error).replace("GPU", "rank"))) from None
        return plan

    def to_text(self) -> str:
        """The plan as JSON text, which is verified first; errors as for ``build``."""
        return plan_text(self.build())

    def _statements(self, message: str) -> str:
        """The author's statements that a message speaks of."""
        found: list[str] = []
        for rank, number, at in _PLACE.findall(message):
            blocks = self.ranks[int(rank)].blocks
            if int(number) < len(blocks) and int(at) < len(blocks[int(number)].statements):
                file, line = blocks[int(number)].statements[int(at)]
                text = f"{Path(file).name}:{line}"
                if text not in found:
                    found.append(text)
        return f" (written at {' and '.join(found)})" if found else ""

    def _json(self) -> Json:
        given = max(self.ranks[0].input.num_chunks or 0, self.ranks[0].output.num_chunks or 0)
        most = max(given, *(rank.scratch.used for rank in self.ranks))
        least, largest = self._message_bytes or (0, _ADDRESSABLE // (most * 2) * given)
        return {
            "name": self.name,
            "collective": COLLECTIVES[self.collective],
            "protocol": self.protocol,
            "inplace": self.in_place,
            "reuse_resources": self._flags["reuse_resources"],
            "num_threads_per_block": self._num_threads,
            "use_double_scratch_buffer": self._flags["use_double_scratch_buffer"],
            "buffer_alignment": 16,
            "min_message_size": least,
            "max_message_size": largest,
            "gpus": [_gpu(rank) for rank in self.ranks],
        }


def _thin_out(plan: Json) -> None:
    """Take out of a right plan the meetings that it does not need, and the marks of those that it does."""
    lists = [block["ops"] for gpu in plan["gpus"] for block in gpu["threadblocks"]]
    lists += [op["ops"] for ops in lists for op in ops if "ops" in op]
    placed = [(ops, op) for ops in lists for op in ops if op.pop(PLACED, False)]
    if len(placed) * sum(map(len, lists)) > _MOST_TRIED:
        return
    for ops, op in placed:
        at = next(at for at, other in enumerate(ops) if other is op)
        del ops[at]
        try:
            check_plan(plan)
        except ScheduleError:
            ops.insert(at, op)


def _gpu(rank: Rank) -> Json:
    remote: dict[tuple[int, str], list[str]] = {}
    for block in rank.blocks:
        for kind, buffers in block.remote.items():
            for buffer in buffers:
                kinds = remote.setdefault(buffer, [])
                if kind not in kinds:
                    kinds.append(kind)
    order = list(remote)
    channels: list[Json] = [
        {"channel_type": kind, "connected_to": peers} for kind, peers in rank.connected.items() if peers
    ]
    channels += [
        {
            "channel_type": "switch",
            "buffer_type": letter,
            "rank_groups": [{"size": len(ranks), "ranks": list(ranks)}],
        }
        for ranks, letter in rank.switches
    ]
    return {
        "id": rank.number,
        "input_chunks": rank.input.num_chunks,
        "output_chunks": rank.output.num_chunks,
        "scratch_chunks": rank.scratch.used,
        "threadblocks": [
            {
                "id": block.number,
                "ops": block.ops,
                "channels": [
                    {"channel_type": kind, "channel_ids": numbers} for kind, numbers in block.channels.items()
                ],
                "remote_buffer_refs": [
                    {"access_channel_type": kind, "remote_buffer_ids": [order.index(buffer) for buffer in buffers]}
                    for kind, buffers in block.remote.items()
                ],
            }
            for block in rank.blocks
        ],
        "channels": channels,
        "remote_buffers": [
            {"rank": owner, "type": letter, "access_channel_types": kinds}
            for (owner, letter), kinds in remote.items()
        ],
        "semaphores": [{"init_value": value} for value in rank.semaphores],
    }
