"""Programs of overlapped operators: rewrites keep what they compute, and refuse what would not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.overlap_cases import CASES, inputs_of, rewritten
from tests.oracles.overlap_programs import evaluate

from mycel.errors import UsageError
from mycel.overlap.language import (
    Node,
    Program,
    Value,
    Writer,
    fuse,
    overlap,
    program_seconds,
    reorder,
    search,
    split,
)
from mycel.overlap.rates import Exchange, Network, Products

PRODUCTS = Products(rows=(1,), flops=(5e10,), bytes_per_second=5e9)


def network(bytes_per_second: float) -> Network:
    def seconds(exchange: Exchange, num_bytes: int) -> float:
        return num_bytes * (2 if exchange == "all_reduce" else 1) / bytes_per_second

    return Network(seconds=seconds, source="made up")


def assert_same(program: Program, other: Program, size: int) -> None:
    inputs = inputs_of(program, size)
    expected, found = evaluate(program, inputs, size), evaluate(other, inputs, size)
    assert expected.keys() == found.keys()
    for name, parts in expected.items():
        for mine, theirs in zip(found[name], parts, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_that_rewrites_come_to_computes_the_same(case: str, size: int) -> None:
    program = CASES[case]()
    kinds = set()
    for steps, other in rewritten(program, 40):
        assert_same(program, other, size)
        assert Program.from_json(other.to_json()) == other
        kinds |= {step.split("(")[0] for step in steps}
    assert kinds >= ({"fuse", "overlap"} if case == "between_layers" else {"split", "reorder", "fuse", "overlap"})


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Sums of products, gathered slices and inputs, with operations on rows behind them."""
    write = Writer()
    rows = draw(st.integers(1, 9))
    values: list[Value] = [
        (write.local("x", rows, 3) @ write.local("w", 3, 4)).all_reduce(),
        write.local("g", rows, 4).all_reduce(),
        write.sliced("s", rows, 4).all_gather(),
        write.replicated("r", rows, 4),
        write.replicated("b", 1, 4),
    ]
    for number in range(draw(st.integers(1, 6))):
        left = draw(st.sampled_from([v for v in values if v.node.rows == rows]))
        kind = draw(st.sampled_from(["add", "mul", "relu", "dropout", "norm", "total"]))
        if kind in ("add", "mul"):
            values.append(write.binary(kind, left, draw(st.sampled_from(values))))
        elif kind == "relu":
            values.append(left.relu())
        elif kind == "dropout":
            values.append(write.dropout(left, 0.4, seed=number))
        elif kind == "norm":
            values.append(write.norm(draw(st.sampled_from(["rms_norm", "layer_norm"])), left))
        else:
            values.append(left.square().total())
    return write.finish(y=values[-1], z=draw(st.sampled_from(values)))


@settings(max_examples=60, deadline=None)
@given(program=programs(), size=st.integers(1, 3))
def test_rewrites_of_any_program_compute_the_same(program: Program, size: int) -> None:
    for number, (_, other) in enumerate(rewritten(program, 6)):
        assert_same(program, other, size)
        if number > 25:
            break


def test_a_search_finds_coconets_schedule() -> None:
    write = Writer()
    x, w = write.local("x", 1024, 512), write.local("w", 512, 1024)
    b, r = write.replicated("b", 1, 1024), write.replicated("r", 1024, 1024)
    program = write.finish(y=write.dropout((x @ w).all_reduce() + b, 0.1, seed=0) + r)
    found = search(program, PRODUCTS, network(5e7), num_ranks=4)
    assert {step.split("(")[0] for step in found.steps} == {"split", "reorder", "overlap"}
    stage = found.program.stages[0]
    operations = [found.program.node(name).operation for name in stage.nodes]
    assert operations[0] == "matmul" and operations[-1] == "all_gather" and "dropout" in operations
    assert stage.tiles > 1
    assert found.seconds == program_seconds(found.program, PRODUCTS, network(5e7), num_ranks=4)
    assert found.seconds < 0.9 * found.plain_s
    assert found.explain().count("\n") == len(found.steps)
    fast = search(program, PRODUCTS, network(1e15), num_ranks=4)
    assert all(s.tiles == 1 for s in fast.program.stages), "over links without end there is nothing to hide"


def product() -> tuple[Writer, Value]:
    write = Writer()
    return write, write.local("x", 8, 4) @ write.local("w", 4, 6)


def test_what_rewrites_refuse() -> None:
    write, made = product()
    both = write.finish(y=made.all_reduce().relu(), also=made)
    with pytest.raises(UsageError, match="split: relu_1 is relu"):
        split(both, "relu_1")
    with pytest.raises(UsageError, match="relu_1 takes nothing that was gathered"):
        reorder(both, "relu_1")
    with pytest.raises(UsageError, match="matmul_1 is used elsewhere"):
        fuse(both, ["matmul_1", "all_reduce_1"])
    with pytest.raises(UsageError, match="no node 'nothing'"):
        fuse(both, ["nothing", "relu_1"])
    with pytest.raises(UsageError, match="two at least"):
        overlap(both, ["matmul_1", "all_reduce_1"], 1)
    write, made = product()
    once = write.finish(y=made.all_reduce().relu())
    staged = fuse(once, ["matmul_1", "all_reduce_1"])
    with pytest.raises(UsageError, match="in a stage already, with matmul_1"):
        split(staged, "all_reduce_1")
    assert overlap(staged, ["matmul_1", "all_reduce_1"], 4).stages[0].tiles == 4
    with pytest.raises(UsageError, match="reduce_scatter comes first"):
        fuse(once, ["all_reduce_1", "relu_1"])
    with pytest.raises(UsageError, match="needs more than a row"):
        reorder(once, "matmul_1")


def test_what_programs_refuse() -> None:
    write = Writer()
    x, w, s = write.local("x", 8, 4), write.sliced("w", 4, 6), write.sliced("s", 8, 4)
    with pytest.raises(UsageError, match="has no layout; gather one"):
        x @ w
    with pytest.raises(UsageError, match="all_reduce takes what is local; s is sliced"):
        s.all_reduce()
    with pytest.raises(UsageError, match="slice what is replicated, or gather what is sliced"):
        s + write.replicated("r", 8, 4)
    with pytest.raises(UsageError, match="a product of 8 x 4 @ 8 x 4"):
        x @ x
    with pytest.raises(UsageError, match="two inputs are called x"):
        write.local("x", 1, 1)
    with pytest.raises(UsageError, match="unknown norm"):
        write.norm("batch_norm", x)
    with pytest.raises(UsageError, match="a share from 0"):
        write.dropout(x, 1.0, seed=0)
    wrong = Node(name="y", operation="all_reduce", inputs=("x",), layout="sliced", rows=8, columns=4)
    with pytest.raises(UsageError, match="expected replicated 8 x 4"):
        Program(nodes=(x.node, wrong), outputs=())
    with pytest.raises(UsageError, match="x is not there yet"):
        Program(nodes=(wrong,), outputs=())
    for text in ("[]", "{}", "nonsense", '{"format": "mycel.overlap.program", "version": 9}'):
        with pytest.raises(UsageError):
            Program.from_json(text)
