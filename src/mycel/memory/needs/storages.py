"""Counts memory as torch takes and returns it: a dispatcher that watches storages, and moments between marks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from mycel.memory.needs.kernels import workspace
from mycel.memory.needs.moments import KINDS, Kind, Moment, Phase

__all__ = ["Storages"]

_ATEN = torch.ops.aten
_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
#: Attention of torch, by whatever kernel.
_ATTENTIONS = {
    _ATTENTION,
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
}


@dataclass(slots=True)
class _Storage:
    """One storage, from when it was first seen.

    Attributes:
        num_bytes: that it has now.
        kind: what it is for, where that is known for certain.
        mark: number of the moment that it was born in.
        died: number of the moment that it died in; none yet.
        saved: number of the moment in which it was saved for backward first; none yet.
    """

    num_bytes: int
    kind: Kind | None
    mark: int
    died: int | None = None
    saved: int | None = None


@dataclass(slots=True)
class _Mark:
    event: int
    phase: Phase
    block: str
    flops: int = 0
    gathers: tuple[str, ...] = ()


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, notes every storage that comes and goes, real or fake, and operations done.

    Storages are told by identity: views and saved tensors of one storage count once. What was there before counts
    from when ``known`` names it. A storage that is resized, as FSDP2 does with what it gathers, counts with what it
    has.

    Attributes:
        attentions: of each attention that torch did the shapes of queries, keys and values.

    Args:
        rounding: bytes to whose multiple the allocator rounds: 512 on a GPU.
        cpu_kernels: add what torch's CPU kernels hold while they run.

    Examples:
        >>> with Storages() as storages:
        ...     storages.mark("forward", "")
        ...     x = torch.ones(1000)
        ...     y = (x + 1).sum()
        >>> storages.moments()[-1].total
        8004
    """

    def __init__(self, *, rounding: int = 1, cpu_kernels: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding, self.cpu_kernels = rounding, cpu_kernels
        self._storages: list[_Storage] = []
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._changes: list[tuple[int, int]] = []
        self._marks: list[_Mark] = []
        self.attentions: list[tuple[torch.Size, ...]] = []

    # -- what happens -------------------------------------------------------------------------------------------

    def __enter__(self) -> Storages:
        self._resizing = _watch_resizes(self)
        self._resizing.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._resizing.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass(arg) for arg in tree_leaves((args, kwargs))):
            return NotImplemented  # a DTensor's own operations come by one by one
        is_grouped = func is _ATEN._grouped_mm.default and _is_narrow(args)
        result = _grouped(args) if is_grouped else func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        extra = workspace(func, args, kwargs) if self.cpu_kernels else 0
        if extra:
            self._changes += [(-1, extra), (-1, -extra)]
        if func.overloadpacket in _ATTENTIONS:
            self.attentions.append(tuple(each.shape for each in args[:3]))
        if self._marks:
            self._marks[-1].flops += _flops(func, args, kwargs, result)
        return result

    def see(self, tensor: Tensor, kind: Kind | None = None) -> None:
        """There is this tensor; of this kind, where that is known.

        Args:
            tensor: any; of a DTensor, this rank's part counts.
            kind: what it is for.
        """
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                inner = getattr(tensor, name)
                if isinstance(inner, Tensor):
                    self.see(inner, kind)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            number = len(self._storages)
            self._storages.append(_Storage(0, kind, max(0, len(self._marks) - 1)))
            self._alive[key] = number, weakref.ref(storage, partial(self._gone, key))
        number = self._alive[key][0]
        if kind is not None:
            self._storages[number].kind = kind
        self._set(number, storage.nbytes())

    def known(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """These are of a kind, since they are there.

        Args:
            tensors: any.
            kind: what they are for.
        """
        for tensor in tensors:
            self.see(tensor, kind)

    def saving(self) -> saved_tensors_hooks:
        """While it is entered, notes in which moment each storage is saved for backward first."""

        def pack(tensor: Tensor) -> Tensor:
            self.see(tensor)
            storage = self._storages[self._alive[tensor.untyped_storage()._cdata][0]]
            if storage.saved is None:
                storage.saved = max(0, len(self._marks) - 1)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def mark(self, phase: Phase, block: str) -> None:
        """A moment begins.

        Args:
            phase: of the step.
            block: that runs now; empty for what is between blocks.
        """
        self._marks.append(_Mark(len(self._changes), phase, block))

    def gathers(self, unit: str) -> None:
        """A sharded unit is gathered now.

        Args:
            unit: its name.
        """
        if self._marks and unit not in self._marks[-1].gathers:
            self._marks[-1].gathers += (unit,)

    def resized(self, storage: Any) -> None:
        """A storage has another size now."""
        if storage._cdata in self._alive:
            number = self._alive[storage._cdata][0]
            if self._storages[number].kind is None and self._storages[number].num_bytes == 0:
                self._storages[number].kind = "exchanges"  # made empty, filled for a while: what FSDP2 gathers into
            self._set(number, storage.nbytes())

    def _gone(self, key: int, _: Any) -> None:
        number = self._alive.pop(key)[0]
        self._set(number, 0)
        self._storages[number].died = max(0, len(self._marks) - 1)

    def _set(self, number: int, num_bytes: int) -> None:
        rounded = -(-num_bytes // self.rounding) * self.rounding
        storage = self._storages[number]
        if rounded != storage.num_bytes:
            self._changes.append((number, rounded - storage.num_bytes))
            storage.num_bytes = rounded

    # -- what came of it ----------------------------------------------------------------------------------------

    def kind_of(self, number: int) -> Kind:
        """What a storage was for.

        Args:
            number: by birth; -1 for what kernels held.
        """
        if number < 0:
            return "temporary"
        storage = self._storages[number]
        if storage.kind is not None:
            return storage.kind
        born = self._marks[storage.mark] if self._marks else None
        is_kept = storage.died is None or storage.died > storage.mark
        return "activations" if born is not None and born.phase == "forward" and is_kept else "temporary"

    def left_by(self, first: int, last: int) -> int:
        """Bytes born in a run of moments that were there after it.

        Args:
            first: number of the first moment.
            last: number of the last.
        """
        born: dict[int, int] = {}
        start = self._marks[first].event
        end = self._marks[last + 1].event if last + 1 < len(self._marks) else len(self._changes)
        for number, change in self._changes[start:end]:
            if number >= 0 and first <= self._storages[number].mark <= last and self._storages[number].kind is None:
                born[number] = born.get(number, 0) + change
        return sum(born.values())

    def saved_in(self, first: int, last: int) -> int:
        """Bytes that a run of moments saved for backward and none before it, parameters and buffers not counted.

        Args:
            first: number of the first moment.
            last: number of the last.
        """
        return sum(
            storage.num_bytes
            for storage in self._storages
            if storage.saved is not None and first <= storage.saved <= last and storage.kind != "parameters"
        )

    def flops_in(self, first: int, last: int) -> int:
        """Operations of a run of moments.

        Args:
            first: number of the first moment.
            last: number of the last.
        """
        return sum(mark.flops for mark in self._marks[first : last + 1])

    def moments(self, first: int = 0) -> tuple[Moment, ...]:
        """What was held between marks.

        Args:
            first: number of the first mark that counts.
        """
        place = {kind: row for row, kind in enumerate(KINDS)}
        changes = np.zeros((len(KINDS), len(self._changes) + 1), dtype=np.int64)
        kinds = {number: place[self.kind_of(number)] for number in {number for number, _ in self._changes}}
        for event, (number, change) in enumerate(self._changes):
            changes[kinds[number], event + 1] = change
        held = np.cumsum(changes, axis=1)
        total = held.sum(axis=0)
        states = held[place["parameters"]] + held[place["optimizer"]]
        ends = [mark.event for mark in self._marks[1:]] + [len(self._changes)]
        made = []
        for mark, end in list(zip(self._marks, ends, strict=True))[first:]:
            span = slice(mark.event, end + 1)
            at = mark.event + int(np.argmax(total[span]))
            before = held[place["gradients"], mark.event]
            working = int((total[span] - states[span] - np.minimum(before, held[place["gradients"], span])).max())
            by_kind = {kind: int(held[row, at]) for kind, row in place.items()}
            made.append(
                Moment(
                    phase=mark.phase,
                    block=mark.block,
                    working=max(0, working),
                    flops=mark.flops,
                    gathers=mark.gathers,
                    **by_kind,
                )
            )
        return tuple(made)

    @property
    def num_marks(self) -> int:
        """Moments begun so far."""
        return len(self._marks)


@contextmanager
def _watch_resizes(storages: Storages) -> Iterator[None]:
    """Resizing a storage goes past dispatchers: it is watched at the class, for as long as somebody counts."""
    kept = torch.UntypedStorage.__dict__.get("resize_")
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: Any) -> Any:
        result = original(storage, size)
        storages.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if kept is None:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = kept  # type: ignore[method-assign]


def _is_narrow(args: Any) -> bool:
    """Whether torch's kernel takes operands of a grouped product that its rule for fake ones does not take."""
    return isinstance(args[0], FakeTensor) and args[0].dtype is not torch.bfloat16


def _grouped(args: Any) -> Any:
    """The result of a grouped product as to its sizes: of a row's group, or one product a group."""
    first, second = args[0], args[1]
    if first.dim() == 2 and second.dim() == 2:
        groups = args[2].shape[0]
        return first.new_empty((groups, first.shape[0], second.shape[1]))
    return first.new_empty((*first.shape[:-1], second.shape[-1]))


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = func.overloadpacket
    if packet is _ATTENTION:
        return int(sdpa_flop_count(*(each.shape for each in args[:3])))  # type: ignore[no-untyped-call]
    if packet is _ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*(each.shape for each in args[:4])))  # type: ignore[no-untyped-call]
    count = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0
