"""Collectives that add up: all_reduce, reduce, reduce_scatter; and the barrier, an all_reduce of one number."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    ReduceOptions,
    ReduceScatterOptions,
)

from mycel.runtime.communicator import Call
from mycel.runtime.fallback import one_by_one
from mycel.runtime.group_calls import GroupCalls
from mycel.runtime.reduce_kernels import DType, ReduceOp
from mycel.runtime.tensors import (
    back_into,
    check_parts,
    flattened,
    put_later,
    scatter_call,
    summing_call,
    uneven_lengths,
)
from mycel.runtime.work import DoneWork

__all__ = ["Reductions"]

Tensor = torch.Tensor


class Reductions(GroupCalls):
    """Reductions of a group, under torch's names."""

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions | None = None) -> dist.Work:
        """Reduce in place; see ``torch.distributed.all_reduce``."""
        opts = opts or AllreduceOptions()
        if self.has_reduced_again(tensors, opts):
            return DoneWork(self._communicator, tensors)
        kind = self._kind_of_sum(tensors, opts)
        known = self._reduction(tensors, opts)
        if known is None or len(tensors) != 1:
            return self._backend_of(tensors).allreduce(tensors, opts)
        return self._all_reduce(tensors, *known, opts, kind)

    def has_reduced_again(self, tensors: list[Tensor], opts: Any) -> bool:
        """Run an all_reduce to its end if it is one that has been run before, small and blocking; whether it was."""
        kind = self._kind_of_sum(tensors, opts)
        return kind is not None and self._has_run_again(kind, tensors[0])

    def _kind_of_sum(self, tensors: list[Tensor], opts: Any) -> Hashable | None:
        """What a blocking all_reduce of a small tensor in place is known by; ``None`` for others."""
        if len(tensors) != 1 or not self._is_small(tensors[0], opts):
            return None
        tensor = tensors[0]
        return tensor.dtype, tensor.numel(), int(opts.reduceOp.op), tensor.is_conj() or tensor.is_neg()

    def allreduce_coalesced(self, tensors: list[Tensor], opts: AllreduceCoalescedOptions | None = None) -> dist.Work:
        """Reduce several tensors of one type in place, as one array."""
        opts = opts or AllreduceCoalescedOptions()
        known = self._reduction(tensors, opts)
        if known is None:
            return self._backend_of(tensors).allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, *known, opts)

    def _all_reduce(
        self,
        tensors: list[Tensor],
        op: ReduceOp,
        average: bool,
        dtype: DType,
        opts: Any,
        kind: Hashable | None = None,
    ) -> dist.Work:
        flat = flattened(tensors)
        settle = back_into(flat, tensors)
        call = summing_call("all_reduce", flat, op, average, dtype)
        return self._issue(call, opts, tensors, settle, kind)

    def reduce(self, tensors: list[Tensor], opts: ReduceOptions | None = None) -> dist.Work:
        """Reduce to the root, which alone gets a result; the others' tensors stay as they are."""
        opts = opts or ReduceOptions()
        known = self._reduction(tensors, opts) if len(tensors) == 1 else None
        if known is None:
            return self._backend_of(tensors).reduce(tensors, opts)
        op, average, dtype = known
        flat = flattened(tensors)
        settle = back_into(flat, tensors)
        if self.rank() != opts.rootRank:
            flat, settle = flat.clone(), None  # partial sums pass through it
        call = summing_call("reduce", flat, op, average, dtype, root=opts.rootRank)
        return self._issue(call, opts, tensors, settle)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduce and keep the own shard; see ``torch.distributed.reduce_scatter_tensor``."""
        opts = opts or ReduceScatterOptions()
        known = self._reduction([output, input], opts)
        if known is None:
            return self._backend_of([input])._reduce_scatter_base(output, input, opts)
        if input.numel() != output.numel() * self.size():
            raise ValueError(
                f"reduce_scatter over {self.size()} ranks: input has {input.numel()} elements, "
                f"expected {output.numel() * self.size()}"
            )
        op: Any = opts.reduceOp
        kind = self._kind_of_parts("reduce_scatter", output, input, opts, int(op.op))
        if kind is not None and self._has_run_again(kind, output, input):
            return DoneWork(self._communicator, [output])
        source, target = flattened([input]), flattened([output])
        settle = back_into(target, [output])
        return self._issue(scatter_call(target, source, *known), opts, [output], settle, kind)

    def reduce_scatter(
        self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduce a list, whose tensors may differ in length, and keep the own element.

        See ``torch.distributed.reduce_scatter``.
        """
        opts = opts or ReduceScatterOptions()
        inputs = input_lists[0] if len(input_lists) == 1 else []
        if len(outputs) == 1 and self._takes([*outputs, *inputs]):
            n = self.size()
            check_parts(f"reduce_scatter over {n} ranks: in the list of inputs", inputs, outputs[0], self.rank(), n)
        known = self._reduction([*outputs, *inputs], opts) if len(outputs) == 1 else None
        if known is None:
            return self._backend_of(outputs).reduce_scatter(outputs, input_lists, opts)
        source = torch.cat([tensor.reshape(-1) for tensor in inputs])
        target = flattened(outputs)
        settle = back_into(target, outputs)
        return self._issue(scatter_call(target, source, *known, uneven_lengths(inputs)), opts, outputs, settle)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduce and scatter several tensors, as one array."""
        opts = opts or ReduceScatterOptions()
        known = self._reduction([*outputs, *inputs], opts)
        even = all(i.numel() == o.numel() * self.size() for o, i in zip(outputs, inputs, strict=True))
        if known is None or not even:
            return one_by_one(self._backend_of(inputs)._reduce_scatter_base, outputs, inputs, opts)
        source = torch.cat([tensor.reshape(self.size(), -1) for tensor in inputs], dim=1).reshape(-1)
        target = source.new_empty(source.numel() // self.size())
        call = scatter_call(target, source, *known)
        return self._issue(call, opts, outputs, put_later(target, outputs))

    def barrier(self, opts: BarrierOptions | None = None) -> dist.Work:
        """Wait until every rank has come here."""
        opts = opts or BarrierOptions()
        if self._communicator is None:
            return self._fallback.gloo.barrier(opts)
        token = self._no_tensor
        call = Call(
            title="barrier",
            name="all_reduce",
            num_elements=1,
            item_bytes=token.element_size(),
            output_address=token.data_ptr(),
            dtype=DType.INT32,
            reduce_op=ReduceOp.MAX,
            keep=(token,),
        )
        return self._issue(call, opts, [token], None)
