"""``compile_pass``: pairs of a product and a collective in compiled graphs, replaced where that pays.

Torch's compiler fuses such pairs on GPUs alone; on processors its micro-pipelining returns without a word. This pass
runs after all of torch's on the graph of every forward and backward. It decides by the model of cost, with rates that
were agreed on by all ranks when the pass was made, so that all ranks replace the same pairs.

Results keep their bits. A product of few rows may be summed in another order than one of many: MKL's is, with 1,024
inner elements and up to 160 rows. So a rank multiplies both ways before it takes a pair's place; where bits differ,
rows still travel in as many tiles as all ranks agreed on, but this rank multiplies them at once.
"""

from __future__ import annotations

import logging
import operator as operators
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from mycel.comm.handle import Handle
from mycel.comm.start import group_or_all
from mycel.errors import UsageError
from mycel.overlap.graph_operators import gather_matmul, gather_matmul_keep, matmul_scatter
from mycel.overlap.rates import Network, Products, group_rates
from mycel.overlap.rows import cut
from mycel.overlap.tiling import Operator, Shape, Tiling, choose_tiling
from mycel.units import format_seconds

__all__ = ["CompilePass", "Found", "compile_pass"]

_log = logging.getLogger(__name__)
_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
#: Part of the plain pair's time that tiles have to save by the model. Compiled programs lose nothing in one tile.
_WORTH = 0.04
#: Seconds that they have to save at least. Measured on CPUs: pairs of 4 to 8 ms that should save 0.3 to 1.3 ms lose
#: up to 0.9, since threads that hand small tiles to each other wait longer than the model knows.
_LEAST_S = 1.5e-3
#: Where torch says what passes run at the end.
_HOOK = "post_grad_custom_post_pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A collective of a compiled graph, and what became of it.

    Attributes:
        collective: ``all_gather`` or ``reduce_scatter``.
        tiling: of the pair that it is part of; ``None``: it is part of none.
        is_replaced: whether that pair was.
        reason: why not.
        at_once: its rows travel in tiles, but are multiplied at once, since tiles have other bits.
    """

    collective: str
    tiling: Tiling | None
    is_replaced: bool
    reason: str = ""
    at_once: bool = False

    def explain(self) -> str:
        """In a line."""
        what = self.collective if self.tiling is None else self.tiling.explain()
        what += "; multiplied at once: products of a tile have other bits" * self.at_once
        return f"replaced: {what}" if self.is_replaced else f"left alone, {self.reason}: {what}"


class CompilePass(Handle, CustomGraphPass):
    """Made by ``compile_pass``; at work on graphs that are compiled until ``close()``.

    Attributes:
        found: collectives of all graphs so far, in the order in which they were compiled.

    Examples:
        On every rank::

            with compile_pass() as overlapped:
                step = torch.compile(model)
                step(x).sum().backward()
            print(overlapped.explain())
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], dtypes: Sequence[torch.dtype], tiles: int | None = None
    ) -> None:
        self.found: list[Found] = []
        self._other_bits: dict[tuple[object, ...], bool] = {}
        self._tiles = tiles
        self._rates: dict[tuple[str, torch.dtype], tuple[Products, Network]] = {}
        for group in groups:
            for dtype in dtypes if dist.get_world_size(group) > 1 and tiles is None else ():
                self._rates[group.group_name, dtype] = group_rates(group, dtype, torch.device("cpu"))
        self._uuid = uuid.uuid4().hex
        config: Any = torch._inductor.config
        self._before = getattr(config, _HOOK)
        setattr(config, _HOOK, self)

    def close(self) -> None:
        """Leave graphs that are compiled from now on alone."""
        config: Any = torch._inductor.config
        if getattr(config, _HOOK) is self:
            setattr(config, _HOOK, self._before)

    def uuid(self) -> str:
        """Another one for every pass: what it decides depends on rates that were measured."""
        return self._uuid

    def explain(self) -> str:
        """A line for every collective."""
        return "\n".join(found.explain() for found in self.found) or "no collective was compiled"

    def __call__(self, graph: Graph) -> None:
        """Replace pairs of a graph. Torch's compiler calls it.

        Args:
            graph: after all of torch's own passes.
        """
        for earlier in self._before if isinstance(self._before, (list, tuple)) else [self._before]:
            if earlier is not None:
                earlier(graph)
        for node in [n for n in graph.nodes if n.op == "call_function"]:
            if node.target is _c10d.all_gather_into_tensor.default:
                self._say(self._gather(graph, node))
            elif node.target is _c10d.reduce_scatter_tensor.default:
                self._say(self._scatter(graph, node))

    def _say(self, found: Found) -> None:
        self.found.append(found)
        _log.info("%s", found.explain())

    def _plan(
        self, operator: Operator, sizes: tuple[int, int, int], like: torch.Tensor, name: str, ranks: int
    ) -> Any:
        """A tiling, or why there is none."""
        if not all(isinstance(size, int) for size in sizes):
            return "its sizes are not known when it is compiled"
        rates = self._rates.get((name, like.dtype))
        if rates is None and self._tiles is None:
            return f"nothing was measured of its group with {like.dtype}: name both to compile_pass"
        shape = Shape(
            operator=operator,
            rows=sizes[0],
            inner=sizes[1],
            columns=sizes[2],
            item_bytes=like.dtype.itemsize,
            num_ranks=ranks,
        )
        if self._tiles is not None or rates is None:
            return Tiling(shape=shape, tiles=self._tiles or 1, is_given=True)
        return choose_tiling(shape, *rates)

    def _judge(self, collective: str, tiling: Any) -> Found | None:
        """What to say of a pair that is left alone; ``None``: it pays."""
        if not isinstance(tiling, Tiling):
            return Found(collective=collective, tiling=None, is_replaced=False, reason=tiling)
        if tiling.is_given:
            return None
        saves_s = tiling.plain_s - tiling.chosen_s
        if tiling.tiles == 1 or saves_s < max(_WORTH * tiling.plain_s, _LEAST_S):
            saved = format_seconds(max(0.0, tiling.plain_s - min(s for _, s in tiling.seconds)))
            return Found(
                collective=collective, tiling=tiling, is_replaced=False, reason=f"it does not pay (saves {saved})"
            )
        return None

    def _at_once(self, tiling: Tiling, rows: torch.Tensor, weight: Node, bias: Any) -> bool:
        """Whether products in tiles would have other bits here than those of all rows."""
        like = weight.meta["val"]
        key = (tiling.shape, tiling.tiles, rows.dtype, rows.stride(), like.stride(), bias is None)
        if key not in self._other_bits:
            self._other_bits[key] = _has_other_bits(tiling, rows, like, bias is not None)
        return self._other_bits[key]

    def _gather(self, graph: Graph, node: Node) -> Found:
        name = "all_gather"
        arguments: Any = node.args
        rows, ranks, group_name = arguments
        wait = _only_user(node, _c10d.wait_tensor.default)
        if wait is None:
            return Found(collective=name, tiling=None, is_replaced=False, reason="it is not awaited at once")
        pairs = [(user, flat) for flat in _flattened(wait) for user in flat.users if _operands(user)[0] is flat]
        if not pairs:
            return Found(collective=name, tiling=None, is_replaced=False, reason="no product takes its rows")
        product, flat = max(pairs, key=lambda p: _columns(p[0]) if isinstance(_columns(p[0]), int) else 0)
        _, weight, bias = _operands(product)
        if product.kwargs or not _can_hoist([weight, bias], wait):
            return Found(collective=name, tiling=None, is_replaced=False, reason="its product cannot be moved to it")
        whole = flat.meta["val"]
        num_rows, inner = whole.shape
        tiling = self._plan("all_gather_matmul", (num_rows, inner, _columns(product)), whole, group_name, ranks)
        if (left := self._judge(name, tiling)) is not None:
            return left
        at_once = self._at_once(tiling, whole, weight, bias)
        _hoist(graph, [weight, bias], wait)
        is_kept = len(wait.users) > 1 or len(flat.users) > 1
        with graph.inserting_before(wait):
            sent = _reshaped(graph, rows, (num_rows // ranks, inner))
            target = gather_matmul_keep if is_kept else gather_matmul
            decided = (ranks, group_name, tiling.tiles, at_once)
            made = graph.call_function(_overload(target), (sent, weight, bias, *decided))
            if is_kept:
                pair = (product.meta["val"], whole)
                made.meta = {"val": pair}
                fused, gathered = (graph.call_function(operators.getitem, (made, i)) for i in range(2))
                fused.meta, gathered.meta = {"val": pair[0]}, {"val": pair[1]}
                gathered = _reshaped(graph, gathered, tuple(wait.meta["val"].shape))
            else:
                fused, gathered = made, None
                made.meta = {"val": product.meta["val"]}
        product.replace_all_uses_with(fused)
        graph.erase_node(product)
        if flat is not wait and not flat.users:
            graph.erase_node(flat)
        if gathered is not None:
            wait.replace_all_uses_with(gathered)
        graph.erase_node(wait)
        graph.erase_node(node)
        return Found(collective=name, tiling=tiling, is_replaced=True, at_once=at_once)

    def _scatter(self, graph: Graph, node: Node) -> Found:
        name = "reduce_scatter"
        arguments: Any = node.args
        product, operation, ranks, group_name = arguments
        wait = _only_user(node, _c10d.wait_tensor.default)
        if wait is None:
            return Found(collective=name, tiling=None, is_replaced=False, reason="it is not awaited at once")
        viewed = product
        if product.target in _RESHAPES and product.args[0].meta["val"].shape[-1] == product.meta["val"].shape[-1]:
            product = product.args[0]
        x, weight, bias = _operands(product)
        if x is None or product.kwargs or operation != "sum":
            return Found(collective=name, tiling=None, is_replaced=False, reason="it is no sum of a product")
        if len(product.users) > 1 or len(viewed.users) > 1:
            return Found(collective=name, tiling=None, is_replaced=False, reason="its product is used elsewhere")
        left, whole = x.meta["val"], product.meta["val"]
        tiling = self._plan("matmul_reduce_scatter", (*left.shape, whole.shape[1]), left, group_name, ranks)
        if (said := self._judge(name, tiling)) is not None:
            return said
        at_once = self._at_once(tiling, left, weight, bias)
        with graph.inserting_before(wait):
            decided = (ranks, group_name, tiling.tiles, at_once)
            fused = graph.call_function(_overload(matmul_scatter), (x, weight, bias, *decided))
            fused.meta = {"val": whole.new_empty(whole.shape[0] // ranks, whole.shape[1])}
            summed = _reshaped(graph, fused, tuple(wait.meta["val"].shape))
        wait.replace_all_uses_with(summed)
        for old in dict.fromkeys((wait, node, viewed, product)):
            graph.erase_node(old)
        return Found(collective=name, tiling=tiling, is_replaced=True, at_once=at_once)


def compile_pass(
    groups: Sequence[dist.ProcessGroup] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    *,
    tiles: int | None = None,
) -> CompilePass:
    """Have ``torch.compile`` overlap products and collectives on processors, from now on until ``close()``.

    All ranks of the groups call it: rates of their products are measured.

    Args:
        groups: whose collectives are looked at; all ranks' if not given.
        dtypes: of products.
        tiles: replace every pair, in so many tiles, whether that pays or not.

    Returns:
        What says of every collective whether it was replaced, and why not.

    Raises:
        UsageError: this torch has no place for such a pass.

    Examples:
        On every rank::

            overlapped = compile_pass([mesh.get_group("tensor")])
            compiled = torch.compile(block)
            compiled(x)
            print(overlapped.explain())
    """
    import torch._inductor.config as config

    if not hasattr(config, _HOOK):
        raise UsageError(f"torch {torch.__version__} has no {_HOOK}; releases from 2.11 to 2.13 are known to have it")
    chosen = [group_or_all(None, "compile_pass")] if groups is None else list(groups)
    return CompilePass(chosen, dtypes, tiles)


@torch.no_grad()
def _has_other_bits(tiling: Tiling, rows: torch.Tensor, weight: torch.Tensor, has_bias: bool) -> bool:
    """Whether products of the rows of a rank, or of a tile of them, differ from the same rows of the whole product.

    Args:
        tiling: how many tiles.
        rows, weight: as the graph knows them: their sizes, layouts and type.
        has_bias: whether one is added.
    """
    with unset_fake_temporarily():
        left, right = (_random(t.shape, t.stride(), t.dtype) for t in (rows, weight))
        bias = _random(right.shape[1:], (1,), right.dtype) if has_bias else None

        def product(begin: int, stop: int) -> torch.Tensor:
            return torch.mm(left[begin:stop], right) if bias is None else torch.addmm(bias, left[begin:stop], right)

        whole, own = product(0, len(left)), len(left) // tiling.shape.num_ranks
        lengths = {own, *cut(own, tiling.tiles)} - {0}
        return any(not torch.equal(product(0, length), whole[:length]) for length in lengths)


def _random(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
    generator = torch.Generator().manual_seed(0)  # the program's own numbers stay what they would have been
    return made.copy_(torch.randn(tuple(shape), generator=generator).to(dtype))


def _only_user(node: Node, target: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


#: The same rows, with other leading dimensions.
_RESHAPES = (_aten.view.default, _aten.reshape.default)


def _flattened(rows: Node) -> list[Node]:
    """Rows as matrices: themselves, or views of them whose last dimension is theirs."""
    width = rows.meta["val"].shape[-1]
    views = [n for n in rows.users if n.target in _RESHAPES]
    return [n for n in (rows, *views) if n.meta["val"].dim() == 2 and n.meta["val"].shape[-1] == width]


def _reshaped(graph: Graph, node: Any, shape: tuple[int, ...]) -> Node:
    """The same elements in another shape; the node itself where it has that."""
    value = node.meta["val"]
    if tuple(value.shape) == shape:
        return node  # type: ignore[no-any-return]
    made = graph.call_function(_aten.reshape.default, (node, list(shape)))
    made.meta = {"val": value.reshape(shape)}
    return made


def _operands(node: Node) -> tuple[Any, Any, Any]:
    """What a product multiplies from the left and the right, and the row that it adds; nothing of what is none."""
    arguments: Any = node.args
    if node.target is _aten.mm.default:
        return arguments[0], arguments[1], None
    if node.target is _aten.addmm.default:
        bias, left, right = arguments
        if isinstance(bias, Node) and bias.meta["val"].dim() == 1:
            return left, right, bias
    return None, None, None


def _columns(product: Node) -> Any:
    return product.meta["val"].shape[1]


def _later(nodes: Sequence[object], place: Node) -> Iterator[Node]:
    """Nodes that some others are made of and that stand behind a place, the last ones first."""
    behind: set[Node] = set()
    node = place
    while node.op != "root":
        behind.add(node)
        node = node.next
    seen: list[Node] = [n for n in nodes if isinstance(n, Node) and n in behind]
    found: set[Node] = set()
    while seen:
        last = seen.pop()
        if last not in found:
            found.add(last)
            seen.extend(n for n in last.all_input_nodes if n in behind)
    order = {n: i for i, n in enumerate(_from(place))}
    yield from sorted(found, key=order.__getitem__, reverse=True)


def _from(place: Node) -> Iterator[Node]:
    node = place
    while node.op != "root":
        yield node
        node = node.next


#: Operators that only look at memory in another way: to do so earlier changes nothing.
_VIEWS = (_aten.permute.default, _aten.view.default, _aten.t.default, _aten.transpose.int, _aten.slice.Tensor)


def _can_hoist(nodes: Sequence[object], place: Node) -> bool:
    """Whether nodes can stand before a place: nothing but views of what stands there already is behind it."""
    return all(n is not place and n.op == "call_function" and n.target in _VIEWS for n in _later(nodes, place))


def _hoist(graph: Graph, nodes: Sequence[object], place: Node) -> None:
    for node in reversed(list(_later(nodes, place))):
        place.prepend(node)


def _overload(operator: Any) -> Any:
    return operator._opoverload
