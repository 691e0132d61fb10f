"""The public face: names are where the page of promises says, light to import, and short to look at.

``python tests/unit/test_face.py`` rewrites the generated lists of ``docs/reference/promised.md``.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType, UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import mycel
import mycel.errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "promised.md"
FACES = (
    "mycel",
    "mycel.runtime",
    "mycel.moe",
    "mycel.data_parallel",
    "mycel.probe",
    "mycel.bench",
    "mycel.emulate",
    "mycel.elastic",
    "mycel.pipeline",
    "mycel.parallel",
)
#: What values that are no classes, functions or modules are.
CONSTANTS = {
    "__version__": "The version, as text.",
    "COMPRESSORS": "Compressors by name.",
    "BENCH_COLLECTIVES": "Collectives that can be measured.",
    "Times": "Type of what actions take: seconds by kind (``F``) or stage and kind (``3F``), or a function.",
}
#: Parameters that users do not give: a thread of a combiner's own, and those of a class without an ``__init__``.
UNDESCRIBED = {"_thread", "args", "kwargs"}


# -- names ------------------------------------------------------------------------------------------------------


def names_table(face: str) -> str:
    """Markdown list of the names of a package, from the code."""
    package = import_module(face)
    rows = ["| name | what it is |", "|---|---|"]
    for name in package.__all__:
        value = getattr(package, name)
        described = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
        text = (inspect.getdoc(value) or "").split("\n\n")[0] if described else CONSTANTS[name]
        text = re.sub(r"``(.*?)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")
        assert text, f"{face}.{name} has no docstring"
        rows.append(f"| `{name}` | {text.removesuffix('::')} |")
    return "\n".join(rows)


def with_generated_lists(text: str) -> str:
    """The page with all lists up to date."""
    for face in FACES:
        marked = re.compile(rf"(<!-- names:{re.escape(face)} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert marked.search(text), f"{PAGE.name} has no place for the names of {face}"
        table = names_table(face)
        text = marked.sub(lambda m, table=table: m.group(1) + table + "\n" + m.group(2), text)
    return text


def test_the_page_of_promises_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_generated_lists(page), "run: python tests/unit/test_face.py"


@pytest.mark.parametrize("face", FACES)
def test_every_name_is_there(face: str) -> None:
    package = import_module(face)
    assert len(set(package.__all__)) == len(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is getattr(package, name)


def test_the_errors_are_at_the_top() -> None:
    assert set(mycel.errors.__all__) <= set(mycel.__all__)


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'mycel' has no attribute 'sythesize'"):
        getattr(mycel, "sythesize")  # noqa: B009  # the type checker would know


def imported_by(code: str) -> set[str]:
    """Modules that a process has imported after running some code."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("code", "not_yet"),
    [
        ("import mycel", {"numpy", "scipy", "numba", "torch", "typer", "yaml"}),
        ("from mycel.cli import build_app; build_app()", {"numpy", "rich", "mycel.topology.model"}),
        (
            "from mycel.cli import build_app\n"
            "build_app()('bound star:ranks=4 -c all_gather'.split(), standalone_mode=False)",
            {"numba", "torch", "ortools", "mycel.collectives.synth"},
        ),
        ("import mycel; mycel.bound(mycel.load_topology('two_boxes:ranks=8'), 'all_gather')", {"numba", "scipy"}),
        ("import mycel; mycel.probe", {"torch", "numba", "scipy.optimize"}),
    ],
)
def test_light_things_import_little(code: str, not_yet: set[str]) -> None:
    assert not imported_by(code) & not_yet


