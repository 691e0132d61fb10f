"""A rotation and a shift from landmarks that are measured twice, with errors that are known as covariances.

Measured are ``r~_i = r_i + v_r`` before and ``b~_i = A r_i + p + v_b`` after a motion ``A``, ``p``, and each landmark
has one 6 x 6 covariance of ``(v_b, v_r)``. What is left over, ``e_i = b~_i - A r~_i - p``, has the covariance

    S_i = R_bb - A R_rb - R_br A' + A R_rr A'

and the estimate makes ``sum e_i' S_i^-1 e_i`` least. Everything is for many runs at once. A rotation's error is the
vector ``d`` with ``A_estimated = exp(-[d x]) A``: for ``A <- exp(-[d x]) A`` and ``p <- p + q`` what is left over
changes by ``-[A r x] d - q``.

References:
    S. Maleki, J. Crassidis, Y. Cheng, M. Schmid, "Total Least Squares for Optimal Pose Estimation", AIAA SciTech
    2022.
    W. Kabsch, "A solution for the best rotation to relate two sets of vectors", Acta Cryst. A32, 1976.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Poses:
    """One pose a run.

    Attributes:
        rotation: ``[runs, 3, 3]``.
        shift: ``[runs, 3]``.
        covariance: of rotation vector and shift, in this order, ``[runs, 6, 6]``; nothing where none was worked out.
    """

    rotation: Array
    shift: Array
    covariance: Array | None = None


def cross_matrix(vectors: Array) -> Array:
    """``[v x]``: its product with a vector is the cross product.

    Args:
        vectors: ``[..., 3]``.

    Returns:
        ``[..., 3, 3]``.
    """
    x, y, z = np.moveaxis(vectors, -1, 0)
    zero = np.zeros_like(x)
    rows = [np.stack(row, -1) for row in ((zero, -z, y), (z, zero, -x), (-y, x, zero))]
    return np.stack(rows, -2)


def rotation_of(vectors: Array) -> Array:
    """``exp([v x])``, by Rodrigues' formula; ``[..., 3]`` to ``[..., 3, 3]``."""
    angle = np.linalg.norm(vectors, axis=-1)[..., None, None]
    small = angle < 1e-8
    safe = np.where(small, 1.0, angle)
    first = np.where(small, 1.0, np.sin(safe) / safe)
    second = np.where(small, 0.5, 2 * (np.sin(safe / 2) / safe) ** 2)  # 1 - cos loses all digits of small angles
    matrix = cross_matrix(vectors)
    return np.eye(3) + first * matrix + second * matrix @ matrix


def vector_of(rotations: Array) -> Array:
    """The inverse of ``rotation_of``, for angles below half a turn; ``[..., 3, 3]`` to ``[..., 3]``."""
    twice_sine = np.stack(
        [
            rotations[..., 2, 1] - rotations[..., 1, 2],
            rotations[..., 0, 2] - rotations[..., 2, 0],
            rotations[..., 1, 0] - rotations[..., 0, 1],
        ],
        -1,
    )
    sine = np.linalg.norm(twice_sine, axis=-1, keepdims=True) / 2
    cosine = (np.trace(rotations, axis1=-2, axis2=-1)[..., None] - 1) / 2
    angle = np.arctan2(sine, cosine)
    return np.where(sine < 1e-12, 0.5, angle / np.where(sine < 1e-12, 1.0, 2 * sine)) * twice_sine


def procrustes(after: Array, before: Array) -> Poses:
    """The rotation and shift with the least sum of plain squares; where estimates begin.

    Args:
        after: landmarks after the motion, ``[runs, landmarks, 3]``.
        before: the same landmarks before it.
    """
    middle_after, middle_before = after.mean(1), before.mean(1)
    product = np.einsum("nki,nkj->nij", after - middle_after[:, None], before - middle_before[:, None])
    left, _, right = np.linalg.svd(product)
    left[..., 2] *= np.sign(np.linalg.det(left @ right))[:, None]  # no mirror image
    rotation = left @ right
    return Poses(rotation, middle_after - np.einsum("nij,nj->ni", rotation, middle_before))


