"""What every rank runs for ``test_messages.py``: sends and receives over the backend, none of them over Gloo."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mycel.errors import CollectiveTimeoutError, CommunicationError, MismatchError, PeerLostError
from mycel.runtime import monitored_barrier, tensor_group

TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.bool,
    torch.complex64,
)
SIZES = (0, 1, 7, 16384, 16385, 300_001)


def given(rank: int, size: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(0, 100, (size,), generator=generator).to(dtype)


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def everything(rank: int, size: int) -> None:
    for check in (types_and_sizes, shapes, rings, tags, any_source, batches, objects, progress, futures, to_oneself):
        check(rank, size)
        dist.barrier()


def types_and_sizes(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in SIZES:
        for dtype in TYPES if n != SIZES[-1] else TYPES[:1]:
            sent, came = given(rank, n, dtype), torch.zeros(n).to(dtype)
            sending = dist.isend(sent, after)
            assert dist.recv(came, before) == before
            sending.wait()
            assert equal(came, given(before, n, dtype)), (n, dtype)
            assert equal(sent, given(rank, n, dtype))


def shapes(rank: int, size: int) -> None:
    """Views with gaps, scalars, tensors that require gradients, inference tensors."""
    after, before = (rank + 1) % size, (rank - 1) % size
    wide = torch.zeros(6, 8)
    sending = dist.isend(given(rank, 24).view(4, 6).t(), after)
    dist.recv(wide[:, ::2], before)
    sending.wait()
    assert torch.equal(wide[:, ::2], given(before, 24).view(4, 6).t())
    assert not wide[:, 1::2].any(), "what lies between must stay"
    leaf, came = torch.full((), float(rank), requires_grad=True), torch.zeros((), requires_grad=True)
    sending = dist.isend(leaf, after)
    dist.recv(came, before)
    sending.wait()
    assert came.item() == before and came.requires_grad
    with torch.inference_mode():
        inferred = torch.zeros(3, 2).t()
    sending = dist.isend(torch.full((2, 3), float(rank)), after)
    dist.recv(inferred, before)
    sending.wait()
    assert (inferred == before).all()


def rings(rank: int, size: int) -> None:
    """Everybody sends first, and waits for it, while what is sent is short; long ones are waited for later."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for number in range(20):
        came = torch.zeros(16384)
        dist.send(torch.full((16384,), float(rank + number)), after)
        dist.recv(came, before)
        assert (came == before + number).all()
    came = torch.zeros(1 << 20)
    sending = dist.isend(torch.full((1 << 20,), float(rank)), after)
    dist.recv(came, before)
    sending.wait()
    assert (came == before).all()


