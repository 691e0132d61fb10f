"""What every rank runs for ``test_federated.py``: the example, small."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "federated"


def compare(rank: int, size: int) -> dict[str, Any]:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    find_anomalies = importlib.import_module("find_anomalies")
    found: dict[str, Any] = find_anomalies.compare("breast_cancer", 0, rounds=2, epochs=10)
    assert find_anomalies.table([found]).splitlines()[-1].startswith("| breast_cancer | 0.9")
    return found
