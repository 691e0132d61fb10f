"""Control of many ranks: what each rank holds before its first call, and what it spends on what others say.

    python benchmarks/scale_control.py [--ranks 64 256 1024] [--per-node 8] [--inquiry] [--output FILE.jsonl]

All ranks of a group are in this process, connected by pairs of sockets as their machines would be, once by the graph
and, where descriptors suffice, once by a connection between every two. No data go anywhere. *open* is the most
descriptors that a rank has for control: its connections, two to wait for them, and the processes of its machine that
it follows. *ways* is how many connections lie between the two ranks that are furthest apart. Then processor time of a
rank, the mean of all: *word* for one word that a rank tells all, *death* to hear of a machine whose ranks are all
gone, and with ``--inquiry`` *inquiry* to hear from every rank where it stands. *MB* is what a rank needs in this
process, the mean, after that.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mycel.runtime.control import Control
from mycel.runtime.control_graph import Graph, control_graph, distances
from mycel.runtime.hearing import Hearing
from mycel.runtime.relay import Relay
from mycel.runtime.verdict import State
from record import append, stamp

#: Beside the connections of ranks: those of this process.
SPARE = 64


class Group:
    """All ranks of a group.

    Args:
        hosts: machine of each rank.
        is_graph: whether words are relayed.
    """

    def __init__(self, hosts: Sequence[str], *, is_graph: bool) -> None:
        size = len(hosts)
        everybody = tuple(range(size))
        self.hosts = hosts
        self.graph: Graph = (
            control_graph(hosts)
            if is_graph
            else tuple(everybody[:rank] + everybody[rank + 1 :] for rank in range(size))
        )
        ends: list[dict[int, socket.socket]] = [{} for _ in hosts]
        for rank, near in enumerate(self.graph):
            for peer in near:
                if rank < peer:
                    ends[rank][peer], ends[peer][rank] = socket.socketpair()
        for sock in [sock for mine in ends for sock in mine.values()]:
            sock.setblocking(False)
        self.ranks = {
            rank: Hearing(
                rank,
                size,
                Control(
                    ends[rank],
                    rank=rank,
                    size=size,
                    num_vertices=size + 1,
                    relay=Relay(rank, self.graph, hosts) if is_graph else None,
                ),
            )
            for rank in range(size)
        }
        self.settle()

    def settle(self) -> None:
        """Have ranks read until there is nothing left to read."""
        poller = select.epoll()
        owners = {}
        for hearing in self.ranks.values():
            descriptor = int(hearing.control.descriptors[0])
            poller.register(descriptor, select.EPOLLIN)
            owners[descriptor] = hearing
        while ready := poller.poll(0, len(owners)):
            for descriptor, _ in ready:
                owners[descriptor].observe()
        poller.close()

    def time(self, act: Callable[[], object]) -> float:
        """Processor seconds of a rank, the mean, until all have heard of it."""
        began = time.process_time()
        act()
        self.settle()
        return (time.process_time() - began) / len(self.ranks)

    def most_open(self) -> int:
        """Descriptors of the rank that has most."""
        followed = (
            sum(self.hosts[peer] == self.hosts[rank] for peer in near) for rank, near in enumerate(self.graph)
        )
        return max(len(near) + 2 + here for near, here in zip(self.graph, followed, strict=True))

    def say_all(self) -> None:
        """Every rank says where it stands, in as many words as after many calls."""
        recent = tuple((number, 1 << 40, 1 << 20) for number in range(128))
        for rank, hearing in self.ranks.items():
            hearing.say(State(what="all_reduce #129", waits_for=((rank + 1) % 8,), header=recent[-1], recent=recent))
            hearing.observe()

    def lose(self, machine: str) -> None:
        """A machine's ranks end."""
        for rank in [rank for rank, host in enumerate(self.hosts) if host == machine]:
            self.ranks.pop(rank).control.after_fork_in_child()  # closes without a goodbye, as the kernel does

    def close(self) -> None:
        """Close everything, without a word."""
        for hearing in self.ranks.values():
            hearing.control.after_fork_in_child()


def memory_mb() -> float:
    """Memory of this process that it shares with no other, in MB."""
    rows = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Private_")) * 1024 / 1e6


def measure(num_ranks: int, per_node: int, *, is_graph: bool, has_inquiry: bool) -> dict[str, Any]:
    """One group."""
    hosts = [f"node{rank // per_node}" for rank in range(num_ranks)]
    gc.collect()
    before = memory_mb()
    began = time.process_time()
    group = Group(hosts, is_graph=is_graph)
    found = {"form_s": (time.process_time() - began) / num_ranks, "open": group.most_open()}
    found["ways"] = max(max(distances(group.graph, rank)) for rank in range(0, num_ranks, max(1, num_ranks // 64)))
    if has_inquiry:
        found["inquiry_s"] = group.time(group.say_all)
        if any(len(hearing.said()[0]) != num_ranks for hearing in group.ranks.values()):
            raise RuntimeError("a rank has not heard all others")
    found["memory_mb"] = (memory_mb() - before) / num_ranks
    found["death_s"] = group.time(lambda: group.lose(hosts[num_ranks // 2]))
    lost = {rank for rank, host in enumerate(hosts) if host == hosts[num_ranks // 2]}
    if any(hearing.control.gone != lost for hearing in group.ranks.values()):
        raise RuntimeError(f"not all ranks know that {sorted(lost)} are gone, and no other")
    found["word_s"] = group.time(lambda: group.ranks[0].poison("failed", "rank 0: the end"))
    if len({str(hearing.cause) for hearing in group.ranks.values()}) != 1:
        raise RuntimeError("not all ranks have heard the same")
    group.close()
    how = "graph" if is_graph else "mesh"
    return {"ranks": num_ranks, "per_node": per_node, "control": how, **found, **stamp()}


def fits(num_ranks: int) -> bool:
    """Whether this process may have a connection between every two ranks."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return num_ranks * (num_ranks + 1) + SPARE <= limit


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=(64, 256, 1024))
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--inquiry", action="store_true", help="every rank says where it stands: minutes for 1,024")
    parser.add_argument("--output", type=Path, help="append a JSON line for each row")
    asked = parser.parse_args()
    print(
        f"{'ranks':>6} {'control':8}{'open':>6}{'ways':>6}{'form, ms':>10}{'word, us':>10}{'death, us':>11}"
        f"{'inquiry, ms':>13}{'MB':>7}"
    )
    for num_ranks in asked.ranks:
        for is_graph in (True, False):
            if not is_graph and not fits(num_ranks):
                print(f"{num_ranks:6} mesh    {num_ranks + 1 + asked.per_node - 1:6}  (too many for this process)")
                continue
            found = measure(num_ranks, asked.per_node, is_graph=is_graph, has_inquiry=asked.inquiry)
            inquiry = f"{1e3 * found['inquiry_s']:13.1f}" if asked.inquiry else f"{'-':>13}"
            print(
                f"{num_ranks:6} {found['control']:8}{found['open']:6}{found['ways']:6}{1e3 * found['form_s']:10.2f}"
                f"{1e6 * found['word_s']:10.0f}{1e6 * found['death_s']:11.0f}{inquiry}{found['memory_mb']:7.2f}"
            )
            sys.stdout.flush()
            if asked.output:
                append(asked.output, [json.loads(json.dumps(found))])


if __name__ == "__main__":
    main()
