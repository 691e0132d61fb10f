"""Arrays in memory that the ranks of a node share: what is there, others read where it lies.

A process has one *arena*, an anonymous file of the kernel's as long as the machine has memory, of which pages exist
as they are first written to. Its descriptor goes to each rank of the node with the ring of a channel
(``ring_memory``), and they map all of it, to read only. So an array may be placed there at any time without a word to
anybody, and a message from it is told by its place (``ring_channels``).

Blocks that are given back are kept for those that are asked for next, up to ``KEPT_BYTES``; of what is beyond, the
kernel gets the pages back. A block is in use while a tensor has its memory, however many tensors share it.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mycel.errors import UsageError
from mycel.runtime.forks import let_go_in_children

__all__ = ["Arena", "Mapping", "arena", "empty", "mapping_of"]

_log = logging.getLogger(__name__)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LONGEST = 1 << 38
#: Bytes of blocks that nobody uses and that stay as they are: new pages cost more than most collectives.
KEPT_BYTES = 1 << 28
_PAGE = mmap.PAGESIZE


class Mapping:
    """Another process's arena, to read.

    Args:
        descriptor: of its memory; may be closed afterwards.

    Attributes:
        address, num_bytes: where it is, and how long.

    Raises:
        OSError, ValueError: it cannot be mapped, or is no arena.
    """

    def __init__(self, descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("its length may change")
        self.num_bytes = os.fstat(descriptor).st_size
        self._memory = _mapped(descriptor, self.num_bytes, mmap.PROT_READ)
        self.address: int = self._memory.ctypes.data


#: Arenas of other processes by the kernel's number of their file: several groups and channels have each once.
_mappings: weakref.WeakValueDictionary[tuple[int, int], Mapping] = weakref.WeakValueDictionary()


def mapping_of(descriptor: int) -> Mapping:
    """The arena that a descriptor is of, mapped once in this process.

    Args:
        descriptor: as for ``Mapping``.

    Raises:
        OSError, ValueError: as ``Mapping``.
    """
    status = os.fstat(descriptor)
    key = (status.st_dev, status.st_ino)
    found = _mappings.get(key)
    if found is None:
        found = _mappings[key] = Mapping(descriptor)
    return found


class _Block:
    """Memory as numpy takes it: all arrays and tensors that have it hold this object, and nothing else does.

    Args:
        address, num_bytes: where it is, and how long.
        memory: what keeps it mapped.
    """

    def __init__(self, address: int, num_bytes: int, memory: mmap.mmap) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (num_bytes,), "typestr": "|u1"}
        self._memory = memory


class Arena:
    """This process's arena.

    Args:
        num_bytes: its length.

    Attributes:
        descriptor: of its memory.
        address, num_bytes: where it is, and how long.

    Raises:
        OSError: the kernel gives no such memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // _PAGE) * _PAGE
        self.descriptor = os.memfd_create("mycel-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.descriptor, self.num_bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._memory = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self._memory.ctypes.data
        self._free = [(0, self.num_bytes)]  # in order, apart from each other: where, and how long
        self._kept: deque[tuple[int, int]] = deque()  # blocks with pages that nobody uses, the oldest first
        self._given_back: deque[tuple[int, int]] = deque()
        self._lock = threading.RLock()
        self._is_busy = self._is_forked = False
        let_go_in_children(self)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8] | None:
        """So many bytes, with whatever is in them.

        Returns:
            The bytes, in use while an array or tensor has them; ``None`` in a signal handler in the middle of this.

        Raises:
            MemoryError: the arena has no room for it.
        """
        length = max(_PAGE, -(-num_bytes // _PAGE) * _PAGE)
        with self._lock:
            if self._is_busy:
                return None
            self._is_busy = True
            try:
                start = self._found(length)
            finally:
                self._is_busy = False
        if start < 0:
            raise MemoryError(f"the memory that ranks share has no {num_bytes} bytes in one piece left")
        block = _Block(self.address + start, num_bytes, self._map)
        weakref.finalize(block, _give_back, weakref.ref(self), start, length).atexit = False
        return np.asarray(block)

    def _found(self, length: int) -> int:
        """The start of a block; -1: there is none."""
        self._collect()
        start = self._reused(length)
        while start < 0 and (start := self._cut(length)) < 0 and self._kept:
            self._drop(*self._kept.popleft())
        return start

    def _collect(self) -> None:
        """Keep what was given back, and let pages go beyond what is kept."""
        while self._given_back:
            self._kept.append(self._given_back.popleft())
        total = sum(length for _, length in self._kept)
        while total > KEPT_BYTES:
            start, length = self._kept.popleft()
            total -= length
            self._drop(start, length)

    def _reused(self, length: int) -> int:
        """A kept block of this length; -1: there is none."""
        for number, (start, kept) in enumerate(self._kept):
            if kept == length:
                del self._kept[number]
                return start
        return -1

    def _cut(self, length: int) -> int:
        """The start of so much of what is free; -1: nowhere is as much in one piece."""
        for number, (start, free) in enumerate(self._free):
            if free >= length:
                self._free[number : number + 1] = [(start + length, free - length)] if free > length else []
                return start
        return -1

    def _drop(self, start: int, length: int) -> None:
        """Give a block's pages to the kernel, and its place to whoever asks next."""
        self._map.madvise(mmap.MADV_REMOVE, start, length)
        merged: list[tuple[int, int]] = []
        for where, free in sorted([*self._free, (start, length)]):
            if merged and sum(merged[-1]) == where:
                merged[-1] = (merged[-1][0], merged[-1][1] + free)
            else:
                merged.append((where, free))
        self._free = merged

    def give_back(self, start: int, length: int) -> None:
        """A block is not used any more. Called when it is collected, between any two steps of any thread."""
        if self._is_forked:  # it is the parent's
            return
        self._given_back.append((start, length))
        if sum(each for _, each in tuple(self._given_back)) > KEPT_BYTES and self._lock.acquire(blocking=False):
            try:
                if not self._is_busy:
                    self._is_busy = True
                    self._collect()
                    self._is_busy = False
            finally:
                self._lock.release()

    def after_fork_in_child(self) -> None:
        """The memory stays the parent's: what it frees, and what it gives, is its own affair."""
        global _arena, _making
        self._is_forked = True
        os.close(self.descriptor)
        _arena, _making = None, threading.Lock()


def _give_back(owner: weakref.ref[Arena], start: int, length: int) -> None:
    if (found := owner()) is not None:
        found.give_back(start, length)


def _mapped(descriptor: int, num_bytes: int, protection: int) -> npt.NDArray[np.uint8]:
    mapped = mmap.mmap(descriptor, num_bytes, prot=protection)
    mapped.madvise(mmap.MADV_DONTDUMP)
    return np.frombuffer(mapped, dtype=np.uint8)


#: Not made yet; ``None`` in a list: the kernel gives none.
_arena: list[Arena | None] | None = None
_making = threading.Lock()


def arena() -> Arena | None:
    """This process's arena, made when it is first asked for; ``None`` where the kernel gives no such memory."""
    global _arena
    if _arena is None:
        with _making:
            if _arena is None:
                _arena = [_made()]
    return _arena[0]


def _made() -> Arena | None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return Arena(min(memory, _LONGEST))
    except OSError as error:  # no such call in this sandbox, no descriptor left, a limit of addresses or file sizes
        _log.debug("arrays cannot be shared: %s", error)
        return None


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, requires_grad: bool = False) -> torch.Tensor:
    """A tensor in memory that the ranks of this node share; collectives read it there instead of copying it out.

    For arrays that live long and are exchanged often: flat buffers of gradients, parameters that are gathered. Any
    rank may place its arrays so, or not, at any time: each is read where it is. Where the kernel gives no shared
    memory, the tensor is an ordinary one.

    A process that is forked shares these arrays with its parent, and does not get copies of them.

    Args:
        size: lengths of the dimensions, as numbers or as one sequence.
        dtype: of the elements; torch's default if not given.
        requires_grad: whether autograd follows it.

    Returns:
        A tensor on the CPU, contiguous, with whatever the memory holds.

    Raises:
        UsageError: a length is negative.
        MemoryError: the shared memory of this process, as much as the machine has, is used up.

    Examples:
        >>> import torch
        >>> gradients = empty(1024, 256, dtype=torch.bfloat16).zero_()
        >>> gradients.shape, gradients.dtype
        (torch.Size([1024, 256]), torch.bfloat16)
    """
    given: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    shape = tuple(int(length) for length in given)
    if any(length < 0 for length in shape):
        raise UsageError(f"empty: a shape of {shape}; lengths are 0 or more")
    dtype = dtype or torch.get_default_dtype()
    num_bytes = math.prod(shape) * dtype.itemsize
    shared = arena() if num_bytes else None
    memory = None if shared is None else shared.take(num_bytes)
    if memory is None:
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    made = torch.from_numpy(memory).view(dtype).view(shape)
    return made.requires_grad_() if requires_grad else made
