"""Our exchanges under names of the library's own expert parallelism, for models that are loaded with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mycel.errors import UsageError
from mycel.moe.dispatch import TokenDispatcher
from mycel.moe.hugging_face.backend import ForeignExperts
from mycel.moe.hugging_face.transformers_api import expert_parallel_module
from mycel.moe.parallel import ExpertParallel
from mycel.wire import WireCodec

__all__ = ["register_expert_parallel"]


def register_expert_parallel(
    name: str = "mycel",
    *,
    dispatcher: str | Callable[[int, DeviceMesh], TokenDispatcher] = "all_to_all",
    codec: str | WireCodec = "identity",
) -> None:
    """Register exchange and arithmetic of experts with transformers' registry of expert parallelism.

    ``from_pretrained(..., distributed_config=DistributedConfig(ep_size=4, fsdp_size=4, ep_implementation=name))``
    then uses them; each rank reads its share of the experts from disk, and the library's own FSDP scales gradients.

    Args:
        name: for ``ep_implementation``.
        dispatcher: a key of ``mycel.moe.dispatch.DISPATCHERS``, or what makes one from a layer's number of experts
            and the mesh. Where a batch is shared by a tensor-parallel group, it has to be ``"all_reduce"``.
        codec: of rows on the wire.

    Raises:
        UsageError: this transformers has no such registry.
    """
    module = expert_parallel_module()
    base: Any = module.EPImplementation

    class MycelExpertParallel(base):  # type: ignore[misc]
        def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            num_experts = experts.num_experts * ep_mesh.size()
            made = dispatcher if isinstance(dispatcher, str) else dispatcher(num_experts, ep_mesh)
            # The library has divided the experts, whole ones, and scales their gradients.
            like: dict[str, Any] = {"codec": codec, "tensor_shards": 1, "gradients": "sum"}
            self.foreign = ForeignExperts(experts, num_experts, ExpertParallel(ep_mesh, dispatcher=made, **like))
            used = self.foreign.routed.dispatcher
            if used.same_tokens != (tp_mesh.size() > 1):
                alike = "share" if tp_mesh.size() > 1 else "do not share"
                raise UsageError(
                    f"ep_implementation {name!r} uses {type(used).__name__}, and ranks of a tensor-parallel group of "
                    f"{tp_mesh.size()} {alike} a batch; dispatcher 'all_reduce' is for those that do, the others "
                    "are for those that do not"
                )

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return self.foreign(hidden_states, top_k_index, top_k_weights)

    module.EPImplementationInterface.register(name, MycelExpertParallel)
