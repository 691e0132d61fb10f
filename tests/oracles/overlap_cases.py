"""Programs of overlapped operators, and all that rewrites make of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tests.oracles.overlap_programs import Everywhere, chunks
from torch import Tensor

from mycel.overlap.language import Program, Writer
from mycel.overlap.language.search import _rewritten, _staged


def attention_output(rows: int = 11) -> Program:
    """CoCoNet's second case, with a norm."""
    write = Writer()
    x, w = write.local("x", rows, 6), write.local("w", 6, 5)
    b, r = write.replicated("b", 1, 5), write.replicated("r", rows, 5)
    scale = write.replicated("scale", 1, 5)
    summed = (x @ w).all_reduce() + b
    return write.finish(y=write.norm("layer_norm", write.dropout(summed, 0.3, seed=4) + r, scale))


def adam(rows: int = 9) -> Program:
    """CoCoNet's first case: state that is sliced already, and a step as long as a layer's weights (LAMB's)."""
    write = Writer()
    g, p = write.local("g", rows, 4), write.replicated("p", rows, 4)
    m, v = write.sliced("m", rows, 4), write.sliced("v", rows, 4)
    mean = g.all_reduce().slice()
    first = m * 0.9 + mean * 0.1
    second = v * 0.99 + mean.square() * 0.01
    step = first / (second.sqrt() + 1e-6) + p.slice() * 0.01
    ratio = (p.square().total() / step.square().total()).sqrt()
    return write.finish(p=(p.slice() - step * ratio * 0.1).all_gather(), m=first, v=second)


def between_layers(rows: int = 8) -> Program:
    """A gather, two products, and a sum in slices, whose gathered rows are wanted too."""
    write = Writer()
    x, up, down = write.sliced("x", rows, 4), write.local("up", 4, 6), write.local("down", 6, 4)
    gathered = x.all_gather()
    hidden = (gathered @ up).gelu()
    return write.finish(y=(hidden @ down).reduce_scatter() + x, total=gathered.relu().total(), all=gathered)


CASES = {"attention_output": attention_output, "adam": adam, "between_layers": between_layers}


def inputs_of(program: Program, size: int) -> dict[str, Everywhere]:
    """Random inputs on every rank; those that all have alike are alike."""
    given: dict[str, Everywhere] = {}
    for number, node in enumerate(n for n in program.nodes if n.operation == "input"):
        drawn = torch.Generator().manual_seed(number)

        def random(rows: int, columns: int, drawn: torch.Generator = drawn) -> Tensor:
            return torch.rand(rows, columns, generator=drawn, dtype=torch.float64) + 0.1

        if node.layout == "local":
            given[node.name] = [random(node.rows, node.columns) for _ in range(size)]
        else:
            whole = random(node.rows, node.columns)
            given[node.name] = chunks(whole, size) if node.layout == "sliced" else [whole] * size
    return given


def rewritten(program: Program, most: int) -> Iterator[tuple[tuple[str, ...], Program]]:
    """Programs that splits and reorders come to, each also with stages, one after the other; and the steps to it."""
    reached: dict[str, tuple[Program, tuple[str, ...]]] = {program.to_text(): (program, ())}
    queue: list[tuple[Program, tuple[str, ...]]] = [(program, ())]
    while queue:
        current, steps = queue.pop(0)
        yield steps, current
        for step, staged in _staged(current):
            yield (*steps, step), staged
            for another, twice in list(_staged(staged))[:2]:
                yield (*steps, step, another), twice
        for step, following in _rewritten(current):
            if following.to_text() not in reached and len(reached) < most:
                reached[following.to_text()] = (following, (*steps, step))
                queue.append((following, (*steps, step)))
