"""Networks as circuits, each in several layouts: where which number stands in which encrypted vector.

Vectors repeat: one of ``n`` numbers, a power of two, stands ``slots / n`` times in a row, so that a rotation goes
around in it and needs no mask. Between two linear layers stands a square: nothing else than sums and products exists.

A product with a matrix of ``m x n`` numbers (``m`` divides ``n``) in one vector is a sum over its ``m`` diagonals,

    y[k] = sum_d W[k mod m, (k + d) mod n] x[(k + d) mod n]    and then    y[k] + y[k + m] + y[k + 2m] + ...

with one rotation a diagonal, or about ``2 sqrt(m)`` for all of them (baby steps and giant steps).

References:
    S. Halevi, V. Shoup, "Algorithms in HElib", CRYPTO 2014 (diagonals); "Faster Homomorphic Linear Transformations in
    HElib", CRYPTO 2018 (baby and giant steps).
    R. Dathathri et al., CHET, PLDI 2019, section 2.4 (HW: one ciphertext a channel; CHW: all channels in one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hisa import Instructions, Vector
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

#: Below this a weight is nothing at 30 bits of scale, and multiplying by it gives a ciphertext that hides nothing.
NOTHING = 1e-8


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer; rows are outputs."""

    weight: Matrix
    bias: Vector


@dataclass(frozen=True, slots=True)
class Convolution:
    """3 x 3, from one channel, on an image with a border of zeros; ``weight[channel, row, column]``."""

    weight: Matrix
    bias: Vector


