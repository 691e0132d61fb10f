"""Data parallel training that needs less of the network: compression, local updates, combiners."""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.data_parallel", "torch")

from mycel.comm.handle import Handle
from mycel.data_parallel.advise import Advice, Prediction, advise
from mycel.data_parallel.advise_sharded import advise_sharded
from mycel.data_parallel.beyond_averaging import MASHA, HDPiSSA, hd_pissa
from mycel.data_parallel.combine import (
    Adasum,
    CombinedGradients,
    Combiner,
    Mean,
    ModelCombiner,
    Sum,
    combine_gradients,
    combine_rows,
)
from mycel.data_parallel.compress import (
    COMPRESSORS,
    FP8,
    TAGC,
    Cast,
    Compressor,
    DenseInt4,
    PowerSGD,
    Quantised,
    RandomK,
    Sign,
    TernGrad,
    TopK,
    heavy_layers,
    make_compressor,
)
from mycel.data_parallel.ddp import DDPCompression
from mycel.data_parallel.entry import compress
from mycel.data_parallel.feedback import ErrorFeedback
from mycel.data_parallel.fsdp import QSDP, FSDPCompression
from mycel.data_parallel.lgreco import LGreCo
from mycel.data_parallel.local import (
    CO2,
    QSR,
    Delayed,
    EveryStep,
    LocalUpdates,
    Members,
    Periodic,
    PostLocal,
    SlowMo,
    Streaming,
    Synchronizer,
    co2,
    diloco,
    local_updates,
    slowmo,
)
from mycel.data_parallel.optimizers import DeMo, Dion, Muon, OneBitAdam, matrix_groups
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.stats import CommStats

__all__ = [
    "CO2",
    "COMPRESSORS",
    "FP8",
    "MASHA",
    "QSDP",
    "QSR",
    "TAGC",
    "Adasum",
    "Advice",
    "Cast",
    "CombinedGradients",
    "Combiner",
    "CommStats",
    "CompressionPolicy",
    "Compressor",
    "DDPCompression",
    "DeMo",
    "Delayed",
    "DenseInt4",
    "Dion",
    "ErrorFeedback",
    "EveryStep",
    "FSDPCompression",
    "HDPiSSA",
    "Handle",
    "LGreCo",
    "LocalUpdates",
    "Mean",
    "Members",
    "ModelCombiner",
    "Muon",
    "OneBitAdam",
    "Periodic",
    "PostLocal",
    "PowerSGD",
    "Prediction",
    "Quantised",
    "RandomK",
    "Sign",
    "SlowMo",
    "Streaming",
    "Sum",
    "Synchronizer",
    "TernGrad",
    "TopK",
    "advise",
    "advise_sharded",
    "co2",
    "combine_gradients",
    "combine_rows",
    "compress",
    "diloco",
    "hd_pissa",
    "heavy_layers",
    "local_updates",
    "make_compressor",
    "matrix_groups",
    "slowmo",
]
