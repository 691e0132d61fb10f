"""Tiers: both ways of a link go at a time, buffers come back, and the allocator keeps a limit."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mycel.comm import Pending
from mycel.errors import CommunicationError, UsageError
from mycel.memory import EmulatedLink, FarMemory, Link, allocator_limit, in_folder, in_host
from mycel.memory.tiers import SectionRing
from mycel.memory.tiers.near import NearMemory, flat, key_of


def test_there_and_back_again() -> None:
    link = EmulatedLink(bandwidth_gbps=10, out_gbps=5)
    near, far, again = torch.arange(100.0), torch.empty(100), torch.empty(100)
    link.store([(far, near)]).wait()
    link.fetch([(far, again)]).wait()
    assert torch.equal(near, again)
    assert (link.stored_bytes, link.fetched_bytes) == (400, 400)
    link.close()
    with pytest.raises(CommunicationError, match="the link is closed"):
        link.fetch([(far, again)])


def test_directions_go_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes out does not wait for what comes in: both have slept as long as their own line says."""
    slept: dict[str, list[float]] = {}

    def sleep(seconds: float) -> None:
        slept.setdefault(threading.current_thread().name.split("_")[0], []).append(seconds)

    monkeypatch.setattr("mycel.memory.tiers.link.time.perf_counter", lambda: 50.0)
    monkeypatch.setattr("mycel.memory.tiers.link.time.sleep", sleep)
    link = EmulatedLink(bandwidth_gbps=1e-6, out_gbps=5e-7, latency_s=0.25)
    a, b = torch.zeros(250), torch.zeros(250)
    for pending in [link.store([(a, b)]), link.fetch([(a, b)]), link.store([(a, b)])]:
        pending.wait()
    assert slept["mycel-link-out"] == pytest.approx([2.25, 4.5])
    assert slept["mycel-link-in"] == pytest.approx([1.25])
    link.close()


def test_a_link_of_ones_own_stores_at_once() -> None:
    class Own(Link):
        def fetch(self, copies: Any) -> Pending[None]:
            return Pending.done(None)

    far = torch.zeros(5)
    link = Own()
    link.store([(far, torch.ones(5))]).wait()
    assert far.sum() == 5 and link.stored_bytes == 20 and Own.stored_bytes == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"bandwidth_gbps": 0}, "GB/s of a link: 0 is not above 0"),
        ({"bandwidth_gbps": float("nan")}, "GB/s of a link: nan is not a number"),
        ({"bandwidth_gbps": "fast"}, "GB/s of a link: .* is not a number"),
        ({"bandwidth_gbps": 1, "out_gbps": -1}, "GB/s out: -1 is not above 0"),
        ({"bandwidth_gbps": 1, "latency_s": -1}, "latency in seconds"),
        ({"bandwidth_gbps": 1, "deadline_s": None}, "deadline in seconds"),
    ],
)
def test_links_that_cannot_be(words: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        EmulatedLink(**words)


@pytest.mark.parametrize("where", ["host", "folder"])
def test_buffers_come_back(where: str, tmp_path: Path) -> None:
    far = FarMemory(in_host if where == "host" else in_folder(tmp_path))
    first = [far.take(4096) for _ in range(3)]
    assert all(buffer.shape == (4096,) and buffer.dtype == torch.uint8 for buffer in first)
    first[0].fill_(7)
    assert int(first[1].sum()) == 0
    assert (far.used_bytes, far.held_bytes, far.peak_bytes) == (12288,) * 3
    for buffer in first:
        far.give(buffer)
    del buffer, first
    for _ in range(5):  # other sizes push out what nobody asks for any more
        taken = [far.take(5000), far.take(6000)]
        for buffer in taken:
            far.give(buffer)
    assert far.used_bytes == 0 and far.held_bytes <= far.peak_bytes == 12288
    far.clear()
    assert far.held_bytes == 0
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file for numbers can be made there"):
        FarMemory(in_folder(tmp_path / "nowhere")).take(100)
    with pytest.raises(UsageError, match=rf"{tmp_path}: no room for {1 << 60} bytes"):
        FarMemory(in_folder(tmp_path)).take(1 << 60)


def test_near_memory_counts_each_storage_once_while_it_lives() -> None:
    near = NearMemory(1000)
    one = torch.zeros(100, dtype=torch.uint8)
    view = one[10:20]
    claim = near.claim(600)
    assert claim is not None and near.claim(500) is None
    assert near.count(view, claim) == 100 and near.count(one) == 0
    assert (near.held, near.claimed) == (100, 500)
    assert torch.equal(flat(view), one) and flat(view).data_ptr() == one.data_ptr()
    near.release(claim)
    near.release(claim)
    assert near.claimed == 0 and near.knows(key_of(one))
    del one
    gc.collect()
    assert near.held == 100
    del view
    gc.collect()
    assert near.held == 0 and near.peak == 100


def test_the_allocator_keeps_the_limit_and_far_memory_does_not_count() -> None:
    pytest.importorskip("resource")
    with allocator_limit(48 << 20):
        far = FarMemory()
        buffers = [far.take(64 << 20) for _ in range(3)]
        buffers[0][:4096].fill_(1)
        with pytest.raises(RuntimeError):
            torch.empty(96 << 20, dtype=torch.uint8)
        small = torch.empty(24 << 20, dtype=torch.uint8)
    assert small.nbytes and torch.empty(96 << 20, dtype=torch.uint8).nbytes
    with pytest.raises(UsageError, match="a limit of -1 bytes"), allocator_limit(-1):
        pass


@pytest.mark.parametrize("again", [False, True])
def test_a_ring_has_what_computes_and_what_is_used_next(again: bool) -> None:
    """Beside a list of all uses in their order, cut after so many different ones."""
    chance = random.Random(5)
    for _ in range(200):
        count, units = chance.randint(1, 12), chance.randint(1, 6)
        uses = [chance.sample(range(units), chance.randint(0, min(3, units))) for _ in range(count)]
        slots = chance.randint(2, 5)
        ring = SectionRing(slots)
        for moment in range(count):
            later = [uses[moment:], uses[:moment]] if again else [uses[moment:]]
            wanted = list(dict.fromkeys(unit for some in later for each in some for unit in each))
            near = ring.near(uses, moment, again=again)
            assert list(near) == wanted[: max(slots, len(uses[moment]))]


@pytest.mark.parametrize("slots", [2, 3, 4, 5, 9])
def test_a_section_is_taken_by_what_is_so_many_further(slots: int) -> None:
    """Five layers in turn: where all have a section, none goes."""
    layers = [(layer,) for layer in range(5)]
    ring = SectionRing(slots)
    for layer in range(5):
        turned = ((layer,), ((layer + slots) % 5,)) if slots < 5 else ((), ())
        assert ring.turned(layers, layer) == turned
    with pytest.raises(UsageError, match="a ring of 1 slots"):
        SectionRing(1)
