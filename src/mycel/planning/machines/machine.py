"""A kind of machine: its data sheet, and how near each way of running a model comes to it, with the errors seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mycel.cost import Device
from mycel.errors import UsageError
from mycel.names import nearest
from mycel.planning.step.coefficients import Coefficients, limits
from mycel.planning.step.links import Rates

__all__ = ["Fit", "Machine", "known_machines", "load_machine", "to_json"]

_FOLDER = Path(__file__).parent
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients of one way of running models on a machine, and how wrong they were about rows they had not seen.

    Attributes:
        name: of the way, such as ``megatron`` or ``fsdp``.
        coefficients: fitted, or assumed where ``num_rows`` is 0.
        fitted: names of those that the rows decided; the others are counted or assumed.
        mean_error: mean of ``|predicted / measured - 1|`` over rows that were left out of the fit.
        median_error: likewise.
        max_error: likewise, the largest.
        num_rows: of the fit.
        source: which rows.
    """

    name: str
    coefficients: Coefficients
    fitted: tuple[str, ...]
    mean_error: float
    median_error: float
    max_error: float
    num_rows: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of node, many of them, and what is known of steps on them.

    Attributes:
        name: as its file is called.
        device: one accelerator.
        rates: of links inside a node and of the network.
        fits: ways of running models, the usual one first.

    Examples:
        >>> machine = load_machine("a100")
        >>> machine.device.flops, machine.rates.ranks_per_node
        (312000000000000.0, 8)
    """

    name: str
    device: Device
    rates: Rates
    fits: tuple[Fit, ...]

    def fit(self, name: str | None = None) -> Fit:
        """A way of running models by name; the usual one if none is given.

        Raises:
            UsageError: there is none of that name.
        """
        if name is None:
            return self.fits[0]
        for one in self.fits:
            if one.name == name:
                return one
        names = [one.name for one in self.fits]
        raise UsageError(
            f"{self.name}: no way to run called {name!r}{nearest(name, names)}; known: {', '.join(names)}"
        )


def known_machines() -> tuple[str, ...]:
    """Names of the machines that mycel knows.

    Examples:
        >>> "a100" in known_machines()
        True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_machine(source: str | Path) -> Machine:
    """A machine by name, or from a file of the same form.

    Args:
        source: one of ``known_machines()``, or a path that ends with ``.json``.

    Raises:
        UsageError: no such machine; a file that cannot be read, of another version, or with a coefficient that
            physics does not allow.
    """
    path = Path(source)
    if path.suffix != ".json":
        known = known_machines()
        if str(source).lower() not in known:
            raise UsageError(
                f"unknown machine {str(source)!r}{nearest(str(source), known)}; known: {', '.join(known)}, or a file"
            )
        path = _FOLDER / f"{str(source).lower()}.json"
        return _read(path)
    return _load(path)


@cache
def _read(path: Path) -> Machine:
    return _load(path)


def _load(path: Path) -> Machine:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as a machine: {error}") from None
    if not isinstance(data, Mapping) or data.get("version") != _VERSION:
        version = data.get("version") if isinstance(data, Mapping) else None
        raise UsageError(f"{path}: version {version!r} of a machine; this mycel reads {_VERSION}")
    try:
        device, links = data["device"], data["links"]
        return Machine(
            name=path.stem,
            device=Device(**device),
            rates=Rates(**links),
            fits=tuple(_fit(one) for one in data["fits"]),
        )
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UsageError(f"{path}: is not a machine: {type(error).__name__} {error}") from None


def _fit(data: Mapping[str, Any]) -> Fit:
    values = {name: float(one["value"]) for name, one in data["coefficients"].items()}
    error = data["error"]
    return Fit(
        name=str(data["name"]),
        coefficients=Coefficients().with_values(values),
        fitted=tuple(name for name, one in data["coefficients"].items() if one.get("is_fitted")),
        mean_error=float(error["mean"]),
        median_error=float(error["median"]),
        max_error=float(error["max"]),
        num_rows=int(error["rows"]),
        source=str(data.get("source", "")),
    )


def to_json(machine: Machine) -> dict[str, object]:
    """A machine as its file has it, every coefficient with its unit and its limits."""
    allowed = limits()
    device, rates = machine.device, machine.rates
    return {
        "version": _VERSION,
        "device": {
            "name": device.name,
            "flops": device.flops,
            "memory_bytes": device.memory_bytes,
            "memory_gbps": device.memory_gbps,
            "float8_flops": device.float8_flops,
            "source": device.source,
        },
        "links": {
            "ranks_per_node": rates.ranks_per_node,
            "link_gbps": rates.link_gbps,
            "network_gbps": rates.network_gbps,
        },
        "fits": [
            {
                "name": fit.name,
                "source": fit.source,
                "error": {
                    "mean": round(fit.mean_error, 4),
                    "median": round(fit.median_error, 4),
                    "max": round(fit.max_error, 4),
                    "rows": fit.num_rows,
                },
                "coefficients": {
                    name: {
                        "value": float(f"{getattr(fit.coefficients, name):.4g}"),
                        "unit": limit.unit,
                        "low": limit.low,
                        "high": limit.high,
                        "is_fitted": name in fit.fitted,
                    }
                    for name, limit in allowed.items()
                },
            }
            for fit in machine.fits
        ],
    }
