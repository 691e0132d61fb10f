"""Collectives that move and do not add: broadcast, all_gather, gather, scatter."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from mycel.collectives.spec import CollectiveName
from mycel.runtime.communicator import Call
from mycel.runtime.fallback import one_by_one
from mycel.runtime.group_calls import GroupCalls
from mycel.runtime.pointed import parts_call
from mycel.runtime.tensors import (
    aliases,
    back_into,
    check_parts,
    element_code,
    flattened,
    gather_call,
    put_later,
    put_results,
    uneven_lengths,
)
from mycel.runtime.work import DoneWork

__all__ = ["Movements"]

Tensor = torch.Tensor


class Movements(GroupCalls):
    """What goes from one rank to all, from all to one and from all to all alike, under torch's names."""

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions | None = None) -> dist.Work:
        """Send the root's tensor to everyone; see ``torch.distributed.broadcast``."""
        opts = opts or BroadcastOptions()
        if len(tensors) != 1 or not self._takes(tensors):
            return self._backend_of(tensors).broadcast(tensors, opts)
        kind = self._kind_of_parts("broadcast", tensors[0], tensors[0], opts, opts.rootRank)
        if kind is not None and self._has_run_again(kind, tensors[0]):
            return DoneWork(self._communicator, tensors)
        flat = flattened(tensors)
        settle = back_into(flat, tensors)
        call = Call(
            name="broadcast",
            root=opts.rootRank,
            num_elements=flat.numel(),
            item_bytes=flat.element_size(),
            output_address=flat.data_ptr(),
            element=element_code(flat.dtype),
            keep=(flat,),
        )
        return self._issue(call, opts, tensors, settle, kind)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None) -> dist.Work:
        """Gather equal shards into one tensor; see ``torch.distributed.all_gather_into_tensor``."""
        opts = opts or AllgatherOptions()
        if not self._takes([output, input]):
            return self._backend_of([input])._allgather_base(output, input, opts)
        if output.numel() != input.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(
                f"all_gather over {self.size()} ranks: output has {output.numel()} elements of {output.dtype}, "
                f"expected {input.numel() * self.size()} of {input.dtype}"
            )
        kind = self._kind_of_parts("all_gather", output, input, opts)
        if kind is not None and self._has_run_again(kind, output, input):
            return DoneWork(self._communicator, [output])
        target, source = flattened([output]), flattened([input])
        settle = back_into(target, [output])
        return self._issue(gather_call(target, source), opts, [output], settle, kind)

    def allgather(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Gather tensors, whose lengths may differ, into a list; see ``torch.distributed.all_gather``."""
        opts = opts or AllgatherOptions()
        outputs = output_lists[0] if len(output_lists) == 1 else []
        if len(inputs) != 1 or not self._takes([*outputs, *inputs]):
            return self._backend_of(inputs).allgather(output_lists, inputs, opts)
        n = self.size()
        check_parts(f"all_gather over {n} ranks: in the list of outputs", outputs, inputs[0], self.rank(), n)
        source = flattened(inputs)
        target = source.new_empty(sum(t.numel() for t in outputs))
        call = gather_call(target, source, uneven_lengths(outputs))
        # The future's value has the nesting that torch's own backends give it.
        return self._issue(call, opts, outputs, put_later(target, outputs))

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Gather several shards, as one array."""
        opts = opts or AllgatherOptions()
        alike = len({t.dtype for t in (*outputs, *inputs)}) == 1
        even = all(o.numel() == i.numel() * self.size() for o, i in zip(outputs, inputs, strict=True))
        if not alike or not even or not self._takes([*outputs, *inputs]):
            return one_by_one(self._backend_of(inputs)._allgather_base, outputs, inputs, opts)
        source = flattened(inputs)
        target = source.new_empty(source.numel() * self.size())
        parts = torch.split(target.view(self.size(), -1), [t.numel() for t in inputs], dim=1)
        settle = partial(put_results, parts, aliases(outputs))
        return self._issue(gather_call(target, source), opts, outputs, settle)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Gather a list of tensors from every rank, as one array; see ``torch.distributed.all_gather_coalesced``."""
        opts = opts or AllgatherOptions()
        outputs = [tensor for of_rank in output_lists for tensor in of_rank]
        alike = len({t.dtype for t in (*outputs, *inputs)}) == 1
        lengths = [t.numel() for t in inputs]
        even = len(output_lists) == self.size() and all([t.numel() for t in o] == lengths for o in output_lists)
        if not alike or not even or not self._takes([*outputs, *inputs]):
            lists = [list(of_input) for of_input in zip(*output_lists, strict=True)]
            gather = self._backend_of(inputs).allgather
            return one_by_one(lambda o, i, opts: gather([o], [i], opts), lists, inputs, opts)
        source = flattened(inputs)
        target = source.new_empty(source.numel() * self.size())
        return self._issue(gather_call(target, source), opts, outputs, put_later(target, outputs))

    def gather(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: GatherOptions | None = None
    ) -> dist.Work:
        """Gather tensors, whose lengths may differ, at the root; see ``torch.distributed.gather``."""
        opts = opts or GatherOptions()
        outputs = output_lists[0] if output_lists else []
        if len(inputs) != 1 or not self._takes([*outputs, *inputs]):
            return self._backend_of(inputs).gather(output_lists, inputs, opts)
        source = flattened(inputs)
        target = source.new_empty(sum(t.numel() for t in outputs))

        def issue() -> dist.Work:
            call = parts_call(self._communicator, "gather", opts.rootRank, target, source, outputs)
            return self._issue(call, opts, outputs, put_later(target, outputs))

        return self._together(issue, is_one=self._is_one("gather", opts.rootRank, target))

    def scatter(
        self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: ScatterOptions | None = None
    ) -> dist.Work:
        """Give each rank a tensor of the root's, of any length; see ``torch.distributed.scatter``."""
        opts = opts or ScatterOptions()
        inputs = input_lists[0] if input_lists else []
        if len(outputs) != 1 or not self._takes([*outputs, *inputs]):
            return self._backend_of(outputs).scatter(outputs, input_lists, opts)
        target = flattened(outputs)
        source = torch.cat([t.reshape(-1) for t in inputs]) if inputs else target.new_empty(0)

        def issue() -> dist.Work:
            call = parts_call(self._communicator, "scatter", opts.rootRank, target, source, inputs)
            return self._issue(call, opts, outputs, back_into(target, outputs))

        return self._together(issue, is_one=self._is_one("scatter", opts.rootRank, target))

    def _is_one(self, name: CollectiveName, root: int, target: Tensor) -> bool:
        """Whether a gather or scatter is one collective, for lengths need not be told first."""
        communicator = self._communicator
        return communicator is None or not target.is_cpu or communicator.sends_parts_directly(name, root)
