"""Compressors by name. Adding one is one file here and one line in ``COMPRESSORS``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mycel.data_parallel.compress.aggregation import Aggregation, Gathered, Linear, Scattered
from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.compress.cast import Cast
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.dense_int4 import DenseInt4
from mycel.data_parallel.compress.encrypted import Encrypted
from mycel.data_parallel.compress.fp8 import FP8
from mycel.data_parallel.compress.int_bucket import Quantised
from mycel.data_parallel.compress.integer_sum import IntegerSum
from mycel.data_parallel.compress.lattice import ShiftedLattice
from mycel.data_parallel.compress.powersgd import PowerSGD
from mycel.data_parallel.compress.random_k import RandomK
from mycel.data_parallel.compress.rounds import AllGather, AllReduce, AllToAll, Conversation, Item, Outcome
from mycel.data_parallel.compress.sign import Sign
from mycel.data_parallel.compress.sum_key import SumKey
from mycel.data_parallel.compress.tagc import TAGC, heavy_layers
from mycel.data_parallel.compress.terngrad import TernGrad
from mycel.data_parallel.compress.top_k import TopK
from mycel.errors import UsageError
from mycel.names import spelled

__all__ = [
    "COMPRESSORS",
    "FP8",
    "TAGC",
    "Aggregation",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Cast",
    "Compressor",
    "Context",
    "Conversation",
    "DenseInt4",
    "Encrypted",
    "Gathered",
    "IntegerSum",
    "Item",
    "Linear",
    "Outcome",
    "PowerSGD",
    "Quantised",
    "RandomK",
    "Scattered",
    "ShiftedLattice",
    "Sign",
    "SumKey",
    "TernGrad",
    "TopK",
    "heavy_layers",
    "make_compressor",
]

#: Makers by name.
COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "bf16": partial(Cast, torch.bfloat16),
    "fp16": partial(Cast, torch.float16),
    "int8": partial(Quantised, 8),
    "int4": partial(Quantised, 4),
    "dense_int4": DenseInt4,
    "integer_sum": IntegerSum,
    "fp8": FP8,
    "sign": Sign,
    "top_k": TopK,
    "random_k": RandomK,
    "terngrad": TernGrad,
    "powersgd": PowerSGD,
    "tagc": TAGC,
    "lattice": ShiftedLattice,
}


def make_compressor(name: str, **options: object) -> Compressor:
    """A compressor by its name.

    Args:
        name: one of ``COMPRESSORS``.
        options: of its class.

    Returns:
        A new one, which keeps state of its own where its kind has any.

    Raises:
        UsageError: no compressor has that name, or it has no such option.

    Examples:
        >>> make_compressor("int4", bucket_size=256).wire_bytes((256,))
        132
    """
    name = spelled(name, sorted(COMPRESSORS), "compressor")
    try:
        return COMPRESSORS[name](**options)
    except TypeError as error:
        raise UsageError(f"compressor {name}: {error}") from None
