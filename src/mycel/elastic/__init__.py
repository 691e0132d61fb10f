"""Survivors go on: groups whose members change while the job runs, and who decides on that.

``reconfigure`` forms a group anew from its members' handles, with schedules for the fabric that is left or has grown.
``Roster`` agrees on who the members are, over a store that outlives ranks; with torchft its lighthouse does that, and
``torchft_process_group`` (``pip install 'mycel[elastic]'``) makes the group for its Manager. See
docs/guides/elastic.md.
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.elastic", "torch")

from mycel.elastic.groups import failure, get_handle, leave, reconfigure, shrink_group, start_alone
from mycel.elastic.members import Members
from mycel.elastic.roster import Candidate, Roster, Round, everyone
from mycel.elastic.torchft import torchft_process_group

__all__ = [
    "Candidate",
    "Members",
    "Roster",
    "Round",
    "everyone",
    "failure",
    "get_handle",
    "leave",
    "reconfigure",
    "shrink_group",
    "start_alone",
    "torchft_process_group",
]
