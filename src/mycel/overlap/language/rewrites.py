"""Rewrites that keep what a program computes: ``split``, ``reorder``, ``fuse``, ``overlap``.

Each looks at what has to hold for it and refuses otherwise, saying why; the program that comes of it is checked as
every program is. Sums may be formed in another order, nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mycel.errors import UsageError
from mycel.overlap.language.program import Node, Program, Stage, row_wise

__all__ = ["fuse", "overlap", "reorder", "split"]


def split(program: Program, name: str) -> Program:
    """An all_reduce becomes a reduce_scatter and an all_gather.

    Args:
        program: with the all_reduce, which is in no stage.
        name: of it; the all_gather keeps it.

    Raises:
        UsageError: it is something else, or in a stage.

    Examples:
        >>> from mycel.overlap.language import Writer
        >>> write = Writer()
        >>> program = write.finish(y=write.local("x", 8, 4).all_reduce())
        >>> print(split(program, "all_reduce_1").to_text().splitlines()[1])
        all_reduce_1_slices = reduce_scatter(x): sliced 8 x 4
    """
    node = _free(program, name)
    if node.operation != "all_reduce":
        raise UsageError(f"split: {name} is {node.operation}; an all_reduce can be split")
    slices = replace(node, name=_new(program, f"{name}_slices"), operation="reduce_scatter", layout="sliced")
    gather = replace(node, operation="all_gather", inputs=(slices.name,))
    return _with(program, {name: (slices, gather)})


def reorder(program: Program, name: str) -> Program:
    """What is done to gathered rows is done to slices, and its result is gathered: ``f(all_gather(x))`` becomes
    ``all_gather(f(x))``. Other inputs that all ranks have in whole are sliced. A slice of gathered rows is what was
    gathered.

    Args:
        program: with the operation.
        name: of the operation; the new all_gather keeps it. A total needs none.

    Raises:
        UsageError: it takes nothing that is gathered, needs more than one row at a time, or is in a stage.

    Examples:
        >>> from mycel.overlap.language import Writer
        >>> write = Writer()
        >>> program = write.finish(y=write.sliced("x", 8, 4).all_gather().relu())
        >>> print(reorder(program, "relu_1").to_text())
        x = input: sliced 8 x 4
        relu_1_slices = relu(x): sliced 8 x 4
        relu_1 = all_gather(relu_1_slices): replicated 8 x 4
        -> y = relu_1
    """
    node = _free(program, name)
    if node.operation == "slice" and program.node(node.inputs[0]).operation == "all_gather":
        return _instead(program, name, program.node(node.inputs[0]).inputs[0])
    if not row_wise(node.operation) and node.operation != "total":
        raise UsageError(f"reorder: {name} is {node.operation}, which needs more than a row at a time")
    inputs = [program.node(i) for i in node.inputs]
    if not any((i.operation == "all_gather" and i.rows == node.rows) or _is_total_of(node, i) for i in inputs):
        raise UsageError(f"reorder: {name} takes nothing that was gathered")
    made: list[Node] = []
    taken: list[str] = []
    for given in inputs:
        if given.rows == 1 and node.rows != 1:
            taken.append(given.name)  # a row for all rows
        elif given.operation == "all_gather":
            taken.append(given.inputs[0])
        elif given.layout == "replicated":
            known = next((m for m in made if m.inputs == (given.name,)), None)
            if known is None:
                known = replace(
                    given,
                    name=_new(program, f"{given.name}_slice_for_{name}"),
                    operation="slice",
                    inputs=(given.name,),
                    layout="sliced",
                    number=0.0,
                    seed=0,
                )
                made.append(known)
            taken.append(known.name)
        else:
            raise UsageError(f"reorder: {name} takes {given.name}, which is {given.layout}")
    if node.operation == "total":
        return _without_unused(_with(program, {name: (*made, replace(node, inputs=tuple(taken)))}))
    slices = replace(node, name=_new(program, f"{name}_slices"), inputs=tuple(taken), layout="sliced")
    gather = replace(node, operation="all_gather", inputs=(slices.name,), number=0.0, seed=0)
    return _without_unused(_with(program, {name: (*made, slices, gather)}))


def fuse(program: Program, names: Sequence[str]) -> Program:
    """Nodes run together: what is done to rows is done where they arrive, before they are sent on.

    A stage is ``matmul`` or nothing, then a ``reduce_scatter``, then operations on its slices, then an ``all_gather``
    of their last result or nothing; or an ``all_gather`` and the ``matmul`` of its rows; or a ``matmul`` and its
    ``all_reduce``.

    Args:
        program: with the nodes, which are in no stage.
        names: of the nodes, in any order.

    Raises:
        UsageError: they are no such stage.

    Examples:
        >>> from mycel.overlap.language import Writer
        >>> write = Writer()
        >>> program = write.finish(y=write.local("x", 8, 4).reduce_scatter().relu().all_gather())
        >>> fused = fuse(program, ["reduce_scatter_1", "relu_1", "all_gather_1"])
        >>> print(fused.to_text().splitlines()[-1])
        fuse(reduce_scatter_1, relu_1, all_gather_1)
    """
    return _staged(program, names, 1, "fuse")


def overlap(program: Program, names: Sequence[str], tiles: int) -> Program:
    """A stage runs in tiles, each of which travels while others are computed.

    Args:
        program: with the nodes; a stage of exactly these becomes one of more tiles.
        names: of the nodes, in any order, as for ``fuse``.
        tiles: how many, two or more.

    Raises:
        UsageError: they are no stage, or there are not several tiles.

    Examples:
        >>> from mycel.overlap.language import Writer
        >>> write = Writer()
        >>> program = write.finish(y=(write.local("x", 8, 4) @ write.local("w", 4, 4)).all_reduce())
        >>> print(overlap(program, ["matmul_1", "all_reduce_1"], 2).to_text().splitlines()[-1])
        overlap(matmul_1, all_reduce_1) in 2 tiles
    """
    if tiles < 2:
        raise UsageError(f"overlap: {tiles} tiles; two at least, and fuse() for one")
    kept = tuple(stage for stage in program.stages if set(stage.nodes) != set(names))
    return _staged(replace(program, stages=kept), names, tiles, "overlap")


def _staged(program: Program, names: Sequence[str], tiles: int, what: str) -> Program:
    nodes = [node for node in program.nodes if node.name in set(names)]
    if len(nodes) != len(set(names)):
        missing = [n for n in names if all(node.name != n for node in nodes)]
        raise UsageError(f"{what}: no node {missing[0]!r}")
    for node in nodes:
        _free(program, node.name)
    why = not_a_stage(program, nodes)
    if why:
        raise UsageError(f"{what}({', '.join(n.name for n in nodes)}): {why}")
    stage = Stage(nodes=tuple(node.name for node in nodes), tiles=tiles)
    return _together(replace(program, stages=(*program.stages, stage)), stage)


def not_a_stage(program: Program, nodes: Sequence[Node]) -> str:
    """Why nodes cannot run together; nothing if they can."""
    slices = [node for node in nodes if node.operation == "slice"]
    names = {node.name for node in nodes}
    rest = [node for node in nodes if node.operation != "slice"]
    kinds = [node.operation for node in rest]
    if len(nodes) < 2:
        return "a stage has two nodes at least"
    if not slices and kinds == ["all_gather", "matmul"]:
        return "" if nodes[1].inputs[0] == nodes[0].name else f"{nodes[1].name} does not multiply what is gathered"
    if not slices and kinds == ["matmul", "all_reduce"]:
        return _alone(program, nodes[0], nodes[1])
    product = rest.pop(0) if kinds[:1] == ["matmul"] else None
    scatter = rest.pop(0) if rest and rest[0].operation == "reduce_scatter" else None
    if scatter is None:
        return "a reduce_scatter comes first, or after the product"
    if product is not None and (why := _alone(program, product, scatter)):
        return why
    gather = rest.pop() if rest and rest[-1].operation == "all_gather" else None
    arrived = {scatter.name}
    for node in rest:
        if not row_wise(node.operation) or node.layout != "sliced":
            return f"{node.name} is {node.operation}, which needs more than the rows that arrive"
        arrived.add(node.name)
    if gather is not None and gather.inputs[0] not in arrived:
        return f"{gather.name} gathers what does not come of {scatter.name}"
    for node in slices:
        if any(user.name not in names for user in program.users(node.name)):
            return f"{node.name} is used elsewhere"
    inside = {scatter.name} | {node.name for node in rest}
    for node in rest:
        if not inside & set(node.inputs):
            return f"{node.name} takes nothing that arrives"
    return ""


def _alone(program: Program, product: Node, collective: Node) -> str:
    if collective.inputs != (product.name,):
        return f"{collective.name} does not take {product.name}"
    if len(program.users(product.name)) > 1 or program.is_output(product.name):
        return f"{product.name} is used elsewhere, and does not exist as a whole in tiles"
    return ""


def _together(program: Program, stage: Stage) -> Program:
    """The program with a stage's nodes beside each other: behind all that they take, before all that takes them.

    Raises:
        UsageError: something stands between that takes from the stage and gives to it.
    """
    members = set(stage.nodes)
    after: set[str] = set()  # takes something of the stage
    before: list[Node] = []
    behind: list[Node] = []
    inside: list[Node] = []
    for node in program.nodes:
        depends = any(i in members or i in after for i in node.inputs)
        if node.name in members:
            if any(i in after for i in node.inputs):
                raise UsageError(f"{node.name} takes what is made of its own stage outside of it")
            inside.append(node)
        elif depends:
            after.add(node.name)
            behind.append(node)
        else:
            before.append(node)
    return replace(program, nodes=(*before, *inside, *behind))


def _free(program: Program, name: str) -> Node:
    node = program.node(name)
    if (stage := program.stage_of(name)) is not None:
        raise UsageError(f"{name} is in a stage already, with {', '.join(n for n in stage.nodes if n != name)}")
    return node


def _is_total_of(node: Node, given: Node) -> bool:
    return node.operation == "total" and given.operation == "all_gather"


def _with(program: Program, instead: dict[str, tuple[Node, ...]]) -> Program:
    nodes = [new for node in program.nodes for new in instead.get(node.name, (node,))]
    return replace(program, nodes=tuple(nodes))


def _instead(program: Program, name: str, other: str) -> Program:
    """Another result in place of one, which is left out."""
    nodes = tuple(
        replace(node, inputs=tuple(other if i == name else i for i in node.inputs))
        for node in program.nodes
        if node.name != name
    )
    outputs = tuple((output, other if of == name else of) for output, of in program.outputs)
    return _without_unused(replace(program, nodes=nodes, outputs=outputs))


def _without_unused(program: Program) -> Program:
    """Gathers that nobody takes any more are left out; inputs stay."""
    while True:
        unused = [
            n.name
            for n in program.nodes
            if n.operation != "input"
            and not program.users(n.name)
            and not program.is_output(n.name)
            and program.stage_of(n.name) is None
        ]
        if not unused:
            return program
        program = replace(program, nodes=tuple(n for n in program.nodes if n.name not in unused))


def _new(program: Program, name: str) -> str:
    taken = {node.name for node in program.nodes}
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found
