"""Plans of memory on models: gradients bit for bit, memory counted by somebody else, and all that can go wrong."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from mycel.comm import Pending
from mycel.errors import CommunicationError, UsageError
from mycel.memory import EmulatedLink, FarMemory, Link, Swapping, attach, in_folder, measure
from mycel.memory.needs import recomputed
from mycel.planning.residency import MemoryInstance, MemoryPlan, Policy, listed_plan
from mycel.planning.residency.plan import POLICIES

WIDTH, TOKENS, COUNT = 32, 64, 5


class Block(nn.Module):
    """A pre-norm MLP with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return y


class Inner(Block):
    """Part of it is under a checkpoint of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda t: torch.nn.functional.gelu(self.up(self.norm(t))), x, use_reentrant=False)
        y: Tensor = x + self.drop(self.down(h))
        return y


class Ends(nn.Module):
    """Its output is saved by itself and by the block that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


KINDS: dict[str, type[nn.Module]] = {"block": Block, "inner": Inner, "ends": Ends}


class NowLink(Link):
    """Copies when it is asked."""

    def fetch(self, copies: Any) -> Pending[None]:
        for far, near in copies:
            near.copy_(far)
        self.fetched_bytes += sum(near.nbytes for _, near in copies)
        return Pending.done(None)


class LateLink(NowLink):
    """Brings things only when they are waited for; until then they are poison."""

    def fetch(self, copies: Any) -> Pending[None]:
        copies = list(copies)
        for _, near in copies:
            near.fill_(255)
        return Pending(lambda: super(LateLink, self).fetch(copies).wait())


class Gate(NowLink):
    """Stores end when they are let."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.wrong = ""

    def store(self, copies: Any) -> Pending[None]:
        copies = list(copies)

        def carry() -> None:
            if not self.open.wait(60):
                raise AssertionError("nobody opened the gate")
            if self.wrong:
                raise OSError(self.wrong)
            for far, near in copies:
                far.copy_(near)

        return Pending(carry)


def make(kind: str = "block", count: int = COUNT) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(KINDS[kind]() for _ in range(count)), nn.Linear(WIDTH, 1))


def inputs(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor, *, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    model(x).square().mean().backward()
    return grads(model)


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def measured(model: nn.Sequential, *, blocks: float | None = None) -> MemoryInstance:
    """Of a model whose last module is no block; with a budget of so many of the largest block."""
    x = inputs()
    found = measure(model, list(model)[:-1], lambda: model(x).square().mean(), link=NowLink(), budget=1 << 30, runs=1)
    if blocks is None:
        return found
    return replace(found, capacity=int(blocks * max(block.saved for block in found.blocks)))


def planned(instance: MemoryInstance, *policy: str) -> MemoryPlan:
    wanted = list(policy) * len(instance.blocks) if len(policy) == 1 else list(policy)
    plan = listed_plan(instance, wanted)  # type: ignore[arg-type]
    assert plan is not None
    return plan


def settled(swapping: Swapping) -> bool:
    """Whether nothing is held any more; what goes out may be a moment late."""
    for number in range(200):
        if swapping.near.held == swapping.near.claimed == swapping.far.used_bytes == 0:
            return True
        if number == 20:
            gc.collect()
        threading.Event().wait(0.01)
    return False


class Counter(TorchDispatchMode):
    """Counts bytes of all storages that operators make, while they live; knows nothing of plans."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._ignored = {p.untyped_storage()._cdata for p in model.parameters()}
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:  # into far memory
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._ignored:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.now -= num_bytes

        self._alive[key] = weakref.ref(storage, gone)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


# -- every plan is the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("link", [NowLink, LateLink, "paced"])
def test_gradients_are_those_of_the_model_bit_for_bit(kind: str, link: Any) -> None:
    model = make(kind)
    x, blocks = inputs(), list(model)[:-1]
    wanted = step(model, x)
    carrier: Link = EmulatedLink(bandwidth_gbps=0.5) if link == "paced" else link()
    every = list(itertools.product(POLICIES, repeat=COUNT))
    chosen = random.Random(7).sample(every, 12) + [(policy,) * COUNT for policy in POLICIES]
    ran = 0
    for size in (1.4, 2.6):
        tight = measured(model, blocks=size)
        for policy in chosen:
            plan = listed_plan(tight, policy)
            if plan is None:
                continue
            ran += 1
            with attach(model, blocks, tight, plan, link=carrier) as swapping:
                for _ in range(2):
                    assert same(step(model, x), wanted), policy
                assert 0 < swapping.near.peak <= tight.capacity
                assert settled(swapping), policy
                if link is NowLink:
                    assert swapping.moved.spilled_bytes == 0
    assert ran > 8
    carrier.close()
    assert same(step(model, x), wanted)


