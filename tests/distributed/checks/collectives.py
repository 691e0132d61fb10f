"""What every rank runs for ``test_collectives.py``. Inputs follow from the rank, so that all ranks know all of them.

Functions return digests of the bits they got where all ranks must have got the same.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mycel.runtime import monitored_barrier
from mycel.runtime.job_ring import RING_CAPACITY

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
SIZES = (0, 1, 7, 1000, 300001)
OPS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")


def digest(*tensors: Tensor) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def given(rank: int, size: int, dtype: torch.dtype, op: str = "SUM", salt: int = 0) -> Tensor:
    """A rank's contribution; factors of a product are near one, so that no type overflows."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if not dtype.is_floating_point:
        bound = 3 if op == "PRODUCT" else 1000
        return torch.randint(-bound, bound + 1, (size,), generator=generator, dtype=dtype)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    if op == "PRODUCT":
        values = 1.0 + 0.1 * values.clamp(-3, 3)
    return values.to(dtype)


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """The reduction rank by rank in the parts' own type, as plain torch does it."""
    total = parts[0].clone()
    for part in parts[1:]:
        if op in ("SUM", "AVG"):
            total += part
        elif op == "PRODUCT":
            total *= part
        else:
            total = torch.maximum(total, part) if op == "MAX" else torch.minimum(total, part)
    if op == "AVG":
        total = total / len(parts) if total.is_floating_point() else total.div(len(parts), rounding_mode="trunc")
    return total


def reference(parts: list[Tensor], op: str) -> np.ndarray:
    """The reduction in 80-bit floats: a judge of float64 as well."""
    wide = np.stack([part.to(torch.float64).numpy() for part in parts]).astype(np.longdouble)
    if op == "PRODUCT":
        return wide.prod(axis=0)
    return wide.sum(axis=0) / (len(parts) if op == "AVG" else 1)


def assert_as_good_as_torch(ours: Tensor, parts: list[Tensor], op: str) -> None:
    """At most twice the error of plain torch in the same type; exact where nothing is rounded."""
    plain = reduced(parts, op)
    assert ours.dtype == plain.dtype
    case = f"{op} of {ours.numel()} elements of {ours.dtype} over {len(parts)} ranks"
    if op in ("MAX", "MIN") or not ours.is_floating_point():
        assert torch.equal(ours, plain), case
        return
    exact = reference(parts, op)
    error = np.abs(ours.to(torch.float64).numpy() - exact)
    allowed = np.abs(plain.to(torch.float64).numpy() - exact)
    if ours.numel() >= 1000:
        assert error.max() <= 2 * allowed.max(), case
        assert error.mean() <= 2 * allowed.mean(), case
    # So few elements may be exact by luck in torch's order of adding and not in ours: bound each by its roundings.
    magnitude = reference([part.abs() for part in parts], op)
    assert (error <= 1.01 * len(parts) * torch.finfo(ours.dtype).eps * magnitude).all(), case


def all_reduce(rank: int, size: int) -> list[str]:
    """Every type, operation and size; twice, with the same bits."""
    digests = []
    cases = [(n, dtype, op) for n in SIZES[:-1] for dtype in (*FLOATS, *INTEGERS) for op in OPS]
    # All ranks know all contributions: many large ones would take long where ranks are many.
    large = (*FLOATS, *INTEGERS) if size < 5 else (torch.float32, torch.bfloat16, torch.int64)
    cases += [(SIZES[-1], dtype, "SUM") for dtype in large] + [(SIZES[-1], torch.float32, "AVG")]
    for n, dtype, op in cases:
        parts = [given(r, n, dtype, op) for r in range(size)]
        results = []
        for _ in range(2):
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
            results.append(tensor)
        assert digest(results[0]) == digest(results[1]), (n, dtype, op)
        if n:
            assert_as_good_as_torch(results[0], parts, op)
        digests.append(digest(results[0]))
    return digests


