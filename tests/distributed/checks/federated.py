"""What every rank runs for ``test_federated.py``: the example, small."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "federated"


def compare(rank: int, size: int) -> dict[str, Any]:
    sys.path.insert(0, str(FOLDER))
    run = importlib.import_module("run")
    found: dict[str, Any] = run.compare("breast_cancer", 0, rounds=2, epochs=10)
    assert run.table([found]).splitlines()[-1].startswith("| breast_cancer | 0.9")
    return found
