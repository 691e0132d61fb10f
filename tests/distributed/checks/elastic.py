"""Groups whose members change, each function on every rank; handles go through a store of files."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mycel import elastic
from mycel.errors import CommunicationError, PeerLostError, UsageError
from mycel.runtime import tensor_group

LIMIT = timedelta(seconds=30)
#: Of the example.
SMALL = ("--width", "4", "--length", "4")


class Others:
    """The other ranks of the test, whatever groups there are."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.store = dist.FileStore(os.environ["STORE_FILE"], -1)
        self._count = 0

    def handles(self) -> list[str]:
        """Of all ranks, in their order."""
        return self.exchange(elastic.get_handle())

    def exchange(self, own: str) -> list[str]:
        self._count += 1
        self.store.set(f"{self._count}/{self.rank}", own)
        return [self.store.get(f"{self._count}/{rank}").decode() for rank in range(self.size)]

    def barrier(self) -> None:
        self.exchange("")


def assert_reduces(expected_size: int) -> None:
    """All collectives that need the right rank and size do what they should."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == expected_size
    tensor = torch.full((1000,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.eq(size * (size + 1) / 2).all()
    gathered = torch.empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(gathered, torch.tensor([rank]))
    assert gathered.tolist() == list(range(size))
    last = torch.tensor([float(rank)])
    dist.broadcast(last, src=size - 1)
    assert last.item() == size - 1


def torch_cases(rank: int, size: int) -> None:
    """What torch tries of its own backends: grow, shrink, both, identity, merge, split, after abort and time-out."""
    elastic.start_alone(timeout=LIMIT)
    others = Others(rank, size)
    ids = iter(range(1000, 2000))
    handles = others.handles()
    _together(next(ids), handles, size)
    middle, last = size // 2, size - 1
    for dropped in (last, middle, 0):  # shrink, and the one that was left out comes back
        uuid = next(ids)
        if rank != dropped:
            _together(uuid, handles[:dropped] + handles[dropped + 1 :], size - 1)
        others.barrier()
        _together(next(ids), handles, size)
    _together(next(ids), handles, size)  # identity
    uuid = next(ids)
    half, own = (handles[:middle], middle) if rank < middle else (handles[middle:], size - middle)
    _together(f"{uuid}-{rank < middle}", half, own)  # split
    _together(next(ids), handles, size)  # merge
    _together(f"alone-{rank}", [handles[rank]], 1)
    _together(next(ids), handles[1:] + handles[:1], size)  # other ranks
    assert dist.get_rank() == (rank - 1) % size
    _together(next(ids), set(handles), size)
    others.barrier()  # an abort fails what others have not finished
    dist.group.WORLD.abort()  # type: ignore[union-attr]
    with pytest.raises(CommunicationError):
        dist.all_reduce(torch.ones(1))
    others.barrier()
    _together(next(ids), handles, size)
    with pytest.raises(CommunicationError, match="already used"):
        elastic.reconfigure(1000, handles)
    assert_reduces(size)  # it was refused before anything was given up
    if rank:
        tensor_group().set_timeout(timedelta(seconds=0.2))
        with pytest.raises(CommunicationError):
            dist.all_reduce(torch.ones(1))
    others.barrier()
    _together(next(ids), handles, size)
    dist.destroy_process_group()


def _together(uuid: int | str, handles: Sequence[str] | set[str], size: int) -> None:
    elastic.reconfigure(uuid, handles, timeout=LIMIT)
    assert_reduces(size)


def by_torchs_own_names(rank: int, size: int) -> bool:
    """``torch.distributed._reconfigure`` and ``shrink_group``, which torch has from 2.14 on; whether it has them."""
    newest: Any = dist
    if not hasattr(newest, "_reconfigure"):
        return False
    others = Others(rank, size)
    options: dict[str, Any] = {"enable_reconfigure": True}
    dist.init_process_group("mycel", store=others.store, rank=rank, world_size=size, timeout=LIMIT, **options)
    assert newest._supports_reconfigure() and dist.get_world_size() == size
    with pytest.raises(CommunicationError, match="has not been formed yet"):
        dist.all_reduce(torch.ones(1))
    handles = others.exchange(newest._get_reconfigure_handle())
    newest._reconfigure(100 + rank, [handles[rank]]).wait()  # each alone
    assert_reduces(1)
    newest._reconfigure(200, handles, timeout=LIMIT, hints={"ignored": "1"}).wait()
    assert_reduces(size)
    with pytest.raises(RuntimeError, match="already used"):
        newest._reconfigure(200, handles).wait()
    if rank:
        newest._reconfigure(201, handles[1:]).wait()
        assert_reduces(size - 1)
    others.barrier()
    newest._reconfigure(202, set(handles)).wait()
    assert_reduces(size)
    dist.destroy_process_group()
    store = dist.PrefixStore("shrink", others.store)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=LIMIT)
    assert not newest._supports_reconfigure()
    assert_reduces(size)
    others.barrier()
    if rank:
        shrunk = newest.shrink_group([0])
        assert shrunk is dist.group.WORLD
        assert_reduces(size - 1)
    others.barrier()
    dist.destroy_process_group()
    return True


def who_does_not_come(rank: int, size: int) -> list[str]:
    """The last rank stays away, then it is gone; the messages, and that the group works afterwards."""
    elastic.start_alone(timeout=LIMIT)
    others = Others(rank, size)
    handles = others.handles()
    elastic.reconfigure(1, handles)
    heard = []
    if rank != size - 1:
        with pytest.raises(CommunicationError) as caught:
            elastic.reconfigure(2, handles, timeout=timedelta(seconds=0.5))
        heard.append(str(caught.value))
        with pytest.raises(CommunicationError, match="has no members"):
            dist.all_reduce(torch.ones(1))
    others.barrier()
    if rank == size - 1:
        with pytest.raises(CommunicationError):  # the others have left it
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    others.barrier()
    if rank != size - 1:
        began = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            elastic.reconfigure(3, handles, timeout=LIMIT)
        heard.append(str(caught.value))
        assert time.monotonic() - began < LIMIT.total_seconds() / 2, "it was waited for, though it is gone"
        elastic.reconfigure(4, handles[:-1])
        assert_reduces(size - 1)
        dist.destroy_process_group()
    return heard


def groups_of_the_new_ranks(rank: int, size: int) -> None:
    """new_group, meshes and DDP over a default group that was formed anew, twice, with other ranks each time."""
    elastic.start_alone(timeout=LIMIT)
    others = Others(rank, size)
    handles = others.handles()
    for uuid, order in ((1, handles), (2, [*handles[2:], *handles[:2]])):
        elastic.reconfigure(uuid, order)
        me = dist.get_rank()
        group = dist.new_group([0, size - 1])
        if me in (0, size - 1):
            tensor = torch.tensor([me + 1.0])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == size + 1
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replica", "shard"))
        tensor = torch.tensor([float(me)])
        dist.all_reduce(tensor, group=mesh.get_group("shard"))
        assert tensor.item() == (me // 2) * 4 + 1
        model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), float(me))).sum().backward()
        assert model.module.weight.grad is not None
        assert model.module.weight.grad.eq((size - 1) / 2).all(), "DDP divides by the size that the group has now"
    dist.destroy_process_group()


def over_a_fabric(rank: int, size: int) -> list[tuple[list[str], int]]:
    """The labels of the fabric that schedules are made for: all places, without one, and in another order."""
    os.environ["RANK"] = str(rank)
    elastic.start_alone(timeout=LIMIT)
    others = Others(rank, size)
    handles = others.handles()
    seen = []
    for uuid, members in ((1, handles), (2, handles[1:]), (3, [*handles[2:], *handles[:2]])):
        if handles[rank] in members:
            elastic.reconfigure(uuid, members)
            assert_reduces(len(members))
            communicator = tensor_group().communicator
            assert communicator is not None
            topology = communicator.topology
            seen.append(([topology.label(vertex) for vertex in topology.ranks], len(topology.links)))
        others.barrier()
    dist.destroy_process_group()
    return seen


def shrink(rank: int, size: int, lost: int) -> float:
    """One rank is killed, and the others go on without it; the seconds that shrinking takes."""
    if rank == lost and (pid := os.fork()):  # what is killed is a child, so that the test's own rank lives
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        return 0.0
    store = dist.FileStore(os.environ["STORE_FILE"], -1)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=size, timeout=LIMIT)
    assert_reduces(size)
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=f"rank {lost}"):
        dist.all_reduce(torch.ones(1))
    began = time.monotonic()
    assert elastic.shrink_group([lost], timeout=LIMIT) is dist.group.WORLD
    took = time.monotonic() - began
    assert dist.get_rank() == rank - (rank > lost)
    assert_reduces(size - 1)
    assert_reduces_in_new_group()
    with pytest.raises(UsageError, match="cannot exclude rank 9"):
        elastic.shrink_group([9])
    with pytest.raises(UsageError, match="is excluded itself"):
        elastic.shrink_group([dist.get_rank()])
    dist.destroy_process_group()
    return took


def assert_reduces_in_new_group() -> None:
    """Groups can be made of the survivors, though the store that the job began with may be gone."""
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.new_group())
    assert tensor.item() == dist.get_world_size()


class FailingAt(TorchDispatchMode):
    """Fails one collective, on every rank the same one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            if self._left == 0:
                raise PeerLostError("as if a rank was lost")
            self._left -= 1
        return func(*args, **(kwargs or {}))


