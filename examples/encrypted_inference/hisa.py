"""Instructions for encrypted vectors, what computes them on plain numbers, and what only notes them.

A circuit is written once, against ``Instructions``. Run on ``Plain`` it gives numbers; on ``sealed.Sealed`` it
computes on ciphertexts; on ``Traced`` it computes nothing that is secret and notes what a run needs: how deep it
multiplies, how large numbers become, which rotations it takes, and how often it calls what at which level. From that
follow the encryption's parameters, the rotation keys, and what a run costs, before anything is encrypted. CHET runs a
circuit once for each of these questions; here one run notes everything.

References:
    R. Dathathri et al., "CHET: An Optimizing Compiler for Fully-Homomorphic Neural-Network Inferencing", PLDI 2019,
    sections 4 (HISA) and 5 (analyses).
    M. Albrecht et al., "Homomorphic Encryption Security Standard", 2018, table 1 (bits of the modulus).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mycel.errors import UsageError

Vector = NDArray[np.float64]
C = TypeVar("C")

#: Most bits of a modulus at 128 bits of security, by the degree of polynomials.
MOST_BITS = {2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
#: Bits above the largest number that a circuit had on trial data.
MARGIN_BITS = 3


class Instructions(Protocol[C]):
    """What a circuit may do to vectors; those of HISA that circuits here call.

    Attributes:
        slots: numbers in a vector; a power of two.
    """

    slots: int

    def encrypt(self, values: Vector) -> C:
        """A vector that may be shorter than ``slots``; it is repeated, so that rotations go around in it."""
        ...

    def decrypt(self, text: C) -> Vector:
        """All slots."""
        ...

    def rotate(self, text: C, steps: int) -> C:
        """To the left: slot ``i`` gets what was in ``i + steps``."""
        ...

    def add(self, one: C, other: C) -> C:
        """Slot by slot; both have the same scale and level."""
        ...

    def multiply(self, one: C, other: C) -> C:
        """Slot by slot, relinearised; to be rescaled."""
        ...

    def multiply_plain(self, text: C, values: Vector | float) -> C:
        """By numbers that are no secret; to be rescaled."""
        ...

    def add_plain(self, text: C, values: Vector | float) -> C:
        """Numbers that are no secret."""
        ...

    def rescale(self, text: C) -> C:
        """After a multiplication: one level less."""
        ...


def repeated(values: Vector | float, slots: int) -> Vector:
    """A vector of all slots.

    Raises:
        UsageError: its length does not divide the number of slots.

    Examples:
        >>> repeated(np.array([1.0, 2.0]), 4)
        array([1., 2., 1., 2.])
    """
    array = np.atleast_1d(np.asarray(values, np.float64))
    if array.ndim != 1 or slots % len(array):
        raise UsageError(f"a vector of shape {array.shape} does not fill {slots} slots evenly; pad it")
    return np.tile(array, slots // len(array))


class Plain:
    """Computes on numbers: what encrypted circuits are compared with."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def encrypt(self, values: Vector) -> Vector:
        """See ``Instructions``, and below."""
        return repeated(values, self.slots)

    def decrypt(self, text: Vector) -> Vector:
        """As it is."""
        return text

    def rotate(self, text: Vector, steps: int) -> Vector:
        """To the left."""
        return np.roll(text, -steps)

    def add(self, one: Vector, other: Vector) -> Vector:
        """Slot by slot."""
        return one + other

    def multiply(self, one: Vector, other: Vector) -> Vector:
        """Slot by slot."""
        return one * other

    def multiply_plain(self, text: Vector, values: Vector | float) -> Vector:
        """Slot by slot."""
        return text * repeated(values, self.slots)

    def add_plain(self, text: Vector, values: Vector | float) -> Vector:
        """Slot by slot."""
        return text + repeated(values, self.slots)

    def rescale(self, text: Vector) -> Vector:
        """Numbers have no scale."""
        return text


@dataclass(frozen=True, slots=True)
class Noted:
    """A vector of trial data, and how many times it was rescaled."""

    values: Vector
    level: int


