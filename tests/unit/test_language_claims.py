"""What was measured of written collectives: the tables of the guide are those of the recorded lines."""

from __future__ import annotations

from statistics import median

import language as claims
import pytest

from record import read

LINES = read(claims.OUTPUT)


def test_the_tables_of_the_guide_are_those_of_their_lines() -> None:
    page = claims.PAGE.read_text(encoding="utf-8")
    inside = page.partition("<!-- language:begin -->\n")[2].partition("<!-- language:end -->")[0]
    assert inside == claims.tables(LINES), "run: python benchmarks/claims/language.py"


def test_mistakes_are_refused_by_line_or_right() -> None:
    mutated = [line for line in LINES if "mutants" in line]
    assert sum(line["refused"] + line["accepted"] for line in mutated) >= 3000
    assert not any(line["misjudged"] for line in mutated)


@pytest.mark.skipif(
    not any("order" in line for line in LINES), reason="not recorded: claims/language.py --only order"
)
def test_the_simulated_order_is_the_measured_one() -> None:
    ordered = [line for line in LINES if "order" in line]
    simulated = sorted(ordered, key=lambda line: float(line["simulated_s"]))
    assert simulated == sorted(ordered, key=lambda line: float(median(line["times_s"])))
    assert not any(line["wrong"] for line in ordered)