def failing_steps(rank: int, size: int) -> list[float]:
    """Steps of HSDP, each of which fails at first, one collective later than the last; the losses."""
    train = _example()
    options = train.parse_arguments(["--shards", str(size), *SMALL])
    training, samples = train.training_of(options), train.Samples(options)
    losses: list[float] = []
    training.join()
    while True:
        over = True
        try:
            with FailingAt(len(losses)):
                loss, *_ = train.take_step(training, samples, over=False, wanted=False)
        except PeerLostError:
            over = False
            training.join()
            loss, *_ = train.take_step(training, samples, over=False, wanted=False)
        losses.append(loss)
        if over:  # a step has fewer collectives than that
            return losses


def example(rank: int, size: int, shards: int, lost: int) -> list[list[dict[str, Any]]]:
    """The example's rank, of which one is killed and comes back; what each of its lives has said.

    With shards it dies within a step, after a reduce_scatter and before the all_reduce of the same gradients: the
    others then fail in different collectives, some while they hold whole parameters.
    """
    folder = Path(os.environ["STORE_FILE"]).parent
    lives = [folder / f"said{rank}.{life}" for life in range(1 + (rank == lost))]
    for said in lives:
        pid = os.fork()
        if pid == 0:
            _live(rank, size, shards, said, dies=shards > 1 and said is not lives[-1])
        if shards == 1 and said is not lives[-1]:
            while not said.exists() or len(said.read_text().splitlines()) < 4:
                time.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == (0 if said is lives[-1] else -signal.SIGKILL)
    return [[json.loads(line) for line in said.read_text().splitlines() if line.startswith("{")] for said in lives]


def _live(rank: int, size: int, shards: int, said: Path, *, dies: bool) -> None:
    """One life of a rank; never returns. Who has come back ends the job with its fifth step."""
    code = 1
    try:
        train = _example()
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        steps = iter(range(5 if said.suffix == ".1" else 1_000_000))
        options = train.parse_arguments(["--shards", str(shards), *SMALL])
        if dies:
            _die_in_all_reduce(20)  # the fourth step's second of six
        store = dist.FileStore(os.environ["STORE_FILE"], -1)
        train.train(options, store, rank, size, lambda seconds: next(steps, None) is None)
        sys.stdout.flush()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _die_in_all_reduce(number: int) -> None:
    """Kill this process when it comes to the one of this number, from 1."""
    real, calls = dist.all_reduce, itertools.count(1)

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    dist.all_reduce = all_reduce


def reference(rank: int, size: int, num_steps: int) -> list[float]:
    """Losses of the run that nobody disturbs."""
    train = _example()
    losses: list[float] = train.reference(train.parse_arguments(SMALL), num_steps)
    return losses


def _example() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "elastic"))
    return importlib.import_module("train")
