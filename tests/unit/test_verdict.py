"""Which link failed, and who is to blame, from what ranks report: pure functions, tried on made-up failures."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycel.collectives.program import Channel
from mycel.errors import TopologyError
from mycel.runtime.control import Control
from mycel.runtime.evidence import Evidence, Hop, collect, failed_links, has_stalled, link_names, probe
from mycel.runtime.faults import Faults
from mycel.runtime.headers import ALL_TO_ALL_V, pack_kind
from mycel.runtime.inquiry import Inquiry
from mycel.runtime.messages import Position
from mycel.runtime.verdict import State, disagreement, is_common, is_whole_without, judge_states, without_links
from mycel.topology.builders import ring, star
from mycel.topology.model import Topology

STAR = star(num_ranks=4, bandwidth="100 Mbit/s")
RING = ring(num_ranks=4, bandwidth="100 Mbit/s")
ALL_REDUCE = pack_kind("all_reduce", 0, 0, None, 0)


def paths(topology: Topology) -> list[tuple[int, ...]]:
    """Of channels between all ranks of a star, or neighbours of a ring."""
    hops = {(link.src, link.dst) for link in topology.links}
    if not topology.switches:
        return sorted(hops)
    (switch,) = topology.switches
    return [(a, switch, b) for a in topology.ranks for b in topology.ranks if a != b]


def after(topology: Topology, dead: set[Hop], *, mute: set[int] = frozenset()) -> dict[int, Evidence]:  # type: ignore[assignment]
    """What ranks would see; the bytes of those who are mute reach nobody."""
    found: dict[int, Evidence] = {}
    ways = paths(topology)

    def broken(path: tuple[int, ...]) -> bool:
        return bool(dead & set(pairwise(path)))

    for rank, vertex in enumerate(topology.ranks):
        stuck, clear, got = [], [], []
        for path in ways:
            src, dst = topology.rank_of[path[0]], topology.rank_of[path[-1]]
            if path[0] == vertex:
                # Acknowledgements come back the same way.
                if broken(path) or broken(path[::-1]):
                    stuck.append((dst, path, 101))
                else:
                    clear.append(path)
            elif path[-1] == vertex:
                got.append((src, path, 100 if broken(path) else 101))
        found[rank] = Evidence(stuck=tuple(stuck), clear=tuple(clear), got=tuple(got))
    return {rank: one for rank, one in found.items() if rank not in mute}


@pytest.mark.parametrize("topology", [STAR, RING], ids=["star", "ring"])
def test_a_broken_direction_is_named_and_the_other_is_not(topology: Topology) -> None:
    for link in topology.links:
        hop = (link.src, link.dst)
        seen = after(topology, {hop})
        assert failed_links(seen) == ((hop,),)
        name = f"link {topology.label(link.src)} -> {topology.label(link.dst)}"
        assert link_names(topology, failed_links(seen), seen) == name


@given(st.sets(st.sampled_from([(link.src, link.dst) for link in RING.links]), min_size=1))
def test_every_broken_link_of_a_ring_is_named(dead: set[Hop]) -> None:
    assert {hop for group in failed_links(after(RING, dead)) for hop in group} == dead


@given(st.sampled_from([(link.src, link.dst) for link in STAR.links]), st.booleans())
def test_links_that_carry_bytes_are_never_named(hop: Hop, both: bool) -> None:
    dead = {hop, hop[::-1]} if both else {hop}
    named = {hop for group in failed_links(after(STAR, dead)) for hop in group}
    assert named == dead


def test_a_rank_that_is_cut_off_is_silent_and_so_is_its_link() -> None:
    dead = {(2, 4), (4, 2)}
    seen = after(STAR, dead, mute={2})
    state = State(what="all_reduce #3", waits_for=(2,), header=(3, ALL_REDUCE, 64), limit_s=5.0)
    verdict = judge_states(dict.fromkeys(seen, state), seen, STAR, str)
    assert verdict.silent == (2,)
    assert "all_reduce #3 reached its timeout of 5 s: rank 2 is silent" in verdict.message
    assert f"link {STAR.label(2)} - {STAR.label(4)}" in verdict.message
    alone = after(STAR, dead, mute={0, 1, 3})
    verdict = judge_states({2: replace(state, waits_for=(0, 1))}, alone, STAR, str)
    assert f"link {STAR.label(2)} - {STAR.label(4)}" in verdict.message


def test_a_rank_that_plans_is_not_called_silent() -> None:
    state = State(what="all_gather #65", waits_for=(1, 2), header=(65, ALL_REDUCE, 64), limit_s=120.0)
    plans = {1: "all_gather over star4"}
    verdict = judge_states({0: state, 3: state}, {}, STAR, str, plans)
    assert verdict.message.startswith("all_gather #65 reached its timeout of 120 s: rank 2 is silent (stopped, ")
    assert verdict.message.endswith("rank 1 is planning all_gather over star4; waited for by rank 0, rank 3")
    only = judge_states({rank: replace(state, waits_for=(1,)) for rank in (0, 2, 3)}, {}, STAR, str, plans)
    assert ": rank 1 is planning all_gather over star4 (" in only.message and "silent" not in only.message
    there = judge_states(dict.fromkeys(range(4), state), {}, STAR, str, plans)  # it was ready while others decided
    assert "planning" not in there.message


def test_nothing_is_named_without_evidence() -> None:
    state = State(what="barrier #1", waits_for=(1,), header=(1, ALL_REDUCE, 4), limit_s=5.0)
    verdict = judge_states({0: state, 1: replace(state, waits_for=(0,))}, {0: Evidence(), 1: Evidence()}, STAR, str)
    assert "no rank silent and no link down: rank 0 in barrier #1 waits for [1]; rank 1" in verdict.message
    assert not verdict.links


def test_the_odd_one_out_comes_first() -> None:
    state = State(what="", waits_for=(), header=(7, ALL_REDUCE, 64))
    odd = replace(state, header=(7, ALL_REDUCE, 128))
    said = disagreement({0: state, 1: state, 2: odd, 3: state}, lambda _: "float32")
    assert said == (
        "ranks do not agree: rank 2 called all_reduce #7 of 128 bytes of float32, op SUM, "
        "rank 0, rank 1, rank 3 called all_reduce #7 of 64 bytes of float32, op SUM"
    )


def test_a_rank_that_has_gone_on_is_held_to_what_it_called() -> None:
    barrier = (7, pack_kind("barrier", 0, 0, None, 0), 4)
    state = State(
        what="", waits_for=(), header=(9, ALL_REDUCE, 64), recent=((7, ALL_REDUCE, 64), (8, ALL_REDUCE, 64))
    )
    assert disagreement({0: state, 1: state, 2: replace(state, header=barrier, recent=())}, str).startswith(
        "ranks do not agree: rank 2 called barrier #7"
    )


def test_a_rank_says_more_where_another_is_further_behind() -> None:
    """Small calls go into a ring before anybody takes them: whoever sends is hundreds ahead of the one that errs."""
    odd = State(
        what="", waits_for=(), header=(3, pack_kind("barrier", 0, 0, None, 0), 4), recent=((2, ALL_REDUCE, 64),)
    )
    first = State(what="", waits_for=(), header=(900, ALL_REDUCE, 64), recent=((800, ALL_REDUCE, 64),))
    more = replace(first, recent=((3, ALL_REDUCE, 64), (4, ALL_REDUCE, 64)))
    book = Inquiry(rank=0)
    book.note(Position(by=0, inquiry=(0, 0), state=odd))
    assert book.file(Position(by=1, inquiry=(0, 0), state=first))
    assert not disagreement(book.states, str) and not is_common(book.states)
    assert book.file(Position(by=1, inquiry=(0, 0), state=more))
    assert disagreement(book.states, str).startswith("ranks do not agree: rank 0 called barrier #3")
    assert is_common(book.states)
    for again in (more, first):
        assert not book.file(Position(by=1, inquiry=(0, 0), state=again))
    assert book.states[1] == more


def test_what_may_differ() -> None:
    state = State(what="", waits_for=(), header=(7, ALL_REDUCE, 64))
    uneven = replace(state, header=(7, pack_kind(ALL_TO_ALL_V, 0, 0, None, 0), 10))
    commit = replace(state, header=(7, pack_kind("commit", 0, 0, None, 0), 4), is_committing=True)
    for others in (
        replace(state, header=(8, pack_kind("barrier", 0, 0, None, 0), 4)),
        commit,
    ):
        assert not disagreement({0: state, 1: others}, str)
    assert not disagreement({0: uneven, 1: replace(uneven, header=(*uneven.header[:2], 20))}, str)


def test_what_is_said_survives_the_way() -> None:
    seen = after(RING, {(0, 1)})[0]
    assert Evidence.from_record(json.loads(json.dumps(seen.to_record())), 4, 5) == seen
    state = State(
        what="x",
        waits_for=(1, 2),
        header=(1, 2, 3),
        is_committing=True,
        limit_s=2.5,
        mismatch="y",
        recent=((0, 2, 4),),
        may_wait=False,
    )
    assert State.from_record(json.loads(json.dumps(state.to_record())), 4) == state


def test_a_probe_takes_no_place_among_the_data() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    out, back = Channel(src=0, dst=1, path=(0, 4, 1)), {Channel(src=0, dst=1, path=(0, 4, 1)): receiver.fileno()}
    with sender, receiver:
        sender.sendall(b"before")
        probe({out: sender.fileno()}, 0)
        sender.sendall(b"after")
        assert receiver.recv(100) == b"before"
        assert receiver.recv(100) == b"after"
        receiver.sendall(b"back")
        assert sender.recv(4) == b"back"  # so that everything before it is acknowledged
        seen = collect({out: sender.fileno()}, 0, frozenset({1}), 0.5)
        assert (seen.stuck, seen.clear, seen.heard) == ((), (out.path,), frozenset({1}))
        unopened = Channel(src=0, dst=2, path=(0, 4, 2))
        seen = collect({out: sender.fileno()}, 0, frozenset(), 0.5, unopened)
        assert failed_links({0: seen}) == (((4, 2),),)
        assert collect(back, 1, frozenset(), 0.5).got[0][:2] == (0, out.path)
        assert not has_stalled({out: sender.fileno()}, 0)


def test_a_new_epoch_begins_without_the_words_of_the_old_one() -> None:
    """A collective that is run again has the same number and another schedule: that is no mismatch."""
    faults = Faults(rank=0, size=2, control=Control({}), dtype_names=str, topology=RING, channels=dict, reroutes=True)
    faults.recent.append((1, ALL_REDUCE, 64))
    left = without_links(RING, frozenset({(0, 1)}))
    faults.next_epoch(left)
    assert (faults.epoch, faults.topology, list(faults.recent)) == (1, left, [])


def test_a_fabric_without_a_cable() -> None:
    left = without_links(RING, frozenset({(0, 1)}))
    assert {(link.src, link.dst) for link in RING.links} - {(link.src, link.dst) for link in left.links} == {
        (0, 1),
        (1, 0),
    }
    with pytest.raises(TopologyError, match="rank 2"):
        without_links(STAR, frozenset({(2, 4)}))
    assert is_whole_without(RING, frozenset({(0, 1)}))
    assert not is_whole_without(STAR, frozenset({(2, 4)}))