def shapes(rank: int, size: int) -> list[str]:
    """Tensors that are no plain vectors: non-contiguous, of several dimensions, views that leave gaps."""
    base = given(rank, 35, torch.float32).view(5, 7)
    total = reduced([given(r, 35, torch.float32) for r in range(size)], "SUM").view(5, 7)
    turned = base.clone().t()
    dist.all_reduce(turned)
    torch.testing.assert_close(turned, total.t())
    wide = base.clone()
    dist.all_reduce(wide[:, ::2])
    torch.testing.assert_close(wide[:, ::2], total[:, ::2])
    assert torch.equal(wide[:, 1::2], base[:, 1::2]), "what lies between must stay"

    gathered = torch.empty(7 * size, 10).t()
    outputs = list(gathered.split(7, dim=1))
    source = torch.arange(70.0).view(7, 10).t() + rank
    dist.all_gather(outputs, source)
    for r in range(size):
        assert torch.equal(outputs[r], torch.arange(70.0).view(7, 10).t() + r)

    sent = base.clone().t() if rank == size - 1 else torch.zeros(7, 5)
    dist.broadcast(sent, size - 1)
    assert torch.equal(sent, given(size - 1, 35, torch.float32).view(5, 7).t())
    kept = torch.zeros(2, 3, 5).transpose(0, 2)
    whole = torch.ones(size * 5, 3, 2) * (rank + 1)
    dist.reduce_scatter_tensor(kept, whole)
    assert (kept == size * (size + 1) / 2).all()
    return [digest(turned), digest(gathered), digest(sent)]


def all_gather(rank: int, size: int) -> list[str]:
    """List, single-tensor and coalesced forms, in place and out of place; inputs stay as they were."""
    digests = []
    for n in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64):
            if n == SIZES[-1] and dtype not in (torch.float32, torch.uint8):
                continue
            parts = [given(r, n, torch.int64).to(dtype) for r in range(size)]
            expected = torch.cat(parts)
            mine = parts[rank].clone()
            outputs = [torch.zeros(n, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, mine)
            assert torch.equal(torch.cat(outputs), expected)
            whole = torch.zeros(n * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            assert torch.equal(whole, expected)
            assert torch.equal(mine, parts[rank])
            stacked = torch.zeros(size, n, dtype=dtype)
            dist.all_gather_into_tensor(stacked, mine)
            assert torch.equal(stacked.view(-1), expected)
            in_place = torch.zeros(n * size, dtype=dtype)
            own = in_place[rank * n : (rank + 1) * n]
            own.copy_(mine)
            dist.all_gather_into_tensor(in_place, own)
            assert torch.equal(in_place, expected)
            digests.append(digest(whole))
    with dist._coalescing_manager(async_ops=False):
        wholes = [torch.zeros(n * size) for n in (3, 1, 50)]
        for n, whole in zip((3, 1, 50), wholes, strict=True):
            dist.all_gather_into_tensor(whole, given(rank, n, torch.float32, salt=n))
    for n, whole in zip((3, 1, 50), wholes, strict=True):
        assert torch.equal(whole, torch.cat([given(r, n, torch.float32, salt=n) for r in range(size)]))
    return digests


def reduce_scatter(rank: int, size: int) -> None:
    """List, single-tensor and coalesced forms; inputs stay as they were."""
    for n in SIZES[:-1]:
        for dtype in (*FLOATS, *INTEGERS):
            for op in OPS if n == 1000 else ("SUM", "AVG"):
                check_reduce_scatter(rank, size, n, dtype, op)
    check_reduce_scatter(rank, size, 100003, torch.float32, "SUM")
    inputs = [given(rank, n * size, torch.float32, salt=n) for n in (3, 1, 50)]
    outputs = [torch.zeros(n) for n in (3, 1, 50)]
    with dist._coalescing_manager(async_ops=False):
        for source, target in zip(inputs, outputs, strict=True):
            dist.reduce_scatter_tensor(target, source)
    for n, target in zip((3, 1, 50), outputs, strict=True):
        parts = [given(r, n * size, torch.float32, salt=n)[rank * n : (rank + 1) * n] for r in range(size)]
        assert_as_good_as_torch(target, parts, "SUM")


def check_reduce_scatter(rank: int, size: int, n: int, dtype: torch.dtype, op: str) -> None:
    wholes = [given(r, n * size, dtype, op) for r in range(size)]
    mine = wholes[rank].clone()
    code = getattr(dist.ReduceOp, op)
    target = torch.zeros(n, dtype=dtype)
    dist.reduce_scatter_tensor(target, mine, op=code)
    again = torch.zeros(n, dtype=dtype)
    dist.reduce_scatter(again, [part.clone() for part in mine.split(n)] if n else [mine] * size, op=code)
    assert torch.equal(mine, wholes[rank]), "reduce_scatter must not touch its input"
    assert digest(target) == digest(again)
    if n:
        assert_as_good_as_torch(target, [whole[rank * n : (rank + 1) * n] for whole in wholes], op)
    own = mine[rank * n : (rank + 1) * n]
    dist.reduce_scatter_tensor(own, mine, op=code)
    assert digest(own) == digest(target), "in place"


def broadcast(rank: int, size: int) -> list[str]:
    """From every root, every kind of element, and barriers between."""
    digests = []
    for root in range(size):
        for n in SIZES if root == 0 else SIZES[:-1]:
            dtype = (torch.float32, torch.uint8, torch.bool, torch.int16)[root % 4]
            expected = given(root, n, torch.int64, salt=root).to(dtype)
            tensor = expected.clone() if rank == root else torch.zeros(n, dtype=dtype)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, expected)
            digests.append(digest(tensor))
        dist.barrier()
    return digests


def all_to_all(rank: int, size: int) -> None:
    """Every kind of element, in place, over itself, several dimensions."""
    for sent, expected in _to_exchange(rank, size):
        mine, came = sent.clone(), torch.zeros_like(sent)
        dist.all_to_all_single(came, mine)
        assert torch.equal(came, expected)
        assert torch.equal(mine, sent), "the input belongs to the caller"
        dist.all_to_all_single(mine, mine)
        assert torch.equal(mine, expected), "over itself"
    turned = torch.zeros(3, 2 * size).t()
    dist.all_to_all_single(turned, torch.full((2 * size, 3), float(rank)))
    assert torch.equal(turned, torch.arange(float(size)).repeat_interleave(2).view(-1, 1).expand(2 * size, 3))
    came = torch.zeros(size)
    work = dist.all_to_all_single(came, torch.full((size,), float(rank)), async_op=True)
    work.wait()
    assert came.tolist() == list(range(size))
    with pytest.raises(ValueError, match="divide by"):
        dist.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1))


