"""examples/pose: signs, the bound, and sums over runs that do not depend on who takes which run."""

from __future__ import annotations

import least_squares
import monte_carlo
import numpy as np
import pytest
from least_squares import Poses


def test_rotations_and_their_vectors_are_each_others_inverse() -> None:
    random = np.random.default_rng(0)
    vectors = np.concatenate([random.normal(size=(50, 3)), 1e-10 * random.normal(size=(5, 3)), np.zeros((1, 3))])
    turned = least_squares.rotation_of(vectors)
    assert np.allclose(turned @ np.swapaxes(turned, 1, 2), np.eye(3), atol=1e-12)
    assert np.allclose(np.linalg.det(turned), 1.0)
    assert np.allclose(least_squares.vector_of(turned), vectors, rtol=1e-9, atol=1e-15)


def test_slopes_are_those_of_finite_differences() -> None:
    """The signs of ``[A r] x`` and of the update belong together."""
    random = np.random.default_rng(1)
    before, after = random.normal(size=(2, 1, 4, 3))
    pose = Poses(least_squares.rotation_of(random.normal(size=(1, 3))), random.normal(size=(1, 3)))
    slope, step = least_squares.slopes(before, pose), 1e-6
    for component in range(6):
        change = np.zeros((1, 6))
        change[0, component] = step
        ends = []
        for way in (1, -1):
            rotation = least_squares.rotation_of(-way * change[:, :3]) @ pose.rotation
            moved = Poses(rotation, pose.shift + way * change[:, 3:])
            ends.append(least_squares.left_over(after, before, moved))
        assert np.allclose((ends[0] - ends[1]) / (2 * step), -slope[..., component], atol=1e-8)


def test_errors_have_the_sign_of_the_update() -> None:
    random = np.random.default_rng(2)
    rotation, shift = least_squares.rotation_of(random.normal(size=3)), random.normal(size=3)
    off = 0.01 * random.normal(size=(1, 6))
    moved = Poses(least_squares.rotation_of(-off[:, :3]) @ rotation, shift + off[:, 3:])
    assert np.allclose(least_squares.errors(moved, rotation, shift), off, atol=1e-12)


def test_without_errors_the_pose_is_found_exactly_and_mirror_images_are_not() -> None:
    scene = monte_carlo.make_scene(3, landmarks=4)
    before = scene.landmarks[None]
    after = before @ scene.rotation.T + scene.shift
    found = least_squares.total_least_squares(after, before, scene.covariance)
    assert np.abs(least_squares.errors(found, scene.rotation, scene.shift)).max() < 1e-12
    mirrored = least_squares.procrustes(-after, before)
    assert np.linalg.det(mirrored.rotation[0]) == pytest.approx(1.0)


def test_a_worse_pose_has_a_larger_weighted_sum() -> None:
    scene = monte_carlo.make_scene(4)
    after, before = monte_carlo.draw(scene, 4, range(3))
    found = least_squares.total_least_squares(after, before, scene.covariance)

    def weighted(pose: Poses) -> np.ndarray:
        off = least_squares.left_over(after, before, pose)
        spread = least_squares.covariance_of_left_over(scene.covariance, pose.rotation)
        return np.einsum("nki,nki->n", off, np.linalg.solve(spread, off[..., None])[..., 0])

    least = weighted(found)
    for component in range(6):
        for way in (1e-2, -1e-2):
            change = np.zeros((3, 6))
            change[:, component] = way
            moved = Poses(least_squares.rotation_of(-change[:, :3]) @ found.rotation, found.shift + change[:, 3:])
            assert (weighted(moved) > least).all()


def test_estimates_meet_the_bound_and_unweighted_ones_do_not() -> None:
    scene = monte_carlo.make_scene(0)
    found = monte_carlo.estimate(scene, 0, 1500)
    least = np.sqrt(np.diag(least_squares.bound(scene.landmarks, scene.covariance, scene.rotation)))
    weighted, unweighted = found.deviations() / least
    assert np.abs(weighted - 1).max() < 4 / np.sqrt(2 * 1500)  # four of a deviation's own deviations
    assert unweighted.min() > 1.15
    low, high = monte_carlo.band(1500)
    assert low <= found.normalised / 1500 <= high


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_moments_of_parts_add_up_to_those_of_the_whole(parts: int) -> None:
    scene = monte_carlo.make_scene(5)
    whole = monte_carlo.moments(scene, 5, range(101))
    summed = monte_carlo.moments(scene, 5, [])
    for part in range(parts):
        summed += monte_carlo.moments(scene, 5, range(part, 101, parts))
    assert summed.count == whole.count == 101
    assert np.allclose(summed.total, whole.total, rtol=1e-12, atol=1e-15)
    assert np.allclose(summed.products, whole.products, rtol=1e-12, atol=1e-18)
    assert summed.normalised == pytest.approx(whole.normalised, rel=1e-12)


def test_bad_landmarks_are_refused() -> None:
    two = np.zeros((1, 2, 3))
    with pytest.raises(ValueError, match=r"2 landmark\(s\) do not fix a pose"):
        least_squares.total_least_squares(two, two, np.zeros((2, 6, 6)))
    with pytest.raises(ValueError, match=r"covariances \(2, 3, 3\); expected"):
        least_squares.total_least_squares(two, two, np.zeros((2, 3, 3)))


def test_a_table_says_when_the_band_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    monte_carlo.main(["--runs", "60"])
    printed = capsys.readouterr().out
    assert printed.count("\n") == 10 and "60 runs" in printed
    scene = monte_carlo.make_scene(0)
    found = monte_carlo.moments(scene, 0, range(60))
    wrong = monte_carlo.Moments(found.count, found.total, found.products, 2 * found.normalised)
    assert "outside its 95 % band" in monte_carlo.table(scene, wrong)
