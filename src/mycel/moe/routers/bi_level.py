"""Two small routers instead of one large: first the node, then experts within it, so that a token visits one node."""

# ruff: noqa: N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.routers.base import Router
from mycel.moe.routers.projection import experts_of
from mycel.moe.slots import RoutingResult, routing_from_slots

__all__ = ["BiLevelRouter"]


class BiLevelRouter(Router):
    """The best node, and there the ``top_k`` best of its experts; weights ``p_node * q_local``.

    Expert ``node * m + local`` of the layer is number ``local`` of a node's ``m``. Logits are the sums of both
    levels', whose softmax over all experts is the product of the two.

    Args:
        node: projection to one logit a node.
        local: projection to one logit an expert of a node.
        top_k: experts a token, all on one node.

    Raises:
        UsageError: a node has fewer than ``top_k`` experts, or a projection does not say its ``num_experts``.

    References:
        He et al., "SMILE: Scaling Mixture-of-Experts with Efficient Bi-level Routing", 2022, section 3.

    Examples:
        >>> import torch
        >>> from mycel.moe import LinearProjection
        >>> router = BiLevelRouter(LinearProjection(8, 2), LinearProjection(8, 4), top_k=3)  # 2 nodes of 4 experts
        >>> nodes = router(torch.randn(5, 8)).top_k_index // 4
        >>> bool((nodes == nodes[:, :1]).all())  # the experts of a token share a node
        True
    """

    def __init__(self, node: nn.Module, local: nn.Module, top_k: int) -> None:
        self.num_nodes, self.per_node = experts_of(node), experts_of(local)
        super().__init__(self.num_nodes * self.per_node, top_k)
        self.node = node
        self.local = local

    def checked(self, top_k: int | None) -> int:
        """See ``Router``; experts of a token share a node."""
        chosen = super().checked(top_k)
        if chosen > self.per_node:
            raise UsageError(f"top_k {chosen}; a node has {self.per_node} experts, and a token visits one node")
        return chosen

    def forward(self, x: Tensor, *, top_k: int | None = None, bias: Tensor | None = None) -> RoutingResult:
        """See ``Router``."""
        k = self.checked(top_k)
        a_TN, b_TM = self.node(x), self.local(x)
        p_TN, q_TM = a_TN.softmax(dim=1), b_TM.softmax(dim=1)
        node_T1 = p_TN.detach().argmax(dim=1, keepdim=True)
        local_TK = q_TM.detach().topk(k, dim=1).indices
        weights_TK = p_TN.gather(1, node_T1) * q_TM.gather(1, local_TK)
        logits_TE = (a_TN.unsqueeze(2) + b_TM.unsqueeze(1)).flatten(1)
        scores_TE = (p_TN.unsqueeze(2) * q_TM.unsqueeze(1)).flatten(1)
        index_TK = node_T1 * self.per_node + local_TK
        return routing_from_slots(index_TK, weights_TK, logits_TE, scores_TE, self.num_experts, full=True)
