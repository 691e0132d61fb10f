"""What graphs hold of a storage that is saved for backward: near, far, or on its way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mycel.comm.pending import Pending
from mycel.memory.tiers.far import FarMemory
from mycel.memory.tiers.near import flat, key_of

__all__ = ["Packed", "Record", "Stays", "moves"]


class Stays:
    """Which storages of a block are never moved: its parameters and buffers, and arguments without gradients.

    What gets no gradient and comes from outside, as masks and positions do, serves all blocks alike.

    Args:
        block: the module.
        arguments: of this call, nested as they are.
    """

    def __init__(self, block: nn.Module, arguments: Any) -> None:
        self.block = block
        tensors = [leaf for leaf in tree_leaves(arguments) if moves(leaf)]
        self.arguments = {key_of(t) for t in tensors if not t.requires_grad}
        #: Storages of arguments with gradients: of these a block can be computed again.
        self.inputs = {key_of(t): t.untyped_storage().nbytes() for t in tensors if t.requires_grad}
        self._own = self._scan()

    def __contains__(self, x: Tensor) -> bool:
        key = key_of(x)
        if key in self.arguments or key in self._own:
            return True
        base = x._base if x._is_view() else x
        if base is None or not base.is_leaf:
            return False
        if base.requires_grad and key not in self.inputs:  # a parameter of somebody else, or a view of one
            return True
        self._own = self._scan()  # sharded parameters get their storage when they are gathered
        return key in self._own

    def _scan(self) -> set[int]:
        own = list(self.block.parameters()) + list(self.block.buffers())
        return {key_of(t) for t in own if type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided}


def moves(x: Any) -> bool:
    """Whether it is a tensor of bytes that can be told by its storage, and not one with a meaning of its own."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.layout == torch.strided
        and x.device.type != "meta"
        and not (x.is_quantized or x.is_conj() or x.is_neg())
        and x.untyped_storage().nbytes() > 0
    )


class Record:
    """One storage.

    Attributes:
        num_bytes: of it.
        device: where it is near.
        near: its bytes near, uint8 of one dimension; ``None`` while they are only far.
        copy: its bytes far; ``None`` before it went out.
        going: whether it goes out now.
        coming: the transfer that fills ``near``.
        blocks: that saved it.
        kept: whether one of them keeps it near.
        wanted: whether it was asked for while it went out, so that it stays.
        aliases: of each saving, a tensor that shares its count of writings, while the first storage is there.
        versions: that count at each saving.
        sent: that count when the storage went out, by saving.
        torn: savings whose numbers were written while they went out.
    """

    __slots__ = (
        "__weakref__",
        "aliases",
        "blocks",
        "coming",
        "copy",
        "device",
        "far",
        "going",
        "kept",
        "near",
        "num_bytes",
        "sent",
        "torn",
        "versions",
        "wanted",
    )

    def __init__(self, x: Tensor, far: FarMemory) -> None:
        self.near: Tensor | None = flat(x)
        self.num_bytes, self.device = self.near.nbytes, self.near.device
        self.copy: Tensor | None = None
        self.coming: Pending[None] | None = None
        self.going = self.kept = self.wanted = False
        self.blocks: set[int] = set()
        self.aliases: dict[int, Tensor] = {}
        self.versions: list[int] = []
        self.sent: dict[int, int] = {}
        self.torn: set[int] = set()
        self.far = far

    @property
    def has_copy(self) -> bool:
        """Whether far memory has it whole."""
        return self.copy is not None and not self.going

    def save(self, x: Tensor) -> int:
        """Note one saving; its number."""
        number = len(self.versions)
        self.aliases[number] = x.detach()
        self.versions.append(x._version)
        return number

    def send(self, copy: Tensor) -> tuple[Tensor, Tensor]:
        """What a link has to copy from now on: far and near."""
        if self.near is None:
            raise RuntimeError("a storage that is not near cannot go out")
        self.copy, self.going = copy, True
        self.sent = {number: alias._version for number, alias in self.aliases.items()}
        return copy, self.near

    def same(self, x: Tensor) -> bool:
        """Whether a storage that only lives elsewhere still has what went out."""
        return not self.torn and self.versions[-1] == x._version

    def written(self, saving: int) -> bool:
        """Whether numbers were written in place after that saving, and far memory has not what was before."""
        alias = self.aliases.get(saving)
        return saving in self.torn or (alias is not None and alias._version != self.versions[saving])

    def drop(self) -> None:
        """Only far from now on."""
        last = max(self.sent.values(), default=-1)  # of what was saved since, which is the same tensor
        for number, alias in self.aliases.items():
            if not alias._version == self.versions[number] == self.sent.get(number, last):
                self.torn.add(number)
        self.aliases = {}
        self.near = self.coming = None

    def __del__(self) -> None:
        if self.copy is not None:
            self.far.give(self.copy)


class Packed:
    """What a graph holds in place of a tensor.

    Attributes:
        record: of its storage.
        block: that saved it.
        saving: which of the record's savings it is.
    """

    __slots__ = ("block", "dtype", "offset", "owner", "record", "saving", "size", "stride")

    def __init__(self, x: Tensor, record: Record, block: int, owner: Any) -> None:
        self.record, self.block, self.owner = record, block, owner
        self.saving = record.save(x)
        self.dtype, self.size, self.stride, self.offset = x.dtype, x.size(), x.stride(), x.storage_offset()

    def tensor(self) -> Tensor:
        """It again; its storage has to be near."""
        near = self.record.near
        if near is None:
            raise RuntimeError("a saved tensor was asked for before it was near")
        made = torch.empty(0, dtype=self.dtype, device=near.device)
        return made.set_(near.untyped_storage(), self.offset, self.size, self.stride)
