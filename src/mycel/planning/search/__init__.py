"""Search for the way to train a model on a cluster: degrees, sharding, cuts, ranks, orders."""

from mycel.planning.search.found import Candidate, Found, Refusal

__all__ = ["Candidate", "Found", "Refusal"]
