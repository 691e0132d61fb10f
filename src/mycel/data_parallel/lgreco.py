"""L-GreCo: each layer gets the level of compression it can bear, re-chosen while training goes on.

A uniform level (rank 4 everywhere, 4 bits everywhere) makes some total error. The same error can be had with fewer
bytes by compressing layers harder that bear it, or that hold many bytes, and others less. Every so many steps the
policy compresses the gradients of the last steps at every level, sums squared errors, and solves for the levels with
the fewest bytes within ``alpha`` times what the uniform level would lose.

Squares are summed, not norms, because squares of what layers lose add up to the square of what the model loses;
``squared=False`` sums norms, as the published code does.

References:
    M. Alimohammadi, I. Markov, E. Frantar, D. Alistarh, "L-GreCo: Layerwise-Adaptive Gradient Compression for
    Efficient and Accurate Deep Learning", arXiv 2210.17357, algorithm 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.brief import brief
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.level_choice import LevelChoice, choose_levels
from mycel.data_parallel.policy import CompressionPolicy
from mycel.errors import UsageError

__all__ = ["LGreCo", "LayerLevel"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLevel:
    """What was chosen for one layer, and what the uniform level would have been.

    Attributes:
        name: of the parameter.
        shape: of it.
        level: chosen: a rank, bits, a density.
        num_bytes: of a payload at that level.
        error: Frobenius norm of what the level loses of the layer's mean gradient.
        uniform_bytes: at the uniform level.
        uniform_error: at the uniform level.
    """

    name: str
    shape: tuple[int, ...]
    level: float
    num_bytes: int
    error: float
    uniform_bytes: int
    uniform_error: float

    __repr__ = brief


class LGreCo(CompressionPolicy):
    """A policy for any family of compressors with levels: ranks, bits, densities.

    Args:
        compressor: of the family, at the uniform level to be compared with.
        every: steps between two choices; until the first one all layers have the uniform level.
        window: steps before a choice whose mean gradient is judged.
        alpha: the budget, as part of the uniform level's error.
        levels: to choose from; by default those of the family between a quarter and four times the uniform one.
        rules: as for ``CompressionPolicy``: what they match is not adapted.
        start_step: steps that are all exact, before.
        min_elements: smaller tensors travel exact.
        squared: sum squares of errors, not norms.

    Raises:
        UsageError: numbers out of range, or the family has no such levels.

    Attributes:
        table: the last choice by layer; empty before the first.
        solution: of the last choice; ``None`` before the first.

    Examples:
        >>> from mycel.data_parallel.compress import Quantised
        >>> policy = LGreCo(Quantised(4), every=1, window=1)
        >>> generator = torch.Generator().manual_seed(0)
        >>> steep = torch.randn(64, 64, generator=generator)
        >>> policy.choose("steep", (64, 64), 0).bits, policy.choose("flat", (64, 64), 0).bits
        (4, 4)
        >>> policy.observe({"steep": steep, "flat": steep / 1000}, 0)
        >>> policy.choose("steep", (64, 64), 1).bits > policy.choose("flat", (64, 64), 1).bits
        True
    """

    def __init__(
        self,
        compressor: Compressor,
        *,
        every: int = 100,
        window: int = 10,
        alpha: float = 1.0,
        levels: Sequence[float] | None = None,
        rules: Mapping[str, Compressor | None] | None = None,
        start_step: int = 0,
        min_elements: int = 256,
        squared: bool = True,
    ) -> None:
        super().__init__(compressor, rules=rules, start_step=start_step, min_elements=min_elements)
        if not (1 <= window <= every and alpha > 0):
            raise UsageError(
                f"L-GreCo every {every} steps over the last {window}, budget {alpha}: want 1 <= window <= every and "
                "a budget above 0"
            )
        self.compressor, self.every, self.window, self.alpha, self.squared = compressor, every, window, alpha, squared
        self.uniform = level_of(compressor)
        near = [level for level in compressor.levels() if self.uniform / 4 <= level <= 4 * self.uniform]
        self.levels = tuple(levels) if levels is not None else tuple(near)
        self._members = {
            level: compressor if level == self.uniform else compressor.at(level) for level in self.levels
        }
        self._members.setdefault(self.uniform, compressor)
        self._chosen: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._due = start_step + every
        self._group: dist.ProcessGroup | None = None
        self.table: tuple[LayerLevel, ...] = ()
        self.solution: LevelChoice | None = None

    def sharded(self, group: dist.ProcessGroup) -> None:
        """Gradients that are observed are shards: errors are summed over the ranks of a group."""
        self._group = group

    def choose(self, name: str, shape: Sequence[int], step: int) -> Compressor | None:
        """See ``CompressionPolicy``; the first call of a step that is due solves for all layers."""
        if step >= self._due:
            self._due = step + self.every
            if self._sums:
                self._solve()
        plain = super().choose(name, shape, step)
        return self._members[self._chosen.get(name, self.uniform)] if plain is self.compressor else plain

    def compressors(self) -> list[Compressor]:
        """See ``CompressionPolicy``."""
        members = list(self._members.values())
        return [*members, *(other for other in super().compressors() if all(other is not m for m in members))]

    def observe(self, means: Mapping[str, Tensor], step: int) -> None:
        """See ``CompressionPolicy``: gradients of the last ``window`` steps before a choice are added up."""
        super().observe(means, step)
        if step < self._due - self.window or step < self.start_step:
            return
        for name, mean in means.items():
            if super().choose(name, mean.shape, step) is not self.compressor:
                continue
            if name in self._sums:
                self._sums[name] += mean
                self._counts[name] += 1
            else:
                self._sums[name] = mean.detach().to(torch.float32, copy=True)
                self._counts[name] = 1

    def state_dict(self) -> dict[str, Tensor]:
        """Chosen levels by parameter, and when the next choice is due; the same on all ranks."""
        levels = {f"level.{name}": torch.tensor(level, dtype=torch.float64) for name, level in self._chosen.items()}
        return {"due": torch.tensor(self._due), **levels}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take levels back.

        Raises:
            UsageError: a level is not one of this policy's.
        """
        levels = {name.removeprefix("level."): float(t) for name, t in state.items() if name.startswith("level.")}
        if unknown := sorted(set(levels.values()) - set(self._members)):
            raise UsageError(f"the state has level {unknown[0]:g}; this policy chooses from {sorted(self._members)}")
        self._due, self._chosen = int(state["due"]), levels

    def explain(self) -> str:
        """The last choice as a table for people: the layers that changed most bytes first."""
        if self.solution is None:
            return f"every layer has level {self.uniform:g}; the first choice comes after step {self._due}"
        lines = [f"{'layer':40} {'shape':>14} {'level':>6} {'bytes':>10} {'uniform':>10} {'error':>9} {'uniform':>9}"]
        for row in sorted(self.table, key=lambda row: row.num_bytes - row.uniform_bytes):
            shape = "x".join(map(str, row.shape))
            lines.append(
                f"{row.name[-40:]:40} {shape:>14} {row.level:6g} {row.num_bytes:10} {row.uniform_bytes:10} "
                f"{row.error:9.3g} {row.uniform_error:9.3g}"
            )
        found, uniform = self.solution, sum(row.uniform_bytes for row in self.table)
        lines.append(
            f"{found.num_bytes} bytes instead of {uniform} at level {self.uniform:g} everywhere "
            f"({uniform / max(1, found.num_bytes):.2f} times fewer; at least {found.bound} for this error), "
            f"solved in {1e3 * found.solve_s:.1f} ms"
        )
        return "\n".join(lines)

    def _solve(self) -> None:
        names = sorted(self._sums)
        levels = sorted(self._members, reverse=True)
        squares = torch.zeros((len(names), len(levels)), dtype=torch.float64)
        for i, name in enumerate(names):
            by_level = self._errors(self._sums[name] / self._counts[name], levels)
            squares[i] = torch.tensor([by_level[level] ** 2 for level in levels])
        if self._group is not None:
            squares = squares.to(self._sums[names[0]].device)
            dist.all_reduce(squares, group=self._group)
            squares = squares.cpu()
        shapes = {name: tuple(self._sums[name].shape) for name in names}
        sums, self._sums, self._counts = self._sums, {}, {}
        if not bool(torch.isfinite(squares).all()):
            logger.warning("L-GreCo: gradients are not finite; the levels stay what they are")
            return
        sizes = [[self._members[level].wire_bytes(shapes[name]) for level in levels] for name in names]
        costs = (squares if self.squared else squares.sqrt()).tolist()
        base = levels.index(self.uniform)
        budget = self.alpha * math.fsum(row[base] for row in costs)
        least = math.fsum(min(row) for row in costs)
        found = choose_levels(sizes, costs, max(budget, least))
        self.solution = found
        before, self._chosen = self._chosen, {n: levels[k] for n, k in zip(names, found.levels, strict=True)}
        for name, level in self._chosen.items():
            if level != before.get(name, self.uniform):
                self._members[level].prime(name, sums[name])
        self.table = tuple(
            LayerLevel(
                name=name,
                shape=shapes[name],
                level=levels[k],
                num_bytes=sizes[i][k],
                error=math.sqrt(float(squares[i, k])),
                uniform_bytes=sizes[i][base],
                uniform_error=math.sqrt(float(squares[i, base])),
            )
            for i, (name, k) in enumerate(zip(names, found.levels, strict=True))
        )
        logger.info("L-GreCo:\n%s", self.explain())

    def _errors(self, tensor: Tensor, levels: Sequence[float]) -> dict[float, float]:
        if not numel(tensor.shape):
            return dict.fromkeys(levels, 0.0)
        known = self.compressor.errors(tensor) if set(levels) <= set(self.compressor.levels()) else {}
        return {level: known[level] if known else self._members[level].error(tensor, level) for level in levels}


def level_of(compressor: Compressor) -> float:
    """The level of its family that a compressor is at: ranks, bits and densities are compared by bytes.

    Raises:
        UsageError: it is at none of its family's levels.
    """
    shape = (1024, 1024)
    for level in compressor.levels():
        if compressor.at(level).wire_bytes(shape) == compressor.wire_bytes(shape):
            return level
    raise UsageError(
        f"{compressor.name}: none of its levels {compressor.levels()} has as many bytes as the compressor given"
    )
