"""Parts of the controller that need no ranks: what is sent, credits, the watch over processes, bad arguments."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import namedtuple
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

import mycel.controller.controller as whole
from mycel.controller import Controller, Credits, Current
from mycel.controller.messages import SMALL_BYTES, Held, Large, answer, replace
from mycel.controller.watch import Watch
from mycel.errors import CollectiveTimeoutError, MissingExtraError, UsageError


def test_arguments_are_replaced_wherever_they_lie() -> None:
    pair = namedtuple("pair", "first second")
    found = replace(([Held(1)], {"a": Held(2)}, pair(Held(3), 4), "b"), Held, lambda held: held.number)
    assert found == ([1], {"a": 2}, pair(3, 4), "b")
    assert isinstance(found[2], pair)


@pytest.mark.parametrize(
    "value",
    [None, 1.5, "word", torch.ones(3), (1, [torch.zeros(2)]), {"a": 1}],
    ids=lambda value: type(value).__name__,
)
def test_small_values_come_with_the_reply(value: object) -> None:
    came = answer(value)
    assert not isinstance(came, Large) and type(came) is type(value)


@pytest.mark.parametrize(
    "value",
    [torch.ones(SMALL_BYTES), object(), "x" * (SMALL_BYTES + 1), [torch.ones(SMALL_BYTES // 8)] * 3],
    ids=["tensor", "object", "text", "list"],
)
def test_others_stay(value: object) -> None:
    assert answer(value) == Large(type(value).__name__)


def test_a_reply_holds_no_graph() -> None:
    assert not answer(torch.ones(2, requires_grad=True) * 2).requires_grad


@pytest.mark.parametrize("slots", [0, -1, 1.5, True])
def test_credits_want_a_whole_number(slots: object) -> None:
    with pytest.raises(UsageError, match="slots"):
        Credits(slots)  # type: ignore[arg-type]


class _Done:
    """A call that is over when it is let."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.outcome = self

    def wait(self, timeout_s: float) -> None:
        assert self.over.wait(timeout_s)


def test_a_credit_comes_back_when_the_call_is_done() -> None:
    edge = Credits(1)
    edge.take(1.0)
    call = _Done()
    edge.give_when_done(call)  # type: ignore[arg-type]
    taken = threading.Thread(target=edge.take, args=(30.0,))
    taken.start()
    assert taken.is_alive()
    call.over.set()
    taken.join(30.0)
    assert not taken.is_alive()
    assert repr(edge) == "Credits(1), 0 free"


def test_a_credit_that_nothing_gives_back_is_not_waited_for_for_ever() -> None:
    edge = Credits(1)
    edge.take(1.0)
    with pytest.raises(CollectiveTimeoutError, match="gives one back"):
        edge.take(0.05)


def test_the_end_of_a_process_is_noticed() -> None:
    ended: list[int] = []
    heard = threading.Event()

    def note(rank: int) -> None:
        ended.append(rank)
        heard.set()

    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    watch = Watch([process.pid for process in processes], note)
    processes[1].kill()
    assert heard.wait(30.0) and ended == [1]
    watch.close()
    processes[0].kill()
    for process in processes:
        process.communicate()


def test_a_watch_that_is_closed_says_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended: list[int] = []
    Watch([process.pid], ended.append).close()
    process.kill()
    process.communicate()
    assert not ended


def test_place_in_a_mesh() -> None:
    here = Current(rank=1, ranks=(0, 4))
    assert (here.size, here.global_rank) == (2, 4)


@pytest.mark.skipif(find_spec("monarch") is not None, reason="Monarch is installed")
def test_without_the_extra_the_error_says_how_to_get_it() -> None:
    with pytest.raises(MissingExtraError, match=r"mycel\[controller\]"):
        Controller(2)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True])
def test_a_controller_wants_ranks(ranks: object) -> None:
    with pytest.raises(UsageError, match="ranks"):
        Controller(ranks)  # type: ignore[arg-type]


def test_failures_of_meshes_that_are_not_ours_stay_monarchs(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    actor = ModuleType("monarch.actor")
    actor.unhandled_fault_hook = lambda failure: left.append(failure.mesh_name)  # type: ignore[attr-defined]
    package = ModuleType("monarch")
    package.actor = actor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "monarch", package)
    monkeypatch.setitem(sys.modules, "monarch.actor", actor)
    monkeypatch.setattr(whole, "_MONARCHS", [])
    monkeypatch.setattr(whole, "_MAY_END", {})
    for name in ("mycel0", "mycel1"):
        whole._answer_for(name)
    meshes = ["mycel0-x", "mycel1-y", "theirs-z", "logger-w"]

    def fail() -> list[str]:
        left.clear()
        for mesh in meshes:
            actor.unhandled_fault_hook(SimpleNamespace(mesh_name=mesh))
        return left

    assert fail() == meshes
    whole._MAY_END["mycel1"] = True  # it has said that a rank is lost
    assert fail() == ["mycel0-x", "theirs-z"]
