"""Placements: what is read, what is refused and how it is said, what is known of memory and ways."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mycel.errors import UsageError
from mycel.pipeline.bounds import makespan_bound, period_bound
from mycel.pipeline.pairing import longest_pairing
from mycel.pipeline.placement import Block, Placement

DATA = Path(__file__).parents[1] / "data" / "pipeline" / "placements.json"
SHAPES: list[dict[str, Any]] = json.loads(DATA.read_text())["shapes"]


def of(name: str) -> dict[str, Any]:
    return json.loads(json.dumps(next(shape for shape in SHAPES if shape["name"] == name)))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape["name"])
def test_given_placements(shape: dict[str, Any]) -> None:
    placement = Placement.from_json(shape)
    assert Placement.from_json(placement.to_json()) == placement
    assert Placement.parse(json.dumps(placement.to_json())) == placement
    assert max(placement.work) == shape["load_bound"]
    expected = max(Fraction(shape["load_bound"]), Fraction(shape["lifetime_bound"]))
    assert period_bound(placement).value == expected
    for count in (8, 32):
        unrolled = shape[f"makespan_of_unrolled_repetend_M{count}"]
        assert count * max(placement.work) <= makespan_bound(placement, count).value <= unrolled


def test_one_micro_batch_needs_what_its_blocks_hold_together() -> None:
    assert Placement.from_json(of("V4_cap4")).need == (1, 1, 1, 1)
    assert Placement.from_json(of("X4_cap4")).need == (1, 1, 1, 1)  # the other chain may be over
    assert Placement.from_json(of("Vmin4")).need == (2, 2, 2, 2)


def test_memory_device_by_device() -> None:
    block = Block(name="S", devices=(2, 0), time=1, memory=(5, 7))
    assert block.devices == (0, 2)
    assert (block.memory_on(0), block.memory_on(1), block.memory_on(2)) == (7, 0, 5)
    assert Block(name="S", devices=(0, 1), time=1, memory=(3, 3)) == Block(name="S", devices=(0, 1), time=1, memory=3)


def test_names_may_stand_for_positions() -> None:
    shape = of("V4_cap4")
    named = shape | {"deps": [[shape["blocks"][a]["name"], shape["blocks"][b]["name"]] for a, b, _ in shape["deps"]]}
    assert Placement.from_json(named) == Placement.from_json(shape)


def changed(**keys: Any) -> dict[str, Any]:
    return of("V4_cap4") | keys


def with_block(number: int, **keys: Any) -> dict[str, Any]:
    shape = of("V4_cap4")
    shape["blocks"][number] |= keys
    return shape


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_block(2, time=0), "block F2: time: 0 is not"),
        (with_block(2, time=-3), "block F2: time: -3 is not"),
        (with_block(2, time=1.5), "block F2: time: 1.5 is not a whole number"),
        (
            changed(deps=[*of("V4_cap4")["deps"], [7, 0, 0]]),
            "in a circle: F1 -> F2 -> F3 -> B3 -> B2 -> B1 -> B0 -> F0 -> F1; drop",
        ),
        (changed(deps=[[0, 1, -1]]), "dependency 0: delay: -1"),
        (changed(deps=[[0, 9, 0]]), "dependency 0: block: 9"),
        (changed(deps=[["F0", "f1", 0]]), "no block is named 'f1' (did you mean 'F1'?)"),
        (changed(deps=[[3, 3, 0]]), "F3 waits for itself"),
        (changed(deps=[]), "is not connected"),
        (changed(cap=[0, 4, 4, 4]), "cap 0 of device 0 is under the 1 that one micro-batch needs"),
        (changed(cap=[4, 4]), "caps for 2 devices, and there are 4"),
        (changed(devices=5), "device 4 has no block"),
        (changed(devices=3), "is on device 3; devices are 0..2"),
        (changed(devices=0), "devices: 0 is not"),
        (changed(blocks=[]), "has no blocks"),
        (with_block(7, memory=-2), "takes 1 of memory and gives back 2"),
        (with_block(1, name="F0"), "two blocks are named F0"),
        (with_block(1, devices=[]), "block F1 is on no device"),
        (with_block(1, devices=[1, 1]), "each can be named once"),
        (changed(version=2), "version 2 of placements; this release reads 1"),
        ({"block": [], "devices": 1}, "the key 'blocks' is missing (is it what you wrote as 'block'?)"),
        ([], "expected a JSON object"),
        (changed(blocks=[3]), "block 0: expected an object"),
        (changed(deps=[[0]]), "expected [before, after]"),
        (changed(deps="F0"), "deps: expected a list"),
    ],
)
def test_what_makes_no_sense_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Placement.from_json(data, source="p.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("p.json: ")
    assert "\n" not in str(caught.value)


def test_memory_given_back_before_it_was_taken() -> None:
    blocks = [
        {"name": "give", "devices": [0], "time": 1, "memory": -1},
        {"name": "take", "devices": [0], "time": 1, "memory": 1},
    ]
    with pytest.raises(UsageError, match="gives back 1 on device 0, of which 0 are taken before it"):
        Placement.from_json({"devices": 1, "blocks": blocks, "deps": [[0, 1, 0]]})


@pytest.mark.parametrize("text", ["", "{", "[1, 2", "nan", "{'a': 1}", "[" * 100_000])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(UsageError, match=r"p\.json"):
        Placement.parse(text, source="p.json")


def test_pairing_takes_the_longest_ways_that_can_all_be_had() -> None:
    length = {(0, 2): 9, (0, 3): 8, (1, 2): 9}
    assert longest_pairing({0: 1, 1: 1}, {2: 1, 3: 1}, length) == 17  # 0 gives way
    assert longest_pairing({0: 2, 1: 1}, {2: 2, 3: 1}, length) == 9 + 9 + 8
    assert longest_pairing({0: 1, 1: 1}, {2: 1, 3: 1}, {(0, 2): 9, (1, 2): 9}) is None
    assert longest_pairing({}, {}, {}) == 0


#: What people, programs and slips put where something else belongs.
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2.5, 1e308, float("nan"), float("inf"), 10**30, -(10**30), 1 << 31, 1 << 63, "", "x", "\x00",
    "\ud800", "é" * 300, [], {}, [[]], [1], [None], {"a": 1}, [1, 2, 3],
)  # fmt: skip


def _places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to everything inside of a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inside for found in [(*way, key), *_places(item, (*way, key))]]


def _slip(shape: dict[str, Any], chance: Random) -> str:
    """A placement in which something is replaced, left out, doubled or counted up; or a text with a hole in it."""
    data = json.loads(json.dumps(shape))
    for _ in range(chance.choice((1, 1, 2))):
        way = chance.choice(_places(data))
        holder = data
        for key in way[:-1]:
            holder = holder[key]
        kind = chance.randrange(4)
        if kind == 0:
            del holder[way[-1]]
        elif kind == 1 and isinstance(holder, list):
            holder.append(holder[way[-1]])
        elif kind == 2 and isinstance(holder[way[-1]], int):
            holder[way[-1]] += chance.choice((-2, -1, 1, 2, 1000))
        else:
            holder[way[-1]] = chance.choice(ODD)
    text = json.dumps(data)
    if chance.random() < 0.2:
        at = chance.randrange(len(text))
        text = text[:at] + chance.choice(("", "[", "9" * 5000, "NaN", '"', "}")) + text[at + chance.randrange(30) :]
    return text


def _read(text: str) -> str:
    """What is said of a file: nothing, or one line that can be shown."""
    try:
        placement = Placement.parse(text, source="file.json")
        period_bound(placement)
        makespan_bound(placement, 5)
    except UsageError as error:
        return str(error)
    assert Placement.parse(json.dumps(placement.to_json())) == placement
    return ""


def test_slips_give_a_placement_or_one_line() -> None:
    said = [_read(_slip(chance.choice(SHAPES), chance)) for chance in map(Random, range(600))]
    assert all("\n" not in line and len(line) < 1000 for line in said)
    assert all(line.startswith("file.json") for line in said if line)
    assert sum(map(bool, said)) > 400


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"devices": 99999999999, "blocks": [{"name": "F0", "devices": [0], "time": 1}]}', "device 1 has no block"),
        ('{"devices": 1e999, "blocks": []}', "not a whole number"),
        ('{"devices": 2, "blocks": [{"name": "F0", "devices": [0, 99999999999], "time": 1}]}', "device 99999999999"),
    ],
)
def test_files_that_name_too_much(text: str, says: str) -> None:
    assert says in _read(text)


def test_more_blocks_than_can_be_searched() -> None:
    blocks = [{"name": f"b{i}", "devices": [0], "time": 1} for i in range(1025)]
    assert "at most 1024 can be searched" in _read(json.dumps({"devices": 1, "blocks": blocks}))
    waits = [[i, i + 1] for i in range(199)]
    chain = Placement.from_json({"devices": 1, "blocks": blocks[:200], "deps": waits})
    assert chain.longest[0][199] == 200
    assert chain.longest[199][0] is None
