"""Random numbers that are functions of what they are for: no generator, no state, nothing to save.

One mixing function makes all of them, from a seed and a counter. It exists twice, compiled for CPU tensors and as
torch operations for tensors elsewhere; both give the same bits. Torch's generators stay where they are.

References:
    Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014 (the mixing function).
"""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mycel.compiled import compiled_without_lock

__all__ = ["GOLDEN", "mixed", "mixed_one", "one_of", "round_at_random", "row_noise", "ternary", "uniform"]

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
#: Steps of counters, as an int64.
GOLDEN = _GOLDEN - (1 << 64)
#: A uniform number has 24 bits, as many as a float32 holds exactly.
_ONE = 1.0 / (1 << 24)


def mixed(z: Tensor) -> Tensor:
    """Each ``int64`` to another that looks like chance, one to one."""
    z = (z ^ _shifted(z, 30)) * (_FIRST - (1 << 64))
    z = (z ^ _shifted(z, 27)) * (_SECOND - (1 << 64))
    return z ^ _shifted(z, 31)


def uniform(seed: int, count: int, device: torch.device | None = None) -> Tensor:
    """``count`` numbers in [0, 1), a function of the seed; what the compiled loops draw too.

    Examples:
        >>> bool((uniform(7, 1000) == uniform(7, 1000)).all()), 0.45 < float(uniform(7, 1000).mean()) < 0.55
        (True, True)
    """
    counters = torch.arange(1, count + 1, dtype=torch.int64, device=device) * GOLDEN + _signed(seed)
    return _shifted(mixed(counters), 40).float() * _ONE


def row_noise(rows_ND: Tensor, seed: int, first_row: int = 0) -> Tensor:
    """A uniform byte for each number of some rows: a function of the row's bits, of its place, and of the seed.

    Rows that differ in a single bit get unrelated noise, and so do equal rows at different places. Whoever computes a
    row again gets its noise again: after a restart, in another process, whatever else has been rounded meanwhile.

    Args:
        rows_ND: float32.
        seed: of 64 bits.
        first_row: place of the first row among all that are rounded together.

    Returns:
        ``uint8`` of the shape of the rows.
    """
    height, width = rows_ND.shape
    bits_ND = rows_ND.detach().contiguous().view(torch.int32)
    num_words = -(-width // 8)
    if rows_ND.is_cpu:
        words = torch.empty(height, num_words, dtype=torch.int64)
        _row_noise(bits_ND.numpy(), np.uint64(seed & _MASK), first_row, words.numpy().view(np.uint64))
    else:
        weights_D = torch.arange(width, device=rows_ND.device).mul_(_WEIGHT).to(torch.int32).bitwise_or_(1).long()
        places_N = torch.arange(first_row + 1, first_row + height + 1, device=rows_ND.device) * GOLDEN
        keys_N = mixed((bits_ND.long() * weights_D).sum(dim=1) + mixed(places_N + _signed(seed)))
        words = mixed(keys_N[:, None] + torch.arange(1, num_words + 1, device=rows_ND.device) * GOLDEN)
    return words.view(torch.uint8)[:, :width]


def round_at_random(numbers: Tensor, noise: Tensor) -> Tensor:
    """To one of the two integers next to each number, in place, so that the mean over many draws is the number.

    Draws are the middles of 256 equal parts of [0, 1]: integers stay what they are, and the mean is right to a 512th.

    Args:
        numbers: float32.
        noise: ``uint8``, uniform.
    """
    return numbers.add_(noise.to(torch.float32).add_(0.5).mul_(1 / 256)).floor_()


def ternary(values: Tensor, scale: Tensor, seed: int) -> Tensor:
    """-1, 0 or 1 (``int8``) for each value: not zero with the probability ``|value| / scale``.

    Args:
        values: float32, 1-D, contiguous; what is not a number becomes 0.
        scale: one number, at least as large as every magnitude.
        seed: of chance.
    """
    if values.is_cpu:
        digits = torch.empty(len(values), dtype=torch.int8)
        _ternary(values.numpy(), np.float32(float(scale)), np.uint64(seed), digits.numpy())
        return digits
    is_up = uniform(seed, len(values), values.device) * scale < values.abs()
    return values.sign().mul_(is_up).nan_to_num_(nan=0.0).to(torch.int8)


_MASK = (1 << 64) - 1
#: Of numbers in the sum that stands for a row; odd, so that no bit of a number is lost.
_WEIGHT = 0x9E3779B1


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned number."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shifted(z: Tensor, by: int) -> Tensor:
    """Right shift that brings in zeros."""
    return (z >> by) & ((1 << (64 - by)) - 1)


@compiled_without_lock
def mixed_one(z: Any) -> Any:
    """``mixed`` for compiled loops: of one ``uint64``."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


@compiled_without_lock
def one_of(seed: Any, i: int) -> Any:
    """Number ``i`` of ``uniform(seed, ...)``, for compiled loops."""
    return np.float32(mixed_one(seed + np.uint64(i + 1) * np.uint64(_GOLDEN)) >> np.uint64(40)) * np.float32(_ONE)


@compiled_without_lock
def _row_noise(bits: Any, seed: Any, first_row: int, words: Any) -> None:
    weights = np.empty(bits.shape[1], dtype=np.int32)
    for j in range(len(weights)):
        weights[j] = np.int32(np.uint32(j * _WEIGHT) | np.uint32(1))
    for row in range(len(words)):
        total = np.int64(0)
        for j in range(len(weights)):
            total += np.int64(bits[row, j]) * np.int64(weights[j])
        place = mixed_one(np.uint64(first_row + row + 1) * np.uint64(_GOLDEN) + seed)
        key = mixed_one(np.uint64(total) + place)
        for j in range(words.shape[1]):
            words[row, j] = mixed_one(key + np.uint64(j + 1) * np.uint64(_GOLDEN))


@compiled_without_lock
def _ternary(values: Any, scale: Any, seed: Any, digits: Any) -> None:
    for i in range(len(values)):
        value = values[i]
        if one_of(seed, i) * scale < abs(value):
            digits[i] = 1 if value > 0 else -1
        else:
            digits[i] = 0
