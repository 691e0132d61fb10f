"""What is decided before a call meets another rank: which door it takes, and what torch finds by name."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mycel.collectives.schedule import Schedule
from mycel.errors import CommunicationError, UsageError
from mycel.runtime import proof, tensor_group
from mycel.runtime.calls import Call
from mycel.runtime.dispatched import is_for_dispatcher
from mycel.runtime.fallback import Fallback
from mycel.runtime.planner import verified_schedules
from mycel.topology.builders import star

ROOT = Path(__file__).resolve().parents[2]


class Named(torch.Tensor):
    """A subclass that sees no operators."""


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("mycel", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- which door -------------------------------------------------------------------------------------------------


def test_memory_is_called_directly() -> None:
    plain, named = torch.ones(3), torch.ones(3).as_subclass(Named)
    parameter = torch.nn.Parameter(torch.ones(3))
    for given in ([plain], [[plain, parameter]], plain, [named], [], dist.AllreduceOptions()):
        assert not is_for_dispatcher((given, dist.AllreduceOptions()))


def test_what_is_more_than_memory_goes_through_the_dispatcher() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    two = TwoTensor(torch.ones(3), torch.ones(3))
    for special in (fake, two, torch.ones(3, device="meta")):
        for given in ([special], [[torch.ones(3), special]], special):
            assert is_for_dispatcher((given, dist.AllreduceOptions()))


def test_whoever_looks_sees_it_at_the_dispatcher() -> None:
    plain = ([torch.ones(3)], dist.AllreduceOptions())
    with Looking():
        assert is_for_dispatcher(plain)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_for_dispatcher(plain)
    assert not is_for_dispatcher(plain)


# -- what is behind a group ---------------------------------------------------------------------------------------


def test_the_tensor_group_of_a_process_group(alone: None) -> None:
    assert tensor_group() is tensor_group(dist.group.WORLD)
    assert (tensor_group().rank(), tensor_group().size()) == (0, 1)
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.name() == "mycel" and backend.options.backend == "mycel"
    assert not backend.supports_splitting and backend.supports_reconfigure


def test_other_backends_have_none() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="of gloo"):
            tensor_group()
    finally:
        dist.destroy_process_group()


def test_torch_finds_the_backend_by_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch.distributed.backends"]
    module, _, name = points["mycel"].partition(":")
    getattr(import_module(module), name)()  # once more does no harm
    assert "mycel" in dist.Backend.backend_list


# -- Gloo ---------------------------------------------------------------------------------------------------------


def fallback(ip: str) -> Fallback:
    return Fallback(dist.HashStore(), 0, 1, timedelta(seconds=5), ip)


def test_gloo_is_made_once_at_its_first_call() -> None:
    lazy = fallback("127.0.0.1")
    made = lazy.gloo
    assert made is lazy.gloo and made.size() == 1
    lazy.close()
    with pytest.raises(CommunicationError, match="destroyed"):
        _ = lazy.gloo


def test_where_gloo_does_not_start_the_error_says_what_for() -> None:
    with pytest.raises(CommunicationError, match=r"does not schedule .* does not start at 203\.0\.113\.7"):
        _ = fallback("203.0.113.7").gloo


# -- proofs -------------------------------------------------------------------------------------------------------


def test_groups_share_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = verified_schedules(star(num_ranks=3), "all_gather", None)["forest"]
    schedule = Schedule.from_json(schedule.to_json())  # another test may have proved the planner's
    proved: list[Any] = []
    right = proof.prove_lowering

    def counting(*given: Any, rank: int | None) -> int:
        proved.append(given[1:])
        return right(*given, rank=rank)

    monkeypatch.setattr(proof, "prove_lowering", counting)

    def refuse(kind: str, message: str) -> CommunicationError:
        return CommunicationError(message)

    call = Call(name="all_gather", num_elements=30, item_bytes=4, output_address=0)
    for rank in range(3):
        proof.Proofs(rank, refuse).require(schedule, call, 100, comes_back=False)
    assert len(proved) == 2  # any size, and this one


def test_sizes_are_looked_at_first_or_when_they_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = verified_schedules(star(num_ranks=3), "all_gather", None)["forest"]
    schedule = Schedule.from_json(schedule.to_json())
    looked: list[int] = []

    def counting(schedule: Schedule, num_elements: int = 0, pieces: int = 0, *, rank: int | None) -> int:
        looked.append(num_elements)
        return 0

    monkeypatch.setattr(proof, "prove_lowering", counting)
    proofs = proof.Proofs(0, lambda kind, message: CommunicationError(message))

    def require(size: int, *, comes_back: bool) -> bool:
        call = Call(name="all_gather", num_elements=size, item_bytes=4, output_address=0)
        return proofs.require(schedule, call, 100, comes_back=comes_back)

    sizes = range(3, 300, 3)
    assert [require(size, comes_back=False) for size in sizes] == [True] * 4 + [False] * (len(sizes) - 4)
    assert looked == [0, *sizes[:4]]
    assert all(require(size, comes_back=True) for size in sizes)
    assert looked == [0, *sizes[:32]]
    assert require(999, comes_back=False)  # enough have been looked at
