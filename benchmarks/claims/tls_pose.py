"""Whether poses by total least squares meet the Cramer-Rao bound, and what the unweighted estimate loses.

    python benchmarks/claims/tls_pose.py            # three scenes of 10,000 runs; about a minute
    python benchmarks/claims/tls_pose.py --quick    # one scene, 1,000 runs; records nothing

A scene has twelve landmarks whose errors before and after the motion are correlated and unlike in every direction
(examples/pose). A row is a scene: standard deviations over the bound, the six components' least and largest, and the
mean normalised error with its band. That ranks divide the runs without a trace is a test
(tests/distributed/test_annex_examples.py). Lines replace those in ``benchmarks/recorded/claims/tls_pose.jsonl``, and
the table in docs/concepts/annex.md.

References:
    S. Maleki, J. Crassidis, Y. Cheng, M. Schmid, "Total Least Squares for Optimal Pose Estimation", AIAA
    SciTech 2022.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "pose"))

import least_squares
import monte_carlo
import numpy as np

from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "tls_pose.jsonl"
PAGE = ROOT / "docs" / "concepts" / "annex.md"
#: A deviation may be this far from the bound.
WITHIN = 0.03


def line(seed: int, runs: int) -> dict[str, Any]:
    """One scene."""
    scene = monte_carlo.make_scene(seed)
    found = monte_carlo.estimate(scene, seed, runs)
    least = np.sqrt(np.diag(least_squares.bound(scene.landmarks, scene.covariance, scene.rotation)))
    weighted, unweighted = (found.deviations() / least).tolist()
    low, high = monte_carlo.band(runs)
    return {
        "seed": seed,
        "runs": runs,
        "weighted": weighted,
        "unweighted": unweighted,
        "normalised": found.normalised / runs,
        "band": [low, high],
    }


def table(lines: list[dict[str, Any]]) -> str:
    """A row a scene."""
    rows = []
    for found in lines:
        low, high = found["band"]
        weighted, unweighted = found["weighted"], found["unweighted"]
        inside = "inside" if low <= found["normalised"] <= high else "outside"
        meets = "yes" if max(abs(ratio - 1) for ratio in weighted) <= WITHIN else "no"
        rows.append(
            (
                found["seed"],
                found["runs"],
                f"{min(weighted):.3f} to {max(weighted):.3f}",
                meets,
                f"{min(unweighted):.2f} to {max(unweighted):.2f}",
                f"{found['normalised']:.3f}, {inside} {low:.3f} to {high:.3f}",
            )
        )
    within = f"all within {WITHIN:.0%}"
    return markdown(("scene", "runs", "over the bound", within, "Procrustes", "mean normalised error"), rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one scene; records nothing")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=10_000)
    options = parser.parse_args()
    if options.quick:
        print(table([line(0, 1000)]))
        return
    conclude(OUTPUT, PAGE, "tls_pose", [line(seed, options.runs) for seed in range(options.seeds)], table)


if __name__ == "__main__":
    main()
