"""Two small convex problems over weights of tasks, solved exactly, which most combiners of tasks come down to.

Both are least squares with weights that are not negative: Lawson's and Hanson's active sets end after finitely many
steps at the optimum, where Frank-Wolfe's steps creep along a face. The matrices have one row a task, so that a factor
of them costs nothing.

References:
    C. Lawson, R. Hanson, "Solving Least Squares Problems", 1974, chapter 23 (NNLS; least distance programming).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

__all__ = ["Matrix", "Vector", "least_upper", "nearest_to_origin", "scale_of"]

Vector: TypeAlias = npt.NDArray[np.float64]
Matrix: TypeAlias = npt.NDArray[np.float64]

#: Of the largest entry: makes the answer the one of least length where several are as good, such as for two tasks
#: with one gradient, whose weights should be equal. Far above rounding, far below what anybody sees.
_RIDGE = 1e-11


def scale_of(gram: Matrix) -> float:
    """Mean squared length of the tasks' gradients, by which a Gram matrix is divided before it is used; 1 if 0."""
    mean = float(np.trace(gram)) / len(gram)
    return mean if mean > 0 else 1.0


def nearest_to_origin(gram: Matrix) -> Vector:
    """The point of the convex hull of some vectors that is nearest to the origin.

    Args:
        gram: inner products of the vectors, ``[K, K]``, symmetric and positive semidefinite.

    Returns:
        Weights of the vectors, ``[K]``, not negative, with sum 1, that make ``w' gram w`` least; where several do,
        those of least length.

    Examples:
        >>> nearest_to_origin(np.array([[1.0, 0.0], [0.0, 3.0]])).round(6).tolist()
        [0.75, 0.25]
        >>> nearest_to_origin(np.ones((2, 2))).round(6).tolist()
        [0.5, 0.5]
    """
    # The least |P u|^2 + (1'u - 1)^2 over u >= 0 points the same way as the nearest point: what is left to choose
    # after the direction is its length alone.
    ones = np.ones((len(gram), len(gram)))
    found = _least(gram / scale_of(gram) + _RIDGE * np.eye(len(gram)) + ones, np.ones(len(gram)))
    weights: Vector = found / found.sum()
    return weights


def least_upper(gram: Matrix, lower: Vector) -> Vector:
    """The least ``v' gram v`` over ``v >= lower``: projects ``sum lower_i g_i`` on what agrees with all vectors.

    Args:
        gram: inner products of the vectors, ``[K, K]``.
        lower: least weights, ``[K]``.

    Returns:
        ``v``, ``[K]``; ``gram v >= 0`` up to rounding. Of several, the one nearest to ``lower``.

    References:
        P. Quinton, V. Rey, "Jacobian Descent for Multi-Objective Optimization", 2024, arXiv 2406.16232,
        proposition 1.

    Examples:
        >>> opposed = np.array([[1.0, -0.5], [-0.5, 1.0]])
        >>> least_upper(opposed, np.array([1.0, 0.0])).round(6).tolist()
        [1.0, 0.5]
    """
    scaled = gram / scale_of(gram) + _RIDGE * np.eye(len(gram))
    above: Vector = lower + _least(scaled, -scaled @ lower)
    return above


def _least(quadratic: Matrix, linear: Vector) -> Vector:
    """The ``u >= 0`` that makes ``u' quadratic u - 2 linear' u`` least; the matrix is positive definite."""
    values, vectors = np.linalg.eigh(quadratic)
    roots = np.sqrt(np.maximum(values, values[-1] * 1e-16))
    factor = roots[:, None] * vectors.T
    found: Vector = nnls(factor, (vectors.T @ linear) / roots)[0]
    return found
