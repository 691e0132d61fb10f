"""TACCL's topology JSON: one machine by its costs in us a MB, and how its network cards are reached.

The full form has matrices ``links``, ``betas`` and ``invbws`` with a row a receiving GPU. The short form gives
``node_betas_list`` and ``node_invbws_list``: two values are an NDv2 (double and single NVLinks of its cube mesh), one
value a machine whose GPUs all hang on one switch, such as DGX-2. Rates are rounded to whole MB/s, latencies are
``alpha``. An ``invbw`` is the sum of alpha and beta, so rates come from betas, and from an ``invbw`` only where no
beta is given.

References:
    A. Shah et al., "TACCL: Guiding Collective Algorithm Synthesis using Communication Sketches", NSDI 2023.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from mycel.errors import TopologyError
from mycel.names import nearest
from mycel.topology.formats.description import Description
from mycel.topology.formats.file_format import FileFormat

__all__ = ["TACCL_JSON", "parse_taccl"]

_KEYS = (
    "name", "gpus_per_node", "nics_per_node", "alpha", "links", "invbws", "betas", "node_betas_list",
    "node_invbws_list", "remote_invbw", "remote_alpha", "remote_beta",
)  # fmt: skip
_MOST_GPUS = 512

#: NDv2 (eight V100): pairs of GPUs with two NVLinks, and with one.
_NDV2_DOUBLE = ((0, 1), (0, 4), (1, 3), (2, 3), (2, 6), (4, 5), (5, 7), (6, 7))
_NDV2_SINGLE = ((0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6))


def parse_taccl(text: str, *, source: str) -> Description:
    """The machine that a TACCL topology file describes.

    Raises:
        TopologyError: not JSON, or not such a file; with the key.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise TopologyError(f"{source}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise TopologyError(f"{source}: not JSON: {type(error).__name__}") from None
    if not isinstance(data, Mapping):
        raise TopologyError(f"{source}: expected a JSON object with 'gpus_per_node'")
    for key in data:
        if key not in _KEYS:
            raise TopologyError(f"{source}: unknown key {key[:40]!r}{nearest(key, _KEYS)}; known: {', '.join(_KEYS)}")
    size = data.get("gpus_per_node")
    if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= _MOST_GPUS:
        raise TopologyError(f"{source}: gpus_per_node must be a whole number in 2..{_MOST_GPUS}; got {size!r:.40}")
    machine = Description(str(data.get("name", "taccl"))[:100], source, unit="MB/s")
    gpus = [machine.rank(f"gpu{number}") for number in range(size)]
    latency_s = float(_number(data.get("alpha", 0), f"{source}: alpha", least=0) / 10**6)
    if "links" in data or "invbws" in data:
        _matrices(machine, data, gpus, latency_s, source)
    else:
        key = "node_betas_list" if data.get("node_betas_list") else "node_invbws_list"
        _short(machine, data.get(key), gpus, latency_s, f"{source}: {key}")
    _interfaces(machine, data, gpus, source)
    return machine


def _short(machine: Description, values: object, gpus: list[str], latency_s: float, where: str) -> None:
    if not isinstance(values, list) or len(values) not in (1, 2):
        raise TopologyError(f"{where} must be a list of one or two numbers (or give 'links' and 'invbws')")
    rates = [_rate(value, where) for value in values]
    if len(rates) == 1:
        machine.switch("nvswitch")
        machine.notes.append("one inverse bandwidth: GPUs are taken to hang on one NVSwitch at that rate")
        for gpu in gpus:
            machine.cable(gpu, "nvswitch", rates[0], latency_s / 2)
        return
    if len(gpus) != 8:
        raise TopologyError(f"{where} of two numbers means an NDv2 with 8 GPUs; gpus_per_node is {len(gpus)}")
    machine.notes.append("two inverse bandwidths: the double and single NVLinks of an NDv2")
    for rate, pairs in zip(rates, (_NDV2_DOUBLE, _NDV2_SINGLE), strict=True):
        for a, b in pairs:
            machine.cable(gpus[a], gpus[b], rate, latency_s)


def _matrices(machine: Description, data: Mapping[str, Any], gpus: list[str], latency_s: float, source: str) -> None:
    betas = data.get("betas", [[0] * len(gpus)] * len(gpus))
    for key, rows in (("links", data.get("links")), ("invbws", data.get("invbws")), ("betas", betas)):
        if not isinstance(rows, list) or len(rows) != len(gpus):
            raise TopologyError(f"{source}: {key} must be a list of {len(gpus)} rows")
        for number, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != len(gpus):
                raise TopologyError(f"{source}: {key}[{number}] must be a list of {len(gpus)} numbers")
    for dst, row in enumerate(data["links"]):
        for src, count in enumerate(row):
            where = f"[{dst}][{src}]"
            if _number(count, f"{source}: links{where}", least=0) and src != dst:
                key = "betas" if _number(betas[dst][src], f"{source}: betas{where}", least=0) else "invbws"
                rate = _rate(data[key][dst][src], f"{source}: {key}{where}")
                machine.cable(gpus[src], gpus[dst], rate, latency_s, one_way=True)


def _interfaces(machine: Description, data: Mapping[str, Any], gpus: list[str], source: str) -> None:
    count = data.get("nics_per_node", -1)
    if isinstance(count, bool) or not isinstance(count, int) or count > len(gpus):
        raise TopologyError(f"{source}: nics_per_node must be a whole number up to {len(gpus)}; got {count!r:.40}")
    if count < 1:
        return
    key = "remote_beta" if data.get("remote_beta") else "remote_invbw"
    rate = _rate(data.get(key), f"{source}: {key}")
    latency_s = float(_number(data.get("remote_alpha", 0), f"{source}: remote_alpha", least=0) / 10**6)
    for number in range(count):
        mine = gpus[number * len(gpus) // count : (number + 1) * len(gpus) // count]
        machine.exit(f"nic{number}", mine, rate, latency_s / 2)


def _rate(value: object, where: str) -> Fraction:
    """Bytes a second, in whole MB/s, of so many microseconds a MB."""
    invbw = _number(value, where, least=0)
    if not Fraction(1, 10**6) <= invbw <= 10**6:
        raise TopologyError(f"{where} must be from 1e-6 to 1e6 us a MB; got {value!r:.40}")
    return Fraction(round(10**6 / invbw) * 10**6)


def _number(value: object, where: str, *, least: int) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 10**12:
        raise TopologyError(f"{where} must be a number of at least {least}; got {value!r:.40}")
    return Fraction(str(value))


TACCL_JSON = FileFormat(
    name="TACCL JSON",
    suffixes=(".json",),
    signature=r'"gpus_per_node"',
    parse=parse_taccl,
    becomes="one machine; us a MB become MB/s",
    written_by="TACCL topology `.json`",
)
