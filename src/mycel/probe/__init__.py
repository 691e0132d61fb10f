"""Finds out what a live cluster looks like: all ranks measure, rank 0 infers a topology and says how sure it is.

Needs neither torch nor privileges; only under torchrun, whose store tells the ranks where rank 0 listens, torch is
imported.
"""

from __future__ import annotations

from mycel.probe.found import Found, LinkNote, found_yaml, summary_lines
from mycel.probe.session import probe
from mycel.probe.survey import Limits

__all__ = ["Found", "Limits", "LinkNote", "found_yaml", "probe", "summary_lines"]
