"""Units that come and go: layouts, plans beside brute force, and training that has the bits of training without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mycel.comm.pending import Pending
from mycel.errors import CommunicationError, SynthesisError, UsageError
from mycel.memory.needs import blocks_of, counted_peak, needs_of, recomputed
from mycel.memory.residency import (
    Demand,
    Residency,
    ResidencyPlan,
    by_next_use,
    check_residency,
    fixed_set,
    layout_of,
    least_recently_used,
    parts_of,
    ring,
    schedule_of,
    search_layout,
)
from mycel.memory.residency.schedule import least_budget
from mycel.memory.tiers import EmulatedLink, FarMemory, Link, in_folder

# -- chunks -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_no_size_of_chunks_wastes_less(sizes: list[int], more: int) -> None:
    most = max(sizes) + more
    best = search_layout(sizes, most_elements=most)
    every = [layout_of(sizes, chunk_elements=size) for size in range(max(sizes), most + 1)]
    assert best.waste <= min(layout.waste for layout in every) + 1e-3
    assert [index for chunk in best.chunks for index in chunk] == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in chunk) <= best.chunk_elements for chunk in best.chunks)


def gpt(layers: int, width: int) -> list[int]:
    """Tensors of a GPT's layers, in order of use; the embedding stands apart, as in PatrickStar."""
    layer = [width, width, 3 * width * width, 3 * width, width * width, width]
    layer += [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    return layer * layers + [width, width]


@pytest.mark.parametrize(
    ("layers", "width"), [(48, 1600), (20, 2560), (24, 3072), (53, 3072), (50, 4096), (60, 4096)]
)
def test_layouts_of_known_models_waste_little(layers: int, width: int) -> None:
    assert search_layout(gpt(layers, width)).waste < 0.005


def test_chunks_that_are_too_small() -> None:
    with pytest.raises(UsageError, match="tensor 1 has 9, 4 more"):
        layout_of([1, 9], chunk_elements=5)
    with pytest.raises(UsageError, match="no tensors"):
        search_layout([])


# -- plans ------------------------------------------------------------------------------------------------------


def least_loads(demand: Demand) -> int:
    """By trying every set at every moment; units of one size, copies of before are old."""
    units = range(len(demand.sizes))
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for uses, room in zip(demand.uses, demand.room, strict=True):
        found: dict[frozenset[int], int] = {}
        for held, loads in best.items():
            for count in range(room + 1):
                for near in combinations(units, count):
                    if set(uses) <= set(near):
                        cost = loads + len(set(near) - held)
                        key = frozenset(near)
                        found[key] = min(found.get(key, cost), cost)
        best = found
    return min(best.values())


@st.composite
def demands(draw: Any) -> Demand:
    units = draw(st.integers(1, 4))
    uses = draw(st.lists(st.tuples(st.integers(0, units - 1)), min_size=1, max_size=7))
    room = draw(st.lists(st.integers(1, units), min_size=len(uses), max_size=len(uses)))
    return Demand(names=tuple("abcd"[:units]), sizes=(1,) * units, uses=tuple(uses), room=tuple(room))


@given(demands())
@settings(max_examples=60, deadline=None)
def test_nothing_loads_less_than_by_next_use(demand: Demand) -> None:
    plan = by_next_use(demand)
    assert check_residency(demand, plan) == plan.loaded_bytes == least_loads(demand)
    for other in (least_recently_used(demand), fixed_set(demand)):
        assert check_residency(demand, other) == other.loaded_bytes >= plan.loaded_bytes


def up_and_down(units: int, room: Callable[[int], int], *, fresh: bool) -> Demand:
    uses = [(unit,) for unit in [*range(units), *reversed(range(units))]]
    rooms = [room(min(moment, 2 * units - 1 - moment)) for moment in range(2 * units)]
    return Demand(
        names=tuple(map(str, range(units))), sizes=(1,) * units, uses=tuple(uses), room=tuple(rooms), fresh=fresh
    )


def test_room_that_follows_activations_is_used() -> None:
    """Of the known case: 32 units, near memory for 24, activations up to 16."""
    demand = up_and_down(32, lambda depth: 24 - depth // 2, fresh=True)
    found = [way(demand).loaded_bytes for way in (fixed_set, least_recently_used, by_next_use)]
    assert found[2] <= 0.75 * found[0] and found[2] < found[1]
    for way in (fixed_set, least_recently_used, by_next_use):
        assert check_residency(demand, way(demand)) == way(demand).loaded_bytes
    constant = up_and_down(32, lambda _: 9, fresh=True)
    assert fixed_set(constant).loaded_bytes - by_next_use(constant).loaded_bytes <= 2  # eviction buys nothing


def mutants(demand: Demand, plan: ResidencyPlan) -> list[ResidencyPlan]:
    """Plans that are wrong: a unit gone that is used or stays, a load left out, everything near at once."""
    made = []
    for moment, (near, loads) in enumerate(zip(plan.near, plan.loads, strict=True)):
        later = [each.difference(more) for each, more in zip(plan.near, plan.loads, strict=True)][moment + 1 :]
        for unit in near & (later[0] if later else set()) | set(demand.uses[moment]):
            changed = (*plan.near[:moment], near - {unit}, *plan.near[moment + 1 :])
            made.append(replace(plan, near=changed))
        for unit in loads:
            fewer = tuple(each for each in loads if each != unit)
            made.append(replace(plan, loads=(*plan.loads[:moment], fewer, *plan.loads[moment + 1 :])))
        every = frozenset(range(4))
        if near != every:
            more = (*plan.near[:moment], every, *plan.near[moment + 1 :])
            made.append(replace(plan, near=more))
    return made


def test_the_next_block_comes_while_one_computes_if_there_is_room() -> None:
    """Between two blocks is a moment that needs no parameters: too short to bring any."""
    demand = Demand(names=("a", "b"), sizes=(4, 4), uses=((0,), (), (1,), ()), room=(8, 8, 8, 8))
    assert demand.with_ahead().uses == ((0, 1), (1,), (1,), ())
    for room in ((7, 8, 8, 8), (8, 3, 8, 8)):
        assert replace(demand, room=room).with_ahead().uses[0] == (0,)
    assert replace(demand, fresh=True).with_ahead().uses == ((0, 1), (1,), (1, 0), (0,))


@pytest.mark.parametrize("slots", [2, 3, 5, 9])
def test_a_ring_has_its_slots_filled_and_turns(slots: int) -> None:
    """A unit comes when the slot of one that has computed is free, and each pass brings it once."""
    demand = up_and_down(6, lambda depth: slots, fresh=False)
    plan = ring(demand, slots=slots)
    assert check_residency(demand, plan) == plan.loaded_bytes == 6 + max(0, 6 - slots)
    assert plan.peak_bytes == min(slots, 6) and plan.loads[1:6] == tuple(
        (slots + place,) if slots + place < 6 else () for place in range(5)
    )
    assert plan.loaded_bytes >= by_next_use(demand).loaded_bytes
    with (
        pytest.raises(SynthesisError, match=rf"moment 0: a ring of {slots} slots .*: 1 bytes too little")
        if (slots <= 6)
        else nullcontext()
    ):
        ring(replace(demand, room=(slots - 1,) * 12), slots=slots)
    with pytest.raises(UsageError, match="a ring of 1 slots"):
        ring(demand, slots=1)


def test_wrong_plans_are_refused() -> None:
    demand = up_and_down(4, lambda depth: 2, fresh=False)
    plan = by_next_use(demand)
    wrong = mutants(demand, plan)
    assert len(wrong) > 20
    for mutant in wrong:
        with pytest.raises(SynthesisError):
            check_residency(demand, mutant)


def test_demands_that_make_no_sense() -> None:
    with pytest.raises(
        SynthesisError, match="moment 1 needs b near, 5 bytes, and has room for 3: 2 bytes too little"
    ):
        Demand(names=("a", "b"), sizes=(1, 5), uses=((0,), (1,)), room=(3, 3))
    with pytest.raises(UsageError, match="uses unit 2, and there are 1"):
        Demand(names=("a",), sizes=(1,), uses=((2,),), room=(3,))
    with pytest.raises(UsageError, match="must be as many"):
        Demand(names=("a",), sizes=(1,), uses=((0,),), room=())


# -- training ---------------------------------------------------------------------------------------------------

WIDTH = 48


class Layer(nn.Module):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.zeros(3))
        for parameter in self.parameters():
            parameter.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.relu(self.up(x)))


