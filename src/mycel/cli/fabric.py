"""The topology that a command line names, and the word on what had to be assumed about it."""

from __future__ import annotations

import shlex
import sys

from mycel.topology.load import read_topology
from mycel.topology.model import Topology

__all__ = ["load_fabric"]


def load_fabric(spec: str) -> Topology:
    """The topology a command line names; that something had to be assumed about it goes to standard error.

    Raises:
        TopologyError: it cannot be read.
    """
    found = read_topology(spec)
    if found.notes:
        number = "one assumption" if len(found.notes) == 1 else f"{len(found.notes)} assumptions"
        print(f"note: {spec} was read with {number}; mycel show {shlex.quote(spec)} lists them", file=sys.stderr)
    return found.topology
