"""Programs of products, pointwise operations, norms and collectives, and rewrites that keep what they compute.

::

    write = Writer()
    x, w = write.local("x", 1024, 512), write.local("w", 512, 1024)
    b, r = write.replicated("b", 1, 1024), write.replicated("r", 1024, 1024)
    program = write.finish(y=write.dropout((x @ w).all_reduce() + b, 0.1, seed=3) + r)
    better = search(program, products, network)
    results = run(better.program, {"x": x_here, "w": w_here, "b": bias, "r": residual})

References:
    A. Jangda et al., "Breaking the Computation and Communication Abstraction Barrier in Distributed Machine Learning
    Workloads", ASPLOS 2022, sections 2 and 3 (CoCoNet's language and its transformations).
"""

from __future__ import annotations

from mycel.overlap.language.cost import program_seconds
from mycel.overlap.language.program import Node, Program, Stage
from mycel.overlap.language.rewrites import fuse, overlap, reorder, split
from mycel.overlap.language.run import run
from mycel.overlap.language.search import Searched, search
from mycel.overlap.language.write import Value, Writer

__all__ = [
    "Node",
    "Program",
    "Searched",
    "Stage",
    "Value",
    "Writer",
    "fuse",
    "overlap",
    "program_seconds",
    "reorder",
    "run",
    "search",
    "split",
]