def left_over(after: Array, before: Array, pose: Poses) -> Array:
    """``e``, ``[runs, landmarks, 3]``."""
    return after - np.einsum("nij,nkj->nki", pose.rotation, before) - pose.shift[:, None]


def covariance_of_left_over(covariance: Array, rotation: Array) -> Array:
    """``S``, ``[runs, landmarks, 3, 3]``, from ``[landmarks, 6, 6]`` of ``(v_b, v_r)`` and ``[runs, 3, 3]``."""
    turn = rotation[:, None]
    of_after, mixed, of_before = covariance[:, :3, :3], covariance[:, :3, 3:], covariance[:, 3:, 3:]
    crossing = mixed @ np.swapaxes(turn, -1, -2)
    return of_after - crossing - np.swapaxes(crossing, -1, -2) + turn @ of_before @ np.swapaxes(turn, -1, -2)


def slopes(before: Array, pose: Poses) -> Array:
    """``H = [[A r x], I]``: minus the derivative of ``e``, ``[runs, landmarks, 3, 6]``."""
    turned = np.einsum("nij,nkj->nki", pose.rotation, before)
    return np.concatenate([cross_matrix(turned), np.broadcast_to(np.eye(3), (*turned.shape, 3))], -1)


def total_least_squares(after: Array, before: Array, covariance: Array, *, steps: int = 6) -> Poses:
    """The pose with the least weighted sum, by Gauss-Newton steps from Procrustes' solution.

    Args:
        after: landmarks after the motion, ``[runs, landmarks, 3]``; at least three that are not on one line.
        before: the same landmarks before it.
        covariance: of a landmark's errors after and before, ``[landmarks, 6, 6]``.
        steps: of Gauss and Newton.

    Returns:
        Poses, and the covariance of each: the inverse of ``sum H' S^-1 H``.

    Raises:
        ValueError: shapes do not fit together, or there are fewer than three landmarks.
    """
    landmarks = after.shape[1]
    if after.shape != before.shape or after.shape[2:] != (3,) or covariance.shape != (landmarks, 6, 6):
        raise ValueError(
            f"landmarks after {after.shape}, before {before.shape}, covariances {covariance.shape}; expected "
            "[runs, n, 3] twice and [n, 6, 6]"
        )
    if landmarks < 3:
        raise ValueError(f"{landmarks} landmark(s) do not fix a pose; measure three or more that are not on one line")
    pose = procrustes(after, before)
    for _ in range(steps):
        information, right = normal_equations(after, before, covariance, pose)
        step = np.linalg.solve(information, right[..., None])[..., 0]
        pose = Poses(rotation_of(-step[:, :3]) @ pose.rotation, pose.shift + step[:, 3:])
    information, _ = normal_equations(after, before, covariance, pose)
    return Poses(pose.rotation, pose.shift, np.linalg.inv(information))


def normal_equations(after: Array, before: Array, covariance: Array, pose: Poses) -> tuple[Array, Array]:
    """``sum H' S^-1 H``, ``[runs, 6, 6]``, and ``sum H' S^-1 e``, ``[runs, 6]``."""
    slope = slopes(before, pose)
    weighted = np.linalg.solve(covariance_of_left_over(covariance, pose.rotation), slope)
    information = np.einsum("nkia,nkib->nab", slope, weighted)
    return information, np.einsum("nkia,nki->na", weighted, left_over(after, before, pose))


def bound(before: Array, covariance: Array, rotation: Array) -> Array:
    """The Cramer-Rao bound: no unbiased estimate has a smaller covariance, ``[6, 6]``; for small errors.

    Args:
        before: true landmarks, ``[landmarks, 3]``.
        covariance: of their errors, ``[landmarks, 6, 6]``.
        rotation: the true one, ``[3, 3]``.
    """
    truth = Poses(rotation[None], np.zeros((1, 3)))
    information, _ = normal_equations(before[None], before[None], covariance, truth)
    return np.linalg.inv(information[0])


def errors(estimated: Poses, rotation: Array, shift: Array) -> Array:
    """Rotation vector and shift by which estimates are off, ``[runs, 6]``."""
    turned = vector_of(estimated.rotation @ rotation.T)
    return np.concatenate([-turned, estimated.shift - shift], 1)
