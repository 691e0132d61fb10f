"""Names as people spell them, wherever one is asked for; for those that are not understood, the nearest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mycel import bound, load_topology, select, synthesize
from mycel.collectives.spec import COLLECTIVES, Collective
from mycel.data_parallel.compress import make_compressor
from mycel.errors import UsageError
from mycel.moe.dispatch import make_dispatcher
from mycel.moe.routers import make_router
from mycel.topology.yaml_format import parse_yaml
from mycel.units import parse_rate
from mycel.wire import make_codec


@pytest.mark.parametrize("form", ["{}", "{}".upper(), "camel", "dashes", "joined"])
def test_collectives_are_understood_in_every_usual_spelling(form: str) -> None:
    for name in COLLECTIVES:
        words = name.split("_")
        spelling = {
            "camel": "".join(word.capitalize() for word in words),
            "dashes": "-".join(words),
            "joined": "".join(words),
        }.get(form, name.upper() if form.isupper() else name)
        root = 0 if name in ("broadcast", "reduce", "gather", "scatter") else None
        assert Collective(spelling, 4, root=root) == Collective(name, 4, root=root)


def test_spellings_reach_the_planner() -> None:
    fabric = load_topology("ring:ranks=4,bandwidth=1 GB/s")
    assert bound(fabric, "AllGather") == bound(fabric, "all_gather")
    assert synthesize(fabric, "all-gather", "Ring") == synthesize(fabric, "all_gather", "ring")
    assert {row.method for row in select(fabric, "allgather", [1024], methods=["RING"]).rows} == {"ring"}


@pytest.mark.parametrize(
    ("ask", "proposed"),
    [
        (lambda: Collective("al_reduce", 2), "all_reduce"),
        (lambda: synthesize(load_topology("ring:ranks=3"), "all_gather", "rign"), "ring"),
        (lambda: select(load_topology("ring:ranks=3"), "all_gather", [8], methods=["rign"]), "ring"),
        (lambda: make_compressor("powersdg"), "powersgd"),
        (lambda: make_codec("bf1"), "bf16"),
        (lambda: make_router("cosin", 4, 4, 2), "cosine"),
        (lambda: make_dispatcher("all_to_al", 4, None), "all_to_all"),
    ],
)
def test_the_nearest_name_is_proposed(ask: Callable[[], object], proposed: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown .* \(did you mean '{proposed}'\?\); known: "):
        ask()


def test_what_is_no_text_is_refused_as_such() -> None:
    with pytest.raises(UsageError, match="a collective is named by a text, got int"):
        Collective(3, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "gbits"), [("100G", 100), ("400GbE", 400), ("25 GE", 25), ("1.6T", 1600), ("100 Gbps", 100)]
)
def test_ports_are_read_as_people_write_them(text: str, gbits: int) -> None:
    assert parse_rate(text) == gbits * 10**9 / 8
    fabric = parse_yaml(f"{{ranks: 2, links: [{{from: 0, to: 1, bandwidth: {text}}}]}}", source="pair.yaml")
    assert load_topology(f"ring:ranks=2,bandwidth={gbits} Gbit/s").capacity[0, 1] == fabric.capacity[0, 1] or (
        fabric.unit != "Gbit/s"
    )


@pytest.mark.parametrize("text", ["100", "100 GB", "100 Gb", "G", "100X", "100BE"])
def test_what_may_be_bytes_or_bits_is_not_guessed(text: str) -> None:
    with pytest.raises(UsageError, match="as a bandwidth"):
        parse_rate(text)


def test_keys_of_yaml_files_have_their_usual_other_names() -> None:
    said = "boxes: [{{name: a, count: 2, gpus: 4, inside: {{bw: 100G}}, {}}}]\nswitches: [core]\n"
    same = "boxes: [{{name: a, count: 2, ranks: 4, inside: {{bandwidth: 100 Gbit/s}}, {}}}]\nswitches: [core]\n"
    uplink = "uplink: {to: core, bandwidth: 40 Gbit/s, per: rank}"
    assert parse_yaml(said.format(uplink), source="a.yaml") == parse_yaml(same.format(uplink), source="a.yaml")
