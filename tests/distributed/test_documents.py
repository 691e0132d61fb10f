"""The Python in documents runs: pages on ranks, and those that start clusters of their own by themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.checks.documents import BEFORE, ELSEWHERE, EMULATED, RANKS, blocks, run_blocks

RunRanks = Callable[..., list[Any]]
ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(f.relative_to(ROOT)) for f in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
WITH_PYTHON = [page for page in PAGES if blocks(page)]


def test_nothing_is_prepared_for_pages_without_python() -> None:
    assert {*BEFORE, *RANKS, *EMULATED} <= set(WITH_PYTHON)
    for page, test in ELSEWHERE.items():
        assert page in WITH_PYTHON and (ROOT / test).is_file()


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page not in (*EMULATED, *ELSEWHERE)])
def test_python_in_documents_runs(run_ranks: RunRanks, page: str, tmp_path: Path) -> None:
    if "transformers" in "".join(text for _, text in blocks(page)) or page == "README.md":
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    ran = run_ranks(RANKS.get(page, 2), "documents", "run_page", page, str(tmp_path), backend=None, strict=True)
    assert set(ran) == {len(blocks(page))}


@pytest.mark.namespaces
@pytest.mark.parametrize("page", EMULATED)
def test_python_that_starts_clusters_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text("print('a step', flush=True)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # Pages say "python", as in an environment that is active; where tests run it need not be.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert run_blocks(page, {"__name__": "page"}) == len(blocks(page))
