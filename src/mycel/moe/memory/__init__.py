"""Memory: models whose experts do not fit near, kept far and brought when, or before, they are needed."""

from __future__ import annotations

from mycel.memory.tiers import CudaLink, EmulatedLink, Link, on_disk
from mycel.moe.memory.ahead import PreGated, pre_gate
from mycel.moe.memory.coded import CodedOffload
from mycel.moe.memory.coded_products import CodedProducts, measure_coded_products
from mycel.moe.memory.disk import DiskLink
from mycel.moe.memory.lookup import CodedMatrix, code_matrix, table_operations
from mycel.moe.memory.offload import Offload, OffloadedExperts
from mycel.moe.memory.policies import FETCH_POLICIES, FetchPolicy, PreGatedFetch, Ring, make_fetch_policy
from mycel.moe.memory.pre_gate import PreGate
from mycel.moe.memory.store import ExpertStore
from mycel.moe.memory.training import TrainingOffload

__all__ = [
    "FETCH_POLICIES",
    "CodedMatrix",
    "CodedOffload",
    "CodedProducts",
    "CudaLink",
    "DiskLink",
    "EmulatedLink",
    "ExpertStore",
    "FetchPolicy",
    "Link",
    "Offload",
    "OffloadedExperts",
    "PreGate",
    "PreGated",
    "PreGatedFetch",
    "Ring",
    "TrainingOffload",
    "code_matrix",
    "make_fetch_policy",
    "measure_coded_products",
    "on_disk",
    "pre_gate",
    "table_operations",
]
