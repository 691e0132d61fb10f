"""What ranks do with collectives of their own: register them, run them, and train over them."""

from __future__ import annotations

import importlib.util
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mycel
from mycel.collectives.language import Array, Written, collective
from mycel.runtime import register, tensor_group, unregister

EXAMPLES = Path(__file__).parents[3] / "examples" / "collectives.py"


def examples() -> Any:
    spec = importlib.util.spec_from_file_location("written_examples", EXAMPLES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def method_of(num_bytes: int, name: str = "all_reduce", group: dist.ProcessGroup | None = None) -> str:
    communicator = tensor_group(group).communicator
    assert communicator is not None
    return communicator.planner.choice(name, None, num_bytes).method  # type: ignore[arg-type]


def sums(size: int, num_elements: int) -> None:
    rank = dist.get_rank()
    for again in range(4):  # small blocking calls take another way from the second time on
        tensor = torch.arange(num_elements, dtype=torch.float64) + rank + again
        dist.all_reduce(tensor)
        expected = torch.arange(num_elements, dtype=torch.float64) * size + sum(range(size)) + again * size
        assert torch.equal(tensor, expected)


def serves(rank: int, size: int, names: list[str]) -> list[str]:
    """Each of some programs is run for a range of sizes, and no longer when it is unregistered."""
    found = []
    for name in names:
        usual = method_of(4096)
        sums(size, 512)
        registered = register(getattr(examples(), name), sizes=("1KB", "64KB"))
        assert registered.method.startswith(f"{name}@")
        found.append(registered.method)
        assert method_of(4096) == registered.method and method_of(1024) == registered.method
        assert method_of(65537) != registered.method != method_of(1023)
        for num_elements in (128, 512, 1001, 8192, 20_000, 7):
            sums(size, num_elements)
        unregister(registered)
        assert method_of(4096) == usual
        sums(size, 512)
    return found


def others_too(rank: int, size: int) -> None:
    """all_gather and reduce_scatter by the ring that serves three collectives, and a schedule from a file."""
    ring = examples().ring
    register(ring, for_="all_gather")
    register(ring, for_="reduce_scatter")
    assert method_of(size * 80, "all_gather").startswith("ring@")
    out = torch.empty(size * 10)
    dist.all_gather_into_tensor(out, torch.full((10,), float(rank)))
    assert torch.equal(out, torch.arange(size).repeat_interleave(10).float())
    part = torch.empty(10)
    dist.reduce_scatter_tensor(part, torch.arange(size * 10).float() * (rank + 1))
    assert torch.equal(part, (torch.arange(10) + rank * 10).float() * (size * (size + 1) // 2))


def offered(rank: int, size: int) -> tuple[str, str]:
    """What is not always to serve is one of those that the model chooses from."""
    usual = method_of(1 << 22)
    slow, quick = examples().one_shot if size == 2 else examples().ring, examples().all_pairs
    register(slow, always=False)
    kept = method_of(1 << 22)
    sums(size, 1 << 12)
    register(quick, always=False)
    return usual, kept


def different(rank: int, size: int) -> str:
    """Ranks that come with different ones are told so by name, and the group goes on."""
    module = examples()
    began = time.monotonic()
    with pytest.raises(mycel.MismatchError) as caught:
        register(module.all_pairs if rank == size - 1 else module.ring)
    assert time.monotonic() - began < 10.0
    sums(size, 100)
    with pytest.raises(mycel.MismatchError):
        register(module.ring, sizes=(0, 1000 + rank))
    sums(size, 100)
    return str(caught.value)


def refused_by_one(rank: int, size: int) -> str:
    """One rank's schedule is wrong: it says why, and all others hear of it."""
    schedule = examples().all_pairs.on(mycel.load_topology(f"star:ranks={size}"))
    if rank == 1:
        schedule = type(schedule).from_json({**(made := schedule.to_json()), "transfers": made["transfers"][:-1]})
    with pytest.raises(mycel.MycelError) as caught:
        register(schedule)
    assert isinstance(caught.value, mycel.VerificationError if rank == 1 else mycel.MismatchError)
    sums(size, 100)
    return str(caught.value)


def not_for_this(rank: int, size: int) -> list[str]:
    """What cannot be registered says why."""
    module, found = examples(), []
    fabric = mycel.load_topology(f"star:ranks={size + 1}")

    def refusal(*arguments: Any, **named: Any) -> None:
        with pytest.raises(mycel.UsageError) as caught:
            register(*arguments, **named)
        found.append(str(caught.value))

    refusal(module.ring.on(fabric))
    refusal(module.ring, for_="broadcast")
    refusal(module.one_shot)
    refusal(3)
    refusal(module.ring, sizes=(10, 5))
    with pytest.raises(mycel.UsageError) as caught:
        unregister("ring@00000000")
    found.append(str(caught.value))
    sums(size, 100)
    return found


def alone(rank: int, size: int) -> str:
    """A rank that does not come is named within the time-out."""
    group = dist.new_group(backend="mycel", timeout=timedelta(seconds=4))
    if rank == size - 1:
        dist.barrier()
        return ""
    with pytest.raises(mycel.CommunicationError) as caught:
        register(examples().ring, group=group)
    dist.barrier()
    return str(caught.value)


def in_groups(rank: int, size: int) -> list[str]:
    """A schedule for a group of two serves that group and no other."""
    half = dist.new_group([0, 1], backend="mycel")
    if rank < 2:
        register(examples().all_pairs, group=half)
        assert method_of(4096, group=half).startswith("all_pairs@")
        tensor = torch.ones(1000) * (rank + 1)
        dist.all_reduce(tensor, group=half)
        assert torch.equal(tensor, torch.full((1000,), 3.0))
    assert not method_of(4096).startswith("all_pairs@")
    sums(size, 1000)
    return [method_of(4096)]


def from_folder(rank: int, size: int) -> list[str]:
    """``MYCEL_SCHEDULES`` has registered what the folder holds, for every group that it fits."""
    sums(size, 2000)
    groups = [method_of(16_000), method_of(1 << 21)]
    pair = dist.new_group([0, 1], backend="mycel")
    if rank < 2:
        groups.append(method_of(16_000, group=pair))
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=pair)
        assert tensor[0] == 2
    return groups


def trains(rank: int, size: int) -> list[float]:
    """Losses of DDP, first over Gloo, then over mycel with a registered schedule: the same to rounding."""
    register(examples().ring)
    curves = []
    for group in (dist.new_group(backend="gloo"), dist.group.WORLD):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.004)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        data = torch.randn(40, size, 8, 16)
        losses = []
        for step in range(40):
            x = data[step, rank]
            loss = ((wrapped(x) - x[:, :4].sin()) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    worst = max(abs(a - b) for a, b in zip(*curves, strict=True))
    assert worst < 1e-6 and curves[1][-1] < curves[1][0]
    return curves[1]


def is_recorded(rank: int, size: int, file: str) -> list[str]:
    """Flight records say which schedule ran."""
    registered = register(examples().ring)
    sums(size, 3000)
    written = mycel.runtime.dump_flight_records(Path(file + f".{rank}"))
    text = Path(str(written)).read_text(encoding="utf-8")
    return [registered.method, str(f'"method": "{registered.method}"' in text)]


@collective("all_reduce")
def wrong(array: Array) -> None:
    """Forgets to send the sums back."""
    for owner, chunk in enumerate(array.cut(array.num_ranks)):
        for rank in array.ranks:
            if rank != owner:
                chunk.add(rank, owner)


def wrong_is_refused(rank: int, size: int) -> str:
    """The error names the author's line."""
    assert isinstance(wrong, Written)
    with pytest.raises(mycel.VerificationError) as caught:
        register(wrong)
    logging.getLogger(__name__).debug("%s", caught.value)
    return str(caught.value)
