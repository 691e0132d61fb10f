"""A transformer by its sizes: how many layers, how wide, and from that its parameters and operations, exactly."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mycel.errors import UsageError

__all__ = ["ModelShape"]

_COUNTS = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "max_seq")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder of transformer layers, alike but for where the experts are.

    Attributes:
        name: what people call it.
        num_layers: transformer layers.
        hidden: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: heads of keys and values, fewer than queries' in grouped-query attention.
        head_dim: width of one head.
        ffn: inner width of a dense layer's feed-forward network.
        vocab: rows of the embedding.
        max_seq: longest sequence that it was made for.
        is_gated: the feed-forward network has a gate (SwiGLU and its like): three matrices instead of two.
        num_experts: routed experts of a layer with experts; 0 for a dense model.
        top_k: experts that a token goes to.
        expert_ffn: inner width of one routed expert.
        shared_ffn: inner width of what all tokens go through beside their experts; 0 for none.
        is_shared_gated: the shared expert's result is weighed by a gate of its own.
        num_dense_layers: layers without experts in a model that has some.
        is_tied: the head is the embedding.
        num_positions: learned positions; 0 where positions are rotated or biased.
        norm_width: parameters of a norm by width: 1 for a scale, 2 with a bias, 0 for none at all.
        norms_per_layer: norms of width ``hidden`` in a layer.
        has_qk_norm: queries and keys have a norm of width ``head_dim``.
        has_qkv_bias: biases of queries, keys and values.
        has_out_bias: bias of the projection after attention.
        has_ffn_bias: biases of the feed-forward matrices.
        element_bytes: of a parameter or an activation as ranks compute with it and send it: 2 where training is in
            16 bits with a master copy in 32, 4 where it is all in 32.

    Raises:
        UsageError: a size that is not positive, elements of another size, heads that do not share evenly, or
            experts without a width.

    References:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017; Shazeer, "GLU Variants Improve Transformer", 2020;
        Ainslie et al., "GQA", EMNLP 2023; Fedus et al., "Switch Transformers", JMLR 2022.

    Examples:
        >>> gpt2 = ModelShape(name="gpt2", num_layers=12, hidden=768, num_heads=12, num_kv_heads=12, head_dim=64,
        ...     ffn=3072, vocab=50257, max_seq=1024, is_gated=False, is_tied=True, num_positions=1024, norm_width=2,
        ...     has_qkv_bias=True, has_out_bias=True, has_ffn_bias=True)
        >>> gpt2.num_parameters
        124439808
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_seq: int = 2048
    is_gated: bool = True
    num_experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    is_shared_gated: bool = False
    num_dense_layers: int = 0
    is_tied: bool = False
    num_positions: int = 0
    norm_width: int = 1
    norms_per_layer: int = 2
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_ffn_bias: bool = False
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < (0 if name == "ffn" else 1):
                raise UsageError(f"model {self.name!r}: {name} is {value!r}; it must be a whole number from 1")
        if self.element_bytes not in (2, 4):
            raise UsageError(f"model {self.name!r}: element_bytes is {self.element_bytes!r}; it must be 2 or 4")
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"model {self.name!r}: {self.num_heads} heads cannot share {self.num_kv_heads} heads of keys and "
                f"values evenly; {_divisor(self.num_heads, self.num_kv_heads)} would do"
            )
        if self.num_experts and not (0 < self.top_k <= self.num_experts and self.expert_ffn > 0):
            raise UsageError(
                f"model {self.name!r}: {self.num_experts} experts need top_k from 1 to {self.num_experts} and "
                f"expert_ffn, got top_k={self.top_k}, expert_ffn={self.expert_ffn}"
            )
        if not self.num_experts and not self.ffn:
            raise UsageError(f"model {self.name!r}: ffn is 0 and there are no experts: say how wide the layers are")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise UsageError(
                f"model {self.name!r}: {self.num_dense_layers} dense layers of {self.num_layers}: must be 0 to all"
            )

    # -- parameters ---------------------------------------------------------------------------------------

    @property
    def matrices_of_ffn(self) -> int:
        """Matrices of a feed-forward network: three with a gate, two without."""
        return 3 if self.is_gated else 2

    @property
    def num_moe_layers(self) -> int:
        """Layers that have experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def attention_parameters(self) -> int:
        """Of a layer's attention: queries, keys, values, output, biases and norms of heads."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        count = self.hidden * (2 * queries + 2 * keys)
        count += (queries + 2 * keys) * self.has_qkv_bias + self.hidden * self.has_out_bias
        return count + 2 * self.head_dim * self.has_qk_norm

    @property
    def ffn_parameters(self) -> int:
        """Of a dense layer's feed-forward network."""
        return self._ffn(self.ffn)

    @property
    def norm_parameters(self) -> int:
        """Of a layer's norms."""
        return self.norms_per_layer * self.norm_width * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Of all routed experts of one layer."""
        return self.num_experts * self._ffn(self.expert_ffn)

    @property
    def moe_parameters(self) -> int:
        """Of a layer's experts, its router, and what all tokens share."""
        router = self.num_experts * self.hidden
        shared = self._ffn(self.shared_ffn) if self.shared_ffn else 0
        return self.expert_parameters + router + shared + self.hidden * self.is_shared_gated

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding and of learned positions; the head counts where it is not tied, by ``head_parameters``."""
        return (self.vocab + self.num_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the head: 0 where it is the embedding."""
        return 0 if self.is_tied else self.vocab * self.hidden

    @property
    def num_parameters(self) -> int:
        """All of them, exactly."""
        every = self.num_layers * (self.attention_parameters + self.norm_parameters)
        feed = (
            self.num_layers - self.num_moe_layers
        ) * self.ffn_parameters + self.num_moe_layers * self.moe_parameters
        return every + feed + self.norm_width * self.hidden + self.embedding_parameters + self.head_parameters

    @property
    def num_active_parameters(self) -> int:
        """Those that one token meets: of routed experts only ``top_k``."""
        if not self.num_experts:
            return self.num_parameters
        idle = self.num_moe_layers * (self.num_experts - self.top_k) * self._ffn(self.expert_ffn)
        return self.num_parameters - idle

    # -- operations ---------------------------------------------------------------------------------------

    def flops_per_token(self, seq: int, *, is_causal: bool = True) -> float:
        """Operations of one token forward and backward, without anything done twice.

        Six for every parameter of a matrix (two forward, four backward) and the products of attention, of which a
        causal one needs half.

        Args:
            seq: tokens of a sequence.
            is_causal: count only what the mask leaves.

        References:
            Narayanan et al., SC 2021, appendix; Chowdhery et al., "PaLM", 2022, appendix B.
        """
        matrices = self.num_layers * self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        width = self.matrices_of_ffn * self.hidden
        matrices += (self.num_layers - self.num_moe_layers) * width * self.ffn
        matrices += self.num_moe_layers * (
            width * (self.top_k * self.expert_ffn + self.shared_ffn) + self.hidden * self.num_experts
        )
        matrices += self.vocab * self.hidden
        core = 12 * self.num_layers * self.num_heads * self.head_dim * seq
        return 6.0 * matrices + (core / 2 if is_causal else core)

    def _ffn(self, inner: int) -> int:
        matrices = self.matrices_of_ffn
        biases = (inner * (matrices - 1) + self.hidden) * self.has_ffn_bias
        return matrices * self.hidden * inner + biases

    def to_json(self) -> dict[str, object]:
        """As an object of JSON, with ``version``; ``mycel.planning.models.json_format`` reads it again."""
        # What 16 bits are called by default is left out: files of models and plans stay what they were.
        named = [f.name for f in fields(self) if f.name != "element_bytes" or self.element_bytes != 2]
        return {"version": 1, **{name: getattr(self, name) for name in named}}


def _divisor(number: int, near: int) -> int:
    """The divisor of a number that is nearest to another."""
    found = {d for low in range(1, int(number**0.5) + 1) if number % low == 0 for d in (low, number // low)}
    return min(found, key=lambda d: (abs(d - near), d))
