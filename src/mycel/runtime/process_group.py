"""The ``torch.distributed`` backend ``mycel``: a process group whose collectives run over verified schedules.

What mycel does not schedule (other collectives, reductions or element types) goes to a Gloo group that the process
group holds inside, or to an NCCL one for tensors on GPUs, so that every program that runs on these runs here. It goes
there directly and never through ``super()``: torch's C++ side calls the base class of a Python process group with the
interpreter lock held (torch 2.13, ``WORK_OVERRIDE`` in ``PyProcessGroup.hpp``). Gloo's ``enqueue`` then waits for a
mutex whose owner, a thread that drops a finished operation, waits for the interpreter lock: a deadlock, now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from mycel.runtime.communicator import Call, Communicator
from mycel.runtime.device.group import DeviceGroup, make_nccl
from mycel.runtime.fabric import Fabric, own_address
from mycel.runtime.forks import keep_in_children
from mycel.runtime.headers import ALL_TO_ALL_V
from mycel.runtime.membership import communicate, flight_log
from mycel.runtime.plain import on_plain_tensors
from mycel.runtime.reduce_kernels import DType, ReduceOp
from mycel.runtime.tensors import (
    BITWISE,
    COMPLEX,
    DTYPES,
    OPS,
    aliases,
    apart_from,
    back_into,
    check_list,
    element_code,
    flattened,
    gather_call,
    moving_call,
    put_later,
    put_results,
    scatter_call,
    split_elements,
    summing_call,
    uneven_lengths,
)
from mycel.runtime.timeouts import bounded, bounded_s, given_s
from mycel.runtime.transport.rendezvous import Rendezvous
from mycel.runtime.work import MycelWork, span_of
from mycel.settings import read_settings
from mycel.untraced import untraced

__all__ = ["MycelProcessGroup", "create_process_group"]

_log = logging.getLogger(__name__)

Tensor = torch.Tensor


@untraced
class MycelProcessGroup(ProcessGroup):
    """A process group; made by ``torch.distributed.init_process_group("mycel")`` and ``new_group``.

    Args:
        store: the group's own key-value store.
        rank, size: in the group.
        timeout: default time-out of a collective.
        global_ranks: of the group's members, in group order.
        world_size, name: ranks of the whole job, and what logs call the group.

    Examples:
        >>> dist.init_process_group("mycel", store=dist.HashStore(), rank=0, world_size=1)
        >>> type(dist.group.WORLD).__name__, dist.destroy_process_group()
        ('MycelProcessGroup', None)
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        global_ranks: Sequence[int],
        world_size: int,
        name: str = "",
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the three-argument form throws
        self._timeout = timeout = bounded(timeout)
        # What can be wrong with files and variables is found before anything connects: a rank that went away with
        # that error would otherwise show itself to the others as a broken connection only.
        settings = read_settings()
        if settings.restarts:  # torchrun's store may hold what the ranks before them have said
            store = PrefixStore(f"restart{settings.restarts}/", store)
        fabric = Fabric(settings, global_ranks, world_size) if size > 1 else None
        own, bind = own_address(settings, global_ranks[rank])
        gloo: Any = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
        self._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, gloo)
        # A backend has a process group's methods, but torch's type information knows them for the latter only.
        self._gloo: ProcessGroup = gloo
        keep_in_children(gloo)
        self._communicator: Communicator | None = None
        if fabric is not None:
            timeout_s = bounded_s(settings.timeout_s or timeout)
            rendezvous = Rendezvous(
                rank=rank,
                size=size,
                store=store,
                own=own,
                bind=bind,
                timeout_s=timeout_s,
                unix=settings.local != "tcp",
            )
            members = tuple(global_ranks)
            topology = fabric.topology(rendezvous.addresses)
            flight = flight_log(rendezvous, members, world_size, name, topology, settings)
            self._communicator = communicate(rendezvous, fabric, topology, timeout_s, settings, flight)
        self._no_tensor = torch.zeros(1, dtype=torch.int32)
        self._devices: DeviceGroup | None = None
        nccl = make_nccl(store, rank, size, timeout, global_ranks, name)
        if nccl is not None:
            # The group is a whole process group, and replaces what torch would have made for other devices.
            self._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
            self._devices = DeviceGroup(
                nccl,
                self._communicator,
                described=fabric is not None and fabric.described,
                least_bytes=settings.nccl_below,
                piece_bytes=settings.piece_bytes,
            )

    # -- what torch asks of a backend ---------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """``mycel``."""
        return "mycel"

    @property
    def communicator(self) -> Communicator | None:
        """The group's communicator; ``None`` in a group of one rank."""
        return self._communicator

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives have been called so far; 0 in a group of one rank."""
        return 0 if self._communicator is None else self._communicator.number

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time-out of later collectives."""
        self._timeout = timeout = bounded(timeout)
        if self._communicator is not None:
            self._communicator.timeout_s = bounded_s(timeout)
        if self._devices is not None:
            self._devices.backend.set_timeout(timeout)

    def shutdown(self) -> None:
        """Finish what is under way, tell the others goodbye and close all connections; nothing in a forked child."""
        if self._communicator is not None:
            self._communicator.close()
            if self._communicator.is_inherited:
                return
        if self._devices is not None:
            self._devices.backend.shutdown()
            self._devices.close()

    def abort(self) -> None:
        """Fail what is under way on every rank."""
        if self._communicator is not None:
            self._communicator.abort()
        if self._devices is not None:
            self._devices.backend.abort()

    # -- collectives --------------------------------------------------------------------------------------

    @on_plain_tensors
    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: AllreduceOptions | None = None
    ) -> dist.Work:
        """Reduce in place; see ``torch.distributed.all_reduce``."""
        opts = opts or AllreduceOptions()
        known = self._reduction(tensors, opts)
        if known is None or len(tensors) != 1:
            return self._backend_of(tensors).allreduce(tensors, opts)
        return self._all_reduce(tensors, *known, opts)

    @on_plain_tensors
    def allreduce_coalesced(self, tensors: list[Tensor], opts: AllreduceCoalescedOptions | None = None) -> dist.Work:
        """Reduce several tensors of one type in place, as one array."""
        opts = opts or AllreduceCoalescedOptions()
        known = self._reduction(tensors, opts)
        if known is None:
            return self._backend_of(tensors).allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, *known, opts)

    def _all_reduce(self, tensors: list[Tensor], op: ReduceOp, average: bool, dtype: DType, opts: Any) -> dist.Work:
        flat = flattened(tensors)
        settle = back_into(flat, tensors)
        call = summing_call("all_reduce", flat, op, average, dtype)
        return self._issue(call, opts, tensors, settle)

    @on_plain_tensors
    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: BroadcastOptions | None = None
    ) -> dist.Work:
        """Send the root's tensor to everyone; see ``torch.distributed.broadcast``."""
        opts = opts or BroadcastOptions()
        if len(tensors) != 1 or not self._takes(tensors):
            return self._backend_of(tensors).broadcast(tensors, opts)
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
        return self._issue(call, opts, tensors, settle)

    @on_plain_tensors
    def reduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: ReduceOptions | None = None
    ) -> dist.Work:
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

    @on_plain_tensors
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
        target, source = flattened([output]), flattened([input])
        settle = back_into(target, [output])
        return self._issue(gather_call(target, source), opts, [output], settle)

    @on_plain_tensors
    def allgather(  # type: ignore[override]
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Gather tensors, whose lengths may differ, into a list; see ``torch.distributed.all_gather``."""
        opts = opts or AllgatherOptions()
        outputs = output_lists[0] if len(output_lists) == 1 else []
        fits = len(inputs) == 1 and len(outputs) == self.size() and outputs[self.rank()].numel() == inputs[0].numel()
        fits = fits and all(t.dtype == inputs[0].dtype for t in outputs)
        if not fits or not self._takes([*outputs, *inputs]):
            return self._backend_of(inputs).allgather(output_lists, inputs, opts)
        source = flattened(inputs)
        target = source.new_empty(sum(t.numel() for t in outputs))
        call = gather_call(target, source, uneven_lengths(outputs))
        # The future's value has the nesting that torch's own backends give it.
        return self._issue(call, opts, outputs, put_later(target, outputs))

    @on_plain_tensors
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllgatherOptions | None = None
    ) -> dist.Work:
        """Gather several shards, as one array."""
        opts = opts or AllgatherOptions()
        alike = len({t.dtype for t in (*outputs, *inputs)}) == 1
        even = all(o.numel() == i.numel() * self.size() for o, i in zip(outputs, inputs, strict=True))
        if not alike or not even or not self._takes([*outputs, *inputs]):
            return _one_by_one(self._backend_of(inputs)._allgather_base, outputs, inputs, opts)
        source = flattened(inputs)
        target = source.new_empty(source.numel() * self.size())
        parts = torch.split(target.view(self.size(), -1), [t.numel() for t in inputs], dim=1)
        settle = partial(put_results, parts, aliases(outputs))
        return self._issue(gather_call(target, source), opts, outputs, settle)

    @on_plain_tensors
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
        source, target = flattened([input]), flattened([output])
        settle = back_into(target, [output])
        return self._issue(scatter_call(target, source, *known), opts, [output], settle)

    @on_plain_tensors
    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduce a list, whose tensors may differ in length, and keep the own element.

        See ``torch.distributed.reduce_scatter``.
        """
        opts = opts or ReduceScatterOptions()
        inputs = input_lists[0] if len(input_lists) == 1 else []
        fits = len(outputs) == 1 and len(inputs) == self.size() and inputs[self.rank()].numel() == outputs[0].numel()
        known = self._reduction([*outputs, *inputs], opts) if fits else None
        if known is None:
            return self._backend_of(outputs).reduce_scatter(outputs, input_lists, opts)
        source = torch.cat([tensor.reshape(-1) for tensor in inputs])
        target = flattened(outputs)
        settle = back_into(target, outputs)
        return self._issue(scatter_call(target, source, *known, uneven_lengths(inputs)), opts, outputs, settle)

    @on_plain_tensors
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduce and scatter several tensors, as one array."""
        opts = opts or ReduceScatterOptions()
        known = self._reduction([*outputs, *inputs], opts)
        even = all(i.numel() == o.numel() * self.size() for o, i in zip(outputs, inputs, strict=True))
        if known is None or not even:
            return _one_by_one(self._backend_of(inputs)._reduce_scatter_base, outputs, inputs, opts)
        source = torch.cat([tensor.reshape(self.size(), -1) for tensor in inputs], dim=1).reshape(-1)
        target = source.new_empty(source.numel() // self.size())
        call = scatter_call(target, source, *known)
        return self._issue(call, opts, outputs, put_later(target, outputs))

    def barrier(  # type: ignore[override]
        self, opts: BarrierOptions | None = None
    ) -> dist.Work:
        """Wait until every rank has come here."""
        opts = opts or BarrierOptions()
        if self._communicator is None:
            return self._gloo.barrier(opts)
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

    @on_plain_tensors
    def all_to_all_single(  # type: ignore[override]
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
        target, source = flattened([output]), apart_from(output, input)
        settle = back_into(target, [output])
        call = moving_call("all_to_all", source.numel() * n, target, source)
        return self._issue(call, opts, [output], settle)

    @on_plain_tensors
    def alltoall(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllToAllOptions | None = None
    ) -> dist.Work:
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
        if communicator is None:
            raise RuntimeError("a group of one rank has no communicator")
        n, rank = self.size(), self.rank()
        blocks = torch.zeros(n, n, dtype=torch.int64)
        blocks[rank] = torch.tensor(gives, dtype=torch.int64)
        if communicator.exchanges_directly:
            blocks[:, rank] = torch.tensor(gets, dtype=torch.int64)
        else:  # some of what others exchange comes through here
            stated = torch.empty(n, 2, n, dtype=torch.int64)
            communicator.run(gather_call(stated.view(-1), torch.tensor([*gives, *gets], dtype=torch.int64)))
            blocks, expected = stated[:, 0].contiguous(), stated[:, 1].T
            for src, dst in (blocks != expected).nonzero().tolist()[:1]:  # every rank sees the same first one
                raise communicator.disagree(
                    f"ranks do not agree: in all_to_all with split sizes, rank {src} gives {blocks[src, dst]} "
                    f"elements to rank {dst}, which expects {expected[src, dst]}"
                )
        if len(outputs) == 1 and target.data_ptr() == outputs[0].data_ptr():
            settle, source = None, apart_from(target, source)
        else:
            settle = put_later(target, outputs)
        call = Call(
            name="all_to_all",
            title=ALL_TO_ALL_V,
            num_elements=int(blocks.sum()),
            item_bytes=target.element_size(),
            input_address=source.data_ptr(),
            output_address=target.data_ptr(),
            element=element_code(target.dtype),
            block_elements=tuple(blocks.view(-1).tolist()),
            knows_all=not communicator.exchanges_directly,
            keep=(target, source),
        )
        return self._issue(call, opts, outputs, settle)

    @on_plain_tensors
    def gather(  # type: ignore[override]
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: GatherOptions | None = None
    ) -> dist.Work:
        """Gather equal tensors at the root; see ``torch.distributed.gather``."""
        opts = opts or GatherOptions()
        outputs = output_lists[0] if output_lists else []
        if len(inputs) != 1 or not self._takes([*outputs, *inputs]):
            return self._backend_of(inputs).gather(output_lists, inputs, opts)
        if self.rank() == opts.rootRank:
            check_list("gather", outputs, inputs[0], self.size())
        source = flattened(inputs)
        target = source.new_empty(source.numel() * len(outputs))
        call = moving_call("gather", source.numel() * self.size(), target, source, root=opts.rootRank)
        return self._issue(call, opts, outputs, put_later(target, outputs))

    @on_plain_tensors
    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: ScatterOptions | None = None
    ) -> dist.Work:
        """Give each rank a tensor of the root's; see ``torch.distributed.scatter``."""
        opts = opts or ScatterOptions()
        inputs = input_lists[0] if input_lists else []
        if len(outputs) != 1 or not self._takes([*outputs, *inputs]):
            return self._backend_of(outputs).scatter(outputs, input_lists, opts)
        if self.rank() == opts.rootRank:
            check_list("scatter", inputs, outputs[0], self.size())
        target = flattened(outputs)
        source = torch.cat([t.reshape(-1) for t in inputs]) if inputs else target.new_empty(0)
        settle = back_into(target, outputs)
        call = moving_call("scatter", target.numel() * self.size(), target, source, root=opts.rootRank)
        return self._issue(call, opts, outputs, settle)

    # -- what Gloo and NCCL do ------------------------------------------------------------------------------

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; rank 0 names those that do not come. The group stays usable either way."""
        gloo: Any = self._gloo
        gloo.monitored_barrier(self._timeout if timeout is None else bounded(timeout), wait_all_ranks)

    @on_plain_tensors
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Receive from whoever sends first; see ``torch.distributed.recv``."""
        return self._backend_of(tensors).recv_anysource(tensors, tag)

    @on_plain_tensors
    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Send to one rank; see ``torch.distributed.send``."""
        return self._backend_of(tensors).send(tensors, dst, tag)

    @on_plain_tensors
    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Receive from one rank; see ``torch.distributed.recv``."""
        return self._backend_of(tensors).recv(tensors, src, tag)

    # Names that older torch versions, or its C++ side, use for the same operations.
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # -- common -------------------------------------------------------------------------------------------

    def _takes(self, tensors: Sequence[Tensor], *, exchange: bool = False) -> bool:
        """Whether a call on these tensors runs over schedules; all ranks must come to the same answer."""
        if self._communicator is None:
            return False
        if self._devices is not None and not self._on_host(tensors):
            return self._devices.takes(tensors, exchange=exchange)
        return all(t.is_cpu and t.layout == torch.strided for t in tensors)

    def _on_host(self, tensors: Sequence[Tensor]) -> bool:
        return not tensors or tensors[0].is_cpu

    def _backend_of(self, tensors: Sequence[Tensor]) -> ProcessGroup:
        """Torch's own backend for tensors like these."""
        if self._devices is None or self._on_host(tensors):
            return self._gloo
        backend: ProcessGroup = self._devices.backend
        return backend

    def _reduction(self, tensors: Sequence[Tensor], opts: Any) -> tuple[ReduceOp, bool, DType] | None:
        """How the tensors are reduced here; ``None``: Gloo's turn."""
        op = OPS.get(opts.reduceOp.op)
        alike = bool(tensors) and len({t.dtype for t in tensors}) == 1
        if op is None or not alike or not self._takes(tensors):
            return None
        of = tensors[0].dtype
        if op[0] in BITWISE and (of.is_floating_point or of.is_complex):
            raise ValueError(f"{op[0].name} is for integers and bool; these tensors are {of}")
        dtype = COMPLEX.get(of) if op[0] is ReduceOp.SUM else None
        dtype = DTYPES.get(of, dtype)
        return None if dtype is None else (*op, dtype)

    def _issue(self, call: Call, opts: Any, result: list[Tensor], settle: Callable[[], None] | None) -> dist.Work:
        communicator = self._communicator
        if communicator is None:
            raise RuntimeError("a group of one rank has no communicator")
        buffer = call.keep[0]
        if self._devices is not None and isinstance(buffer, Tensor) and not self._on_host([buffer]):
            with span_of(call.title or call.name, call.num_elements * call.item_bytes) or nullcontext():
                return self._devices.start(call, buffer.device, result, settle)
        timeout_s, span = given_s(opts.timeout), span_of(call.title or call.name, call.num_elements * call.item_bytes)
        if span is not None:
            span.__enter__()  # type: ignore[no-untyped-call]
        if getattr(opts, "asyncOp", True):
            work = MycelWork(communicator, communicator.start(call, timeout_s=timeout_s, settle=settle), result)
            if span is not None:  # it ends when the collective does, wherever that is seen
                span._call_end_callbacks_on_future(work.get_future())
            return work
        try:
            communicator.run(call, timeout_s=timeout_s, settle=settle)
        finally:
            if span is not None:
                span.__exit__(None, None, None)
        return MycelWork(communicator, None, result)


def _one_by_one(
    operation: Callable[[Tensor, Tensor, Any], dist.Work], outputs: list[Tensor], inputs: list[Tensor], opts: Any
) -> dist.Work:
    """Gloo's coalesced forms, which it does not offer to Python: all but the last are waited for here."""
    works: list[dist.Work] = []
    for output, input in zip(outputs, inputs, strict=True):
        for work in works[-1:]:
            work.wait()
        works.append(operation(output, input, opts))
    return works[-1]


def create_process_group(options: Any, backend_options: Any = None) -> MycelProcessGroup:
    """Make a process group, as ``torch.distributed.Backend.register_backend`` asks for with its extended interface.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, rank, size, time-out, members.
        backend_options: unused.
    """
    size = options.group_size
    members = list(options.global_ranks_in_group) or list(range(size))
    world_size = dist.get_world_size() if options.global_ranks_in_group else size
    return MycelProcessGroup(
        options.store, options.group_rank, size, options.timeout, members, world_size, str(options.group_id)
    )
