"""Mixture of experts: a layer whose experts live on many ranks, and its parts.

::

    layer = mycel.moe.MoE(dim=512, hidden=1024, num_experts=16, top_k=2, parallel=mesh)
    y = layer(x)
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.moe", "torch")

from mycel.comm.meter import ByteMeter
from mycel.comm.nodes import node_mesh, nodes_of
from mycel.comm.pending import keep_exchanges
from mycel.moe.balance import (
    AdaptiveL1,
    BiLevelLoss,
    ExpertBias,
    GShardLoss,
    LoadBalancing,
    LoadImportanceLoss,
    SequenceLoss,
    SwitchLoss,
    ZLoss,
)
from mycel.moe.capacity import CapacityPolicy
from mycel.moe.checkpoint import experts_apart
from mycel.moe.dispatch import TokenDispatcher, make_dispatcher
from mycel.moe.experts import Experts, SharedExpert
from mycel.moe.foreign import read_megatron, read_tutel
from mycel.moe.hugging_face import apply, restore
from mycel.moe.kernels import use_kernels
from mycel.moe.kernels.measure import measure_products
from mycel.moe.kernels.products import ProductTable, use_products
from mycel.moe.layer import MoE, attach_moe_loss, expert_parameter_names, moe_loss, update_balancing
from mycel.moe.lsh import LSHDispatcher
from mycel.moe.parallel import ExpertParallel
from mycel.moe.routers import (
    BiLevelRouter,
    CosineProjection,
    ExpertChoiceRouter,
    LinearProjection,
    ReLURouter,
    Router,
    TopKRouter,
)
from mycel.moe.schedule import ExpertSchedule, Tuner
from mycel.moe.slots import RoutingResult
from mycel.moe.tiled import TiledOptimizer
from mycel.moe.totals import over_tokens
from mycel.moe.training import clip_grad_norm, full_state_dict, grad_norm
from mycel.moe.upcycling import upcycled
from mycel.planning.placement import ExpertLayout
from mycel.wire import WireCodec

__all__ = [
    "AdaptiveL1",
    "BiLevelLoss",
    "BiLevelRouter",
    "ByteMeter",
    "CapacityPolicy",
    "CosineProjection",
    "ExpertBias",
    "ExpertChoiceRouter",
    "ExpertLayout",
    "ExpertParallel",
    "ExpertSchedule",
    "Experts",
    "GShardLoss",
    "LSHDispatcher",
    "LinearProjection",
    "LoadBalancing",
    "LoadImportanceLoss",
    "MoE",
    "ProductTable",
    "ReLURouter",
    "Router",
    "RoutingResult",
    "SequenceLoss",
    "SharedExpert",
    "SwitchLoss",
    "TiledOptimizer",
    "TokenDispatcher",
    "TopKRouter",
    "Tuner",
    "WireCodec",
    "ZLoss",
    "apply",
    "attach_moe_loss",
    "clip_grad_norm",
    "expert_parameter_names",
    "experts_apart",
    "full_state_dict",
    "grad_norm",
    "keep_exchanges",
    "make_dispatcher",
    "measure_products",
    "moe_loss",
    "node_mesh",
    "nodes_of",
    "over_tokens",
    "read_megatron",
    "read_tutel",
    "restore",
    "upcycled",
    "update_balancing",
    "use_kernels",
    "use_products",
]
