"""The documentation's site, for tests that look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder: what ``make docs`` made, where that is newer than all it is made of; else it is made here."""
    built = ROOT / "build" / "site"
    sources = [ROOT / "mkdocs.yml", *ROOT.glob("docs/**/*.*"), *ROOT.glob("src/mycel/**/*.py")]
    index = built / "index.html"
    if index.exists() and index.stat().st_mtime > max(file.stat().st_mtime for file in sources):
        return built
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("no site: build/site is not there or is old, and mkdocs is not installed (make docs)")
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(made)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return made
