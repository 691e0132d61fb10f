"""Methods whose ranks average neither gradients nor parameters. One a file, or a few where it takes several."""

from __future__ import annotations

from mycel.data_parallel.beyond_averaging.hd_pissa import HDPiSSA, hd_pissa
from mycel.data_parallel.beyond_averaging.masha import MASHA

__all__ = ["MASHA", "HDPiSSA", "hd_pissa"]
