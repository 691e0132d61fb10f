"""How fast channels may send: alone at what their path carries, with others at their share."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

from mycel.collectives.program import Channel
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective
from mycel.collectives.synth import methods_for, synthesize
from mycel.cost import Costs
from mycel.runtime import pacing
from mycel.runtime.calibration import costs_to_text
from mycel.runtime.fabric import Fabric
from mycel.runtime.membership import communicate
from mycel.runtime.pacing import LONG_S, Pacer, is_unpaced, path_pace, shared_paces
from mycel.runtime.transport.rendezvous import Address, Rendezvous
from mycel.settings import read_settings
from mycel.topology.builders import loopback, ring, star, two_boxes
from mycel.topology.json_format import to_json
from mycel.topology.model import Topology

FABRICS = [star(num_ranks=5, bandwidth="400 Mbit/s"), two_boxes(num_ranks=8, between="50 Mbit/s")]


@pytest.mark.parametrize("topology", FABRICS, ids=lambda t: t.name)
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_shares_fill_the_busiest_link_and_overrun_none(topology: Topology, name: str) -> None:
    n = topology.num_ranks
    for method in methods_for(name):
        schedule = synthesize(topology, Collective(name=name, num_ranks=n), method)  # type: ignore[arg-type]
        rates: dict[tuple[int, int], float] = {}
        for rank in range(n):
            for channel, pace in shared_paces(schedule, rank, 1.0).items():
                assert 0 < pace <= (path_pace(topology, channel, 1.0) or 0)
                for hop in pairwise(channel.path):
                    rates[hop] = rates.get(hop, 0.0) + pace
        unit = float(topology.bytes_per_second_per_unit or 0)
        filled = {hop: rate / (topology.capacity[hop] * unit) for hop, rate in rates.items()}
        room = 1.0 if schedule.depth == 1 else 1.1
        # Paces are whole numbers of bytes, at most 16 of them on a link here.
        assert max(filled.values()) <= room + 1e-5
        assert max(filled.values()) >= 0.99


def test_no_pace_where_nothing_is_known_or_the_kernel_is_too_slow() -> None:
    channel = Channel(src=0, dst=1, path=(0, 1))
    assert path_pace(ring(num_ranks=3), channel, 1.0) is None
    assert path_pace(ring(num_ranks=3, bandwidth="100 Gbit/s"), channel, 1.0) is None
    assert path_pace(ring(num_ranks=3, bandwidth="80 Mbit/s"), channel, 0.0) is None
    assert path_pace(ring(num_ranks=3, bandwidth="80 Mbit/s"), channel, 0.5) == 5_000_000
    fast = synthesize(loopback(num_ranks=3), Collective(name="all_gather", num_ranks=3))
    assert shared_paces(fast, 0, 1.0) == {}


def test_long_runs_share_and_short_ones_do_not() -> None:
    schedule = synthesize(FABRICS[0], Collective(name="all_to_all", num_ranks=5), "direct")
    with _paced(schedule) as paces:
        assert paces(LONG_S / 2) == [50_000_000]
        assert paces(LONG_S) == [int(Fraction(50_000_000, 4))]
        assert paces(LONG_S * 2) == [int(Fraction(50_000_000, 4))]
        assert paces(0.0) == [50_000_000]


def test_short_runs_share_where_one_rank_sends_everything() -> None:
    alone = synthesize(FABRICS[0], Collective(name="broadcast", num_ranks=5, root=0), "tree")
    assert {t.src for t in alone.transfers} == {0}
    with _paced(alone) as paces:
        assert paces(0.0) == paces(LONG_S) == [int(Fraction(50_000_000, 4))]
    chain = synthesize(FABRICS[0], Collective(name="broadcast", num_ranks=5, root=0), "forest")
    assert chain.depth > 1
    with _paced(chain) as paces:
        assert paces(0.0) == [50_000_000]


SLOW = json.dumps(to_json(star(num_ranks=2, bandwidth="400 Mbit/s")))
NO_LIMIT = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("topology", "asked", "pace"),
    [
        ("", {}, NO_LIMIT),
        (SLOW, {}, 48_499_999),
        (SLOW, {"MYCEL_PACE": "0"}, NO_LIMIT),
        ("", {"MYCEL_PACE": "0.5"}, 500_000_000),
    ],
)
def test_two_machines_hold_back_only_where_rates_were_given(
    topology: str, asked: dict[str, str], pace: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel says of the channels of two ranks that take each other for machines of their own."""
    monkeypatch.setattr("mycel.runtime.transport.rendezvous.is_loopback", lambda ip: False)
    if topology:
        (tmp_path / "fabric.json").write_text(topology, encoding="utf-8")
        asked = {**asked, "MYCEL_TOPOLOGY": str(tmp_path / "fabric.json")}
    settings = read_settings({**asked, "MYCEL_CACHE": str(tmp_path)})
    store = dist.HashStore()

    def be_rank(rank: int) -> set[int]:
        own = Address(host="ab"[rank], ip="127.0.0.1", port=0, pid=rank)
        rendezvous = Rendezvous(
            rank=rank, size=2, store=store, own=own, timeout_s=60.0, notice=costs_to_text(Costs())
        )
        fabric = Fabric(settings, [0, 1], 2)
        communicator = communicate(rendezvous, fabric, fabric.topology(rendezvous.addresses), 60.0, settings, None)
        plan = communicator.planner.plan("all_reduce", None, "forest")
        communicator._channels.open(plan.channels, communicator._attempt("a test", 60.0, (0, 0, 0)))
        descriptors = communicator._channels.descriptors
        outgoing = [socket.socket(fileno=os.dup(fd)) for channel, fd in descriptors.items() if channel.src == rank]
        option = pacing.SO_MAX_PACING_RATE
        found = {each.getsockopt(socket.SOL_SOCKET, option) & NO_LIMIT for each in outgoing}
        for each in outgoing:
            each.close()
        communicator.close()
        return found

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(be_rank, range(2))) == [{pace}, {pace}]


@contextmanager
def _paced(schedule: Schedule) -> Iterator[Callable[[float], list[int]]]:
    """The paces, each once, that rank 0's channels have in a run expected to take so many seconds."""
    channels = [c for c in {Channel(src=t.src, dst=t.dst, path=t.path) for t in schedule.transfers} if c.src == 0]
    sockets = {channel: socket.socket() for channel in channels}
    pacer = Pacer(0, 1.0)

    def paces(seconds: float) -> list[int]:
        descriptors = {channel: sock.fileno() for channel, sock in sockets.items()}
        pacer.adapt("schedule", schedule, seconds, descriptors)
        option = pacing.SO_MAX_PACING_RATE
        return sorted({sock.getsockopt(socket.SOL_SOCKET, option) & 0xFFFFFFFF for sock in sockets.values()})

    try:
        for sock in sockets.values():  # as they are opened
            sock.setsockopt(socket.SOL_SOCKET, pacing.SO_MAX_PACING_RATE, 50_000_000)
        yield paces
    finally:
        for sock in sockets.values():
            sock.close()


def test_where_nothing_has_a_pace() -> None:
    assert is_unpaced(loopback(num_ranks=3), 0.97)
    assert is_unpaced(star(num_ranks=3, bandwidth="400 Mbit/s"), 0), "nobody asked for one"
    assert not is_unpaced(star(num_ranks=3, bandwidth="400 Mbit/s"), 0.97)
    one_slow = two_boxes(num_ranks=4, inside="5 GB/s", between="50 Mbit/s")
    assert not is_unpaced(one_slow, 0.97)
