"""What a planner has to know of a model, seen by running it without computing anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.memory.needs import Storages
from mycel.parallel.chain import Call, watch
from mycel.planning.models.hugging_face import from_hugging_face
from mycel.planning.models.json_format import ModelDescription, ModuleDescription
from mycel.planning.models.shape import ModelShape

__all__ = ["describe"]

#: Linear layers by what people call them: columns of the result are shared over ranks, or rows of it are summed.
_COLWISE = frozenset(("q", "k", "v", "q_proj", "k_proj", "v_proj", "wq", "wk", "wv")) | frozenset(
    ("gate_proj", "up_proj", "up", "gate", "w1", "w3", "fc1", "c_fc")
)
_ROWWISE = frozenset(("out", "o", "o_proj", "wo", "out_proj", "down_proj", "down", "w2", "fc2", "c_proj"))
#: Of a sequence that is made up for a Hugging Face model.
_LENGTH = 128
#: Of sequences, where nothing in a model says so.
_LONGEST = 2048


def describe(
    model: nn.Module, example: Tensor | tuple[Any, ...] | None = None, *, name: str | None = None
) -> dict[str, Any]:
    """A model as JSON that ``mycel plan search --model FILE`` reads: modules, operations, parameters, memory.

    Nothing is computed, and a model on the ``meta`` device will do: a forward runs on tensors without numbers.
    Mixtures of experts that look at numbers are run on real ones instead, where the model has some.

    Args:
        model: any module that passes its input through modules, one after the other; Hugging Face's causal language
            models as they come.
        example: arguments of a forward, shape ``[batch, seq]`` for a language model; made up where a Hugging Face
            configuration says what it takes.
        name: what to call it; the class's name if not given.

    Returns:
        The object of ``mycel.planning.models.ModelDescription``.

    Raises:
        UsageError: no example is given and none can be made up, the forward fails on it, or it is no chain.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(256, 32), *(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 256))
        >>> said = describe(model, torch.zeros(2, 16, dtype=torch.long), name="small")
        >>> [m["name"] for m in said["modules"]], said["num_layers"], said["vocab"], said["modules"][1]["flops"]
        (['0', '1', '2', '3', '4'], 3, 256, 65536.0)
    """
    args = _example_of(model, example)
    seen = _Seen()
    watched = watch(model, args, around=lambda modules: _measuring(modules, seen))
    calls = [call for call in watched.calls if call.name]
    names = _chain(model, "", calls, watched.got, watched.gave)
    if len(names) < 2:
        raise UsageError(
            f"{type(model).__name__} is no chain of modules: between its input and its result something is done that "
            "belongs to no module of a chain; put it into a module"
        )
    modules = dict(model.named_modules())
    described = [_module(name, modules[name], seen) for name in names]
    shapes = {call.name: call.shape for call in calls}
    shape = _shape(model, name or type(model).__name__, names, modules, seen, shapes)
    return ModelDescription(shape=shape, modules=tuple(described)).to_json()


def _example_of(model: nn.Module, example: Tensor | tuple[Any, ...] | None) -> tuple[Any, ...]:
    if example is not None:
        return example if isinstance(example, tuple) else (example,)
    config = getattr(model, "config", None)
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise UsageError(f"{type(model).__name__}: give an example of its input, a tensor or a tuple of arguments")
    return (torch.zeros(1, min(longest, _LENGTH), dtype=torch.long),)


# -- what a run shows -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """Attributes: by module; and heads of queries, of keys, and their width, where attention was seen."""

    flops: dict[str, float] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    heads: tuple[int, int, int] | None = None


@contextmanager
def _measuring(modules: Mapping[str, nn.Module], seen: _Seen) -> Iterator[None]:
    """Operations and kept bytes of every module while a model runs, as ``mycel.memory`` counts them."""
    storages = Storages(cpu_kernels=False)
    open_calls: list[int] = []
    runs: list[tuple[str, int, int]] = []

    def begin(module: nn.Module, _: Any) -> None:
        if not open_calls:
            storages.known((*module.parameters(), *module.buffers()), "parameters")
        open_calls.append(storages.num_marks)
        storages.mark("forward", "")

    def ending(name: str) -> Callable[..., None]:
        def end(*_: Any) -> None:
            runs.append((name, open_calls.pop(), storages.num_marks - 1))
            storages.mark("forward", "")

        return end

    handles: list[Any] = []
    try:
        for name, module in modules.items():
            handles += [
                module.register_forward_pre_hook(begin, prepend=True),
                module.register_forward_hook(ending(name)),
            ]
        with storages, storages.saving():
            yield
    finally:
        for handle in handles:
            handle.remove()
    for name, first, last in runs:
        seen.flops[name] = seen.flops.get(name, 0.0) + storages.flops_in(first, last)
        seen.kept[name] = seen.kept.get(name, 0) + storages.saved_in(first, last)
    for query, key, _ in storages.attentions[:1]:
        seen.heads = query[1], key[1], query[3]


# -- the chain --------------------------------------------------------------------------------------------------


def _chain(model: nn.Module, prefix: str, calls: Sequence[Call], got: int | None, gave: int | None) -> list[str]:
    """Modules below a prefix that hand on its input, one after the other, until its result; or none."""
    module = model.get_submodule(prefix) if prefix else model
    start = f"{prefix}." if prefix else ""
    inside = [call for call in calls if call.name.startswith(start)]
    called = {call.name for call in inside}
    # The outermost calls: those with no called module between them and the prefix.
    top = [call for call in inside if not any(call.name.startswith(f"{o}.") for o in called)]
    # From the result back: who gave it, and who gave what that one got.
    links: list[Call] = []
    at = gave
    for call in reversed(top):
        if call.gave == at and not (at == got and links):
            links.insert(0, call)
            at = call.got
    owned = tuple(f"{link.name}." for link in links)
    loose = [n for n, _ in module.named_parameters(prefix=prefix) if not n.startswith(owned)]
    if at != got or not links or loose:
        return []
    repeated = _repeated(model, [link.name for link in links])
    names: list[str] = []
    for link in links:
        finer = [] if link.name in repeated else _chain(model, link.name, calls, link.got, link.gave)
        names += finer or [link.name]
    return names


def _repeated(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Modules that stand numbered beside others of their class: layers, which are cut between and not into."""
    by_kind: dict[tuple[str, type], list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            by_kind.setdefault((parent, type(model.get_submodule(name))), []).append(name)
    return {name for group in by_kind.values() if len(group) > 1 for name in group}


def _module(name: str, module: nn.Module, seen: _Seen) -> ModuleDescription:
    layouts: dict[str, str] = {}
    linear = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    last = {n: n.rpartition(".")[2] for n in linear}
    if name.rpartition(".")[2].isdigit():
        has_both = {"colwise", "rowwise"} <= {_layout(word) for word in last.values()}
        layouts = {n: _layout(word) if has_both else "replicate" for n, word in last.items()}
    elif isinstance(module, nn.Linear):
        layouts = {"": "colwise"}
    elif isinstance(module, nn.Embedding):
        layouts = {"": "rowwise"}
    return ModuleDescription(
        name=name,
        kind=type(module).__name__,
        flops=float(seen.flops.get(name, 0.0)),
        num_parameters=sum(p.numel() for p in module.parameters()),
        activation_bytes=seen.kept.get(name, 0),
        layouts=tuple(layouts.items()),
    )


def _layout(word: str) -> str:
    return "colwise" if word in _COLWISE else "rowwise" if word in _ROWWISE else "replicate"


# -- sizes ------------------------------------------------------------------------------------------------------


def _shape(
    model: nn.Module,
    name: str,
    names: Sequence[str],
    modules: Mapping[str, nn.Module],
    seen: _Seen,
    shapes: Mapping[str, tuple[int, ...]],
) -> ModelShape:
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        known = from_hugging_face(config.to_dict(), where=name)
        return replace(known, name=name, element_bytes=_element_bytes(model))
    numbered = [n for n in names if n.rpartition(".")[2].isdigit()]
    kinds = [type(modules[n]) for n in numbered]
    kind = max(kinds, key=kinds.count, default=None)
    layers = [n for n in numbered if type(modules[n]) is kind]
    # Where layers and head are of one class, the widths tell them apart.
    layers = [n for n in layers if shapes[n] == shapes[layers[0]]] or list(names[1:-1]) or list(names)
    hidden = shapes[layers[0]][-1] if shapes[layers[0]] else 1
    layer = modules[layers[0]]
    linear = [m for m in layer.modules() if isinstance(m, nn.Linear)]
    heads, kv_heads, width = seen.heads or (1, 1, hidden)
    inner = max((m.in_features for m in linear if m.out_features == hidden), default=hidden)
    into = [m for m in linear if m.out_features == inner and m.in_features == hidden]
    norms = [m for m in layer.modules() if "Norm" in type(m).__name__ and any(True for _ in m.parameters())]
    tables = sorted((m for m in model.modules() if isinstance(m, nn.Embedding)), key=lambda m: -m.num_embeddings)
    vocab = tables[0].num_embeddings if tables else (shapes[names[-1]] or (1,))[-1]
    down = [m for m in linear if m.in_features == inner and m.out_features == hidden]
    learned = tables[1].num_embeddings if len(tables) > 1 else 0
    head = getattr(modules[names[-1]], "weight", None)
    return ModelShape(
        name=name,
        num_layers=len(layers),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        ffn=inner,
        vocab=vocab,
        max_seq=learned or _LONGEST,
        is_gated=len(into) >= 2 and inner != hidden,
        is_tied=bool(tables) and head is tables[0].weight,
        num_positions=learned,
        norm_width=2 if any(len(list(m.parameters())) > 1 for m in norms) else 1 if norms else 0,
        norms_per_layer=len(norms),
        has_ffn_bias=any(m.bias is not None for m in (*into, *down) if inner != hidden),
        has_qkv_bias=any(m.bias is not None for m in linear if m not in into and m not in down),
        element_bytes=_element_bytes(model),
    )


def _element_bytes(model: nn.Module) -> int:
    """Of most parameters: a model is trained in the type that it is made in."""
    sizes: Counter[int] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.element_size()] += parameter.numel()
    return 4 if sizes and max(sizes, key=lambda size: sizes[size]) >= 4 else 2
