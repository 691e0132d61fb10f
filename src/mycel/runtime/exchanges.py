"""Where every rank has something of its own for every other: all_to_all, send, receive; and the watched barrier."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllToAllOptions

from mycel.collectives.spec import permutation
from mycel.runtime.communicator import Call
from mycel.runtime.group_calls import GroupCalls
from mycel.runtime.headers import ALL_TO_ALL_V
from mycel.runtime.p2p import PointToPoint
from mycel.runtime.tensors import (
    apart_from,
    back_into,
    element_code,
    flattened,
    gather_call,
    moving_call,
    put_later,
    split_elements,
)
from mycel.runtime.timeouts import bounded
from mycel.runtime.work import DoneWork

__all__ = ["Exchanges"]

Tensor = torch.Tensor


class Exchanges(GroupCalls):
    """Exchanges of a group, under torch's names."""

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions | None = None,
    ) -> dist.Work:
        """Exchange parts with every rank; see ``torch.distributed.all_to_all_single``.

        With split sizes, those of one rank can be equal while those of others are not: either all ranks give sizes
        or none does.
        """
        opts = opts or AllToAllOptions()
        gives, gets = [], []
        if output_split_sizes or input_split_sizes:
            gives = split_elements(input, input_split_sizes, self.size(), "input")
            gets = split_elements(output, output_split_sizes, self.size(), "output")
            if output.dtype != input.dtype:
                raise ValueError(f"all_to_all: output is of {output.dtype}, input of {input.dtype}")
        if not self._takes([output, input], exchange=bool(gives)):
            backend = self._backend_of([input])
            return backend.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)
        if gives:
            return self._exchange(flattened([output]), flattened([input]), gives, gets, [output], opts)
        n = self.size()
        if output.numel() != input.numel() or output.dtype != input.dtype or input.shape[:1].numel() % n:
            raise ValueError(
                f"all_to_all over {n} ranks: output has {output.numel()} elements of {output.dtype}, input "
                f"{input.numel()} of {input.dtype} in {input.shape[:1].numel()} rows; expected as many, in rows that "
                f"divide by {n}"
            )
        kind = self._kind_of_parts("all_to_all", output, input, opts)
        if output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
            kind = None  # the input is read from a copy
        if kind is not None and self._has_run_again(kind, output, input):
            return DoneWork(self._communicator, [output])
        target, source = flattened([output]), apart_from(output, input)
        settle = back_into(target, [output])
        call = moving_call("all_to_all", source.numel() * n, target, source)
        return self._issue(call, opts, [output], settle, kind)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: AllToAllOptions | None = None) -> dist.Work:
        """Exchange tensors with every rank; see ``torch.distributed.all_to_all``, which Gloo offers from 2.12 on."""
        opts = opts or AllToAllOptions()
        types = {t.dtype for t in (*outputs, *inputs)}
        if len(outputs) != self.size() or len(inputs) != self.size() or len(types) != 1:
            raise ValueError(
                f"all_to_all over {self.size()} ranks: {len(inputs)} inputs and {len(outputs)} outputs of "
                f"{', '.join(sorted(map(str, types)))}; expected {self.size()} each, all of one type"
            )
        if not self._takes([*outputs, *inputs], exchange=True):
            return self._backend_of(inputs).alltoall(outputs, inputs, opts)
        # A rank cannot see in its own lengths whether those of others are equal: they always count as uneven.
        source = torch.cat([t.reshape(-1) for t in inputs])
        target = source.new_empty(sum(t.numel() for t in outputs))
        return self._exchange(
            target, source, [t.numel() for t in inputs], [t.numel() for t in outputs], outputs, opts
        )

    def _exchange(
        self, target: Tensor, source: Tensor, gives: list[int], gets: list[int], outputs: list[Tensor], opts: Any
    ) -> dist.Work:
        """An all_to_all whose parts differ in length."""
        communicator = self._communicator
        is_one = communicator is None or communicator.exchanges_directly or not target.is_cpu
        return self._together(lambda: self._exchange_now(target, source, gives, gets, outputs, opts), is_one=is_one)

    def _exchange_now(
        self, target: Tensor, source: Tensor, gives: list[int], gets: list[int], outputs: list[Tensor], opts: Any
    ) -> dist.Work:
        communicator = self._communicator
        if communicator is None:
            raise RuntimeError("a group of one rank has no communicator")
        n, rank = self.size(), self.rank()
        if communicator.exchanges_directly:
            blocks = [0] * (n * n)
            blocks[rank * n : (rank + 1) * n] = gives
            blocks[rank::n] = gets
        else:  # some of what others exchange comes through here
            stated = torch.empty(n, 2, n, dtype=torch.int64)
            communicator.run(gather_call(stated.view(-1), torch.tensor([*gives, *gets], dtype=torch.int64)))
            given, expected = stated[:, 0], stated[:, 1].T
            for src, dst in (given != expected).nonzero().tolist()[:1]:  # every rank sees the same first one
                raise communicator.disagree(
                    f"ranks do not agree: in all_to_all with split sizes, rank {src} gives {given[src, dst]} "
                    f"elements to rank {dst}, which expects {expected[src, dst]}"
                )
            blocks = given.reshape(-1).tolist()
        if len(outputs) == 1 and target.data_ptr() == outputs[0].data_ptr():
            settle, source = None, apart_from(target, source)
        else:
            settle = put_later(target, outputs)
        call = Call(
            name="all_to_all",
            title=ALL_TO_ALL_V,
            num_elements=sum(blocks),
            item_bytes=target.element_size(),
            input_address=source.data_ptr(),
            output_address=target.data_ptr(),
            element=element_code(target.dtype),
            block_elements=tuple(blocks),
            knows_all=not communicator.exchanges_directly,
            keep=(target, source),
        )
        return self._issue(call, opts, outputs, settle)

    def permute(
        self, output: Tensor, input: Tensor, targets: Sequence[int | None], lengths: Sequence[int]
    ) -> dist.Work:
        """One block from each rank to one other, all of which every rank knows: over all links that can help.

        An all_to_all with such split sizes goes straight from rank to rank, since a rank that knows its own sizes
        alone cannot know of others that pass through it. Returns at once.

        Args:
            output: for the block that comes; of no element where none does.
            input: the block of this rank, of the same type; on the CPU, both.
            targets: of each rank the one that gets its block; ``None``: none does.
            lengths: elements of each rank's block.

        Raises:
            UsageError: no permutation.
            ValueError: tensors of other lengths or kinds.
        """
        communicator, n, rank = self._communicator, self.size(), self.rank()
        wanted = permutation(targets)
        blocks = [0] * (n * n)
        for source, target in enumerate(targets):
            if target is not None and target != source:
                blocks[source * n + target] = lengths[source]
        gives, gets = sum(blocks[rank * n : (rank + 1) * n]), sum(blocks[rank::n])
        if communicator is None or not (input.is_cpu and output.is_cpu) or input.dtype != output.dtype:
            raise ValueError(
                f"permute over {n} ranks: input of {input.dtype} on {input.device}, output of {output.dtype} on "
                f"{output.device}; expected one type, on the CPU, and two ranks or more"
            )
        if (input.numel(), output.numel()) != (gives, gets):
            raise ValueError(
                f"permute: rank {rank} gives {input.numel()} elements and expects {output.numel()}; by the lengths "
                f"of all ranks it gives {gives} and gets {gets}"
            )
        target_, source_ = flattened([output]), apart_from(output, input)
        call = Call(
            name="all_to_all",
            title=ALL_TO_ALL_V,
            num_elements=sum(blocks),
            item_bytes=output.element_size(),
            input_address=source_.data_ptr(),
            output_address=target_.data_ptr(),
            element=element_code(output.dtype),
            block_elements=tuple(blocks),
            weights=wanted.weights,
            keep=(target_, source_),
        )
        return self._issue(call, AllToAllOptions(), [output], back_into(target_, [output]))

    # -- messages between two ranks -------------------------------------------------------------------------

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; rank 0 names those that do not come. The group stays usable either way."""
        self._messages.monitored_barrier(self._timeout if timeout is None else bounded(timeout), wait_all_ranks)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Receive from whoever sends first; see ``torch.distributed.recv``."""
        return self._messenger(tensors).recv_anysource(tensors, tag)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Send to one rank; see ``torch.distributed.send``."""
        return self._messenger(tensors).send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Receive from one rank; see ``torch.distributed.recv``."""
        return self._messenger(tensors).recv(tensors, src, tag)

    def _messenger(self, tensors: Sequence[Tensor]) -> ProcessGroup | PointToPoint:
        """Who sends or receives tensors like these."""
        return self._messages if self._messages.takes(tensors) else self._backend_of(tensors)