def test_another_counter_sees_the_memory_go() -> None:
    """At the end of forward: what a dispatcher sees alive is what the plan keeps, and what is outside of blocks."""
    model = make()
    x, blocks = inputs(tokens=256), list(model)[:-1]
    found = measure(model, blocks, lambda: model(x).sum(), link=NowLink(), budget=1 << 30, runs=1)
    alive, largest = {}, max(block.saved for block in found.blocks)
    for policy in ("keep", "swap", "recompute", "recompute_swap"):
        with (
            attach(model, blocks, found, planned(found, policy), link=NowLink()) as swapping,
            Counter(model) as counter,
        ):
            out = model(x).sum()
            for _ in range(400):  # what goes out may be a moment late
                if not policy.endswith("swap") or swapping.near.held <= largest:
                    break
                threading.Event().wait(0.01)
            alive[policy] = counter.now
            assert swapping.near.held <= counter.now
            del out
    saved = sum(block.saved for block in found.blocks)
    block_inputs = sum(block.input for block in found.blocks)
    assert alive["keep"] >= 0.95 * saved
    assert alive["recompute"] <= block_inputs + 3 * found.blocks[1].input  # and x, and what the last block gave
    assert alive["swap"] < 1.3 * largest < 0.3 * saved  # the last block's is needed next
    assert alive["recompute_swap"] <= alive["recompute"]


@pytest.mark.parametrize("policy", ["swap", "recompute", "recompute_swap"])
def test_the_peak_that_another_counter_sees_falls(policy: Policy) -> None:
    model = make()
    x, blocks = inputs(tokens=256), list(model)[:-1]
    found = measure(model, blocks, lambda: model(x).sum(), link=NowLink(), budget=1 << 30, runs=1)
    tight = replace(found, capacity=2 * max(block.saved for block in found.blocks) + 5 * 256 * WIDTH * 4)
    step(model, x)  # gradients are there from now on
    peaks = []
    for instance, plan in ((found, planned(found, "keep")), (tight, planned(tight, policy))):
        with attach(model, blocks, instance, plan, link=NowLink()), Counter(model) as counter:
            model(x).sum().backward()
        peaks.append(counter.peak)
    assert peaks[1] < 0.75 * peaks[0]


def test_one_storage_that_is_saved_twice_moves_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            return (y * y + y.exp() + y.view(-1).view_as(y).sin()) * 0.01  # y is saved four times

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), nn.Linear(WIDTH, 1))
    x = inputs()
    found = measure(model, ["1"], lambda: model(x).sum(), link=NowLink(), budget=1 << 30, runs=1)
    one = TOKENS * WIDTH * 4
    assert found.blocks[0].input == one  # for recomputation, though it is not saved
    with attach(model, ["1"], found, planned(found, "swap"), link=NowLink()) as swapping:
        model(x).sum().backward()
        assert swapping.moved.out_bytes == 2 * one  # y, and the result of exp