def all_to_all_of_lists(rank: int, size: int) -> None:
    """One tensor for each rank, of every kind of element."""
    for sent, expected in _to_exchange(rank, size):
        if sent.numel():
            came = torch.zeros(size, sent.numel() // size, dtype=sent.dtype)
            dist.all_to_all(list(came), list(sent.view(size, -1)))
            assert torch.equal(came.view(-1), expected)
    with pytest.raises(ValueError, match=r"expected \d+ each"):
        dist.all_to_all([torch.zeros(1)] * size, [torch.zeros(1)] * (size - 1))


def _to_exchange(rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What this rank sends, and what it gets."""
    for n in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64):
            if n == SIZES[-1] and (dtype != torch.float32 or size > 4):
                continue
            wholes = [given(r, n * size, torch.int64, salt=n).to(dtype) for r in range(size)]
            yield wholes[rank], torch.cat([whole[rank * n : (rank + 1) * n] for whole in wholes])


def gather_and_scatter(rank: int, size: int) -> None:
    """To and from every root, every kind of element, lists of any shape."""
    for root in range(size):
        for n in SIZES if root == 0 else SIZES[:-1]:
            dtype = (torch.float32, torch.uint8, torch.bool, torch.int16, torch.complex64)[root % 5]
            parts = [given(r, n, torch.int64, salt=root).to(dtype) for r in range(size)]
            came = [torch.zeros(n, dtype=dtype) for _ in range(size)] if rank == root else None
            dist.gather(parts[rank].clone(), came, dst=root)
            assert came is None or all(torch.equal(a, b) for a, b in zip(came, parts, strict=True))
            kept = torch.zeros(n, dtype=dtype)
            dist.scatter(kept, [part.clone() for part in parts] if rank == root else None, src=root)
            assert torch.equal(kept, parts[rank])
    wide = torch.zeros(3, 4).t()
    work = dist.scatter(
        wide, [torch.full((4, 3), float(r)) for r in range(size)] if rank == 0 else None, src=0, async_op=True
    )
    work.wait()
    assert (wide == rank).all()
    if rank == 0:
        with pytest.raises(ValueError, match="tensor 0 has 3 elements"):
            dist.scatter(torch.zeros(2), [torch.zeros(3)] * size, src=0)


def reduce_to_root(rank: int, size: int) -> None:
    """To every root, several types; what the others gave stays theirs."""
    for root in range(size):
        for n in SIZES if root == 0 else SIZES[:-1]:
            dtype = (torch.float32, torch.int16, torch.float64, torch.uint8)[root % 4]
            parts = [(given(r, n, torch.int64, salt=root) % 13).to(dtype) for r in range(size)]
            tensor = parts[rank].clone()
            dist.reduce(tensor, dst=root)
            assert torch.equal(tensor, reduced(parts, "SUM") if rank == root else parts[rank])
    turned = torch.full((4, 3), rank + 1.0).t()
    dist.reduce(turned, dst=size - 1, op=dist.ReduceOp.MAX, async_op=True).wait()
    assert (turned == (size if rank == size - 1 else rank + 1)).all()


def bits_and_parts(rank: int, size: int) -> None:
    """Bitwise operations on every integer type and on bool; sums of complex numbers."""
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        parts = [
            (given(r, 77, torch.int64) % 2 if dtype == torch.bool else given(r, 77, torch.int64) % 128)
            for r in range(size)
        ]
        parts = [part.to(dtype) for part in parts]
        for name, combine in (("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or), ("BXOR", torch.bitwise_xor)):
            expected = functools.reduce(combine, parts)
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
            assert torch.equal(tensor, expected), (dtype, name)
    for dtype in (torch.complex64, torch.complex128):
        tensor = torch.full((7, 2), complex(rank, 1), dtype=dtype).t()
        dist.all_reduce(tensor)
        assert (tensor == complex(size * (size - 1) / 2, size)).all()
        whole = torch.full((size * 3,), complex(1, rank), dtype=dtype)
        shard = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter_tensor(shard, whole)
        assert (shard == complex(size, size * (size - 1) / 2)).all()
    with pytest.raises(ValueError, match="integers and bool"):
        dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.BOR)


def monitored(rank: int, size: int) -> None:
    """A monitored barrier passes, names the rank that does not come, and leaves the group usable."""
    monitored_barrier(timeout=timedelta(seconds=20))
    if rank != 1:
        with pytest.raises(RuntimeError, match="Rank 1 failed" if rank == 0 else ""):
            monitored_barrier(timeout=timedelta(seconds=0.5))
    dist.barrier()


def several_at_once(rank: int, size: int) -> list[str]:
    """Started together, waited for in another order, mixed with blocking ones; futures and callbacks."""
    tensors = [given(rank, n, torch.float32, salt=n) for n in (5, 70000, 1, 3000, 0, 12345)]
    expected = [
        reduced([given(r, n, torch.float32, salt=n) for r in range(size)], "SUM")
        for n in (5, 70000, 1, 3000, 0, 12345)
    ]
    works = [dist.all_reduce(t, async_op=True) for t in tensors[:4]]
    gathered = torch.zeros(size)
    gathering = dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), async_op=True)
    dist.all_reduce(tensors[4])
    works += [dist.all_reduce(tensors[5], async_op=True)]
    chained = works[-1].get_future().then(lambda f: [t.clone() for t in f.value()])
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
    gathering.wait()
    assert torch.equal(gathered, torch.arange(float(size)))
    for tensor, right in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, right)
    assert torch.equal(chained.wait()[0], tensors[5])

    many = [torch.full((10,), float(rank + i)) for i in range(300)]
    works = [dist.all_reduce(t, async_op=True) for t in many]
    for i, (work, tensor) in enumerate(zip(works, many, strict=True)):
        work.wait()
        assert (tensor == sum(r + i for r in range(size))).all()

    with dist._coalescing_manager(async_ops=True) as manager:
        pair = [torch.full((4,), float(rank)), torch.full((9,), float(rank))]
        for tensor in pair:
            dist.all_reduce(tensor)
    manager.wait()
    assert all((tensor == size * (size - 1) / 2).all() for tensor in pair)
    return [digest(*tensors), digest(*many)]


def uneven(rank: int, size: int) -> None:
    """Parts of different lengths, empty ones among them, in all_to_all, all_gather and reduce_scatter."""
    # Rank r gives (r * d + salt) % 5 rows to rank d.
    for salt, width, dtype in ((0, 1, torch.float32), (3, 7, torch.bfloat16), (1, 20000, torch.float32)):
        gives = [(rank * d + salt) % 5 for d in range(size)]
        gets = [(r * rank + salt) % 5 for r in range(size)]
        source = torch.full((sum(gives), width), float(rank), dtype=dtype)
        expected = torch.cat([torch.full((rows, width), float(r), dtype=dtype) for r, rows in enumerate(gets)])
        came = torch.zeros(sum(gets), width, dtype=dtype)
        dist.all_to_all_single(came, source, gets, gives)
        assert torch.equal(came, expected)
        turned = torch.zeros(width, sum(gets), dtype=dtype).t()
        dist.all_to_all_single(turned, source, gets, gives, async_op=True).wait()
        assert torch.equal(turned, expected)
        parts = [torch.zeros(rows, width, dtype=dtype) for rows in gets]
        dist.all_to_all(parts, list(source.split(gives)))
        assert torch.equal(torch.cat(parts), expected)
    dist.all_to_all_single(torch.zeros(0), torch.zeros(0), [0] * size, [0] * size)
    with pytest.raises(ValueError, match="that add up to the rows"):
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [1] * size, [0] * size)

    lengths = [(r * 37) % 4 * 1000 for r in range(size)]
    wholes = [torch.full((length,), r + 1.0) for r, length in enumerate(lengths)]
    gathered = [torch.zeros(length) for length in lengths]
    dist.all_gather(gathered, wholes[rank])
    assert all(torch.equal(a, b) for a, b in zip(gathered, wholes, strict=True))
    mine = torch.zeros(lengths[rank])
    dist.reduce_scatter(mine, [torch.full((length,), rank + 1.0) for length in lengths])
    assert (mine == size * (size + 1) / 2).all()


def not_scheduled(rank: int, size: int) -> None:
    """What has no schedule works all the same: messages, and what torch makes of several calls."""
    came = torch.zeros(3)
    sending = dist.isend(torch.full((3,), float(rank)), (rank + 1) % size)
    dist.recv(came, (rank - 1) % size)
    sending.wait()
    assert (came == (rank - 1) % size).all()
    came = torch.zeros(3)
    swaps = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank - 1) % size),
        dist.P2POp(dist.irecv, came, (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    assert (came == (rank + 1) % size).all()

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    told = [{"from": 0}] if rank == 0 else [None]
    dist.broadcast_object_list(told, src=0)
    assert told == [{"from": 0}]
    with pytest.raises(ValueError, match="output has 5 elements"):
        dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(4))
    with pytest.raises(ValueError, match="input has 5 elements"):
        dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(5))
    if rank == 0:  # lists that do not fit are refused by whoever has them, and the group lives
        lists = [torch.zeros(4)] * size
        with pytest.raises(ValueError, match=f"{size - 1} tensors; expected {size}"):
            dist.all_gather(lists[1:], torch.zeros(4))
        with pytest.raises(ValueError, match="tensor 0 has 4 elements"):
            dist.all_gather(lists, torch.zeros(5))
        with pytest.raises(ValueError, match="tensor 0 has 4 elements"):
            dist.reduce_scatter(torch.zeros(5), lists)
    dist.barrier()


def many_not_scheduled(rank: int, size: int) -> None:
    """Barriers and messages that no schedule carries, one after the other: none of them may hang."""
    for _ in range(200):
        monitored_barrier()
        came = torch.zeros(1)
        sending = dist.isend(torch.full((1,), float(rank)), (rank + 1) % size)
        dist.recv(came, (rank - 1) % size)
        sending.wait()
        assert came.item() == (rank - 1) % size


def more_than_the_ring_holds(rank: int, size: int) -> None:
    """One rank starts more collectives than its ring has slots while the other has started none."""
    tensors = [torch.ones(1) for _ in range(RING_CAPACITY + 100)]
    if rank == size - 1:
        # Comes only when the others have filled their rings: they say so before they start the first one too many.
        dist.recv(torch.zeros(1), src=0)
    works = []
    for number, tensor in enumerate(tensors):
        if rank == 0 and number == RING_CAPACITY - 1:
            dist.send(torch.zeros(1), dst=size - 1)
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    assert all(tensor.item() == size for tensor in tensors)


CHECKS: tuple[Callable[[int, int], Any], ...] = (
    all_reduce,
    shapes,
    all_gather,
    reduce_scatter,
    broadcast,
    all_to_all,
    all_to_all_of_lists,
    gather_and_scatter,
    reduce_to_root,
    bits_and_parts,
    uneven,
    several_at_once,
    not_scheduled,
)


def everything(rank: int, size: int) -> dict[str, Any]:
    """All checks in one process group; what each returned, by name."""
    return {check.__name__: check(rank, size) for check in CHECKS}
