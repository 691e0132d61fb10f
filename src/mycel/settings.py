"""The only reader of the environment.

Each variable is read when it is asked for, never at import, so that tests and launchers can set them late.

========================  ====================================================================
``MYCEL_TOPOLOGY``        file that describes the fabric (JSON or YAML); none: ranks are assumed
                          to sit behind one switch
``MYCEL_WIRING``          file that says at which address each rank, and each physical path, is
                          reached; ``mycel emulate`` writes it
``MYCEL_ADDRESS``         address at which the other ranks reach this one, where the machine has several
``MYCEL_TIMEOUT``         seconds a collective may take, instead of the process group's time-out
``MYCEL_PIECE_BYTES``     bytes of one pipelined piece, overriding the cost model's choice
``MYCEL_PACE``            part of a path's bandwidth at which a connection sends at most (0.97); 0: no pacing
``MYCEL_FLIGHT_RECORDER`` collectives that are kept to be written down after a failure (2000); 0: none
``MYCEL_FLIGHT_DIR``      folder for what was kept; where it is set, written there when groups close too
``MYCEL_LOCAL``           sockets between ranks of one host: ``unix`` (the default) or ``tcp``
``MASTER_ADDR``           where the store is, as torchrun sets it; the route to it tells a rank its own address
========================  ====================================================================
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mycel.errors import UsageError

__all__ = ["Settings", "read_settings"]


#: Collectives that the flight recorder keeps if nobody says otherwise: about 1.5 MB.
FLIGHT_RECORDS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks for; ``None`` where it says nothing."""

    topology: Path | None = None
    wiring: Path | None = None
    address: str | None = None
    timeout_s: float | None = None
    master_address: str | None = None
    piece_bytes: int | None = None
    paced: float | None = None
    flight_records: int = FLIGHT_RECORDS
    flight_folder: Path | None = None
    local: str | None = None


def read_settings(environ: dict[str, str] | None = None) -> Settings:
    """Read the ``MYCEL_*`` variables.

    Args:
        environ: mapping to read instead of the process environment.

    Raises:
        UsageError: a variable holds something that is not of its kind.

    Examples:
        >>> read_settings({"MYCEL_TIMEOUT": "30"}).timeout_s
        30.0
    """
    env = os.environ if environ is None else environ
    return Settings(
        topology=Path(env["MYCEL_TOPOLOGY"]) if env.get("MYCEL_TOPOLOGY") else None,
        wiring=Path(env["MYCEL_WIRING"]) if env.get("MYCEL_WIRING") else None,
        address=env.get("MYCEL_ADDRESS") or None,
        master_address=env.get("MASTER_ADDR") or None,
        timeout_s=_positive(env.get("MYCEL_TIMEOUT"), "MYCEL_TIMEOUT"),
        piece_bytes=_positive_int(env.get("MYCEL_PIECE_BYTES"), "MYCEL_PIECE_BYTES"),
        paced=0.0 if env.get("MYCEL_PACE") == "0" else _positive(env.get("MYCEL_PACE"), "MYCEL_PACE"),
        flight_records=_count(env.get("MYCEL_FLIGHT_RECORDER"), "MYCEL_FLIGHT_RECORDER", FLIGHT_RECORDS),
        flight_folder=Path(env["MYCEL_FLIGHT_DIR"]) if env.get("MYCEL_FLIGHT_DIR") else None,
        local=_one_of(("unix", "tcp"), env.get("MYCEL_LOCAL"), "MYCEL_LOCAL"),
    )


def _one_of(allowed: tuple[str, ...], text: str | None, name: str) -> str | None:
    if not text:
        return None
    if text not in allowed:
        raise UsageError(f"{name}={text!r} is not one of: {', '.join(allowed)}")
    return text


def _positive(text: str | None, name: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None
    if not value > 0:
        raise UsageError(f"{name}={text!r} must be positive")
    return value


def _count(text: str | None, name: str, default: int) -> int:
    return 0 if text == "0" else _positive_int(text, name) or default


def _positive_int(text: str | None, name: str) -> int | None:
    value = _positive(text, name)
    if value is None:
        return None
    if value != int(value):
        raise UsageError(f"{name}={text!r} must be a whole number")
    return int(value)
