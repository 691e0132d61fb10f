"""Plans in the channel language: what thread blocks of GPUs do, operation by operation.

Each function gives a plan that is verified when it is built. Run this file to write them as MSCCL++ execution plans
into a folder; ``mycel verify FILE`` looks at them again, and ``mycel.runtime.register(FILE)`` runs them on CPU ranks.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

from mycel.collectives.channels import ChannelPlan


def pairs(num_ranks: int = 4) -> ChannelPlan:
    """all_gather: a thread block for each peer puts the rank's part there."""
    plan = ChannelPlan("all_gather", num_ranks, name="pairs", in_place=True)
    for one in plan.ranks:
        for other in plan.ranks[one.number + 1 :]:
            for end in plan.memory(one.block(), other.block()):
                mine = end.block.rank
                end.signal(is_relaxed=True)
                end.wait(is_relaxed=True)
                end.put(plan.ranks[mine].output[mine], plan.ranks[end.peer].output[mine])
                end.signal()
                end.wait()
    return plan


def packets(num_ranks: int = 4) -> ChannelPlan:
    """all_reduce of small arrays: everybody sends packets to the owner of a chunk, who sends packets back."""
    plan = ChannelPlan(
        "all_reduce",
        num_ranks,
        name="packets",
        chunks=num_ranks,
        in_place=True,
        protocol="LL",
        has_two_scratches=True,
    )
    n = num_ranks
    blocks = [rank.block() for rank in plan.ranks]
    ends = {}
    for a, b in combinations(range(n), 2):
        ends[a, b], ends[b, a] = plan.memory(blocks[a], blocks[b])
    for rank in plan.ranks:
        mine, others = rank.number, [r for r in plan.ranks if r is not rank]
        for other in others:
            ends[mine, other.number].put_packets(rank.input[other.number], other.scratch[mine])
        blocks[mine].reduce_packets(
            rank.input[mine],
            rank.input[mine],
            *(rank.scratch[other.number] for other in others),
            to=[other.scratch[n + mine] for other in others],
        )
        for other in others:
            blocks[mine].unpack(rank.scratch[n + other.number], rank.input[other.number])
    return plan


def switch(num_ranks: int = 4) -> ChannelPlan:
    """all_reduce through a switch that adds: each rank has one chunk added and written to all."""
    plan = ChannelPlan("all_reduce", num_ranks, name="switch", chunks=num_ranks, in_place=True)
    blocks = [rank.block() for rank in plan.ranks]
    ends = [end for a, b in combinations(blocks, 2) for end in plan.memory(a, b)]
    for end in ends:
        end.signal(is_relaxed=True)
    for end in ends:
        end.wait(is_relaxed=True)
    for end in plan.switch(blocks, "input"):
        end.reduce_broadcast(end.block.rank)
    for end in ends:
        end.signal()
    for end in ends:
        end.wait()
    return plan


def group(num_ranks: int = 2, num_blocks: int = 4) -> ChannelPlan:
    """all_gather: several thread blocks share each put."""
    plan = ChannelPlan("all_gather", num_ranks, name="group", in_place=True, message_bytes=(64 * num_ranks, 1 << 30))
    for one in plan.ranks:
        for other in plan.ranks[one.number + 1 :]:
            sides = [rank.group(num_blocks) for rank in (one, other)]
            ends = plan.memory(sides[0].blocks[0], sides[1].blocks[0])
            for rank, side, end in zip((one, other), sides, ends, strict=True):
                source, target = rank.output[rank.number], plan.ranks[end.peer].output[rank.number]
                end.signal(is_relaxed=True)
                end.wait(is_relaxed=True)
                rank.barrier(*side.blocks)
                for block in side.blocks:
                    end.of(block).put(source, target)
                rank.barrier(*side.blocks)
                end.signal()
                end.wait()
    return plan


def pipeline(num_ranks: int = 2, unit_bytes: int = 1 << 16) -> ChannelPlan:
    """all_gather by way of scratch: one thread block puts pieces, and another copies out what has come."""
    plan = ChannelPlan("all_gather", num_ranks, name="pipeline")
    for one in plan.ranks:
        for other in plan.ranks:
            if one is other:
                continue
            sender, taker = one.block(), other.block()
            there, here = plan.memory(sender, taker)
            here.signal(is_relaxed=True)
            there.wait(is_relaxed=True)
            with sender.pipeline(unit_bytes):
                there.put(one.input[0], other.scratch[one.number])
                there.signal()
            with taker.pipeline(unit_bytes):
                here.wait()
                taker.copy(other.scratch[one.number], other.output[one.number])
            here.signal()
            there.wait()
        one.block().copy(one.input[0], one.output[one.number])
    return plan


def shift(num_ranks: int = 4) -> ChannelPlan:
    """sendrecv: every rank's input goes to the next one through a port, which is flushed at the end."""
    plan = ChannelPlan("sendrecv", num_ranks, name="shift")
    for rank in plan.ranks:
        following = plan.ranks[(rank.number + 1) % num_ranks]
        there, here = plan.port(rank.block(), following.block())
        here.signal()
        there.wait()
        there.put(rank.input[0], following.output[0], with_signal=True, with_flush=True)
        here.wait()
    return plan


def reduce_scatter(num_ranks: int = 3) -> ChannelPlan:
    """reduce_scatter: each rank reads its chunk from all others and adds, and all wait until it has been read."""
    plan = ChannelPlan("reduce_scatter", num_ranks, name="reads", in_place=True)
    blocks = [rank.block() for rank in plan.ranks]
    ends = [end for a, b in combinations(blocks, 2) for end in plan.memory(a, b)]
    for end in ends:
        end.signal(is_relaxed=True)
    for end in ends:
        end.wait(is_relaxed=True)
    for rank, block in zip(plan.ranks, blocks, strict=True):
        own = rank.input[rank.number]
        block.reduce(own, own, *(other.input[rank.number] for other in plan.ranks if other is not rank))
    for end in ends:
        end.signal()
    for end in ends:
        end.wait()
    return plan


#: All of them.
PLANS = (pairs, packets, switch, group, pipeline, shift, reduce_scatter)


def main(folder: str) -> None:
    """Write all plans into a folder."""
    for make in PLANS:
        Path(folder, f"{make.__name__}.plan.json").write_text(make().to_text())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
