"""A share of ``benchmarks/mutants.py``: one thing changed in what every method makes, and in files of others.

The verifier and a judge that shares nothing with it must agree about every mutant, both ways.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from mycel.collectives.imports.msccl_xml import parse
from mycel.collectives.synth import SYNTHESIZERS
from mycel.collectives.synth.classics import CLASSICS
from mycel.collectives.verify.blocks import verify_blocks
from mycel.errors import ScheduleError

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


mutants = load(ROOT / "benchmarks" / "mutants.py")
examples = load(ROOT / "tests" / "unit" / "test_msccl_import.py").RIGHT


def test_verifier_and_judge_agree_about_mutants_of_every_method() -> None:
    rows = mutants.run(800, seed=20, processes=1)
    outcomes = {row[3] for row in rows}
    assert outcomes == {"rejected", "malformed", "equivalent"}
    assert {row[0] for row in rows} == SYNTHESIZERS.keys() | CLASSICS.keys()
    assert {row[1] for row in rows} == {"schedule", "program", "xml"}


@pytest.mark.parametrize("name", [name for name in examples if name != "all_to_all"])
def test_verifier_and_judge_agree_about_mutants_of_files_of_others(name: str) -> None:
    algo = ET.fromstring(examples[name])
    algo.attrib.setdefault("outofplace", str(1 - int(algo.attrib["inplace"])))
    judge = sys.modules["judge"]
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
