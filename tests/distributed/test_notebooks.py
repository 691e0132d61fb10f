"""Notebooks run from the first cell to the last, in one interpreter, and are kept without their output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
#: Cells that start clusters say so in their tags.
NEEDS_CLUSTERS = "namespaces"
cases = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[notebook.stem for notebook in NOTEBOOKS])


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Its cells of code."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def run(notebook: Path, folder: Path, *, with_clusters: bool) -> str:
    """What its cells print; those that start clusters only where they are to run, and then all that follow."""
    wanted = [c for c in cells(notebook) if with_clusters or NEEDS_CLUSTERS not in c["metadata"].get("tags", ())]
    assert wanted
    program = folder / "cells.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in wanted), encoding="utf-8")
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("MYCEL_") and k not in ("RANK", "WORLD_SIZE")
    }
    done = subprocess.run(
        [sys.executable, program.name], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@cases
def test_it_is_kept_without_output(notebook: Path) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(notebook))


@cases
def test_planning_runs_anywhere(notebook: Path, tmp_path: Path) -> None:
    assert run(notebook, tmp_path, with_clusters=False)


@pytest.mark.namespaces
@cases
def test_it_runs_to_its_end(notebook: Path, tmp_path: Path) -> None:
    said = run(notebook, tmp_path, with_clusters=True)
    assert "gloo: " in said and "mycel: " in said and "times as fast" in said
