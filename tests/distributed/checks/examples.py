"""What every rank runs for ``test_examples.py``: one of ``examples/training``, inside the process group at hand."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "training"


def losses(rank: int, size: int, name: str, *arguments: str) -> list[float]:
    """The losses that an example returns."""
    sys.path.insert(0, str(FOLDER))
    # What a launcher sets, for libraries that ask the environment and not torch.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    common = importlib.import_module("common")
    seen: list[float] = importlib.import_module(name).train(common.parse_arguments(None, arguments))
    return seen
