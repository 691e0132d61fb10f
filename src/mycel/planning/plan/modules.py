"""Names of a model's parts: what a pipeline is cut between, and how tensor parallelism shares what is inside."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence

from mycel.errors import UsageError
from mycel.planning.models.json_format import ModelDescription
from mycel.planning.models.shape import ModelShape

__all__ = ["cut_modules", "digest_of_model", "layers_among", "layouts_of", "module_names", "pattern_names"]

_NUMBERED = re.compile(r"(.*?)\.?(\d{1,6})", re.ASCII)
#: Of Hugging Face's decoders, whose names a model has that is known by its sizes only.
_COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ROWWISE = ("self_attn.o_proj",)


def module_names(model: ModelDescription) -> tuple[str, ...]:
    """Names of what a pipeline may be cut between, in order of execution.

    A described model has its own; one of which only sizes are known is taken to be a Hugging Face decoder.

    Args:
        model: sizes, and modules if it was described.

    Examples:
        >>> from mycel.planning.models import named
        >>> names = module_names(ModelDescription(shape=named("llama3-8b")))
        >>> names[0], names[1], names[-2:]
        ('model.embed_tokens', 'model.layers.0', ('model.norm', 'lm_head'))
    """
    if model.modules:
        return tuple(module.name for module in model.modules)
    layers = (f"model.layers.{layer}" for layer in range(model.shape.num_layers))
    return ("model.embed_tokens", *layers, "model.norm", "lm_head")


def layers_among(model: ModelDescription) -> tuple[str, ...]:
    """Names of the modules that are transformer layers.

    They are those numbered under one name, or of one kind, or of one kind and size: whichever are as many as the
    model has layers.

    Args:
        model: sizes, and modules if it was described.

    Raises:
        UsageError: neither is.
    """
    names = module_names(model)
    by_prefix: dict[str, list[str]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        if found is not None:
            by_prefix.setdefault(found[1], []).append(name)
    by_kind: dict[str, list[str]] = {}
    by_size: dict[str, list[str]] = {}
    for module in model.modules:
        by_kind.setdefault(module.kind, []).append(module.name)
        by_size.setdefault(f"{module.kind} {module.num_parameters}", []).append(module.name)
    for groups in (by_prefix, by_kind, by_size):
        for group in groups.values():
            if len(group) == model.shape.num_layers:
                return tuple(group)
    seen = max(map(len, by_prefix.values()), default=0)
    raise UsageError(
        f"model {model.shape.name!r} has {model.shape.num_layers} layers, and {seen} of its modules are numbered "
        "under one name: num_layers of the description must say how many modules are layers"
    )


def cut_modules(names: Sequence[str], layers: Sequence[str], counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Module names of stages that hold so many layers each.

    What stands before the first layer goes with the first stage, what follows a layer goes with it, and what follows
    the last goes with the last stage.

    Args:
        names: of all modules, in order of execution.
        layers: those of them that are layers.
        counts: layers of each stage.

    Raises:
        UsageError: counts that do not add up to the layers.

    Examples:
        >>> cut_modules(["embed", "l.0", "l.1", "l.2", "head"], ["l.0", "l.1", "l.2"], [2, 1])
        (('embed', 'l.0', 'l.1'), ('l.2', 'head'))
    """
    if sum(counts) != len(layers) or min(counts, default=0) < 0:
        raise UsageError(f"stages of {list(counts)} layers are not the {len(layers)} layers of the model")
    is_layer = set(layers)
    owner = [stage for stage, count in enumerate(counts) for _ in range(count)]
    stages: list[list[str]] = [[] for _ in counts]
    seen = 0
    for name in names:
        if name in is_layer:
            stages[owner[seen]].append(name)
            seen += 1
        elif seen == len(layers):
            stages[-1].append(name)
        else:
            stages[owner[seen - 1] if seen else 0].append(name)
    return tuple(map(tuple, stages))


def layouts_of(model: ModelDescription) -> tuple[tuple[str, str], ...]:
    """How tensor parallelism shares a model's modules: patterns of names, where ``*`` is a number.

    Args:
        model: sizes, and modules with layouts if it was described.

    Examples:
        >>> from mycel.planning.models import named
        >>> dict(layouts_of(ModelDescription(shape=named("llama3-8b"))))["model.layers.*.self_attn.o_proj"]
        'rowwise'
    """
    if model.modules:
        return _described(model)
    shape, inside = model.shape, "model.layers.*."
    rows = [(inside + name, "colwise") for name in _COLWISE] + [(inside + name, "rowwise") for name in _ROWWISE]
    if shape.num_dense_layers or not shape.num_experts:
        rows += _network(shape, inside + "mlp.")
    if shape.num_experts:
        rows += [(inside + "mlp.gate", "replicate"), *_network(shape, inside + "mlp.experts.*.")]
        rows += _network(shape, inside + "mlp.shared_expert.") if shape.shared_ffn else []
    return (("model.embed_tokens", "rowwise"), *rows, ("lm_head", "colwise"))


def pattern_names(pattern: str, names: Sequence[str]) -> bool:
    """Whether a pattern names one of some modules, or something inside of one.

    Args:
        pattern: dotted name in which ``*`` is a number.
        names: of modules.
    """
    parts = pattern.split(".")
    for name in names:
        own = name.split(".")
        if len(own) <= len(parts) and all(
            mine == theirs or (theirs == "*" and mine.isdigit()) for mine, theirs in zip(own, parts, strict=False)
        ):
            return True
    return False


def digest_of_model(shape: ModelShape, names: Sequence[str]) -> str:
    """Twelve letters that differ between models of other sizes or module names; what people call them is no part.

    Args:
        shape: sizes.
        names: of modules.
    """
    facts = {key: value for key, value in shape.to_json().items() if key != "name"}
    text = json.dumps([facts, list(names)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _network(shape: ModelShape, prefix: str) -> list[tuple[str, str]]:
    columns = ("gate_proj", "up_proj") if shape.is_gated else ("up_proj",)
    return [*((prefix + name, "colwise") for name in columns), (prefix + "down_proj", "rowwise")]


def _described(model: ModelDescription) -> tuple[tuple[str, str], ...]:
    """Layouts of described modules; where all numbered ones agree they are one pattern."""
    found: dict[str, Counter[str]] = {}
    single: list[tuple[str, str, str]] = []
    for module in model.modules:
        numbered = _NUMBERED.fullmatch(module.name)
        name = f"{numbered[1]}.*".lstrip(".") if numbered else module.name
        for parameter, layout in module.layouts:
            pattern = f"{name}.{parameter}" if parameter else name
            found.setdefault(pattern, Counter())[layout] += 1
            single.append((pattern, f"{module.name}.{parameter}" if parameter else module.name, layout))
    rows: dict[str, str] = {}
    for pattern, own, layout in single:
        rows[pattern if len(found[pattern]) == 1 else own] = layout
    return tuple(rows.items())
