"""The columns of an MPI in ``benchmarks/loopback.py``: told by a Python that has one, refused where there is none."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

import loopback
import mpi


def python_that_says(folder: Path, said: str) -> str:
    """A program in place of an interpreter."""
    made = folder / "python"
    made.write_text(f"#!{sys.executable}\nprint({said!r})\n")
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return str(made)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@host", ("openmpi", "5.0.11")),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri", ("mpich", "5.0.2")),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS", ("impi", "2021.18.1")),
    ],
)
def test_an_mpi_is_known_by_what_it_says(tmp_path: Path, said: str, expected: tuple[str, str]) -> None:
    assert mpi.named(python_that_says(tmp_path, said)) == expected


def test_a_python_without_mpi_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--mpi .*python: no Open MPI, MPICH or Intel MPI there: Spam"):
        mpi.named(python_that_says(tmp_path, "Spam"))


def test_ours_stands_beside_the_best_of_the_others() -> None:
    """Neither the empty backend nor another variant of mycel counts as one of the others."""
    rows = {
        "empty": {"median_s": 0.1, "min_s": 0.1},
        "memory:tree": {"median_s": 2.0, "min_s": 1.0},
        "unix/65536": {"median_s": 0.5, "min_s": 0.5},
        "gloo": {"median_s": 8.0, "min_s": 6.0},
        "mpich-5": {"median_s": 4.0, "min_s": 4.0},
    }
    assert loopback.ratio_to_best(rows) == "; memory:tree to the best: 0.50 (min 0.25)"
    assert loopback.ratio_to_best({"memory": rows["empty"]}) == ""
