"""Memory for arrays that ranks share: blocks come and go, pages with them, and children leave it alone."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref

import numpy as np
import pytest
import torch

import mycel
from mycel.errors import UsageError
from mycel.runtime import arena as a

PAGE = os.sysconf("SC_PAGE_SIZE")


def pages(arena: a.Arena) -> int:
    """Pages that the kernel has given to it."""
    return os.fstat(arena.descriptor).st_blocks * 512 // PAGE


def test_blocks_are_apart_and_come_back() -> None:
    arena = a.Arena(64 * PAGE)
    first, second = arena.take(PAGE + 1), arena.take(PAGE)
    assert first is not None and second is not None
    first[:], second[:] = 1, 2
    assert first.ctypes.data + 2 * PAGE <= second.ctypes.data
    assert (first == 1).all()
    assert (second == 2).all()
    where = first.ctypes.data
    part = first[:3]
    del first
    other = arena.take(PAGE + 1)
    assert other is not None and other.ctypes.data != where, "a view still has it"
    del part
    again = arena.take(PAGE + 2)
    assert again is not None and again.ctypes.data == where


def test_all_room_can_be_used_and_is_given_back_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a, "KEPT_BYTES", 4 * PAGE)
    arena = a.Arena(64 * PAGE)
    held = [arena.take(PAGE) for _ in range(64)]
    with pytest.raises(MemoryError, match=f"has no {PAGE} bytes in one piece left"):
        arena.take(PAGE)
    for block in held:
        assert block is not None
        block[:] = 1
    assert pages(arena) == 64
    del block
    held.clear()
    whole = arena.take(64 * PAGE)
    assert whole is not None
    assert pages(arena) < 64, "pages of blocks that nobody uses go back to the kernel"


def test_a_tensor_holds_its_block_and_nothing_else_does() -> None:
    made = a.arena()
    assert made is not None
    tensor = mycel.empty(3, 5, dtype=torch.bfloat16)
    assert made.address <= tensor.data_ptr() < made.address + made.num_bytes
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 5), torch.bfloat16, True)
    ended: list[int] = []
    weakref.finalize(tensor.untyped_storage(), ended.append, 1)
    where, row = tensor.data_ptr(), tensor[1]
    del tensor
    gc.collect()
    other = mycel.empty(3, 5, dtype=torch.bfloat16)
    assert other.data_ptr() != where
    del row
    gc.collect()
    assert where in {mycel.empty([3, 5], dtype=torch.bfloat16).data_ptr() for _ in range(8)}


def test_what_can_be_asked_for() -> None:
    assert mycel.empty(0, 4).shape == (0, 4)
    assert mycel.empty().shape == ()
    assert mycel.empty([2], requires_grad=True).requires_grad
    assert mycel.empty(2, dtype=torch.complex128).dtype is torch.complex128
    with pytest.raises(UsageError, match=r"a shape of \(2, -1\)"):
        mycel.empty(2, -1)


def test_without_shared_memory_tensors_are_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(a, "_arena", None)
    assert mycel.empty(4).shape == (4,)
    assert a.arena() is None


def test_others_see_what_is_written_and_cannot_write() -> None:
    arena = a.Arena(4 * PAGE)
    block = arena.take(PAGE)
    assert block is not None
    there = a.mapping_of(arena.descriptor)
    assert a.mapping_of(arena.descriptor) is there
    block[:] = 7
    offset = block.ctypes.data - arena.address
    assert (there._memory[offset : offset + PAGE] == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        there._memory[0] = 1


def test_memory_whose_length_may_change_is_no_arena() -> None:
    descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE)
    with pytest.raises(ValueError, match="its length may change"):
        a.mapping_of(descriptor)
    os.close(descriptor)


def ended(child: int, limit_s: float = 60.0) -> int:
    """The status of a process that has ended; one that takes too long is killed."""
    until = time.monotonic() + limit_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def test_a_child_frees_nothing_of_its_parents() -> None:
    tensor = mycel.empty(PAGE, dtype=torch.uint8).fill_(5)
    parents = a.arena()
    child = os.fork()
    if child == 0:
        del tensor
        mine = a.arena()
        own = mycel.empty(PAGE, dtype=torch.uint8).fill_(6)
        os._exit(0 if mine is not parents and int(own[0]) == 6 else 1)
    assert ended(child) == 0
    assert (tensor == 5).all()
    assert a.arena() is parents
    assert np.array_equal(tensor.numpy(), np.full(PAGE, 5, dtype=np.uint8))