def test_parameters_and_what_serves_all_blocks_are_never_moved() -> None:
    class Masked(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            return super().forward(x * mask)

    blocks = nn.ModuleList(Masked() for _ in range(3))
    mask = torch.ones(TOKENS, WIDTH)
    x = inputs().requires_grad_()

    def loss() -> Tensor:
        y = x
        for block in blocks:
            y = block(y, mask=mask)
        return y.sum()

    torch.manual_seed(0)
    loss().backward()  # type: ignore[no-untyped-call]
    wanted = grads(blocks)
    found = measure(blocks, list(blocks), loss, link=NowLink(), budget=1 << 30, runs=1)
    places = [p.data_ptr() for p in blocks.parameters()]
    with attach(blocks, list(blocks), found, planned(found, "swap"), link=NowLink()) as swapping:
        blocks.zero_grad()
        torch.manual_seed(0)
        loss().backward()  # type: ignore[no-untyped-call]
        assert swapping.moved.out_bytes <= sum(block.saved for block in found.blocks)
    assert same(grads(blocks), wanted)
    assert places == [p.data_ptr() for p in blocks.parameters()]
    activation = TOKENS * WIDTH * 4
    assert all(block.input == activation for block in found.blocks)  # and not the mask as well


# -- graphs of all sorts ----------------------------------------------------------------------------------------


def test_several_graphs_alive_stay_within_the_budget() -> None:
    model = make()
    blocks = list(model)[:-1]
    tight = measured(model, blocks=3.2)

    def both() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        losses = [model(inputs(seed)).square().mean() for seed in (1, 2)]
        for loss in losses:
            loss.backward()
        return grads(model)

    wanted = both()
    plan = planned(tight, "recompute", "swap", "recompute", "swap", "keep")
    with attach(model, blocks, tight, plan, link=NowLink()) as swapping:
        assert same(both(), wanted)
        assert swapping.near.peak <= tight.capacity
        assert settled(swapping)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_that_is_kept_can_be_gone_through_again(policy: Policy) -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    found = measured(model)

    def twice() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return grads(model)

    wanted = twice()
    roomy = replace(found, capacity=sum(block.saved for block in found.blocks) * 2)
    with attach(model, blocks, roomy, planned(roomy, policy), link=NowLink()) as swapping:
        assert same(twice(), wanted)
        loss = model(x).square().mean()
        loss.backward()
        with pytest.raises(RuntimeError, match=r"second time|extra time|already been freed|unpacked once"):
            loss.backward()
        del loss
        assert settled(swapping)


def test_second_derivatives() -> None:
    model = make(count=2)
    blocks, x = list(model)[:-1], inputs()

    def penalty() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        x_ = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x_).square().sum(), x_, create_graph=True)
        grad.square().sum().backward()
        return grads(model)

    wanted = penalty()
    found = measured(model)
    roomy = replace(found, capacity=1 << 30)
    with attach(model, blocks, roomy, planned(roomy, "swap"), link=NowLink()):
        got = penalty()
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(got, wanted, strict=True))


def test_passes_without_gradients_hold_nothing() -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    found = measured(model, blocks=2.5)
    with attach(model, blocks, found, planned(found, "swap"), link=NowLink()) as swapping:
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
        assert swapping.near.peak == 0 == swapping.moved.out_bytes
        model(x)  # a forward without a backward
        assert same(step(model, x), step(model, x))
        assert settled(swapping)


def test_checkpoints_around_blocks_give_way_to_the_plan() -> None:
    model = make("inner")
    blocks, x = list(model)[:-1], inputs()

    def around() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        y = x.clone().requires_grad_()
        for block in blocks[:3]:
            y = checkpoint(block, y, use_reentrant=False)
        y = checkpoint(lambda t: torch.sigmoid(blocks[4](torch.tanh(blocks[3](t)))), y, use_reentrant=False)
        model[-1](y).sum().backward()
        return grads(model)

    wanted = around()
    tight = measured(model, blocks=3.0)
    for policy in (["swap"] * 5, ["recompute_swap", "swap", "recompute", "swap", "swap"]):
        plan = listed_plan(tight, policy)  # type: ignore[arg-type]
        if plan is not None:
            with attach(model, blocks, tight, plan, link=NowLink()) as swapping:
                assert same(around(), wanted)
                assert swapping.near.peak <= tight.capacity


def test_an_exception_in_a_block_leaves_nothing_behind() -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    wanted = step(model, x)
    tight = measured(model, blocks=2.2)

    class StopError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise StopError

    with attach(model, blocks, tight, planned(tight, "swap"), link=NowLink()) as swapping:
        handle = model[3].down.register_forward_pre_hook(stop)
        with pytest.raises(StopError):
            model(x)
        handle.remove()
        handle = model[1].register_full_backward_hook(stop)
        with pytest.raises(StopError):
            model(x).sum().backward()
        handle.remove()
        assert settled(swapping)
        assert same(step(model, x), wanted)


def test_autocast() -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()

    def narrow() -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return grads(model)

    wanted = narrow()
    found = replace(measured(model), capacity=1 << 24)
    for policy in POLICIES:
        with attach(model, blocks, found, planned(found, policy), link=NowLink()):
            assert same(narrow(), wanted)


# -- what goes wrong --------------------------------------------------------------------------------------------


def test_forwarding_what_is_still_near() -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    wanted = step(model, x)
    found = measured(model)
    link = Gate()
    with attach(model, blocks, found, planned(found, "swap"), link=link) as swapping:
        assert same(step(model, x), wanted)  # nothing is far yet
        assert link.fetched_bytes == 0 < swapping.moved.forwarded_bytes
        link.open.set()
        assert settled(swapping)


