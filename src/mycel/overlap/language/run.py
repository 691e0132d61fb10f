"""Runs a program on the ranks of a group, its stages in tiles; without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.meter import ByteMeter
from mycel.comm.pending import Pending
from mycel.comm.start import group_or_all
from mycel.errors import UsageError
from mycel.overlap.engine import gather_product, product_everywhere, product_scatter
from mycel.overlap.exchanges import Across, padded
from mycel.overlap.language.arithmetic import apply
from mycel.overlap.language.program import Node, Program, Stage
from mycel.overlap.rows import BlockTile, block_tiles

__all__ = ["run"]


@torch.no_grad()
def run(
    program: Program,
    inputs: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    meter: ByteMeter | None = None,
) -> dict[str, Tensor]:
    """What a program is for. All ranks of the group call it, with the same program.

    Args:
        program: on any number of ranks.
        inputs: by name: whole matrices where they are local or replicated, this rank's rows where they are sliced,
            as ``torch.chunk`` divides them.
        group: the ranks; all if not given.
        meter: counts bytes, as ``program``.

    Returns:
        By the outputs' names: whole matrices, or this rank's rows of sliced ones.

    Raises:
        UsageError: an input is missing, or of another shape.

    Examples:
        >>> from mycel.overlap.language import Writer
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> write = Writer()
        >>> program = write.finish(y=(write.local("x", 2, 2) @ write.local("w", 2, 2)).all_reduce() + 1.0)
        >>> run(program, {"x": torch.eye(2), "w": torch.ones(2, 2)})["y"].tolist()
        [[2.0, 2.0], [2.0, 2.0]]
        >>> dist.destroy_process_group()
    """
    group = group_or_all(group, "run")
    going = _Run(program, Across.of(group, "program", meter))
    for node in program.nodes:
        if node.operation == "input":
            going.take(node, inputs)
    done: set[str] = set()
    for node in program.nodes:
        if node.name in going.values or node.name in done:
            continue
        stage = program.stage_of(node.name)
        if stage is None:
            going.one(node)
        else:
            going.stage([program.node(name) for name in stage.nodes], stage)
            done |= set(stage.nodes)
    return {name: going.values[of] for name, of in program.outputs}


class _Run:
    """One run: what is there so far."""

    def __init__(self, program: Program, across: Across) -> None:
        self.program, self.across = program, across
        self.values: dict[str, Tensor] = {}

    def blocks(self, rows: int) -> tuple[int, ...]:
        """Rows of each rank."""
        each = -(-rows // self.across.size)
        return tuple(max(0, min(each, rows - rank * each)) for rank in range(self.across.size))

    def own(self, rows: int) -> tuple[int, int]:
        """This rank's rows of an array, from and to."""
        blocks = self.blocks(rows)
        begin = sum(blocks[: self.across.rank])
        return begin, begin + blocks[self.across.rank]

    def take(self, node: Node, inputs: Mapping[str, Tensor]) -> None:
        begin, stop = self.own(node.rows) if node.layout == "sliced" else (0, node.rows)
        given = inputs.get(node.name)
        if given is None:
            raise UsageError(f"run: no input {node.name!r}; there are {', '.join(inputs) or 'none'}")
        if given.shape != (stop - begin, node.columns):
            raise UsageError(
                f"run: input {node.name!r} has shape {list(given.shape)}, expected {[stop - begin, node.columns]} of "
                f"a {node.layout} matrix"
            )
        self.values[node.name] = given

    def one(self, node: Node) -> None:
        """A node by itself."""
        taken = [self.values[name] for name in node.inputs]
        if node.operation == "matmul":
            found = taken[0] @ taken[1]
        elif node.operation == "slice":
            begin, stop = self.own(node.rows)
            found = taken[0][begin:stop]
        elif node.operation == "all_reduce":
            found = self.across.total(taken[0].clone(memory_format=torch.contiguous_format)).wait()
        elif node.operation == "reduce_scatter":
            found = product_scatter(taken[0], None, self.across, rows=self.blocks(node.rows), tiles=1)
        elif node.operation == "all_gather":
            blocks = self.blocks(node.rows)
            arrived = self.across.gather(padded(taken[0], max(blocks))).wait()
            found = torch.cat([part[:count] for part, count in zip(arrived, blocks, strict=True)])
        elif node.operation == "total":
            found = taken[0].sum().reshape(1, 1)
            if self.program.node(node.inputs[0]).layout == "sliced":
                found = self.across.total(found).wait()
        else:
            begin, stop = self.own(node.rows) if node.layout == "sliced" else (0, node.rows)
            found = apply(node, taken, begin, stop)
        self.values[node.name] = found

    def stage(self, nodes: Sequence[Node], stage: Stage) -> None:
        """Nodes that run together; ``rewrites.not_a_stage`` says which can."""
        first, last = nodes[0], nodes[-1]
        if first.operation == "all_gather":
            x, weight = self.values[first.inputs[0]], self.values[last.inputs[1]]
            keep = self.program.is_output(first.name) or len(self.program.users(first.name)) > 1
            product, gathered = gather_product(
                x, weight, None, self.across, rows=self.blocks(first.rows), tiles=stage.tiles, keep=keep
            )
            self.values[last.name] = product
            if gathered is not None:
                self.values[first.name] = gathered
        elif last.operation == "all_reduce":
            x, weight = (self.values[name] for name in first.inputs)
            self.values[last.name] = product_everywhere(x.contiguous(), weight, self.across, tiles=stage.tiles)
        else:
            self.slices(nodes, stage.tiles)

    def slices(self, nodes: Sequence[Node], tiles: int) -> None:
        """Perhaps a product, a reduce_scatter, operations on its slices, perhaps an all_gather of the last one's."""
        product = next((node for node in nodes if node.operation == "matmul"), None)
        scatter = next(node for node in nodes if node.operation == "reduce_scatter")
        gather = nodes[-1] if nodes[-1].operation == "all_gather" else None
        work = [n for n in nodes if n not in (product, scatter, gather)]
        blocks = self.blocks(scatter.rows)
        tiles = 1 if self.across.size == 1 else tiles
        cuts = iter(block_tiles(blocks, tiles))
        names = {node.name for node in nodes}
        told = [n for n in work if n.layout == "sliced" and self._is_used_outside(n.name, names)]
        parts: dict[str, list[Tensor]] = {node.name: [] for node in told}
        gathers: list[tuple[BlockTile, Pending[Tensor]]] = []

        def finish(rows: Tensor, begin: int, stop: int) -> None:
            tile = self._tile(work, scatter, rows, begin, stop)
            for name, found in parts.items():
                found.append(tile[name])
            if gather is not None:
                cut = next(cuts)
                gathers.append((cut, self.across.gather(padded(tile[gather.inputs[0]], cut.most))))

        x = self.values[(product or scatter).inputs[0]]
        weight = None if product is None else self.values[product.inputs[1]]
        summed = product_scatter(x.contiguous(), weight, self.across, rows=blocks, tiles=tiles, finish=finish)
        self.values[scatter.name] = summed
        for name, found in parts.items():
            node = self.program.node(name)
            self.values[name] = torch.cat(found) if found else summed.new_empty(0, node.columns)
        if gather is not None:
            whole = summed.new_empty(gather.rows, gather.columns)
            for cut, pending in gathers:
                arrived = pending.wait()
                for rank, (start, count) in enumerate(zip(cut.starts, cut.counts, strict=True)):
                    whole[start : start + count] = arrived[rank, :count]
            self.values[gather.name] = whole

    def _tile(self, work: Sequence[Node], scatter: Node, rows: Tensor, begin: int, stop: int) -> dict[str, Tensor]:
        """What operations make of the rows that arrived; ``begin`` and ``stop`` count in this rank's slice."""
        offset = self.own(scatter.rows)[0]
        inside = {scatter.name: rows}
        for node in work:
            if node.operation == "slice":
                inside[node.name] = self.values[node.inputs[0]][offset + begin : offset + stop]
                continue
            taken = [self._rows(name, inside, begin, stop) for name in node.inputs]
            inside[node.name] = apply(node, taken, offset + begin, offset + stop)
        return inside

    def _rows(self, name: str, inside: Mapping[str, Tensor], begin: int, stop: int) -> Tensor:
        if name in inside:
            return inside[name]
        is_sliced = self.program.node(name).layout == "sliced"
        return self.values[name][begin:stop] if is_sliced else self.values[name]

    def _is_used_outside(self, name: str, inside: set[str]) -> bool:
        return self.program.is_output(name) or any(user.name not in inside for user in self.program.users(name))
