"""Machine code on disk must go when anything that went into it changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.effort import long

INNER = "from mycel.compiled import compiled\n\n@compiled\ndef inner(x):\n    return x + {}\n"
OUTER = """
from mycel.compiled import {decorator}
from inner_module import inner

@{decorator}
def outer(x):
    return inner(x) * 10

if __name__ == "__main__":
    print(outer(1), sum(outer.stats.cache_hits.values()))
"""


def run(folder: Path) -> str:
    done = subprocess.run([sys.executable, str(folder / "outer.py")], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("decorator", [pytest.param("compiled", marks=long), "compiled_without_lock"])
def test_a_change_in_a_called_module_is_seen(tmp_path: Path, decorator: str) -> None:
    (tmp_path / "outer.py").write_text(OUTER.format(decorator=decorator), encoding="utf-8")
    (tmp_path / "inner_module.py").write_text(INNER.format(1), encoding="utf-8")
    assert run(tmp_path) == "20 0"
    assert run(tmp_path) == "20 1", "unchanged code comes from the disk"
    (tmp_path / "inner_module.py").write_text(INNER.format(2), encoding="utf-8")
    assert run(tmp_path) == "30 0"
