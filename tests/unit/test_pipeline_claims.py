"""The tables of claims about pipelines are made from the recorded lines."""

from __future__ import annotations

import importlib
from statistics import median

import pytest

import paced
import record
import simulated_orders


@pytest.mark.parametrize("name", ["megatron", "tessel", "pathways", "skippipe", "oneflow", "simulated_orders"])
def test_tables_are_those_recorded(name: str) -> None:
    claim = importlib.import_module(name)
    lines = record.read(claim.OUTPUT)
    page = claim.PAGE.read_text(encoding="utf-8")
    assert lines and record.with_section(page, name, claim.table(lines)) == page


def test_searched_orders_beat_their_baselines() -> None:
    lines = record.read(importlib.import_module("tessel").OUTPUT)
    for name, least in (("slow links, 16", 1.25), ("M, 8", 1.15), ("M, 16", 1.2), ("memory for 3, 16", 1.25)):
        *others, searched = [line for line in lines if line["case"] == name]
        assert others and all(paced.ratio(line["seconds"], searched["seconds"]) >= least for line in others), name
        assert all(line["losses"] == searched["losses"] for line in others)


def test_the_simulator_is_near() -> None:
    lines = simulated_orders.everything()
    errors = [abs(line["simulated_s"] / median(line["seconds"]) - 1) for line in lines]
    right, total = simulated_orders.in_sequence(lines)
    assert len(lines) >= 40 and median(errors) < 0.08 and right >= 0.9 * total
