"""Triton's kernels of linear attention; only ``launches`` imports them, where one is to run."""