@dataclass(frozen=True, slots=True)
class Network:
    """Layers with squares between them; the first may be a convolution."""

    name: str
    layers: tuple[Dense | Convolution, ...]

    def __call__(self, images: Matrix) -> Matrix:
        """On plain numbers, ``[images, 64]`` to ``[images, classes]``: what every layout must give."""
        x = images
        for number, layer in enumerate(self.layers):
            if number:
                x = x**2
            if isinstance(layer, Convolution):
                wide = np.pad(x.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
                taps = [wide[:, r : r + 8, c : c + 8] for r in range(3) for c in range(3)]
                made = np.einsum("tnrc,kt->nkrc", np.stack(taps), layer.weight.reshape(-1, 9))
                x = (made + layer.bias[:, None, None]).reshape(len(x), -1)
            else:
                x = x @ layer.weight.T + layer.bias
        return x


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to compute a network on encrypted vectors.

    Attributes:
        name: of the layout.
        images: that one run takes, at most; ``None``: as many as there are slots.
        pack: images ``[n, 64]`` to the vectors that are encrypted.
        run: encrypted vectors to encrypted results.
        unpack: decrypted results and number of images to ``[n, classes]``.
    """

    name: str
    images: int | None
    pack: Callable[[Matrix], list[Vector]]
    run: Callable[[Instructions[Any], list[Any]], list[Any]]
    unpack: Callable[[list[Vector], int], Matrix]

    def whole(self, machine: Instructions[Any], images: Matrix) -> Matrix:
        """Encrypt, run and decrypt on one machine."""
        texts = [machine.encrypt(vector) for vector in self.pack(images)]
        return self.unpack([machine.decrypt(t) for t in self.run(machine, texts)], len(images))


def power_of_two(number: int) -> int:
    """The least that is no smaller."""
    return 1 << (number - 1).bit_length()


def square(machine: Instructions[Any], text: Any) -> Any:
    """And one level less."""
    return machine.rescale(machine.multiply(text, text))


def total(machine: Instructions[Any], texts: Sequence[Any]) -> Any:
    """Sum of several."""
    made = texts[0]
    for text in texts[1:]:
        made = machine.add(made, text)
    return made


def folded(machine: Instructions[Any], text: Any, length: int, stride: int) -> Any:
    """In each slot the sum over all slots of ``length`` that are multiples of ``stride`` away."""
    step = stride
    while step < length:
        text = machine.add(text, machine.rotate(text, step))
        step *= 2
    return text


def by_diagonals(machine: Instructions[Any], texts: Sequence[Any], weights: Sequence[Matrix], baby: int) -> Any:
    """Sum of products of matrices with vectors that each repeat; the result repeats by the matrices' rows.

    Args:
        machine: computes.
        texts: vectors of ``n`` numbers.
        weights: ``[m, n]`` each, powers of two, ``m`` no more than ``n``.
        baby: rotations of the vectors themselves; 1 to ``m``, a divisor.
    """
    rows, columns = weights[0].shape
    place = np.arange(columns)
    turned = [[machine.rotate(text, d) for d in range(baby)] for text in texts]
    parts = []
    for giant in range(0, rows, baby):
        terms = []
        for of_text, weight in zip(turned, weights, strict=True):
            for d, text in enumerate(of_text):
                diagonal = weight[place % rows, (place + giant + d) % columns]
                if np.abs(diagonal).max() > NOTHING:
                    terms.append(machine.multiply_plain(text, np.roll(diagonal, giant)))
        if terms:
            parts.append(machine.rotate(total(machine, terms), giant))
    return folded(machine, machine.rescale(total(machine, parts)), columns, rows)


def padded(layer: Dense, columns: int) -> tuple[Matrix, Vector]:
    """Weight and bias with rows and columns that are powers of two."""
    rows = power_of_two(len(layer.bias))
    weight, bias = np.zeros((rows, columns)), np.zeros(rows)
    weight[: len(layer.bias), : layer.weight.shape[1]] = layer.weight
    bias[: len(layer.bias)] = layer.bias
    return weight, bias


def dense_diagonals(network: Network, *, giant: bool) -> Layout:
    """One image in one vector; each layer by diagonals, with giant steps or without."""

    def run(machine: Instructions[Any], texts: list[Any]) -> list[Any]:
        text, columns = texts[0], 64
        for number, layer in enumerate(network.layers):
            assert isinstance(layer, Dense)
            weight, bias = padded(layer, columns)
            text = by_diagonals(
                machine, [square(machine, text) if number else text], [weight], baby_of(weight, giant)
            )
            text, columns = machine.add_plain(text, bias), len(bias)
        return [text]

    return Layout("giant steps" if giant else "diagonals", 1, one_image, run, first_vector(network))


def baby_of(weight: Matrix, giant: bool) -> int:
    """How many rotations of the vector itself."""
    return 1 << math.ceil(math.log2(len(weight)) / 2) if giant else len(weight)


def one_image(images: Matrix) -> list[Vector]:
    """The vector of one image of 8 x 8."""
    return [images[0]]


def first_vector(network: Network) -> Callable[[list[Vector], int], Matrix]:
    """Classes stand at the beginning of the only result."""
    last = network.layers[-1]
    return lambda results, count: results[0][None, : len(last.bias)]


def dense_rows(network: Network) -> Layout:
    """One image in one vector; a row after the other, then a column after the other."""

    def run(machine: Instructions[Any], texts: list[Any]) -> list[Any]:
        whole, each = texts[0], texts
        for number, layer in enumerate(network.layers):
            assert isinstance(layer, Dense)
            if number % 2 == 0:  # one vector in, one result an output, in all slots
                source = square(machine, whole) if number else whole
                weight, _ = padded(layer, 64)
                terms = [machine.rescale(machine.multiply_plain(source, row)) for row in weight[: len(layer.bias)]]
                each = [folded(machine, term, 64, 1) for term in terms]
                each = [machine.add_plain(text, float(b)) for text, b in zip(each, layer.bias, strict=True)]
            else:  # one input a vector, one vector out
                weight, bias = padded(Dense(layer.weight.T, np.zeros(layer.weight.shape[1])), 64)[0], layer.bias
                squares = [square(machine, text) for text in each]
                terms = [machine.multiply_plain(text, weight[i]) for i, text in enumerate(squares)]
                ends = np.zeros(64)
                ends[: len(bias)] = bias
                whole = machine.add_plain(machine.rescale(total(machine, terms)), ends)
        return each if len(network.layers) % 2 else [whole]

    def unpack(results: list[Vector], count: int) -> Matrix:
        if len(network.layers) % 2:
            return np.array([[vector[0] for vector in results]])
        return first_vector(network)(results, count)

    return Layout("rows", 1, one_image, run, unpack)


def dense_batched(network: Network) -> Layout:
    """A vector a pixel, with as many images as there are slots; no rotations."""

    def pack(images: Matrix) -> list[Vector]:
        room = np.zeros((power_of_two(len(images)), images.shape[1]))
        room[: len(images)] = images
        return list(room.T)

    def run(machine: Instructions[Any], texts: list[Any]) -> list[Any]:
        for number, layer in enumerate(network.layers):
            assert isinstance(layer, Dense)
            if number:
                texts = [square(machine, text) for text in texts]
            made = []
            for row, bias in zip(layer.weight, layer.bias, strict=True):
                pairs = zip(texts, row, strict=True)
                terms = [machine.multiply_plain(text, float(w)) for text, w in pairs if abs(w) > NOTHING]
                made.append(machine.add_plain(machine.rescale(total(machine, terms)), float(bias)))
            texts = made
        return texts

    return Layout("batched", None, pack, run, lambda results, count: np.stack([v[:count] for v in results], 1))


#: Numbers of a channel: 10 x 10 with the border, and up to a power of two.
PLANE, WIDTH = 128, 10


def on_plane(image: Matrix) -> Vector:
    """An image of 8 x 8 with a border of zeros."""
    plane = np.zeros(PLANE)
    plane[: WIDTH * WIDTH] = np.pad(image.reshape(8, 8), 1).ravel()
    return plane


def convolved(network: Network, *, together: bool) -> Layout:
    """A convolution, a square and a linear layer: a vector a channel (HW), or all channels in one (CHW)."""
    first, last = network.layers
    assert isinstance(first, Convolution) and isinstance(last, Dense)
    channels = len(first.bias)
    taps = [(r - 1) * WIDTH + c - 1 for r in range(3) for c in range(3)]
    kernels = first.weight.reshape(channels, 9)
    rows = power_of_two(len(last.bias))
    bias = np.zeros(rows)
    bias[: len(last.bias)] = last.bias
    planes = np.zeros((channels, rows, PLANE))  # what stands in the border counts nothing
    for channel, part in enumerate(last.weight.reshape(len(last.bias), channels, 64).transpose(1, 0, 2)):
        planes[channel, : len(last.bias)] = [on_plane(row) for row in part]

    def run(machine: Instructions[Any], texts: list[Any]) -> list[Any]:
        turned = [machine.rotate(texts[0], tap % PLANE) for tap in taps]
        if together:
            wide = power_of_two(channels)
            weights = np.zeros((wide, 9))
            weights[:channels] = kernels
            vectors = np.repeat(weights.T, PLANE, axis=1)
            sums = [total(machine, [machine.multiply_plain(t, v) for t, v in zip(turned, vectors, strict=True)])]
            shifts: list[Vector | float] = [np.repeat(np.append(first.bias, np.zeros(wide - channels)), PLANE)]
            matrix = np.concatenate([*planes, *np.zeros((wide - channels, rows, PLANE))], 1)
            matrices = [matrix]
        else:
            sums = [
                total(machine, [machine.multiply_plain(t, float(w)) for t, w in zip(turned, kernel, strict=True)])
                for kernel in kernels
            ]
            shifts, matrices = list(map(float, first.bias)), list(planes)
        maps = [machine.add_plain(machine.rescale(s), b) for s, b in zip(sums, shifts, strict=True)]
        squares = [square(machine, text) for text in maps]
        return [machine.add_plain(by_diagonals(machine, squares, matrices, baby_of(matrices[0], True)), bias)]

    name = "CHW" if together else "HW"
    return Layout(name, 1, lambda images: [on_plane(images[0])], run, first_vector(network))


def layouts_of(network: Network) -> list[Layout]:
    """All that can compute a network."""
    if isinstance(network.layers[0], Convolution):
        return [convolved(network, together=False), convolved(network, together=True)]
    return [
        dense_rows(network),
        dense_diagonals(network, giant=False),
        dense_diagonals(network, giant=True),
        dense_batched(network),
    ]
