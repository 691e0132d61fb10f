"""Rows of FSDP units: what lies where, and what becomes of it in bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.data_parallel.compress import TAGC, Cast, Compressor, Context, Quantised, ShiftedLattice, TopK
from mycel.data_parallel.fsdp.layout import Segment, layout_of, rows_of, whole_of
from mycel.data_parallel.fsdp.route import nodes_between
from mycel.data_parallel.fsdp.rows import RowCodec
from mycel.errors import UsageError
from mycel.topology.builders import ring, two_boxes
from mycel.topology.model import Link, Topology, Vertex


def segment(name: str, shape: tuple[int, ...], num_rows: int, *, dim: int = 0, trainable: bool = True) -> Segment:
    shard = (*shape[:dim], -(-shape[dim] // num_rows), *shape[dim + 1 :])
    numel = torch.Size(shard).numel()
    return Segment(name=name, numel=numel, shape=shape, shard_shape=shard, shard_dim=dim, trainable=trainable)


@given(shape=st.lists(st.integers(1, 7), min_size=1, max_size=3), num_rows=st.integers(1, 5), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_parameter_comes_back_from_its_rows(shape: list[int], num_rows: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    part = segment("w", tuple(shape), num_rows, dim=dim)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    rows = rows_of(whole, part, num_rows)
    assert rows.shape == (num_rows, part.numel)
    assert torch.equal(whole_of(rows, part), whole)


def test_rows_without_some_gradients_are_recognised_where_that_is_possible() -> None:
    frozen = segment("frozen", (9, 9), 1, trainable=False)
    parts = (segment("a", (4, 2), 1), frozen, segment("b", (3,), 1), segment("c", (3,), 1))
    assert [s.name for s in layout_of(parts, 14) or ()] == ["a", "b", "c"]
    assert [s.name for s in layout_of(parts, 8) or ()] == ["a"]
    assert layout_of(parts, 11) is None  # with b or with c
    assert layout_of(parts, 7) is None


def codec_of(*compressors: Compressor | None, dtype: torch.dtype = torch.float32) -> tuple[RowCodec, torch.Tensor]:
    """A row of a vector, matrices of these compressors with the vector between, and another vector."""
    parts = [segment("norm", (5,), 1)]
    chosen: list[Compressor | None] = [None]
    for number, compressor in enumerate(compressors):
        parts += [segment(f"w{number}", (24, 16), 1), segment(f"b{number}", (3,), 1)]
        chosen += [compressor, None]
    row = torch.randn(sum(s.numel for s in parts), generator=torch.Generator().manual_seed(0)).to(dtype)
    return RowCodec(parts, chosen, dtype), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_come_back_exactly_and_matrices_nearly(dtype: torch.dtype) -> None:
    lattice = ShiftedLattice(8, bucket_size=64)
    codec, row = codec_of(lattice, lattice, None, dtype=dtype)
    payload = codec.encode(row, Context(name="unit"))
    assert len(payload) == codec.num_bytes
    assert codec.exact_bytes == (5 + 3 * 3 + 24 * 16) * dtype.itemsize
    found = torch.empty_like(row)
    codec.decode(payload, found, Context(name="unit"))
    exact = torch.ones(len(row), dtype=torch.bool)
    for begin in (5, 5 + 384 + 3):
        exact[begin : begin + 384] = False
    assert torch.equal(found[exact], row[exact])
    assert 0 < float((found - row).abs().max()) < 0.05


@pytest.mark.parametrize("compressor", [Quantised(8), Cast(torch.bfloat16), TopK(0.2), TAGC(2.0)])
def test_several_payloads_add_up(compressor: Compressor) -> None:
    codec, row = codec_of(compressor, compressor)
    contexts = [Context(name="unit", rank=rank, world_size=3) for rank in range(3)]
    rows = [row * (rank + 1) for rank in range(3)]
    payloads = [codec.encode(r, c) for r, c in zip(rows, contexts, strict=True)]
    together, apart = torch.zeros(len(row)), torch.zeros(len(row))
    codec.add(payloads, together, contexts)
    for payload, context in zip(payloads, contexts, strict=True):
        codec.add([payload], apart, [context])
    assert torch.allclose(together, apart, atol=1e-4)
    assert torch.allclose(together[:5], 6 * row[:5])
    assert float((together - 6 * row).norm()) < float((6 * row).norm())


def test_a_row_in_a_wider_type_travels_in_the_codecs() -> None:
    codec, row = codec_of(Quantised(8), dtype=torch.bfloat16)
    payload = codec.encode(row.float(), Context(name="unit"))
    assert len(payload) == codec.num_bytes
    found = torch.zeros(len(row))
    codec.add([payload], found, [Context(name="unit")])
    assert torch.equal(found[:5], row[:5].float())


def test_rows_of_vectors_and_of_nothing() -> None:
    codec, row = codec_of()
    assert codec.num_bytes == codec.exact_bytes == 20
    assert torch.equal(codec.encode(row, Context(name="unit")).view(torch.float32), row)
    assert RowCodec((), (), torch.float32).encode(torch.empty(0), Context(name="unit")).numel() == 0


def boxed(*names: str | None) -> Topology:
    vertices = [Vertex(kind="rank", label=f"r{i}", node=name) for i, name in enumerate(names)]
    hub = len(vertices)
    links = [Link(src=a, dst=b, capacity=1) for i in range(hub) for a, b in ((i, hub), (hub, i))]
    return Topology(
        name="boxed", unit="Mbit/s", vertices=(*vertices, Vertex(kind="switch", label="hub")), links=tuple(links)
    )


def test_nodes_are_taken_from_the_topology() -> None:
    assert nodes_between(two_boxes(num_ranks=8)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert nodes_between(boxed("a", "b", "a", "b")) == ((0, 2), (1, 3))
    for flat in (ring(num_ranks=4), boxed("a", "a"), boxed("a", "b"), boxed("a", "a", None, None)):
        assert nodes_between(flat) is None
    with pytest.raises(UsageError, match="nodes of 2, 1 ranks"):
        nodes_between(boxed("a", "a", "b"))
