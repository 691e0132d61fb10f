"""Affine maps of states, as scans move them: applied, composed, transposed, cut into rows and packed as one vector.

A state ``S`` of shape (keys, values) is held transposed, one row of ``keys`` numbers for each value, because rows are
independent of each other whatever the transition is: ``row' = row M^T + u``. So rows can go to different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Maps", "Shape", "applied", "applied_to_states", "assembled", "composed", "framed", "unframed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of one map.

    Attributes:
        heads: states side by side, rows of a batch included.
        values: rows of a state.
        keys: numbers of a row.
        order: of the transition: 0 a number a head, 1 a diagonal, 2 a matrix.
    """

    heads: int
    values: int
    keys: int
    order: int

    @property
    def update(self) -> int:
        """Numbers of a state."""
        return self.heads * self.values * self.keys

    @property
    def transition(self) -> int:
        """Numbers of a transition."""
        return self.heads * self.row_of_transition

    @property
    def row_of_transition(self) -> int:
        """Numbers of the transition of one head."""
        return (1, self.keys, self.keys * self.keys)[self.order]

    @property
    def rows(self) -> int:
        """Of the states of all heads."""
        return self.heads * self.values

    def cut(self, parts: int) -> list[tuple[int, int]]:
        """Rows divided evenly: first and one after the last of each part."""
        return [(self.rows * part // parts, self.rows * (part + 1) // parts) for part in range(parts)]

    def heads_of(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Heads that rows belong to."""
        low, high = rows
        return (low // self.values, -(-high // self.values)) if high > low else (0, 0)

    def packed(self, rows: tuple[int, int]) -> int:
        """Numbers of these rows of a map, with the transitions that they need."""
        first, last = self.heads_of(rows)
        return (last - first) * self.row_of_transition + (rows[1] - rows[0]) * self.keys


def applied(transition: Tensor, state: Tensor, order: int) -> Tensor:
    """A transition of shape (..., heads, [keys, [keys]]) applied to states (..., heads, values, keys)."""
    if order == 0:
        return state * transition[..., None, None]
    if order == 1:
        return state * transition[..., None, :]
    return state @ transition.mT


def applied_to_states(transition: Tensor, state: Tensor, order: int) -> Tensor:
    """As ``applied``, for states that are not transposed, (..., keys, values)."""
    return transition @ state if order == 2 else applied(transition, state.mT, order).mT


def composed(later: Tensor, earlier: Tensor, order: int) -> Tensor:
    """The transition of first one and then another."""
    return later @ earlier if order == 2 else later * earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class Maps:
    """Maps of some runs.

    Attributes:
        transition: of shape (runs, heads), (runs, heads, keys) or (runs, heads, keys, keys).
        update: of shape (runs, heads, values, keys).
    """

    transition: Tensor
    update: Tensor

    @property
    def shape(self) -> Shape:
        """Of each."""
        _, heads, values, keys = self.update.shape
        return Shape(heads=heads, values=values, keys=keys, order=self.transition.dim() - 2)

    def __len__(self) -> int:
        return len(self.update)

    def transposed(self) -> Maps:
        """Of the same runs from the last to the first, with the transitions by which gradients pass."""
        turned = self.transition.mT if self.transition.dim() == 4 else self.transition
        return Maps(transition=turned.flip(0), update=self.update.flip(0))

    def then(self, later: Maps) -> Maps:
        """First these, then others; run by run."""
        order = self.shape.order
        return Maps(
            transition=composed(later.transition, self.transition, order),
            update=applied(later.transition, self.update, order) + later.update,
        )

    def leaves(self, state: Tensor) -> Tensor:
        """What leaves runs that a state of shape (runs, heads, values, keys) comes into."""
        return applied(self.transition, state, self.shape.order) + self.update

    def __getitem__(self, run: int) -> Maps:
        return Maps(transition=self.transition[run : run + 1], update=self.update[run : run + 1])

    def pack(self, rows: tuple[int, int] | None = None) -> Tensor:
        """Some rows of all states, and the transitions of their heads, run by run as one vector."""
        shape = self.shape
        chosen = (0, shape.rows) if rows is None else rows
        first, last = shape.heads_of(chosen)
        transition = self.transition[:, first:last].flatten(1)
        update = self.update.flatten(1, 2)[:, chosen[0] : chosen[1]].flatten(1)
        return torch.cat([transition, update], 1).flatten()

    @staticmethod
    def unpack(vector: Tensor, shape: Shape, rows: tuple[int, int] | None = None) -> Maps:
        """The maps in a vector; of rows, maps of the heads that they belong to, zeros where rows are missing."""
        chosen = (0, shape.rows) if rows is None else rows
        first, last = shape.heads_of(chosen)
        runs = vector.view(-1, shape.packed(chosen))
        cut = (last - first) * shape.row_of_transition
        transition = runs[:, :cut].reshape(len(runs), last - first, *[shape.keys] * shape.order)
        rows_of = runs[:, cut:].reshape(len(runs), chosen[1] - chosen[0], shape.keys)
        return Maps(transition=transition, update=framed(rows_of, shape, chosen))


def framed(rows: Tensor, shape: Shape, chosen: tuple[int, int]) -> Tensor:
    """Rows (runs, rows, keys) as states (runs, heads, values, keys).

    Those of one head stay alone; of several, whole heads with zeros for the rows that are missing at either end.
    """
    first, last = shape.heads_of(chosen)
    if last - first <= 1:
        return rows[:, None]
    before, after = chosen[0] - first * shape.values, last * shape.values - chosen[1]
    padded = torch.nn.functional.pad(rows, (0, 0, before, after))
    return padded.reshape(len(rows), last - first, shape.values, shape.keys)


def unframed(states: Tensor, shape: Shape, chosen: tuple[int, int]) -> Tensor:
    """The rows (runs, rows, keys) that ``framed`` was given."""
    first, last = shape.heads_of(chosen)
    rows = states.flatten(1, 2)
    if last - first <= 1:
        return rows
    before = chosen[0] - first * shape.values
    return rows[:, before : before + chosen[1] - chosen[0]]


def assembled(parts: Sequence[Tensor], shape: Shape) -> Tensor:
    """States (runs, heads, values, keys) of the rows in parts (runs, numbers), in order."""
    return torch.cat(list(parts), 1).reshape(-1, shape.heads, shape.values, shape.keys)