def test_a_link_that_fails_is_named_and_the_next_step_works() -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    wanted = step(model, x)
    tight = measured(model, blocks=2.2)
    link = Gate()
    link.open.set()
    with attach(model, blocks, tight, planned(tight, "swap"), link=link) as swapping:
        link.wrong = "the cable is out"
        with pytest.raises(CommunicationError, match=r"block \d \(\d\): \d+ bytes did not get to far.*cable is out"):
            step(model, x)
        assert settled(swapping)
        link.wrong = ""
        assert same(step(model, x), wanted)


def test_a_thread_that_never_ends_is_named() -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    tight = measured(model, blocks=2.2)
    link = Gate()
    with attach(model, blocks, tight, planned(tight, "swap"), link=link, deadline_s=0.2) as swapping:
        with pytest.raises(CommunicationError, match=r"block 2 \(2\) waited 0.2 s for \d+ bytes of near memory"):
            model(x)
        link.open.set()
        assert settled(swapping)
        assert len(step(model, x)) > 0


def test_what_does_not_come_back_is_named() -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    wanted = step(model, x)
    tight = measured(model, blocks=2.2)

    class Torn(NowLink):
        wrong = True

        def fetch(self, copies: Any) -> Pending[None]:
            if not self.wrong:
                return super().fetch(copies)

            def fail() -> None:
                raise OSError("the far machine is gone")

            return Pending(fail)

    link = Torn()
    with attach(model, blocks, tight, planned(tight, "swap"), link=link) as swapping:
        with pytest.raises(CommunicationError, match="did not come back from far memory: the far machine is gone"):
            step(model, x)
        link.wrong = False
        assert settled(swapping)
        assert same(step(model, x), wanted)


@pytest.mark.parametrize("way", ["store", "fetch"])
def test_a_link_that_takes_nothing_is_named_and_the_next_step_works(way: str) -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    wanted = step(model, x)
    tight = measured(model, blocks=2.2)

    class Refuses(NowLink):
        wrong = True

        def refuse(self, asked: str) -> None:
            if self.wrong and asked == way:
                raise OSError("the cable is out")

        def store(self, copies: Any) -> Pending[None]:
            self.refuse("store")
            return super().store(copies)

        def fetch(self, copies: Any) -> Pending[None]:
            self.refuse("fetch")
            return super().fetch(copies)

    link = Refuses()
    with attach(model, blocks, tight, planned(tight, "swap"), link=link) as swapping:
        with pytest.raises(CommunicationError, match=r"block \d.*: \d+ bytes did not (get|come).*the cable is out"):
            step(model, x)
        assert settled(swapping)
        assert swapping.far.used_bytes == 0
        link.wrong = False
        assert same(step(model, x), wanted)


def test_a_far_file_that_fills_is_named_and_the_next_step_works(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    model = make()
    blocks, x = list(model)[:-1], inputs()
    wanted = step(model, x)
    tight = measured(model, blocks=2.2)
    far = FarMemory(in_folder(tmp_path))
    with attach(model, blocks, tight, planned(tight, "swap"), link=NowLink(), far=far) as swapping:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(UsageError, match=r"block 0 \(0\): .*no room for \d+ bytes"):
                model(x)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert settled(swapping)
        assert same(step(model, x), wanted)
        assert far.peak_bytes > 0


@pytest.mark.parametrize("policy", ["keep", "swap"])  # what is computed again is as it was when it was saved
def test_written_in_place_after_saving(policy: Policy) -> None:
    class Writes(nn.Module):
        def __init__(self, *, when: str) -> None:
            super().__init__()
            self.linear, self.when = nn.Linear(WIDTH, WIDTH), when

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            z = y.exp()
            w = z * 2
            if self.when == "after":
                z.add_(1)  # exp saved its result
            return w

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Writes(when="never"), nn.Linear(WIDTH, 1))
    x = inputs()
    found = measure(model, ["1"], lambda: model(x).sum(), link=NowLink(), budget=1 << 30, runs=1)
    with attach(model, ["1"], found, planned(found, policy), link=NowLink()):
        model(x).sum().backward()
        model[1].when = "after"
        loss = model(x).sum()
        with pytest.raises(UsageError, match=r"block 0 \(1\): a tensor of shape \[64, 32\] .* was modified in place"):
            loss.backward()


