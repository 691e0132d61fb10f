"""Search for the way to train a model on a cluster: degrees, sharding, cuts, ranks, orders."""

from mycel.planning.search.found import Candidate, Found, Refusal
from mycel.planning.search.limits import Limit, Limits
from mycel.planning.search.refine import Failure, Refined, Trial, refine
from mycel.planning.search.search import Progress, search

__all__ = [
    "Candidate",
    "Failure",
    "Found",
    "Limit",
    "Limits",
    "Progress",
    "Refined",
    "Refusal",
    "Trial",
    "refine",
    "search",
]
