"""The tables of claims about experts, and those of adaptive parallelism, are made from the recorded lines."""

from __future__ import annotations

import importlib

import pytest

import moe_flex
import record


@pytest.mark.parametrize("name", ["tutel", "smile", "ppmoe", "ted", "eps_moe", "se_moe"])
def test_claims_are_those_recorded(name: str) -> None:
    claim = importlib.import_module(name)
    lines = record.read(claim.OUTPUT)
    page = claim.PAGE.read_text(encoding="utf-8")
    assert lines and record.with_section(page, name, claim.table(lines)) == page


def test_plans_are_those_recorded() -> None:
    rows = moe_flex.latest(record.read(moe_flex.RECORDED / "moe_flex.jsonl"))
    page = moe_flex.PAGE.read_text(encoding="utf-8")
    assert record.with_section(page, "moe_flex", moe_flex.tables(rows)) == page
    counted = [row for row in rows if row["question"] == "bytes"]
    sent = {(row["tokens"], row["top_k"], row["algorithm"]): row["metered"] for row in counted}
    assert all(sent[*load, "hierarchical"] < sent[*load, "all_to_all"] for load in moe_flex.LOADS)