@dataclass(slots=True)
class Traced:
    """Computes on trial data and notes what a run on ciphertexts would need.

    Attributes:
        slots: see ``Instructions``.
        calls: by instruction and level; ``multiply_scalar`` and ``add_scalar`` are those of one number.
        rotations: steps, between 1 and ``slots - 1``.
        depth: rescalings one after the other.
        largest: number that occurred.
    """

    slots: int
    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    rotations: set[int] = field(default_factory=set)
    depth: int = 0
    largest: float = 0.0

    def _note(self, name: str, level: int, values: Vector) -> Noted:
        self.calls[name, level] += 1
        self.depth = max(self.depth, level)
        self.largest = max(self.largest, float(np.abs(values).max()))
        return Noted(values, level)

    def encrypt(self, values: Vector) -> Noted:
        """Level 0."""
        return self._note("encrypt", 0, repeated(values, self.slots))

    def decrypt(self, text: Noted) -> Vector:
        """The trial data's result."""
        return self._note("decrypt", text.level, text.values).values

    def rotate(self, text: Noted, steps: int) -> Noted:
        """Needs a key of its own for each number of steps."""
        if steps % self.slots == 0:
            return text
        self.rotations.add(steps % self.slots)
        return self._note("rotate", text.level, np.roll(text.values, -steps))

    def add(self, one: Noted, other: Noted) -> Noted:
        """Levels are the same, or the circuit is wrong."""
        if one.level != other.level:
            raise UsageError(f"vectors at levels {one.level} and {other.level} are added; rescale them alike first")
        return self._note("add", one.level, one.values + other.values)

    def multiply(self, one: Noted, other: Noted) -> Noted:
        """Levels are the same, or the circuit is wrong."""
        if one.level != other.level:
            raise UsageError(f"vectors at levels {one.level} and {other.level} are multiplied; rescale them first")
        return self._note("multiply", one.level, one.values * other.values)

    def multiply_plain(self, text: Noted, values: Vector | float) -> Noted:
        """One number costs less than a vector."""
        name = "multiply_scalar" if np.ndim(values) == 0 else "multiply_plain"
        return self._note(name, text.level, text.values * repeated(values, self.slots))

    def add_plain(self, text: Noted, values: Vector | float) -> Noted:
        """One number costs less than a vector."""
        name = "add_scalar" if np.ndim(values) == 0 else "add_plain"
        return self._note(name, text.level, text.values + repeated(values, self.slots))

    def rescale(self, text: Noted) -> Noted:
        """One level further."""
        self.calls["rescale", text.level] += 1
        self.depth = max(self.depth, text.level + 1)
        return Noted(text.values, text.level + 1)

    def cost_s(self, prices: Mapping[tuple[str, int], float]) -> float:
        """Seconds of a run.

        Args:
            prices: seconds a call, by instruction and level (``prices.measured``).
        """
        return sum(count * prices[call] for call, count in self.calls.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Of the encryption.

    Attributes:
        degree: of polynomials; a vector has half as many slots.
        bits: of the primes: the one that is left at the end, one a rescaling, and the one for keys.
        scale_bits: bits after the point.
    """

    degree: int
    bits: tuple[int, ...]
    scale_bits: int

    def __post_init__(self) -> None:
        if self.degree not in MOST_BITS:
            raise UsageError(f"polynomials of degree {self.degree}; possible are {', '.join(map(str, MOST_BITS))}")
        if sum(self.bits) > MOST_BITS[self.degree]:
            raise UsageError(
                f"a modulus of {sum(self.bits)} bits at degree {self.degree}: 128 bits of security allow "
                f"{MOST_BITS[self.degree]}; take the next degree"
            )

    @property
    def slots(self) -> int:
        """Numbers a vector."""
        return self.degree // 2

    @property
    def depth(self) -> int:
        """Rescalings that are possible."""
        return len(self.bits) - 2

    def check(self, trace: Traced) -> None:
        """Refuse a circuit that these parameters are too small for; nothing has run yet.

        Raises:
            UsageError: it multiplies deeper, its numbers get too large, or it has more slots.
        """
        if trace.depth > self.depth:
            raise UsageError(
                f"the circuit multiplies {trace.depth} times one after the other, and a modulus of {len(self.bits)} "
                f"primes allows {self.depth}; add {trace.depth - self.depth} of {self.scale_bits} bits"
            )
        room = 2.0 ** (self.bits[0] - self.scale_bits - 1)
        if trace.largest >= room:
            raise UsageError(
                f"numbers of {trace.largest:.3g} occur, and a first prime of {self.bits[0]} bits at "
                f"{self.scale_bits} bits of scale holds less than {room:.3g}; make it larger"
            )
        if trace.slots != self.slots:
            raise UsageError(f"the circuit has vectors of {trace.slots} slots, degree {self.degree} has {self.slots}")


def parameters_for(depth: int, largest: float, *, scale_bits: int = 30, least_slots: int = 1) -> Parameters:
    """The smallest that a circuit can run with.

    Args:
        depth: rescalings one after the other.
        largest: number that occurs.
        scale_bits: bits after the point.
        least_slots: that a vector must have.

    Raises:
        UsageError: no degree allows a circuit so deep.

    Examples:
        >>> parameters_for(3, 20.0)
        Parameters(degree=8192, bits=(39, 30, 30, 30, 39), scale_bits=30)
    """
    first = scale_bits + MARGIN_BITS + 1 + max(0, math.ceil(math.log2(max(largest, 1.0))))
    bits = (first, *[scale_bits] * depth, first)
    for degree, most in MOST_BITS.items():
        if sum(bits) <= most and degree // 2 >= least_slots:
            return Parameters(degree=degree, bits=bits, scale_bits=scale_bits)
    raise UsageError(
        f"a circuit that multiplies {depth} times deep at {scale_bits} bits needs {sum(bits)} bits of modulus; at "
        f"128 bits of security there are {MOST_BITS[max(MOST_BITS)]}: use a shallower circuit or a smaller scale"
    )
