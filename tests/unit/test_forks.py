"""What forked children let go of, and what they never destroy."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable

from mycel.runtime.forks import keep_in_children, let_go_in_children


class Owner:
    """Holds a pipe's writing end."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.let_go = 0

    def after_fork_in_child(self) -> None:
        self.let_go += 1
        os.close(self.writer)


class Loud:
    """Says so when it is destroyed."""

    def __init__(self, say: Callable[[], None]) -> None:
        self.say = say

    def __del__(self) -> None:
        self.say()


def exit_code(child: Callable[[], bool]) -> int:
    """0 if a forked child finds what it ought to."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if child() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_lets_go_once_and_its_parent_keeps_everything() -> None:
    owner = Owner()
    let_go_in_children(owner)

    def grandchild() -> bool:
        return owner.let_go == 1

    def child() -> bool:
        return owner.let_go == 1 and exit_code(grandchild) == 0

    assert exit_code(child) == 0
    assert owner.let_go == 0
    os.write(owner.writer, b"x")
    assert os.read(owner.reader, 1) == b"x"
    os.close(owner.writer)
    assert os.read(owner.reader, 1) == b"", "no child may hold the other end"
    os.close(owner.reader)


def test_the_registry_keeps_nothing_alive() -> None:
    made = Owner()
    let_go_in_children(made)
    keep_in_children(made)
    seen = weakref.ref(made)
    os.close(made.reader)
    os.close(made.writer)
    del made
    gc.collect()
    assert seen() is None


def test_what_is_kept_is_not_destroyed_in_a_child() -> None:
    heard: list[str] = []
    kept, other = Loud(lambda: heard.append("kept")), Loud(lambda: heard.append("other"))
    keep_in_children(kept)

    def child() -> bool:
        nonlocal kept, other
        del kept, other
        gc.collect()
        return heard == ["other"]

    assert exit_code(child) == 0
    del kept, other
    assert sorted(heard) == ["kept", "other"]
