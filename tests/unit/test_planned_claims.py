"""Tables of measured plans are made from the recorded lines, and the lines say what the pages say of them."""

from __future__ import annotations

import importlib

import pytest

import paced
import record

SCRIPTS = ("planned", "holmes", "yuan", "coconet_plans", "oneflow_layouts")


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_are_those_recorded(name: str) -> None:
    script = importlib.import_module(name)
    lines = record.read(script.OUTPUT)
    page = script.PAGE.read_text(encoding="utf-8")
    assert lines and record.with_section(page, name, script.table(lines)) == page


def test_counted_bytes_of_layouts_are_those_of_the_formula() -> None:
    lines = record.read(importlib.import_module("oneflow_layouts").OUTPUT)
    direct = [line for line in lines if line["case"] != "S0 to S1" or line["how"] == "all_to_all"]
    assert len(direct) >= 21 and all(line["counted"] == line["predicted"] for line in direct)
    assert all(line["off"] < 1e-5 for line in lines)


def test_plans_that_were_found_beat_uniform_ones() -> None:
    lines = record.read(importlib.import_module("planned").OUTPUT)
    for part, least in (("odd", 1.25), ("head", 1.15), ("llama", 1.0), ("qwen3_moe", 1.0)):
        uniform, found = [line for line in lines if line["part"] == part]
        assert paced.ratio(uniform["seconds"], found["seconds"]) >= least, part
        assert max(uniform["loss_off"], found["loss_off"]) <= 1e-5, part
        assert len(found["seconds"]) >= 9


def test_shares_send_half_of_the_bytes_and_are_faster() -> None:
    for name in ("planned", "coconet_plans"):
        lines = record.read(importlib.import_module(name).OUTPUT)
        whole, shares = [line for line in lines if line.get("part") == "scatter" or "boundaries" in line["case"]]
        assert 0.47 < shares["crossed"] / whole["crossed"] < 0.55, name  # headers are on top of halves
        assert paced.ratio(whole["seconds"], shares["seconds"]) > 1, name
