"""examples/encrypted_inference: every layout gives the network's numbers, in the clear, traced, and encrypted."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import circuits
import hisa
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import encrypted_digits
import prices
import sealed
from circuits import Convolution, Dense, Network
from hisa import Parameters, Plain, Traced, parameters_for

from mycel.errors import MissingExtraError, MycelError, UsageError

with_seal = pytest.mark.skipif(find_spec("tenseal") is None, reason="tenseal is not installed")


def dense(random: np.random.Generator, outputs: int, inputs: int) -> Dense:
    return Dense(random.normal(size=(outputs, inputs)) / 8, random.normal(size=outputs))


def networks() -> list[Network]:
    random = np.random.default_rng(0)
    kernels = Convolution(random.normal(size=(3, 3, 3)), random.normal(size=3))
    return [
        Network("one layer", (dense(random, 10, 64),)),
        Network("two layers", (dense(random, 16, 64), dense(random, 10, 16))),
        Network("odd width", (dense(random, 12, 64), dense(random, 10, 12))),
        Network("three layers", (dense(random, 16, 64), dense(random, 8, 16), dense(random, 3, 8))),
        Network("channels", (kernels, dense(random, 10, 192))),
    ]


CASES = [(network, layout) for network in networks() for layout in circuits.layouts_of(network)]
cases = pytest.mark.parametrize(("network", "layout"), CASES, ids=[f"{n.name}, {lay.name}" for n, lay in CASES])


@cases
def test_every_layout_gives_the_networks_numbers(network: Network, layout: circuits.Layout) -> None:
    images = np.random.default_rng(1).uniform(size=(layout.images or 5, 64))
    wanted, machine, trace = network(images), Plain(512), Traced(512)
    assert np.allclose(layout.whole(machine, images), wanted, atol=1e-9)
    assert np.allclose(layout.whole(trace, images), wanted, atol=1e-9)
    assert trace.depth == 2 * len(network.layers) - 1
    assert trace.largest >= np.abs(wanted).max()


def test_giant_steps_need_fewer_rotations_and_batches_none() -> None:
    needed = {}
    for layout in circuits.layouts_of(networks()[1]):
        trace = Traced(512)
        layout.whole(trace, np.ones((1, 64)))
        needed[layout.name] = sum(count for (name, _), count in trace.calls.items() if name == "rotate")
    assert needed["batched"] == 0
    assert 0 < needed["giant steps"] < needed["diagonals"] < needed["rows"]


def test_parameters_follow_from_a_trace() -> None:
    assert parameters_for(1, 10.0).degree == 4096
    assert parameters_for(3, 10.0).degree == 8192
    assert parameters_for(1, 10.0, least_slots=4096).degree == 8192
    assert parameters_for(3, 1e6).bits[0] > parameters_for(3, 10.0).bits[0]
    with pytest.raises(UsageError, match="multiplies 40 times deep"):
        parameters_for(40, 1.0)


def test_parameters_that_are_too_small_are_refused_before_anything_runs() -> None:
    trace = Traced(4096)
    circuits.layouts_of(networks()[1])[2].whole(trace, np.ones((1, 64)))
    assert trace.depth == 3
    with pytest.raises(UsageError, match=r"multiplies 3 times .* allows 2; add 1 of 30 bits"):
        Parameters(degree=8192, bits=(40, 30, 30, 40), scale_bits=30).check(trace)
    with pytest.raises(UsageError, match=r"numbers of .* occur"):
        Parameters(degree=8192, bits=(31, 30, 30, 30, 31), scale_bits=30).check(trace)
    with pytest.raises(UsageError, match="4096 slots, degree 16384 has 8192"):
        Parameters(degree=16384, bits=(40, 30, 30, 30, 40), scale_bits=30).check(trace)
    with pytest.raises(UsageError, match="110 bits at degree 4096"):
        Parameters(degree=4096, bits=(40, 30, 40), scale_bits=30)
    with pytest.raises(UsageError, match="degree 1000"):
        Parameters(degree=1000, bits=(40, 30, 40), scale_bits=30)


def test_wrong_circuits_are_found_by_tracing_them() -> None:
    trace = Traced(8)
    text = trace.encrypt(np.ones(8))
    with pytest.raises(UsageError, match="levels 1 and 0 are added"):
        trace.add(trace.rescale(text), text)
    with pytest.raises(UsageError, match="levels 1 and 0 are multiplied"):
        trace.multiply(trace.rescale(text), text)
    with pytest.raises(UsageError, match="does not fill 8 slots evenly"):
        trace.encrypt(np.ones(3))


def test_prices_choose() -> None:
    trace = Traced(8)
    trace.decrypt(trace.add(trace.encrypt(np.ones(8)), trace.encrypt(np.ones(8))))
    costs = {("encrypt", 0): 2.0, ("add", 0): 0.5, ("decrypt", 0): 0.25}
    assert trace.cost_s(costs) == 4.75


@with_seal
def test_the_prices_of_this_machine_name_every_instruction() -> None:
    found = prices.candidates(networks()[0], np.full((4, 64), 0.5), 3)
    assert {c.layout.name for c in found} == {"rows", "diagonals", "giant steps", "batched"}
    assert {c.layout.name: c.runs for c in found}["batched"] == 1
    for candidate in found:
        assert 0 < candidate.modelled_s() < 600
    assert prices.cheapest(networks()[0], np.full((4, 64), 0.5), 3).layout.name != "rows"


@with_seal
@pytest.mark.parametrize("name", ["giant steps", "CHW"])
def test_encrypted_layouts_give_the_networks_numbers(name: str) -> None:
    network = networks()[4 if name == "CHW" else 1]
    images = np.random.default_rng(2).uniform(size=(1, 64))
    trial = np.random.default_rng(3).uniform(size=(4, 64))
    candidate = next(c for c in prices.candidates(network, trial, 1) if c.layout.name == name)
    machine = sealed.Sealed.with_keys(candidate.parameters, candidate.trace.rotations)
    assert np.abs(candidate.layout.whole(machine, images) - network(images)).max() < 1e-2


@with_seal
def test_digits_in_one_batch_are_classified_as_in_the_clear() -> None:
    (trained, held), network = encrypted_digits.digits(), encrypted_digits.train("64-8-10")
    traced = prices.candidates(network, trained.images[:32], len(held.images))
    candidate = next(c for c in traced if c.layout.name == "batched")
    found = encrypted_digits.classify(candidate, held.images, len(held.images))
    assert found is not None and len(found.logits) == 360
    assert (found.logits.argmax(1) == network(held.images).argmax(1)).all()
    assert np.abs(found.logits - network(held.images)).max() < 1e-2
    with pytest.raises(UsageError, match="a batch of 0 images: layout 'batched' takes 1 to"):
        encrypted_digits.classify(candidate, held.images, 0)


@with_seal
def test_the_side_without_the_secret_key_decrypts_nothing_and_rotates_only_as_agreed() -> None:
    keeper = sealed.Sealed.with_keys(parameters_for(1, 1.0), [3])
    worker = sealed.Sealed.from_public(keeper.parameters, keeper.public())
    values = np.arange(8.0) / 8
    text = worker.unpack(keeper.pack(keeper.encrypt(values)))
    turned = keeper.decrypt(keeper.unpack(worker.pack(worker.rotate(text, 3))))
    assert np.abs(turned[:8] - np.roll(values, -3)).max() < 1e-2
    with pytest.raises(UsageError, match="no secret key"):
        worker.decrypt(text)
    with pytest.raises(UsageError, match=r"rotation by 5: .*make keys for"):
        worker.rotate(text, 5)


@with_seal
def test_parameters_without_security_are_refused() -> None:
    with pytest.raises(MycelError, match="128 bits of security allow 109"):
        sealed.Sealed(Parameters(degree=4096, bits=(60, 30, 60), scale_bits=30))


def test_without_the_extra_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tenseal", None)
    with pytest.raises(MissingExtraError, match=r"needs tenseal, .*mycel\[encrypted\]"):
        sealed.Sealed(parameters_for(1, 1.0))


def test_the_comparison_says_what_was_chosen_and_what_was_fastest() -> None:
    line = {"circuit": "a", "images": 1, "degree": 8192, "keys": 1, "right": 1, "compared": 1}
    lines = [
        {**line, "layout": "one", "modelled_s": 1.0, "measured_s": 3.0},
        {**line, "layout": "other", "modelled_s": 2.0, "measured_s": 1.0},
        {**line, "circuit": "b", "layout": "one", "modelled_s": 2.0, "measured_s": 1.0},
    ]
    made = encrypted_digits.table(lines)
    assert "fastest in 1 of 2 circuits" in made
    assert made.count("chosen, fastest") == 1 and made.count("| chosen |") == 1 and made.count("| fastest |") == 1


def test_vectors_repeat() -> None:
    assert hisa.repeated(2.0, 4).tolist() == [2.0] * 4