def test_the_version_is_written_once() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^dynamic = \["version"\]$', project, re.MULTILINE)
    assert not re.search(r"^version =", project, re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", mycel.__version__)


# -- the reference ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", [*FACES, "mycel.errors"])
def test_every_face_has_a_page_of_the_reference(face: str) -> None:
    """It has an entry for each name of ``__all__``; ``tests/pages`` looks for them in the site that is built."""
    page = f"reference/api/{face.rpartition('.')[2]}.md"
    assert f"<!-- exports of {face} -->" in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    assert f"]({page})" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


# -- what docstrings say ----------------------------------------------------------------------------------------


def explained() -> list[tuple[str, str]]:
    """Names at the faces that are classes or functions, but for exceptions, which are raised and not called."""
    found = []
    for face in FACES:
        for name in import_module(face).__all__:
            value = getattr(import_module(face), name)
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            if not is_error and (inspect.isclass(value) or inspect.isroutine(value)):
                found.append((face, name))
    return found


@pytest.mark.parametrize(("face", "name"), explained())
def test_docstrings_show_and_describe(face: str, name: str) -> None:
    value = getattr(import_module(face), name)
    text = inspect.getdoc(value) or ""
    assert re.search(r"^ *>>> |::$", text, re.MULTILINE), "no example: neither a session nor a block after '::'"
    if inspect.isclass(value):
        is_made = Protocol not in value.__bases__ and bool(inspect.signature(value).parameters.keys() - UNDESCRIBED)
        assert not is_made or re.search(r"^(Args|Attributes):$", text, re.MULTILINE), "neither Args nor Attributes"
        return
    for parameter in inspect.signature(value).parameters:
        assert re.search(rf"^    (\w+, )*{parameter}(, \w+)*:", text, re.MULTILINE), f"no word about {parameter}"


# -- collectives by name ----------------------------------------------------------------------------------------


def test_a_name_is_a_collective() -> None:
    fabric = mycel.load_topology("ring:ranks=4")
    assert mycel.bound(fabric, "all_gather") == mycel.bound(fabric, mycel.Collective("all_gather", 4))
    assert mycel.bound(fabric, "broadcast").collective.root == 0
    assert mycel.synthesize(fabric, "reduce_scatter").collective.num_ranks == 4
    assert mycel.select(fabric, "scatter", [1 << 10], methods=["direct"]).collective.to_text() == "scatter 4 root 0"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("all_gathr", "did you mean 'all_gather'"),
        ("All-Reduces", "did you mean 'all_reduce'"),
        ("gossip", "unknown collective 'gossip'; known: all_gather, "),
        (None, "NoneType is no collective: give one of all_gather"),
    ],
)
def test_what_is_no_collective(wrong: Any, says: str) -> None:
    with pytest.raises(mycel.UsageError, match=says):
        mycel.bound(mycel.load_topology("ring:ranks=4"), wrong)
    with pytest.raises(mycel.UsageError, match="num_ranks is a whole number"):
        mycel.Collective("all_gather", "4")  # type: ignore[arg-type]


# -- short text -------------------------------------------------------------------------------------------------

MOST = 500


def large(kind: Any, depth: int = 0) -> Any:
    """Something large of a type: the longest strings and tuples that a field of a data class could hold."""
    many = (300, 30, 3)[depth] if depth < 3 else 0  # values may hold others of their kind
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return inner[0]
    if origin in (Union, UnionType):
        return large(next(part for part in inner if part is not type(None)), depth)
    if kind in (int, float, bool, Fraction):
        return kind(3)
    if kind in (str, bytes, Path):
        return {str: "x" * 1000, bytes: b"x" * 1000, Path: Path("x" * 900)}[kind]
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return next(iter(kind))
    if kind is torch.Tensor:
        return torch.zeros(900)
    if origin is np.ndarray or kind is np.ndarray:
        return np.zeros(900)
    if origin in (tuple, list, set, frozenset):
        if (origin is tuple and len(inner) != 2) or (len(inner) == 2 and inner[1] is not ...):
            return tuple(large(part, depth + 1) for part in inner)
        elements = [large(inner[0], depth + 1) for _ in range(many)]
        return origin(elements) if origin in (tuple, list) else origin({str(i) for i in range(many)})
    if origin is dict or origin is Mapping or getattr(origin, "__name__", "") == "Mapping":
        return MappingProxyType({f"{i}" * 20: large(inner[1], depth + 1) for i in range(many)})
    if is_dataclass(kind) and isinstance(kind, type):
        return unchecked(kind, depth + 1)
    return object()


