"""Tables of measured plans are made from the recorded lines, and the lines say what the pages say of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import paced
import record

SCRIPTS = ("planned", "holmes", "yuan", "coconet_plans", "oneflow_layouts")


def recorded(name: str) -> list[dict[str, Any]]:
    """Lines of a script; tests of what nobody has measured yet are skipped, with the command that measures."""
    script = importlib.import_module(name)
    lines = record.read(script.OUTPUT)
    if not lines:
        pytest.skip(f"not recorded: run {Path(script.__file__).relative_to(record.ROOT)}")
    return lines


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_are_those_recorded(name: str) -> None:
    script, lines = importlib.import_module(name), recorded(name)
    page = script.PAGE.read_text(encoding="utf-8")
    assert record.with_section(page, name, script.table(lines)) == page


def test_counted_bytes_of_layouts_are_those_of_the_formula() -> None:
    lines = recorded("oneflow_layouts")
    direct = [line for line in lines if line["case"] != "S0 to S1" or line["how"] == "all_to_all"]
    assert len(direct) >= 21 and all(line["counted"] == line["predicted"] for line in direct)
    assert all(line["off"] < 1e-5 for line in lines)


@pytest.mark.parametrize(("part", "least"), [("odd", 1.25), ("head", 1.15), ("llama", 1.0), ("qwen3_moe", 1.0)])
def test_plans_that_were_found_beat_uniform_ones(part: str, least: float) -> None:
    lines = [line for line in recorded("planned") if line["part"] == part]
    if not lines:
        pytest.skip(f"not recorded: run benchmarks/planned.py, the part of {part}")
    uniform, found = lines
    assert paced.ratio(uniform["seconds"], found["seconds"]) >= least
    assert max(uniform["loss_off"], found["loss_off"]) <= 1e-5
    assert len(found["seconds"]) >= 9


@pytest.mark.parametrize("name", ["planned", "coconet_plans"])
def test_shares_send_half_of_the_bytes_and_are_faster(name: str) -> None:
    lines = [line for line in recorded(name) if line.get("part") == "scatter" or "boundaries" in line["case"]]
    if not lines:
        pytest.skip(f"not recorded: run benchmarks/{name}.py, the part of boundaries")
    whole, shares = lines
    assert 0.47 < shares["crossed"] / whole["crossed"] < 0.55  # headers are on top of halves
    assert paced.ratio(whole["seconds"], shares["seconds"]) > 1
