"""A unit of parameters: far for good, in one buffer, and near in another while something computes with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mycel.comm.pending import Pending
from mycel.errors import UsageError
from mycel.memory.residency.slots import Slot
from mycel.memory.tiers import FarMemory, Link

__all__ = ["Unit", "far_like"]

#: Where a tensor begins in a buffer: at a multiple of as many bytes, as torch's allocator has it.
_ALIGNED = 64


def _starts(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    return starts, end


def _views(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of these shapes and types that stand in a buffer of bytes."""
    starts, _ = _starts(tensors)
    return [
        buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
        for start, like in zip(starts, tensors, strict=True)
    ]


def far_like(far: FarMemory, tensor: Tensor) -> Tensor:
    """The same numbers in far memory.

    Args:
        far: that lends the buffer, for good.
        tensor: contiguous.
    """
    if tensor.nbytes == 0:
        return tensor
    there = _views(far.take(tensor.nbytes), [tensor])[0]
    return there.copy_(tensor)


class Unit:
    """Parameters that come and go together: those of a block.

    Outside of a pass a parameter's data are the far ones, and so are gradients: optimizers, checkpoints and clipping
    see those, and need to know nothing. In a pass they are near. Near numbers have one storage for good, which is
    emptied and filled, since graphs hold views of it.

    Args:
        name: of the block.
        slots: of parameters that no other unit has.
        far: lends buffers.
        device: where near is.

    Attributes:
        num_bytes: of the near buffer.
        is_near: whether the near numbers are there, or on their way.
        waiting_for: parameters whose gradients this backward pass has not brought yet.

    Raises:
        UsageError: a parameter that is not contiguous.
    """

    def __init__(self, name: str, slots: Iterable[Slot], far: FarMemory, device: torch.device) -> None:
        self.name, self.slots = name, list(slots)
        numbers = [slot.numbers() for slot in self.slots]
        for each in numbers:
            if not each.is_contiguous():
                raise UsageError(f"{name}: a parameter of {tuple(each.shape)} is not contiguous in memory")
        self._lender = far
        self.num_bytes = _starts(numbers)[1]
        self._far = far.take(self.num_bytes)
        self.far = _views(self._far, numbers)
        self._near = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.near = _views(self._near, self.far)
        self._near.untyped_storage().resize_(0)
        self._far_grad: Tensor | None = None
        self.far_grads: list[Tensor] = []
        for place, (slot, there) in enumerate(zip(self.slots, self.far, strict=True)):
            there.copy_(slot.numbers().detach())
            grad = slot.gradient()
            slot.be_gradient(None)
            slot.be(there)
            if grad is not None:
                slot.be_gradient(self._grads()[place].copy_(grad))
        self.is_near = False
        self._coming: Pending[None] | None = None
        self._versions: tuple[int, ...] = ()
        self.waiting_for: set[int] = set()
        #: Gradients of this pass that go far, by place: near ones, and those that were there already.
        self._leaving: list[tuple[int, Tensor]] = []
        self._kept: dict[int, Tensor] = {}
        self._stores: list[tuple[Pending[None], list[Tensor], list[tuple[Tensor, Tensor]]]] = []

    def _grads(self) -> list[Tensor]:
        if self._far_grad is None:
            self._far_grad = self._lender.take(self.num_bytes)
            laid = _views(self._far_grad, self.far)
            self.far_grads = [slot.shaped(each) for slot, each in zip(self.slots, laid, strict=True)]
        return self.far_grads

    # -- numbers ------------------------------------------------------------------------------------------------

    def start(self, link: Link) -> bool:
        """Bring them; does not wait. Whether anything had to move.

        Args:
            link: that carries them.
        """
        versions = tuple(slot.version() for slot in self.slots)
        if self.is_near:
            if versions == self._versions:
                return False
            self.drop()  # somebody has written the far ones since
        self._near.untyped_storage().resize_(self.num_bytes)
        self._coming = link.fetch([(self._far, self._near)])
        self._versions, self.is_near = versions, True
        return True

    def enter(self) -> None:
        """Wait for them, and compute with them from now on."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming.wait()
        for slot, near in zip(self.slots, self.near, strict=True):
            slot.compute(near)

    def leave(self) -> None:
        """Parameters are the far ones again; the near numbers stay where they are."""
        for slot, there in zip(self.slots, self.far, strict=True):
            slot.compute(there)

    def drop(self) -> None:
        """Give near memory back."""
        if not self.is_near:
            return
        self.leave()
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming.wait()
        self._near.untyped_storage().resize_(0)
        self.is_near = False

    # -- gradients ----------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """A backward pass comes to this unit: what it brings is told from gradients that are there."""
        for place, slot in enumerate(self.slots):
            grad = slot.gradient()
            if grad is not None:
                self._kept[place] = grad
                slot.be_gradient(None)
        self.waiting_for = {place for place, slot in enumerate(self.slots) if slot.parameter.requires_grad}

    def arrived(self, place: int, link: Link) -> None:
        """A gradient is complete; with the last one they go.

        Args:
            place: of the parameter, among the unit's.
            link: that carries them.
        """
        grad = self.slots[place].gradient()
        if grad is not None and grad.numel() == 0:  # a rank whose shard is empty
            self._kept[place] = grad
            self.slots[place].be_gradient(None)
        elif grad is not None:
            self._leaving.append((place, grad.detach()))
            self.slots[place].be_gradient(None)
        self.waiting_for.discard(place)
        if not self.waiting_for:
            self.send(link)

    def send(self, link: Link) -> None:
        """Gradients that are complete go far; does not wait.

        Args:
            link: that carries them.
        """
        if not self._leaving:
            return
        copies, added, lent = [], [], []
        for place, grad in self._leaving:
            there = self._grads()[place]
            if place in self._kept:
                buffer = self._lender.take(grad.nbytes)
                lent.append(buffer)
                staged = _views(buffer, [grad])[0]
                copies.append((staged, grad))
                added.append((self._kept.pop(place), staged))
                self._kept[place] = added[-1][0]
            else:
                copies.append((there, grad))
                self._kept[place] = there
        self._leaving = []
        self._stores.append((link.store(copies), lent, added))

    def settle(self) -> None:
        """Wait until gradients that went are far, and give near memory back."""
        while self._stores:
            pending, lent, added = self._stores.pop(0)
            pending.wait()
            for there, staged in added:
                there.add_(staged)
            for buffer in lent:
                self._lender.give(buffer)

    def show(self) -> None:
        """Parameters have their gradients, far ones."""
        self.leave()
        for place, grad in self._kept.items():
            self.slots[place].be_gradient(grad)
        self._kept = {}
        self.waiting_for = set()

    def forget(self) -> None:
        """Of a pass that failed nothing is left."""
        self._leaving, self.waiting_for = [], set()
        self._coming = None
        self._stores = []
        self.leave()
        self._kept = {}
        if self.is_near:
            self._near.untyped_storage().resize_(0)
            self.is_near = False

    def close(self) -> None:
        """Parameters and gradients are near for good, and far buffers go back."""
        self.settle()
        self.drop()
        for slot, there in zip(self.slots, self.far, strict=True):
            grad = slot.gradient()
            slot.be_gradient(None)
            slot.be(there.to(self._near.device, copy=True))
            if grad is not None:
                slot.be_gradient(grad.to(self._near.device, copy=True))
        self._lender.give(self._far)
        if self._far_grad is not None:
            self._lender.give(self._far_grad)
