"""The floor of exchanges in one process: what is under way, what is kept, and what a group of one rank sees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm import (
    ByteMeter,
    InBackground,
    Packed,
    Pending,
    agree,
    equal_nodes,
    keep_exchanges,
    nodes_of,
    there_and_back,
)
from mycel.comm.pending import communicate
from mycel.errors import UsageError
from mycel.topology.builders import ring, two_boxes


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def test_what_is_under_way_is_awaited_once_and_kept() -> None:
    waited: list[int] = []

    def finish() -> int:
        waited.append(1)
        return 7

    pending = Pending(finish)
    assert not waited, "nobody has waited yet"
    assert (pending.wait(), pending.wait(), waited) == (7, 7, [1])


def test_a_wait_that_failed_fails_again() -> None:
    def finish() -> None:
        raise UsageError("lost")

    pending = Pending(finish)
    for _ in range(2):
        with pytest.raises(UsageError, match="lost"):
            pending.wait()


def test_jobs_in_the_background_keep_their_order_and_their_errors() -> None:
    thread, order = InBackground(), list[int]()
    bundle = Packed([torch.zeros(3)]).bundles[0]

    def job(number: int) -> None:
        order.append(number)
        if number == 1:
            raise UsageError("job 1")

    jobs = [thread.start(lambda number=number: job(number), bundle) for number in range(3)]
    jobs[2].wait()
    assert order == [0, 1, 2]
    with pytest.raises(UsageError, match="job 1"):
        jobs[1].wait()


def test_kept_exchanges_are_not_launched_again_and_keep_no_graph() -> None:
    launched: list[Tensor] = []

    def exchange(x: Tensor) -> Tensor:
        def launch() -> Pending[Tensor]:
            launched.append(x)
            return Pending.done(x * 2)

        return communicate(launch).wait()

    x = torch.ones(3, requires_grad=True)
    writing, reading = keep_exchanges()
    with writing:
        first = exchange(x)
    with reading:
        again = exchange(x)
    assert len(launched) == 1
    assert torch.equal(first, again)
    assert first.requires_grad
    assert not again.requires_grad
    exchange(x)
    assert len(launched) == 2


def test_there_and_back_is_its_adjoint_for_those_that_need_it() -> None:
    asked: list[Tensor] = []

    def back(gradient: Tensor) -> Tensor:
        asked.append(gradient)
        return 3 * gradient

    x, index = torch.randn(4, requires_grad=True), torch.arange(4)
    moved, same = there_and_back([x, index], lambda t: 3 * t, back)
    assert torch.equal(same, 3 * index)
    moved.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4
    assert len(asked) == 1


def test_agreement_takes_tensors_of_any_kind(alone: dist.ProcessGroup) -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    tensors = [parameter, torch.arange(5), torch.randn(2, 6).t(), torch.tensor(1.5, dtype=torch.bfloat16)]
    before = [t.detach().clone() for t in tensors]
    agree(iter(tensors), alone)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    agree([], alone)


def test_nodes_of_a_fabric() -> None:
    assert nodes_of(two_boxes(num_ranks=4)) == ((0, 1), (2, 3))
    assert nodes_of(ring(num_ranks=3)) == ((0, 1, 2),)
    assert equal_nodes(two_boxes(num_ranks=4), "this test") == ((0, 1), (2, 3))


def test_a_meter_counts_neither_the_own_rank_nor_the_own_node(alone: dist.ProcessGroup) -> None:
    meter = ByteMeter()
    meter.add_even("x", 100, alone)
    assert meter.total() == 0
    meter.sent["x", 1], meter.sent["y", 2] = 5, 7
    assert (meter.total(), meter.total(["y"]), meter.between([[0, 1], [2]])) == (12, 7, 7)