def tags(rank: int, size: int) -> None:
    """Asked for in another order than sent; order kept within a tag."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sendings = [
        dist.isend(torch.full((n,), float(10 * tag + k)), after, tag=tag)
        for k in range(3)
        for tag, n in ((1, 5), (2, 100_000), (7, 30_000))
    ]
    for tag, n in ((7, 30_000), (1, 5), (2, 100_000)):
        for k in range(3):
            came = torch.zeros(n)
            dist.recv(came, before, tag=tag)
            assert (came == 10 * tag + k).all()
    for sending in sendings:
        sending.wait()


def any_source(rank: int, size: int) -> None:
    for n in (4, 200_000):
        if rank:
            dist.send(torch.full((n,), float(rank)), 0, tag=n)
            continue
        seen = []
        for _ in range(size - 1):
            came = torch.zeros(n)
            source = dist.recv(came, tag=n)
            assert (came == source).all()
            seen.append(source)
        assert sorted(seen) == list(range(1, size))


def batches(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for n in (3, 100_000):
        came = [torch.zeros(n) for _ in range(4)]
        operations = [dist.P2POp(dist.irecv, tensor, before, tag=k) for k, tensor in enumerate(came)]
        operations += [dist.P2POp(dist.isend, torch.full((n,), float(rank + k)), after, tag=k) for k in range(4)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
            assert work.is_completed() and work.is_success()
        assert all((tensor == before + k).all() for k, tensor in enumerate(came))
        with dist._coalescing_manager(async_ops=True):
            works = [dist.irecv(came[0], before), dist.isend(torch.full((n,), rank + 0.5), after)]
        for work in works:
            assert work is not None
            work.wait()
        assert (came[0] == before + 0.5).all()
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        other = size - 1 - rank
        came = [torch.zeros(2)]
        operations = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), other, pair)]
        operations += [dist.P2POp(dist.irecv, came[0], other, pair)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert (came[0] == other).all()
        dist.destroy_process_group(pair)


def gone_with_what_it_wanted(rank: int, size: int) -> None:
    """A message is taken and its receiver leaves, all before its sender has looked at what was said of it."""
    del size
    for length in (16_385, 20_000):  # longer than what is sent unasked, and sent early
        value = torch.full((length,), 3.0)
        pair = dist.new_group([0, 1])
        endpoint = tensor_group(pair)._messages._endpoint  # type: ignore[attr-defined]
        if rank == 1:
            came = torch.zeros(length)
            dist.recv(came, 0, group=pair)
            assert bool((came == value).all())
            dist.destroy_process_group(pair)
        else:
            work = dist.isend(value, 1, group=pair)
            assert work is not None
            with endpoint._moving:
                until = time.monotonic() + 60.0
                while 1 not in endpoint._lines.gone:
                    assert time.monotonic() < until, "rank 1 has not left"
                    time.sleep(0.01)
                endpoint._look()
            work.wait()
            dist.destroy_process_group(pair)


def random_exchanges(rank: int, size: int, seed: int) -> None:
    """Any messages between any ranks, begun and waited for in any order that keeps each tag's own."""
    plan, order = random.Random(seed), random.Random(1000 * seed + rank)
    for number in range(12):
        messages = []
        for key in range(plan.randrange(1, 25)):
            src, dst = plan.sample(range(size), 2)
            length = plan.choice((0, 1, 50, 5000, 16384, 16385, 40_000, 400_000))
            messages.append((src, dst, plan.randrange(3), length, 100.0 * number + key))
        mine = [message for message in messages if rank in message[:2]]
        streams: dict[tuple[int, int, int], list[tuple[int, int, int, int, float]]] = {}
        for message in mine:
            streams.setdefault(message[:3], []).append(message)
        works = []
        while streams:
            stream = order.choice(sorted(streams))
            src, dst, tag, length, value = streams[stream].pop(0)
            if not streams[stream]:
                del streams[stream]
            if src == rank:
                works.append((dist.isend(torch.full((length,), value), dst, tag=tag), None, value))
            else:
                came = torch.zeros(length)
                works.append((dist.irecv(came, src, tag=tag), came, value))
        order.shuffle(works)
        for work, came, value in works:
            assert work is not None
            work.wait()
            assert came is None or bool((came == value).all())


def objects(rank: int, size: int) -> None:
    if rank == 0:
        dist.send_object_list([{"a": 1}, "x" * 100_000, None], dst=size - 1)
    if rank == size - 1:
        told: list[Any] = [None, None, None]
        assert dist.recv_object_list(told, src=0) == 0
        assert told == [{"a": 1}, "x" * 100_000, None]


def progress(rank: int, size: int) -> None:
    """Messages get through while the main thread is busy in Python and waits for nothing."""
    after, before = (rank + 1) % size, (rank - 1) % size
    came = torch.zeros(3 << 20)
    receiving = dist.irecv(came, before)
    sending = dist.isend(torch.full((3 << 20,), float(rank)), after)
    assert receiving is not None and sending is not None
    seen = threading.Event()
    receiving.get_future().then(lambda future: seen.set())
    until = time.monotonic() + 30
    while not seen.is_set():
        assert time.monotonic() < until
        sum(range(1000))
    assert receiving.is_completed() and (came == before).all()
    while not sending.is_completed():
        assert time.monotonic() < until


def futures(rank: int, size: int) -> None:
    """A future is done when its work is, and holds the tensor; the memory is held, whatever becomes of the tensor."""
    after, before = (rank + 1) % size, (rank - 1) % size
    came = torch.zeros(1 << 18)
    own = came[:]
    receiving = dist.irecv(came, before)
    early = receiving.get_future()
    came.data = torch.zeros(1)
    sent = torch.full((1 << 18,), float(rank))
    sending = dist.isend(sent, after)
    sent.set_(torch.zeros(1).untyped_storage())
    receiving.wait()
    sending.wait()
    for future in (early, receiving.get_future(), sending.get_future()):
        here: list[str] = []
        assert future.done()
        future.then(lambda _, here=here: here.append(threading.current_thread().name))
        assert here == ["MainThread"]
    assert (own == before).all()
    assert receiving._source_rank() == before


def kinds_of_wires(rank: int, size: int) -> list[str]:
    """What carried this rank's messages."""
    rings(rank, size)
    waiting = tensor_group()._messages._endpoint._waiting
    return sorted({type(connection.wire).__name__ for connection in waiting.connections.values()})