def unchecked(kind: type, depth: int = 0) -> Any:
    """A value of a data class or named tuple with large fields, made without asking whether they make sense."""
    hints = get_type_hints(kind)
    if not is_dataclass(kind):
        return kind(*(large(hints[name], depth) for name in kind._fields))  # type: ignore[attr-defined]
    value = object.__new__(kind)
    for field in fields(kind):
        object.__setattr__(value, field.name, large(hints[field.name], depth))
    return value


def public_values() -> list[type]:
    """Data classes and named tuples at the faces, and those that one gets from what is there."""
    kinds: set[type] = set()
    for face in FACES:
        for name in import_module(face).__all__:
            value = getattr(import_module(face), name)
            kinds |= {value} if inspect.isclass(value) else set()
    more = (
        "mycel.collectives.program.Channel mycel.collectives.program.Instruction mycel.collectives.schedule.Chunk "
        "mycel.collectives.schedule.Transfer mycel.collectives.select.Row mycel.collectives.sensitivity.Gain "
        "mycel.collectives.simulate.Machine mycel.collectives.synth.array_forest.Forest "
        "mycel.collectives.synth.sketch.plan.SketchPlan mycel.collectives.synth.sketch.reader.Sketch "
        "mycel.collectives.synth.steps.Front mycel.collectives.synth.steps.Point mycel.topology.wiring.Wiring "
        "mycel.topology.formats.description.Reading mycel.settings.Settings mycel.settings.Launched "
        "mycel.data_parallel.advise.Advice mycel.data_parallel.advise.Prediction "
        "mycel.report.data.Report mycel.report.data.TrainingRun mycel.report.flight.findings.Findings "
        "mycel.report.flight.links.Suspect mycel.report.flight.records.Dump mycel.report.flight.records.Group"
    )
    for path in more.split():
        module, _, name = path.rpartition(".")
        kinds.add(getattr(import_module(module), name))
    return sorted(
        (kind for kind in kinds if is_dataclass(kind) or hasattr(kind, "_fields")), key=lambda kind: kind.__qualname__
    )


@pytest.mark.parametrize("kind", public_values(), ids=lambda kind: kind.__qualname__)
def test_large_values_are_short_to_look_at(kind: type) -> None:
    text = repr(unchecked(kind))
    assert re.match(rf"{kind.__name__}(\.parse)?\(", text) and text.endswith(")")
    assert len(text) < MOST


def test_real_values_are_short_to_look_at() -> None:
    fabric = mycel.load_topology("dgx_a100:nodes=2")
    schedule = mycel.synthesize(fabric, "all_reduce")
    limit = mycel.bound(fabric, "all_reduce")
    program = mycel.lower(schedule, 1 << 16, piece_elements=1 << 12)[0]
    run = mycel.simulate(schedule, 1 << 20)
    for value in (fabric, schedule, limit, program, run, fabric.links[0], schedule.transfers[-1], run.channels[0]):
        assert len(repr(value)) < MOST
    assert len(json.dumps(schedule.to_json())) > 10 * MOST, "all of it is still to be had"
    assert repr(fabric) == (
        "Topology(name='dgx_a100_x2', unit='GB/s', vertices=<36 of Vertex>, links=<96 of Link>, link_classes=())"
    )
    assert (
        repr(mycel.Link(src=0, dst=1, capacity=2)) == "Link(src=0, dst=1, capacity=2, latency_s=0.0, link_class=None)"
    )
    assert hash(fabric) == hash(mycel.load_topology("dgx_a100:nodes=2"))
    assert isinstance(mycel.report, ModuleType)


if __name__ == "__main__":
    PAGE.write_text(with_generated_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