class Model(nn.Module):
    """Layers between an embedding and a head that is the same parameter; one layer is not trained."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(60, WIDTH), nn.Linear(WIDTH, 60, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList([Layer(frozen=i == 2) for i in range(layers)])
        self.fails = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        if self.fails:
            x.register_hook(_fail)
        return nn.functional.cross_entropy(self.head(x), ids)


def _fail(grad: Tensor) -> None:
    raise ZeroDivisionError("a backward pass that fails")


class Plain(Link):
    """Copies at once, in the thread that asks, so that what it frees is counted there."""

    def fetch(self, copies: Any) -> Pending[None]:
        for far, near in copies:
            near.copy_(far)
            self.fetched_bytes += near.nbytes
        return Pending.done(None)


def ids(step: int) -> Tensor:
    return torch.randint(0, 60, (24,), generator=torch.Generator().manual_seed(step))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int, micro: int = 1) -> list[float]:
    losses = []
    for step in range(first, first + count):
        for part in range(micro):
            loss = model(ids(step * micro + part))
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def held(
    model: nn.Module, optimizer: torch.optim.Optimizer, link: Link, *, part: float = 0.25, micro: int = 1
) -> Residency:
    """The model in a part of what parameters, gradients and optimizer take."""
    blocks = blocks_of(model)
    needs = needs_of(model, (ids(0),), optimizer=optimizer)
    states = needs.most("parameters") + needs.most("gradients") + needs.most("optimizer")
    schedule = schedule_of(needs, parts_of(model, blocks), round(part * states), micro_batches=micro)
    return Residency(model, optimizer, schedule, blocks, link)


def adam_w(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("micro", [1, 2])
def test_training_has_the_bits_of_training_without(options: dict[str, Any], micro: int) -> None:
    wanted = Model()
    losses = steps(wanted, adam_w(wanted, **options), 0, 4, micro)
    model = Model()
    optimizer = adam_w(model, **options)
    link = EmulatedLink(bandwidth_gbps=50)
    with held(model, optimizer, link, micro=micro) as residency:
        assert residency.schedule.peak <= residency.schedule.budget
        assert steps(model, optimizer, 0, 3, micro) == losses[: 3 * micro]
        assert residency.off_schedule == 0
        states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        assert states and 0 < residency.peak_bytes < sum(p.nbytes for p in model.parameters())
        copied = {name: value.clone() for name, value in model.state_dict().items()}
    link.close()
    assert all(torch.equal(value, copied[name]) for name, value in model.state_dict().items())
    assert steps(model, optimizer, 3, 1, micro) == losses[3 * micro :]  # closed: as it was, and goes on
    for parameter, other in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_the_budget_is_kept_and_told_closely() -> None:
    model = Model()
    optimizer = adam_w(model)
    with held(model, optimizer, Plain()) as residency:
        counted = counted_peak(lambda: steps(model, optimizer, 0, 1))
        again = counted_peak(lambda: steps(model, optimizer, 1, 1))
        assert counted <= residency.schedule.budget
        assert 0.98 * again <= residency.schedule.peak <= residency.schedule.budget
        planned = residency.schedule.plan.loaded_bytes
        assert residency.link.fetched_bytes == 2 * planned


def test_more_memory_moves_less_and_pins() -> None:
    moved = []
    for part in (0.25, 0.4, 0.7, 1.2):
        model = Model()
        optimizer = adam_w(model)
        link = Plain()
        with held(model, optimizer, link, part=part) as residency:
            steps(model, optimizer, 0, 2)
            assert link.fetched_bytes + link.stored_bytes == 2 * residency.schedule.moved_bytes or part < 1.2
            moved.append(residency.schedule.moved_bytes)
            pinned = residency.schedule.pinned
    assert moved == sorted(moved, reverse=True) and moved[-1] == 0
    assert len(pinned) == len(residency.schedule.parts.names)


def test_recomputation_and_evaluation_in_between() -> None:
    wanted, model = Model(), Model()
    optimizers = [adam_w(wanted), adam_w(model)]
    link = EmulatedLink(bandwidth_gbps=50)
    with recomputed(blocks_of(wanted)), recomputed(blocks_of(model)), held(model, optimizers[1], link):
        for step in range(3):
            assert steps(model, optimizers[1], step, 1) == steps(wanted, optimizers[0], step, 1)
            with torch.no_grad():
                assert torch.equal(model(ids(9)), wanted(ids(9)))
    link.close()


def test_a_ring_without_gradients_brings_each_unit_once_and_what_is_used_at_both_ends_twice() -> None:
    """The output layer's numbers are the embedding's: they give their section away, and have it again at the end."""
    model = Model()
    optimizer, link, blocks = adam_w(model), Plain(), blocks_of(model)
    needs = needs_of(model, (ids(0),), optimizer=optimizer)
    schedule = schedule_of(needs, parts_of(model, blocks), needs.peak, slots=2)
    with Residency(model, optimizer, schedule, blocks, link) as residency:
        steps(model, optimizer, 0, 1)
        units = residency._units.values()
        whole = sum(unit.num_bytes for unit in units)
        both_ends = next(unit.num_bytes for unit in units if unit.name == "embedding and head")
        for brought in (whole + both_ends, whole):  # it is still there when the next pass begins
            before = link.fetched_bytes
            with torch.no_grad():
                model(ids(9))
            assert link.fetched_bytes - before == brought
        assert residency.off_schedule == 0


def test_without_gradients_the_next_block_comes_while_one_computes() -> None:
    model = Model()
    optimizer = adam_w(model)
    wanted = Model()
    link = Plain()
    with held(model, optimizer, link, part=0.4) as residency, torch.no_grad():
        names = residency.schedule.parts.names
        begun: list[tuple[str, set[str]]] = []
        for name, layer in model.layers.named_children():

            def note(module: nn.Module, args: Any, name: str = name) -> None:
                begun.append((name, {names[index] for index, unit in residency._units.items() if unit.is_near}))

            layer.register_forward_pre_hook(note)
        assert torch.equal(model(ids(0)), wanted(ids(0)))
        ahead = {f"layers.{index}" for index in range(6) if names.index(f"layers.{index}") in residency._units}
        assert len(ahead) > 2
        for name, near in begun[:-1]:
            following = f"layers.{int(name) + 1}"
            assert following in near or following not in ahead
        assert residency.peak_bytes <= residency.schedule.plan.peak_bytes
        before = link.fetched_bytes
        assert torch.equal(model(ids(1)), wanted(ids(1)))
        assert link.fetched_bytes - before <= sum(unit.num_bytes for unit in residency._units.values())
    assert residency.off_schedule == 0


def test_a_pass_that_fails_leaves_nothing() -> None:
    wanted, model = Model(), Model()
    optimizers = [adam_w(wanted), adam_w(model)]
    with held(model, optimizers[1], Plain()):
        model.fails = True
        with pytest.raises(ZeroDivisionError):
            model(ids(0)).backward()
        model.fails = False
        assert steps(model, optimizers[1], 0, 2) == steps(wanted, optimizers[0], 0, 2)


class Faulty(Plain):
    """Fails from its so manieth transfer near on, or whenever something goes far, where it is told to."""

    fetches: int | None = None
    stores = True

    def fetch(self, copies: Any) -> Pending[None]:
        if self.fetches is not None:
            self.fetches -= 1
            if self.fetches < 0:
                return Pending(_torn)
        return super().fetch(copies)

    def store(self, copies: Any) -> Pending[None]:
        return super().store(copies) if self.stores else Pending(_torn)


def _torn() -> None:
    raise OSError("the cable is out")


def near_bytes(residency: Residency) -> int:
    return sum(unit._near.untyped_storage().nbytes() for unit in residency._units.values())


@pytest.mark.parametrize("fetches", [0, 3, 6, 9, 11, None])
def test_a_link_that_fails_is_named_and_the_next_step_is_right(fetches: int | None) -> None:
    wanted, model = Model(), Model()
    optimizers = [adam_w(wanted), adam_w(model)]
    losses = steps(wanted, optimizers[0], 0, 3)
    link = Faulty()
    with held(model, optimizers[1], link) as residency:
        assert steps(model, optimizers[1], 0, 1) == losses[:1]
        used = residency.far.used_bytes
        link.fetches, link.stores = fetches, fetches is not None
        what = r"\d+ bytes of parameters did not come from" if fetches is not None else "gradients did not get to"
        with pytest.raises(CommunicationError, match=rf"^\S.*: {what} far memory: the cable is out"):
            steps(model, optimizers[1], 1, 1)
        assert near_bytes(residency) == 0
        link.fetches, link.stores = None, True
        optimizers[1].zero_grad()
        assert steps(model, optimizers[1], 1, 2) == losses[1:]
        assert residency.far.used_bytes == used


def test_a_pass_that_fails_waits_for_what_is_on_its_way() -> None:
    """A transfer that is still queued must not find its place gone."""
    wanted, model = Model(), Model()
    optimizers = [adam_w(wanted), adam_w(model)]
    link = EmulatedLink(bandwidth_gbps=0.02)
    with held(model, optimizers[1], link) as residency:
        model.fails = True
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                model(ids(0)).backward()
        model.fails = False
        assert steps(model, optimizers[1], 0, 2) == steps(wanted, optimizers[0], 0, 2)
        assert near_bytes(residency) <= residency.schedule.budget
    link.close()


def test_far_memory_that_is_full_is_named_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    wanted, model = Model(), Model()
    optimizers = [adam_w(wanted), adam_w(model)]
    left = [0]
    make = in_folder(tmp_path)

    def some(num_bytes: int) -> Tensor:
        left[0] -= num_bytes
        if left[0] < 0:
            raise UsageError("far memory: no room")
        return make(num_bytes)

    needs = needs_of(model, (ids(0),), optimizer=optimizers[1])
    parts = parts_of(model, blocks_of(model))
    schedule = schedule_of(needs, parts, least_budget(needs, parts) * 5 // 4)
    units = [size for unit, size in enumerate(parts.sizes) if unit not in schedule.pinned]
    far = FarMemory(some)
    left[0] = sum(units) - 1
    with pytest.raises(UsageError, match=r"^layers\.5: far memory: no room"):
        Residency(model, optimizers[1], schedule, blocks_of(model), Plain(), far=far)
    assert far.used_bytes == 0
    assert steps(model, optimizers[1], 0, 1) == steps(wanted, optimizers[0], 0, 1)
    left[0] = 1 << 30
    with Residency(model, optimizers[1], schedule, blocks_of(model), Plain(), far=far) as residency:
        left[0] = 100
        with pytest.raises(UsageError, match=r"^layers\.5: gradients did not get to far memory: far memory: no room"):
            steps(model, optimizers[1], 1, 1)
        assert near_bytes(residency) == 0
        left[0] = 1 << 30
        optimizers[1].zero_grad()
        assert steps(model, optimizers[1], 1, 2) == steps(wanted, optimizers[0], 1, 2)


def test_backward_after_closing_is_refused() -> None:
    wanted, model = Model(), Model()
    optimizers = [adam_w(wanted), adam_w(model)]
    residency = held(model, optimizers[1], Plain())
    loss = model(ids(0))
    residency.close()
    with pytest.raises(UsageError, match="residency was closed between a forward pass and its backward pass"):
        loss.backward()
    assert steps(model, optimizers[1], 0, 2) == steps(wanted, optimizers[0], 0, 2)


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.long)])
def test_steps_leave_descriptors_threads_and_far_memory_as_they_are(count: int, tmp_path: Path) -> None:
    model = Model()
    optimizer = adam_w(model)
    link = EmulatedLink(bandwidth_gbps=50)
    with held(model, optimizer, link, micro=2) as residency:
        seen = set()
        for step in range(count):
            steps(model, optimizer, step, 1, 2)
            if step > 2:
                descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
                seen.add((descriptors, threading.active_count(), residency.far.held_bytes, residency.far.used_bytes))
        assert len(seen) == 1
    link.close()


def test_schedulers_of_rates_and_loaded_states_are_welcome() -> None:
    wanted, model = Model(), Model()
    optimizers = [adam_w(wanted), adam_w(model)]
    rates = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    kept = {name: value.clone() for name, value in wanted.state_dict().items()}
    with held(model, optimizers[1], Plain()):
        for step in range(2):
            assert steps(model, optimizers[1], step, 1) == steps(wanted, optimizers[0], step, 1)
            for rate in rates:
                rate.step()
        model.load_state_dict(kept)
        wanted.load_state_dict(kept)
        assert steps(model, optimizers[1], 5, 2) == steps(wanted, optimizers[0], 5, 2)


def test_what_makes_no_sense_is_refused() -> None:
    model = Model()
    optimizer = adam_w(model)
    with pytest.raises(SynthesisError, match="bytes too little"):
        held(model, optimizer, Plain(), part=0.01)
    assert model(ids(0)).requires_grad  # as it was
    with held(model, optimizer, Plain()) as residency:
        with pytest.raises(UsageError, match="held by a schedule already"):
            Residency(model, optimizer, residency.schedule, blocks_of(model), Plain())
        with pytest.raises(UsageError, match="for another model"):
            Residency(nn.Linear(2, 2), optimizer, residency.schedule, {}, Plain())
    residency.close()
    searching = torch.optim.LBFGS(model.parameters())
    with pytest.raises(UsageError, match="all parameters at once"):
        Residency(model, searching, residency.schedule, blocks_of(model), Plain())