def mixed_ways(rank: int, size: int) -> None:
    """Each rank in another environment than the next."""
    os.environ["MYCEL_LOCAL"] = ("memory", "unix")[rank % 2]
    store = dist.FileStore(os.environ["STORE_FILE"], size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    rings(rank, size)
    exchange = tensor_group()._messages._endpoint._exchange
    called = {peer: outlet.connections[0] for peer, outlet in exchange.outlets.items()}
    kinds = [(rank, type(connection.wire).__name__) for connection in called.values()]
    kinds += [(peer, type(connection.wire).__name__) for peer, connection in exchange.inlets.items()]
    assert len(kinds) == 2 and all(kind == ("MemoryWire", "SocketWire")[who % 2] for who, kind in kinds), kinds
    dist.barrier()


def to_oneself(rank: int, size: int) -> None:
    for call in (dist.send, dist.recv, dist.isend, dist.irecv):
        with pytest.raises(ValueError, match=r"rank of the current process|from, another rank"):
            call(torch.zeros(1), rank)
    with pytest.raises(ValueError, match=r"no rank|not part of"):
        dist.isend(torch.zeros(1), size)


def disagreeing(rank: int, size: int, late: bool) -> None:
    """Sizes or types that differ: an error that says so on both, at the latest with the next call."""
    other = 1 - rank
    if late and rank == 1:
        time.sleep(0.2)
    with pytest.raises(MismatchError, match=r"rank 0 sent 32 bytes of float32 with tag 4 to rank 1, which receives"):
        if rank == 0:
            dist.send(torch.zeros(8), other, tag=4)
        else:
            dist.recv(torch.zeros(8, dtype=torch.int32), other, tag=4)
        dist.barrier()
    with pytest.raises(CommunicationError, match="failed earlier"):
        dist.all_reduce(torch.zeros(1))


def late(rank: int, size: int) -> None:
    """A time-out names the rank, on whoever waits; then the group has failed, for all."""
    if rank == 0:
        dist.group.WORLD.set_timeout(timedelta(seconds=0.7))  # type: ignore[union-attr]
        receiving = dist.irecv(torch.zeros(1), 1, tag=2)
        assert receiving is not None
        with pytest.raises(RuntimeError, match=r"still under way after 0.1 s"):
            receiving.wait(timedelta(seconds=0.1))
        with pytest.raises(CollectiveTimeoutError, match=r"recv from rank 1 \(tag 2.*timeout of 0.7 s: nothing with"):
            receiving.wait()
        assert isinstance(receiving.exception(), CollectiveTimeoutError)
    else:
        with pytest.raises(CollectiveTimeoutError, match=r"recv from rank 1 \(tag 2"):
            dist.recv(torch.zeros(1), 0)


def killed(rank: int, size: int) -> None:
    """The other ranks hear of a death, in receives and sends that wait for the dead (a child of its rank)."""
    victim = size - 1
    if rank == victim and (child := os.fork()):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    store = dist.FileStore(os.environ["STORE_FILE"], size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    came = torch.zeros(1)
    if rank == victim:
        dist.send(came, 0)
        dist.recv(came, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        dist.recv(came, victim)
        dist.send(came, victim)
    with pytest.raises(PeerLostError, match=rf"rank {victim} was lost during"):
        if rank == 0:
            dist.send(torch.zeros(1 << 20), victim)
        else:
            dist.recv(came, victim, tag=5)
    with pytest.raises(PeerLostError, match=rf"failed earlier: rank {victim}"):
        dist.isend(came, 1 - rank)


def left_behind(rank: int, size: int) -> None:
    """What was sent before its sender destroyed its group is received after; what was not asked for is dropped."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        for tag in range(4):
            dist.send(torch.full((10_000,), float(tag)), 1, tag=tag)
        long = dist.isend(torch.full((4 << 20,), 9.0), 1, tag=9)
        never = dist.isend(torch.zeros(4 << 20), 1, tag=10)
        assert long is not None and never is not None
        until = time.monotonic() + 20
        while not long._transfer.begun:  # type: ignore[attr-defined]
            assert time.monotonic() < until
            long.is_completed()
        dist.destroy_process_group()
        assert long.wait()
        with pytest.raises(CommunicationError, match="destroyed"):
            never.wait()
        store.set("left", "")
        return
    came = torch.zeros(4 << 20)
    dist.recv(came, 0, tag=9)
    assert (came == 9).all()
    for tag in reversed(range(4)):
        came = torch.zeros(10_000)
        dist.recv(came, 0, tag=tag)
        assert (came == tag).all()
    store.wait(["left"], timedelta(seconds=20))  # until then it could be asked for
    with pytest.raises(PeerLostError, match="rank 0 left"):
        dist.recv(torch.zeros(4 << 20), 0, tag=10)


def forked(rank: int, size: int) -> None:
    """A child gets an error, for what is under way too, may destroy the group, and disturbs nobody."""
    came = torch.zeros(1)
    sending = dist.isend(torch.full((1,), float(rank)), (rank + 1) % size)
    dist.recv(came, (rank - 1) % size)
    assert sending is not None
    sending.wait()
    late = torch.zeros(1)
    waiting = dist.irecv(late, (rank - 1) % size, tag=9)
    assert waiting is not None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            with pytest.raises(CommunicationError, match="forked"):
                waiting.wait()
            assert waiting.is_completed() and not waiting.is_success()
            with pytest.raises(CommunicationError, match="forked"):
                dist.send(came, (rank + 1) % size)
            dist.destroy_process_group()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    dist.send(torch.full((1,), float(rank)), (rank + 1) % size, tag=9)
    waiting.wait()
    assert late.item() == (rank - 1) % size
    rings(rank, size)


def barriers(rank: int, size: int) -> None:
    """Monitored barriers pass, name who does not come, and leave the group as it was, many times over."""
    monitored_barrier(timeout=timedelta(seconds=20))
    for absent in ((1,), (size - 1, 1)):
        if rank not in absent:
            named = "Rank 1 failed" if len(set(absent)) == 1 else f"Ranks 1, {size - 1} failed"
            with pytest.raises(CollectiveTimeoutError, match=named):
                monitored_barrier(timeout=timedelta(seconds=1.5), wait_all_ranks=True)
        dist.barrier()
        monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    rings(rank, size)


def parts(rank: int, size: int) -> None:
    """Gather and scatter of parts of any length, empty ones among them, from and to every root."""
    lengths = [(r * 37) % 4 * 1000 + (r == 2) for r in range(size)]
    wholes = [given(r, length, torch.complex64) for r, length in enumerate(lengths)]
    for root in range(size):
        for is_async in (False, True):
            came = [torch.zeros(length, dtype=torch.complex64) for length in lengths] if rank == root else None
            work = dist.gather(wholes[rank].clone(), came, dst=root, async_op=is_async)
            if work is not None:
                work.wait()
            assert came is None or all(map(equal, came, wholes))
            kept = torch.zeros(lengths[rank], dtype=torch.complex64)
            given_out = [whole.clone() for whole in wholes] if rank == root else None
            work = dist.scatter(kept, given_out, src=root, async_op=is_async)
            if work is not None:
                work.wait()
            assert equal(kept, wholes[rank])
    if rank == 0:
        with pytest.raises(ValueError, match="tensor 0 has 3 elements"):
            dist.scatter(torch.zeros(2), [torch.zeros(3)] * size, src=0)
        with pytest.raises(ValueError, match="expected"):
            dist.gather(torch.zeros(2), [torch.zeros(2)] * (size + 1), dst=0)
    dist.barrier()


def parts_that_differ(rank: int, size: int) -> None:
    """Root and rank disagree about a length: an error on every rank."""
    with pytest.raises(MismatchError, match="ranks do not agree"):
        dist.gather(torch.zeros(5 + (rank == 1)), [torch.zeros(5)] * size if rank == 0 else None, dst=0)
        dist.barrier()


@contextmanager
def without_gloo() -> Iterator[None]:
    """Nothing inside makes the group behind fall back to Gloo."""
    fallback = tensor_group()._fallback
    assert fallback._gloo is None
    yield
    assert fallback._gloo is None


def nothing_over_gloo(rank: int, size: int) -> None:
    with without_gloo():
        rings(rank, size)
        any_source(rank, size)
        monitored_barrier()
        parts(rank, size)
        objects(rank, size)


def pipeline(rank: int, size: int) -> list[float]:
    """Torch's pipeline schedules over one stage a rank: losses and gradients of plain training."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    losses: list[float] = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(size)]
        inputs, targets = given(0, 128).view(8, 16) / 100, given(1, 128).view(8, 16) / 100
        loss = torch.nn.functional.mse_loss(torch.nn.Sequential(*layers)(inputs), targets)
        loss.backward()
        right = [parameter.grad.clone() for parameter in layers[rank].parameters()]
        layers[rank].zero_grad()
        stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
        parts: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=targets, losses=parts)
            torch.testing.assert_close(torch.stack(parts).mean(), loss.detach())
        else:
            schedule.step()
        for parameter, gradient in zip(layers[rank].parameters(), right, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        losses.append(loss.item())
    return losses
