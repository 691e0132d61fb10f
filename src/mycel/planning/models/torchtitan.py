"""A model by torchtitan's name for it, ``llama3 8B``, or by the sizes in its model arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mycel.errors import UsageError
from mycel.names import nearest
from mycel.planning.models.fields import MOST_LAYERS, size
from mycel.planning.models.shape import ModelShape

__all__ = ["FLAVORS", "from_torchtitan", "named"]

#: Flavors of ``torchtitan/models``: arguments of ``TransformerModelArgs`` by name.
FLAVORS: dict[str, dict[str, Any]] = {
    name: {
        **dict(zip(("dim", "n_layers", "n_heads", "n_kv_heads"), sizes, strict=True)),
        **more,
    }
    for name, sizes, more in (
        ("llama3-8b", (4096, 32, 32, 8), {"ffn_dim_multiplier": 1.3, "multiple_of": 1024}),
        ("llama3-70b", (8192, 80, 64, 8), {"ffn_dim_multiplier": 1.3, "multiple_of": 4096}),
        ("llama3-405b", (16384, 126, 128, 8), {"ffn_dim_multiplier": 1.2, "multiple_of": 4096}),
        ("qwen3-8b", (4096, 36, 32, 8), {"hidden_dim": 12288, "vocab_size": 151936, "qk_norm": True}),
        (
            "qwen3-32b",
            (5120, 64, 64, 8),
            {"hidden_dim": 25600, "vocab_size": 151936, "qk_norm": True, "head_dim": 128},
        ),
    )
}
#: Other spellings.
_ALIASES = {"llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "llama3.1-405b": "llama3-405b"}


def named(name: str) -> ModelShape:
    """A model by torchtitan's name and flavor.

    Args:
        name: such as ``llama3-8B`` or ``llama3.1 405B``.

    Raises:
        UsageError: there is none of that name; the message proposes the nearest.

    Examples:
        >>> named("llama3.1-405B").num_parameters
        405853388800
    """
    key = name.strip().lower().replace(" ", "-").replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in FLAVORS:
        known = [*FLAVORS, *_ALIASES]
        raise UsageError(f"unknown model {name!r}{nearest(key, known)}; known: {', '.join(known)}, or a file")
    return from_torchtitan(FLAVORS[key], name=key)


def from_torchtitan(arguments: Mapping[str, Any], *, name: str = "torchtitan", where: str = "") -> ModelShape:
    """A model's sizes from torchtitan's model arguments.

    Args:
        arguments: ``dim``, ``n_layers``, ``n_heads`` and so on.
        name: what to call it.
        where: the file, for messages.

    Raises:
        UsageError: a size that is missing or out of range.

    References:
        torchtitan, ``torchtitan/models/llama3/model/args.py``: the feed-forward width is two thirds of four widths,
        times ``ffn_dim_multiplier``, rounded up to ``multiple_of``.
    """
    where = where or name
    dim = size(arguments, "dim", where=where, least=1)
    heads = size(arguments, "n_heads", where=where, least=1, most=MOST_LAYERS)
    inner = arguments.get("hidden_dim")
    if inner is None:
        factor = arguments.get("ffn_dim_multiplier") or 1.0
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 100:
            raise UsageError(f"{where}: ffn_dim_multiplier is {factor!r}; it must be a number above 0")
        multiple = size(arguments, "multiple_of", where=where, default=256, least=1)
        inner = -(-int(factor * int(2 * 4 * dim / 3)) // multiple) * multiple
    return ModelShape(
        name=name,
        num_layers=size(arguments, "n_layers", where=where, least=1, most=MOST_LAYERS),
        hidden=dim,
        num_heads=heads,
        num_kv_heads=size(arguments, "n_kv_heads", where=where, default=heads, least=1),
        head_dim=size(arguments, "head_dim", where=where, default=max(1, dim // heads), least=1),
        ffn=size({"hidden_dim": inner}, "hidden_dim", where=where, least=1),
        vocab=size(arguments, "vocab_size", where=where, default=128256, least=1),
        max_seq=size(arguments, "max_seq_len", where=where, default=8192, least=1),
        has_qk_norm=bool(arguments.get("qk_norm", False)),
        is_tied=bool(arguments.get("enable_weight_tying", False)),
    )
