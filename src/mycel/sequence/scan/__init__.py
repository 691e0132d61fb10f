"""The exclusive scan of affine maps over a layout: all that linear attention has to communicate."""

from mycel.sequence.scan.call import scan, start_scan
from mycel.sequence.scan.choice import explain_scan
from mycel.sequence.scan.graph import attached
from mycel.sequence.scan.ways import WAYS

__all__ = ["WAYS", "attached", "explain_scan", "scan", "start_scan"]
