"""A unit of parameters: far for good, in one buffer, and near in another while something computes with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from mycel.comm.pending import Pending
from mycel.errors import CommunicationError, MycelError, UsageError
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
        UsageError: a parameter that is not contiguous, or far memory without room; the parameters are as they were.
    """

    def __init__(self, name: str, slots: Iterable[Slot], far: FarMemory, device: torch.device) -> None:
        self.name, self.slots = name, list(slots)
        numbers = [slot.numbers() for slot in self.slots]
        for each in numbers:
            if not each.is_contiguous():
                raise UsageError(f"{name}: a parameter of {tuple(each.shape)} is not contiguous in memory")
        self._lender = far
        self.num_bytes = _starts(numbers)[1]
        try:
            self._far = far.take(self.num_bytes)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
        self.far = _views(self._far, numbers)
        self._near = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        self.near = _views(self._near, self.far)
        self._near.untyped_storage().resize_(0)
        self._far_grad: Tensor | None = None
        self.far_grads: list[Tensor] = []
        self.is_near = False
        self._coming: Pending[None] | None = None
        self._versions: tuple[int, ...] = ()
        self.waiting_for: set[int] = set()
        #: Gradients of this pass that go far, by place: near ones, and those that were there already.
        self._leaving: list[tuple[int, Tensor]] = []
        self._kept: dict[int, Tensor] = {}
        self._stores: list[tuple[Pending[None], list[Tensor], list[tuple[Tensor, Tensor]]]] = []
        try:
            held = {place: grad for place, slot in enumerate(self.slots) if (grad := slot.gradient()) is not None}
            gradients = {place: self._grads()[place].copy_(grad) for place, grad in held.items()}
        except UsageError as error:
            far.give(self._far)
            raise UsageError(f"{name}: {error}") from error
        for place, (slot, there) in enumerate(zip(self.slots, self.far, strict=True)):
            there.copy_(slot.numbers().detach())
            slot.be_gradient(None)
            slot.be(there)
            if place in gradients:
                slot.be_gradient(gradients[place])

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
        try:
            self._coming = link.fetch([(self._far, self._near)])
        except Exception as error:
            self._near.untyped_storage().resize_(0)
            raise self._lost(error) from error
        self._versions, self.is_near = versions, True
        return True

    def enter(self) -> None:
        """Wait for them, and compute with them from now on.

        Raises:
            CommunicationError: they did not come.
        """
        if self._coming is not None:
            coming, self._coming = self._coming, None
            try:
                coming.wait()
            except Exception as error:
                self._renew()
                raise self._lost(error) from error
        for slot, near in zip(self.slots, self.near, strict=True):
            slot.compute(near)

    def leave(self) -> None:
        """Parameters are the far ones again; the near numbers stay where they are."""
        for slot, there in zip(self.slots, self.far, strict=True):
            slot.compute(there)

    def drop(self) -> None:
        """Give near memory back, once nobody writes there any more."""
        if not self.is_near:
            return
        self.leave()
        if self._coming is not None:
            coming, self._coming = self._coming, None
            try:
                coming.wait()
            except Exception:  # nobody needs them any more
                self._renew()
                return
        self._near.untyped_storage().resize_(0)
        self.is_near = False

    def _renew(self) -> None:
        """Another near storage, in place of one that a transfer may still write to."""
        self._near = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._near.device)
        self.near = _views(self._near, self.far)
        self._near.untyped_storage().resize_(0)
        self.is_near = False

    def _lost(self, error: Exception) -> CommunicationError:
        return CommunicationError(
            f"{self.name}: {self.num_bytes} bytes of parameters did not come from far memory: {error}"
        )

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

        Raises:
            CommunicationError, UsageError: they cannot leave; the message says why.
        """
        if not self._leaving:
            return
        copies: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        lent: list[Tensor] = []
        arriving: dict[int, Tensor] = {}
        try:
            for place, grad in self._leaving:
                there = self._kept.get(place)
                if there is None:
                    arriving[place] = self._grads()[place]
                    copies.append((arriving[place], grad))
                else:
                    lent.append(self._lender.take(grad.nbytes))
                    staged = _views(lent[-1], [grad])[0]
                    copies.append((staged, grad))
                    added.append((there, staged))
            pending = link.store(copies)
        except Exception as error:
            for buffer in lent:
                self._lender.give(buffer)
            raise self._stuck(error) from error
        self._leaving = []
        self._kept |= arriving
        self._stores.append((pending, lent, added))

    def _stuck(self, error: Exception) -> MycelError:
        kind = UsageError if isinstance(error, UsageError) else CommunicationError
        return kind(f"{self.name}: gradients did not get to far memory: {error}")

    def settle(self) -> None:
        """Wait until gradients that went are far, and give near memory back.

        Raises:
            CommunicationError: they did not get there.
        """
        while self._stores:
            pending, lent, added = self._stores.pop(0)
            try:
                pending.wait()
            except Exception as error:
                for buffer in lent:  # whatever carried them may still write there
                    self._lender.forget(buffer)
                if self._far_grad is not None:
                    self._lender.forget(self._far_grad)
                    self._far_grad = None
                raise self._stuck(error) from error
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
        """Of a pass that failed nothing is left near, and no gradient; what is under way ends first."""
        self._leaving, self.waiting_for = [], set()
        while self._stores:
            with suppress(MycelError):
                self.settle()
        self.leave()
        self._kept = {}
        self.drop()

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