class WritesWithin(nn.Module):
    """Writes what it has saved, and saves more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        z = y * 2
        y.add_(1)
        return z.tanh()


@pytest.mark.parametrize("policy", [*POLICIES, None])
def test_written_in_place_within_a_block(policy: Policy | None) -> None:
    """Also computed again, where torch's checkpoint takes what was written."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), WritesWithin(), nn.Linear(WIDTH, 1))
    x = inputs()
    if policy is None:
        with recomputed({"1": model[1]}):
            loss = model(x).sum()
            with pytest.raises(UsageError, match=r"a WritesWithin .*: a tensor of shape .* was modified in place"):
                loss.backward()
        return
    block = {"forward_us": 1, "backward_us": 1, "saved": 1 << 20, "input": 1 << 14}
    rates = {"out_bytes_per_us": 1e3, "in_bytes_per_us": 1e3}
    found = MemoryInstance.from_json({"blocks": [block], "capacity": 1 << 22, **rates})
    with attach(model, ["1"], found, planned(found, policy), link=NowLink()) as swapping:
        loss = model(x).sum()
        with pytest.raises(UsageError, match=r"block 0 \(1\): a tensor of shape \[64, 32\] .* was modified in place"):
            loss.backward()
        del loss
        assert settled(swapping)


def test_larger_inputs_than_planned() -> None:
    model = make()
    blocks = list(model)[:-1]
    tight = measured(model, blocks=1.5)
    with attach(model, blocks, tight, planned(tight, "swap"), link=NowLink()) as swapping:
        with pytest.raises(
            UsageError, match=r"block 0 \(0\) saves more than the \d+ bytes of the plan, and near memory"
        ):
            model(inputs(tokens=4 * TOKENS))
        assert settled(swapping)
        assert len(step(model, inputs(tokens=TOKENS // 2))) > 0


def test_bad_calls() -> None:
    model = make()
    blocks, x, link = list(model)[:-1], inputs(), NowLink()
    found = measured(model)
    plan = planned(found, "swap")

    def loss() -> Tensor:
        out: Tensor = model(x).square().mean()
        return out

    largest = max(block.saved for block in found.blocks)
    with pytest.raises(
        UsageError, match=rf"block \d \(\d\) saves {largest} bytes, and of the budget of \d+ .* too little"
    ):
        measure(model, blocks, loss, link=link, budget=largest + 100, runs=1)
    with pytest.raises(UsageError, match=r"a budget of 1 bytes, and \d+ are saved outside"):
        measure(model, blocks, loss, link=link, budget=1, runs=1)
    with pytest.raises(UsageError, match="a budget in bytes: '4GB' is not a whole number"):
        measure(model, blocks, loss, link=link, budget="4GB")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a link"):
        attach(model, blocks, found, plan, link=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a plan of memory"):
        attach(model, blocks, found, found, link=link)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="was called 0 times"):
        measure(model, blocks, lambda: model[0](x).sum(), link=link, budget=1 << 30)
    with pytest.raises(UsageError, match="has no module '6'"):
        attach(model, ["6"], found, plan, link=link)
    with pytest.raises(UsageError, match="a Block, is no module of Sequential"):
        attach(model, [Block()], found, plan, link=link)
    with pytest.raises(UsageError, match="'0' is there twice"):
        attach(model, ["0", model[0]], found, plan, link=link)
    with pytest.raises(UsageError, match=r"block '0.up' is inside block '0'"):
        attach(model, ["0", "0.up"], found, plan, link=link)
    with pytest.raises(UsageError, match="a plan of 5 blocks for an instance of 5 and a model of 2"):
        attach(model, blocks[:2], found, plan, link=link)
    with pytest.raises(UsageError, match="the plan is for another instance, or wrong"):
        attach(model, blocks, replace(found, capacity=largest), planned(found, "keep"), link=link)
    swapping = attach(model, blocks, found, plan, link=link)
    with pytest.raises(UsageError, match="swapped already; close that first"):
        attach(model, blocks, found, plan, link=link)
    graph = loss()
    swapping.close()
    swapping.close()
    with pytest.raises(UsageError, match="closed between a forward pass and its backward pass"):
        graph.backward()  # type: ignore[no-untyped-call]
    assert all("forward" not in block.__dict__ for block in blocks)
    with attach(model, blocks, found, plan, link=link):
        loss().backward()  # type: ignore[no-untyped-call]


def test_it_explains_itself() -> None:
    model = make()
    blocks = list(model)[:-1]
    tight = measured(model, blocks=2.5)
    with attach(model, blocks, tight, planned(tight, "swap"), link=NowLink()) as swapping:
        step(model, inputs())
        text = swapping.explain()
    assert "5 blocks: 5 swap; planned" in text and f"  4: swap, saves {tight.blocks[4].saved}" in text.replace(
        "B", ""
    )
    assert "measured" in text and "near" in text and "against the plan 0B" in text


# -- for a long time --------------------------------------------------------------------------------------------


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("is_thrown_away", [False, True])
@pytest.mark.parametrize("blocks", [3.0, 40.0])
def test_far_memory_holds_what_one_iteration_needs(blocks: float, is_thrown_away: bool) -> None:
    """Whatever a backward pass takes from near memory, before a slow link has it far, is gone before the next is."""
    model = make()
    x, found = inputs(), measured(model, blocks=blocks)
    plan = planned(found, *["swap"] * (COUNT - 1), "keep")
    link = EmulatedLink(bandwidth_gbps=0.05)  # an iteration's blocks take longer out than it computes
    far = FarMemory()
    with attach(model, list(model)[:-1], found, plan, link=link, far=far) as swapping:
        once = sum(block.saved for block in found.blocks[:-1])
        for _ in range(20):
            if is_thrown_away:
                model(x)
            else:
                step(model, x)
        assert swapping.moved.out_bytes > 19 * once / 2 and swapping.moved.spilled_bytes == 0
        if not is_thrown_away:
            assert swapping.moved.forwarded_bytes > 0
        assert 0 < far.peak_bytes <= once and far.held_bytes <= once
    link.close()


@pytest.mark.parametrize("gbps", [1.0, 0.05, 0.005])
@pytest.mark.parametrize("blocks", [1.4, 3.0, 40.0])
def test_near_memory_holds_one_iteration_however_slow_the_link(blocks: float, gbps: float) -> None:
    """Nothing of an iteration is near when the next one's first block begins."""
    model = make()
    x, found = inputs(), measured(model, blocks=blocks)
    begins: list[int] = []
    link = EmulatedLink(bandwidth_gbps=gbps)
    with attach(model, list(model)[:-1], found, planned(found, "swap"), link=link) as swapping:
        with Counter(model) as counter:
            first = model[0].norm.register_forward_pre_hook(lambda *_: begins.append(counter.now))
            for _ in range(6):
                step(model, x)
            model.zero_grad()
            model(x)  # thrown away
            step(model, x)
            first.remove()
        once = sum(block.saved for block in found.blocks)
        assert swapping.near.peak <= min(found.capacity, once)
        assert swapping.moved.spilled_bytes == 0 < swapping.moved.out_bytes
    link.close()
    assert len(begins) == 8 and max(begins) == begins[1] == x.nbytes


def test_far_memory_of_a_large_iteration_is_given_back() -> None:
    model = make()
    x, found = inputs(), measured(model)
    far = FarMemory()
    with attach(model, list(model)[:-1], found, planned(found, "swap"), link=NowLink(), far=far) as swapping:
        step(model, x)
        assert settled(swapping)
        once = far.held_bytes
        both = [model(x), model(x)]
        for out in both:
            out.sum().backward()
        del both, out
        assert settled(swapping)
        assert far.held_bytes > once
        for _ in range(2):  # the first gives back what was lent before both
            step(model, x)
            assert settled(swapping)
        assert far.held_bytes == once


def test_what_an_iteration_before_left_on_its_way_is_named() -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    wanted = step(model, x)
    found = measured(model)
    link = Gate()
    with attach(model, blocks, found, planned(found, "swap"), link=link, deadline_s=0.2) as swapping:
        assert same(step(model, x), wanted)
        with pytest.raises(
            CommunicationError, match=r"block 0 \(0\): waited 0.2 s for 5 transfers .* iteration before"
        ):
            step(model, x)
        link.open.set()
        assert settled(swapping)
        assert same(step(model, x), wanted)


@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.long)])
def test_steps_leave_descriptors_threads_and_far_memory_as_they_are(steps: int, tmp_path: Path) -> None:
    model = make()
    blocks, x = list(model)[:-1], inputs()
    tight = measured(model, blocks=2.2)
    plan = planned(tight, "swap", "recompute_swap", "swap", "recompute_swap", "swap")
    link = EmulatedLink(bandwidth_gbps=5)
    before = threading.active_count()
    for far in (FarMemory(), FarMemory(in_folder(tmp_path))):
        with attach(model, blocks, tight, plan, link=link, far=far):
            seen = []
            for number in range(steps):
                step(model, x)
                if number >= 2:
                    seen.append((_descriptors(), threading.active_count(), far.held_bytes))
            assert max(seen) == min(seen) or len(set(seen[1:])) == 1, set(seen)
    link.close()
    assert threading.active_count() == before


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
