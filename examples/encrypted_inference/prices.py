"""What each instruction costs on this machine, by level, and which layout of a network that makes the cheapest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from circuits import Layout, Matrix, Network, layouts_of
from hisa import Parameters, Traced, parameters_for
from sealed import Sealed

#: Calls of which a price is the median.
CALLS = 5
#: Of a vector, on which a circuit is traced before its parameters are known.
LEAST_SLOTS = 2048


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with what a trace found of it.

    Attributes:
        layout: of the network.
        trace: of one run.
        parameters: with which it can run.
        runs: for all images.
    """

    layout: Layout
    trace: Traced
    parameters: Parameters
    runs: int

    def modelled_s(self) -> float:
        """Seconds for all images, encryption and decryption included."""
        return self.runs * self.trace.cost_s(measured(self.parameters))


@cache
def measured(parameters: Parameters) -> dict[tuple[str, int], float]:
    """Seconds a call, by instruction and level; takes about a second."""
    machine = Sealed.with_keys(parameters, [1])
    random = np.random.default_rng(0)
    values = random.uniform(0.5, 1.0, machine.slots)
    prices: dict[tuple[str, int], float] = {("encrypt", 0): seconds(lambda: machine.encrypt(values))}
    text = machine.encrypt(values)
    for level in range(parameters.depth + 1):
        calls: dict[str, Callable[[], Any]] = {
            "decrypt": lambda text=text: machine.decrypt(text),
            "rotate": lambda text=text: machine.rotate(text, 1),
            "add": lambda text=text: machine.add(text, text),
            "add_plain": lambda text=text: machine.add_plain(text, values),
            "add_scalar": lambda text=text: machine.add_plain(text, 0.7),
        }
        if level < parameters.depth:
            product = machine.multiply_plain(text, 0.7)
            calls |= {
                "multiply": lambda text=text: machine.multiply(text, text),
                "multiply_plain": lambda text=text: machine.multiply_plain(text, values),
                "multiply_scalar": lambda text=text: machine.multiply_plain(text, 0.7),
                "rescale": lambda product=product: machine.rescale(product),
            }
            text = machine.rescale(product)
        prices |= {(name, level): seconds(call) for name, call in calls.items()}
    return prices


def seconds(call: Callable[[], Any]) -> float:
    """Median of a few, after one that does not count."""
    call()
    taken = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def candidates(network: Network, trial: Matrix, count: int) -> list[Candidate]:
    """Every layout of a network, traced.

    Args:
        network: to be run.
        trial: images that are no secret, from which follows how large numbers become.
        count: images to be classified.
    """
    made = []
    for layout in layouts_of(network):
        fits = min(count, layout.images or count)
        images = np.resize(trial, (fits, trial.shape[1]))
        first = traced(layout, images[:LEAST_SLOTS], LEAST_SLOTS)
        parameters = parameters_for(first.depth, first.largest, least_slots=LEAST_SLOTS)
        fits = min(fits, parameters.slots)
        trace = traced(layout, images[:fits], parameters.slots)
        parameters.check(trace)
        made.append(Candidate(layout, trace, parameters, -(-count // fits)))
    return made


def traced(layout: Layout, images: Matrix, slots: int) -> Traced:
    """What one run needs."""
    trace = Traced(slots)
    layout.whole(trace, images)
    return trace


def cheapest(network: Network, trial: Matrix, count: int) -> Candidate:
    """The layout that the prices say is the fastest; nothing of the network has been encrypted yet."""
    return min(candidates(network, trial, count), key=Candidate.modelled_s)
