"""A share of ``benchmarks/mutants.py``: one thing changed in what every method makes, and in files of others.

The verifier and a judge that shares nothing with it must agree about every mutant, both ways.
"""

from __future__ import annotations

import random
from xml.etree import ElementTree as ET

import pytest
from tests.effort import long
from tests.unit.test_msccl_import import RIGHT

import judge
import mutants
from mycel.collectives.imports.msccl_xml import parse
from mycel.collectives.synth import SYNTHESIZERS
from mycel.collectives.synth.classics import CLASSICS
from mycel.collectives.verify.blocks import verify_blocks
from mycel.errors import ScheduleError


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=long)])
def test_verifier_and_judge_agree_about_mutants_of_every_method(share: int) -> None:
    """Of every so many subjects, and of the first ones of each method at each level."""
    rows: list[mutants.Row] = []
    for number, subject in enumerate(mutants.subjects()):
        met = {row[:2] for row in rows}
        if number % share == 0 or subject[2:] not in met:
            rows += mutants.run_subject(subject, 3, seed=20)
    outcomes = {row[3] for row in rows}
    assert outcomes == {"rejected", "malformed", "equivalent"}
    assert {row[0] for row in rows} == SYNTHESIZERS.keys() | CLASSICS.keys()
    assert {row[1] for row in rows} == {"schedule", "program", "xml"}


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "all_to_all"])
def test_verifier_and_judge_agree_about_mutants_of_files_of_others(name: str) -> None:
    algo = ET.fromstring(RIGHT[name])
    algo.attrib.setdefault("outofplace", str(1 - int(algo.attrib["inplace"])))
    assert judge.judge_xml(algo) is None
    chance = random.Random(name)
    seen: set[bool] = set()
    for _ in range(250):
        kind = chance.choice(mutants.XML_KINDS)
        mutant = mutants.xml_mutant(algo, kind, chance)
        if mutant is None:
            continue
        defect = judge.judge_xml(mutant)
        seen.add(defect is None)
        text = ET.tostring(mutant, encoding="unicode")
        try:
            verify_blocks(parse(text))
        except ScheduleError as error:
            assert defect is not None, f"{kind}: refused though right: {error}"
        else:
            assert defect is None, f"{kind}: accepted, but {defect}: {text}"
    assert seen == {True, False}
