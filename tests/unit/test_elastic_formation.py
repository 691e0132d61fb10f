"""Forming groups from handles: who is let in, who is named when somebody does not come, what the members share."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.settled import settled

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError, UsageError
from mycel.records import RecordSocket
from mycel.runtime.elastic.formation import Formation, own_place, places_in_fabric
from mycel.runtime.elastic.handle import Handle, in_rank_order
from mycel.runtime.elastic.proofs import proof, proves
from mycel.settings import Settings
from mycel.topology.builders import ring
from mycel.topology.json_format import to_json

LIMIT = timedelta(seconds=20)


class Formed:
    """What stands for a group here: it says how it was made."""

    def __init__(self, store: dist.Store, rank: int, size: int, *rest: Any) -> None:
        self.store, self.rank, self.size, self.rest = store, rank, size, rest

    def set_timeout(self, timeout: timedelta) -> None:
        pass


@pytest.fixture
def formations() -> Iterator[list[Formation]]:
    made = [Formation() for _ in range(4)]
    yield made
    for formation in made:
        formation.close()


def form(
    formations: Sequence[Formation], uuid: int, handles: Sequence[str] | set[str], timeout: timedelta = LIMIT
) -> list[Any]:
    """What each one gets, or the error it gets instead."""

    def one(formation: Formation) -> Any:
        try:
            return formation.form(formation.plan(uuid, handles), timeout, Formed, LIMIT)
        except (CommunicationError, UsageError) as error:
            return error

    with ThreadPoolExecutor(len(formations)) as pool:
        return list(pool.map(one, formations))


def texts(formations: Sequence[Formation]) -> list[str]:
    return [formation.handle.to_text() for formation in formations]


def test_ranks_are_the_places_in_the_list(formations: list[Formation]) -> None:
    handles = texts(formations)
    order = [2, 0, 3, 1]
    made = form(formations, 1, [handles[i] for i in order])
    assert [(one.rank, one.size) for one in made] == [(order.index(i), 4) for i in range(4)]


def test_of_a_set_all_choose_the_same_ranks(formations: list[Formation]) -> None:
    made = form(formations, 1, set(texts(formations)))
    assert sorted(one.rank for one in made) == [0, 1, 2, 3]


def test_groups_shrink_grow_merge_and_stay(formations: list[Formation]) -> None:
    handles = texts(formations)
    assert [one.size for one in form(formations[:2], 1, handles[:2])] == [2, 2]
    assert [one.size for one in form(formations[2:], 2, handles[2:])] == [2, 2]
    assert [one.size for one in form(formations, 3, handles)] == [4] * 4  # merged
    assert [one.rank for one in form(formations, 4, handles)] == [0, 1, 2, 3]  # the same again
    assert [one.size for one in form(formations[1:], 5, handles[1:])] == [3] * 3  # without the one that served
    assert [one.rank for one in form(formations, 6, [*handles[1:], handles[0]])] == [3, 0, 1, 2]  # back, at the end
    assert [one.size for one in form(formations[:1], 7, handles[:1])] == [1]


def test_members_share_a_store(formations: list[Formation]) -> None:
    stores = [dist.PrefixStore("a/", one.store) for one in form(formations, 1, texts(formations))]
    stores[0].set("word", b"\x00\xff")
    assert stores[3].get("word") == b"\x00\xff"
    assert [stores[1].add("n", 3), stores[2].add("n", 1)] == [3, 4]
    assert stores[1].check(["word", "n"]) and not stores[1].check(["word", "other"])
    assert stores[2].compare_set("c", "", "1") == b"1" and stores[3].compare_set("c", "", "2") == b"1"
    assert stores[1].delete_key("word") and not stores[1].delete_key("word")
    with pytest.raises(RuntimeError, match=r"no 'a//?word' in time"):
        stores[2].wait(["word"], timedelta(milliseconds=50))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stores[2].get, "late")
        stores[1].set("late", "now")
        assert waiting.result(10) == b"now"


def test_who_waits_for_a_member_that_has_left_is_told(formations: list[Formation]) -> None:
    made = form(formations, 1, texts(formations))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made[1].store.wait, ["never"], LIMIT)
        formations[3].leave()
        with pytest.raises(PeerLostError, match=r"rank 3 \(pid \d+ at .*\) has left"):
            waiting.result(10)


def test_those_who_do_not_come_are_named(formations: list[Formation]) -> None:
    for error in form(formations[:3], 1, texts(formations), timedelta(seconds=0.3)):
        assert isinstance(error, CollectiveTimeoutError)
        assert "rank 3 (pid" in str(error) and "did not come within 0.3 s; 3 of 4 members did" in str(error)
    assert [one.size for one in form(formations, 2, texts(formations))] == [4] * 4, "and it can be tried again"


def test_those_who_are_gone_are_named_long_before_the_time_is_over(formations: list[Formation]) -> None:
    handles = texts(formations)
    formations[3].close()
    for error in form(formations[:3], 1, handles):
        assert isinstance(error, PeerLostError) and f"rank 3 ({Handle.from_text(handles[3]).described})" in str(error)
    assert [str(error).count("rank 0") for error in form(formations[:3], 2, [handles[3], *handles[:3]])] == [1] * 3


def test_an_id_serves_once(formations: list[Formation]) -> None:
    handles = texts(formations)
    form(formations, 1, handles)
    assert all("already used" in str(error) for error in form(formations, 1, handles))
    newcomer = Formation()
    try:  # that one cannot know, but the member that serves the group does
        (error,) = form([newcomer], 1, [handles[0], newcomer.handle.to_text()])
        assert isinstance(error, CommunicationError) and "same handles" in str(error)
        for formation in formations:
            formation.leave()
        (error,) = form([newcomer], 1, [handles[0], newcomer.handle.to_text()])
        assert "already used" in str(error) or "choose a new one" in str(error)
    finally:
        newcomer.close()


def test_members_with_different_lists_are_refused(formations: list[Formation]) -> None:
    handles = texts(formations)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(form, formations[:1], 1, handles[:2], timedelta(seconds=1))
        server = formations[0]._server
        assert server is not None
        while not any(session.present for session in list(server._sessions.values())):
            time.sleep(0.001)
        (error,) = form(formations[1:2], 1, handles[:3], timedelta(seconds=5))
        first.result(10)
    assert "have not all been given the same handles" in str(error)


# -- strangers ----------------------------------------------------------------------------------------------------


def call(handle: Handle, deadline: float) -> RecordSocket:
    return RecordSocket(socket.create_connection((handle.ip, handle.port), timeout=5), longest=1 << 16)


def test_the_key_is_asked_for(formations: list[Formation]) -> None:
    line = call(formations[0].handle, 5)
    deadline = time.monotonic() + 5
    challenge = line.receive(deadline)
    said = (challenge["nonce"], "00", "1", 0, 1, "x")
    join = {"type": "join", "uuid": "1", "rank": 0, "size": 1, "members": "x", "nonce": "00"}
    line.send({**join, "proof": proof(b"guessed", "member", *said)}, 1.0)
    assert "the key is not that of the handle" in line.receive(deadline)["why"]
    line.sock.close()


def test_what_was_said_before_proves_nothing(formations: list[Formation]) -> None:
    key = b"key"
    assert proves(proof(key, "member", "a", 1), key, "member", "a", 1)
    others: list[tuple[Any, ...]] = [("member", "b", 1), ("server", "a", 1), ("member", "a", 2), ("member", "a1", "")]
    assert not any(proves(proof(key, "member", "a", 1), key, *other) for other in others)
    assert not proves(None, key, "member", "a", 1)


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4 + b"{", b"\x02\x00\x00\x00[]"])
def test_strangers_do_not_keep_members_from_meeting(formations: list[Formation], says: bytes) -> None:
    handles = texts(formations)
    strangers = [socket.create_connection((formations[0].handle.ip, formations[0].handle.port)) for _ in range(300)]
    for stranger in strangers:
        try:
            stranger.sendall(says)
        except ConnectionError:  # there are more than are kept
            continue
    assert [one.size for one in form(formations, 1, handles)] == [4] * 4
    for stranger in strangers:
        stranger.close()


def test_nothing_is_left_when_it_is_closed() -> None:
    before = threading.active_count()
    formation = Formation()
    handle = formation.handle
    formation.close()
    formation.close()
    assert settled(threading.active_count) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((handle.ip, handle.port), timeout=5)


# -- handles, places ------------------------------------------------------------------------------------------------


def handle(place: int | None = None, port: int = 1) -> Handle:
    return Handle(ip="::1", port=port, host="here", pid=7, key="ab" * 16, place=place)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{" * 10_000,
        handle().to_text().replace('"mycel_handle":1', '"mycel_handle":2'),
        handle().to_text().replace('"port":1', '"port":"1"'),
        handle().to_text().replace('"port":1', '"port":70000'),
        handle().to_text().replace("ab" * 16, "xy" * 16),
        handle().to_text().replace('"pid":7', '"pid":7,"more":1'),
        "x" * 10_000,
    ],
)
def test_texts_that_are_no_handles(text: str) -> None:
    with pytest.raises(UsageError, match="is no handle of a mycel group"):
        Handle.from_text(text)


def test_of_a_set_places_make_the_ranks() -> None:
    members = [handle(place, port) for place, port in ((2, 1), (0, 2), (None, 3), (1, 4))]
    ordered = in_rank_order({member.to_text() for member in members}, members[0])
    assert [member.place for member in ordered] == [0, 1, 2, None]


def test_a_member_is_there_once_and_oneself_too() -> None:
    with pytest.raises(CommunicationError, match="named twice"):
        in_rank_order([handle(0).to_text()] * 2, handle(0))
    with pytest.raises(CommunicationError, match="not among the 1 handles"):
        in_rank_order([handle(0).to_text()], handle(1))


def test_places_in_a_described_fabric(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    file.write_text(json.dumps(to_json(ring(num_ranks=4))))
    settings = Settings(topology=file)
    assert places_in_fabric([handle(3), handle(1)], settings) == ((3, 1), 4)
    assert places_in_fabric([handle(), handle()], Settings()) == ((0, 1), 2)
    wrong: list[tuple[list[Handle], str]] = [
        ([handle(0), handle()], "set MYCEL_PLACE"),
        ([handle(4)], "is none of them"),
        ([handle(1, 1), handle(1, 2)], "say that they are the same rank"),
    ]
    for members, what in wrong:
        with pytest.raises(UsageError, match=what):
            places_in_fabric(members, settings)


def test_the_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    of: Callable[..., int | None] = lambda **settings: own_place(Settings(**settings))  # noqa: E731
    assert (of(), of(topology=Path("x")), of(topology=Path("x"), place=1), of(place=0)) == (None, 2, 1, 0)
