"""Groups of unequal degree side by side: losses and gradients of one process, agreement, what is refused."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from tests import rank_threads
from tests.rank_threads import on_ranks
from torch import Tensor, nn

from mycel.comm import SomeRanks
from mycel.errors import CommunicationError, MismatchError, MycelError, UsageError, VerificationError
from mycel.planning.grouping import Candidate, PlannedGroup, SequencePlan, SequencePlanner, check_groups
from mycel.sequence import MicroBatch, SequenceStep, apply, planned_step, steps

WIDTH, WORDS = 8, 16
Documents = list[dict[str, Tensor]]


@pytest.fixture(autouse=True)
def groups_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "new_group", rank_threads.new_group)
    monkeypatch.setattr(dist, "destroy_process_group", rank_threads.destroy_process_group)


class Net(nn.Module):
    """Attention and a causal convolution between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.conv(x.mT)[..., : x.shape[1]].mT.tanh())


class Silent(Net):
    """Takes what models of transformers take, and gives no loss."""

    def forward(self, input_ids: Tensor, **others: Any) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)


def loss_of(model: nn.Module, part: MicroBatch) -> Tensor:
    return part.mean(losses_of(model(part.batch["input_ids"]), part.batch["labels"]))


def documents_of(lengths: Sequence[int], seed: int = 1) -> Documents:
    """Random tokens; a tenth of the labels do not count."""
    chance = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(0, WORDS, (length,), generator=chance)
        labels = ids.masked_fill(torch.rand(length, generator=chance) < 0.1, -100)
        made.append({"input_ids": ids, "labels": labels})
    return made


def whole(net: nn.Module, documents: Documents) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, each document by itself."""
    net.zero_grad()
    parts = [
        losses_of(net(d["input_ids"][None])[:, :-1], d["labels"][None, 1:]).sum()
        for d in documents
        if len(d["labels"]) > 1
    ]
    count = sum(int((d["labels"][1:] != -100).sum()) for d in documents)
    loss = torch.stack(parts).sum() / count
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def plan_of(*groups: tuple[int, Sequence[int], Sequence[int]]) -> SequencePlan:
    made = tuple(PlannedGroup(micro_batch=m, ranks=tuple(r), sequences=tuple(s)) for m, r, s in groups)
    return SequencePlan(groups=made, total_us=1.0, lower_bound_us=0.0)


def random_plan(chance: random.Random, num_ranks: int, num_sequences: int) -> SequencePlan:
    """Micro-batches of groups of any degrees, some ranks idle."""
    left = list(range(num_sequences))
    chance.shuffle(left)
    groups: list[tuple[int, Sequence[int], Sequence[int]]] = []
    for micro_batch in itertools.count():
        ranks = list(range(num_ranks))
        chance.shuffle(ranks)
        while ranks and left and (not groups or groups[-1][0] < micro_batch or chance.random() < 0.7):
            degree, many = chance.randint(1, len(ranks)), chance.randint(1, len(left))
            groups.append((micro_batch, ranks[:degree], left[:many]))
            ranks, left = ranks[degree:], left[many:]
        if not left:
            return plan_of(*groups)
    raise AssertionError


def checked(
    net: Net, num_ranks: int, documents: Documents, take: Callable[[int, Any], Iterable[SequenceStep]]
) -> list[Any]:
    """Every rank's steps, whose loss and gradients must be those of one process."""
    wanted_loss, wanted = whole(net, documents)

    def work(rank: int, group: Any) -> Any:
        model = copy.deepcopy(net)
        model.zero_grad()
        with apply(model, group) as handle:
            found = [(step.run(model, loss_of).item(), step) for step in take(rank, handle)]
        return found, {name: p.grad for name, p in model.named_parameters()}

    ranks = on_ranks(num_ranks, work)
    for found, _ in ranks:
        assert [loss for loss, _ in found] == pytest.approx([wanted_loss] * len(found), rel=1e-12)
    for name, gradient in wanted.items():
        mean = torch.stack([of[name] for _, of in ranks]).mean(0) / len(ranks[0][0])
        assert float((mean - gradient).abs().max()) < 1e-12
    return [found for found, _ in ranks]


@pytest.mark.parametrize(
    ("num_ranks", "lengths", "groups"),
    [
        (3, [9, 4, 5], [(0, [0, 1], [0]), (0, [2], [2, 1])]),
        (4, [9, 1, 5, 2], [(0, [3, 1], [0]), (0, [0], [1]), (1, [0, 1, 2, 3], [2]), (2, [2], [3])]),  # idle ranks
        (2, [3, 1], [(0, [1], [0]), (1, [1], [1])]),  # rank 0 has nothing at all
        (1, [3, 4], [(0, [0], [1]), (1, [0], [0])]),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(
    net: Net, num_ranks: int, lengths: list[int], groups: list[Any]
) -> None:
    plan, documents = plan_of(*groups), documents_of(lengths)
    found = checked(net, num_ranks, documents, lambda rank, handle: [planned_step(plan, documents, handle)])
    said = found[0][0][1].explain()
    assert f"{len(lengths)} sequences, {sum(lengths)} tokens" in said and ("idle" in said) == (num_ranks in (2, 4))


def test_the_handle_says_which_way_a_group_went(net: Net) -> None:
    plan, documents = plan_of((0, [0, 1], [0]), (0, [2], [1])), documents_of([7, 5])

    def work(rank: int, group: Any) -> tuple[str, str]:
        model = copy.deepcopy(net)
        said = []
        for way in ("auto", "ring"):
            with apply(model, group, way=way) as handle:  # type: ignore[arg-type]
                for part in planned_step(plan, documents, handle).micro_batches():
                    loss_of(model, part).backward()
                    said.append(handle.explain())
        return said[0], said[1]

    shared, _, alone = on_ranks(3, work)
    assert "attention goes by" in shared[0] and "wires by two measured sizes" in shared[0]
    assert "predicted" in shared[0] and "tokens by rank: 3, 4 of 1 documents" in shared[0]
    assert "tokens by rank: 5 of 1 documents" in alone[0] and "predicted" not in alone[0]
    assert "attention goes by ring, as apply was told" in alone[1]


def test_random_plans(net: Net) -> None:
    chance = random.Random(3)
    for seed in range(12):
        num_ranks = chance.choice([2, 3, 4])
        documents = documents_of([chance.randint(1, 12) for _ in range(chance.randint(2, 7))] + [5], seed)
        plan = random_plan(chance, num_ranks, len(documents))
        checked(net, num_ranks, documents, lambda _, handle, p=plan, d=documents: [planned_step(p, d, handle)])


def test_documents_are_loaded_where_they_are_shared(net: Net) -> None:
    plan = plan_of((0, [0, 1], [0]), (0, [2], [2, 1]))
    documents, asked = documents_of([9, 4, 5]), [set[int]() for _ in range(3)]

    def take(rank: int, handle: Any) -> list[SequenceStep]:
        def load(index: int) -> dict[str, Tensor]:
            asked[rank].add(index)
            return documents[index]

        return [planned_step(plan, [9, 4, 5], handle, load=load)]

    checked(net, 3, documents, take)
    assert asked == [{0}, {0}, {1, 2}]


def test_tensors_as_documents(net: Net) -> None:
    plan = plan_of((0, [0, 1], [0]), (1, [1], [1]))
    documents = [torch.randn(n, 2 * WIDTH) for n in (5, 3)]
    layer = nn.MultiheadAttention(2 * WIDTH, 2, batch_first=True)

    def work(rank: int, group: Any) -> list[Tensor]:
        with apply(copy.deepcopy(layer), group) as handle:
            step = planned_step(plan, documents, handle)
            assert step.num_labels == 6
            return [part.batch for part in step.micro_batches()]

    first, second = on_ranks(2, work)
    assert first[0].shape[1] + second[0].shape[1] == 5
    assert first[1].equal(torch.zeros(1, 1, 2 * WIDTH)) and second[1].equal(documents[1][None])


# -- steps ------------------------------------------------------------------------------------------------------


def planner_of(num_ranks: int, **others: Any) -> SequencePlanner:
    return SequencePlanner(
        num_ranks=num_ranks,
        capacity_tokens=8,
        us_per_token2=0.1,
        us_per_token=1.0,
        us_per_step=10.0,
        candidates=tuple(Candidate(size=n, comm_us_per_token=n - 1.0) for n in (1, 2, 4) if n <= num_ranks),
        max_micro_batches=3,
        limit_s=0,
        **others,
    )


def test_steps_are_planned_by_one_rank_and_run_by_all(net: Net) -> None:
    documents = documents_of([20, 4, 5, 6, 3])
    other = documents[::-1]

    def take(rank: int, handle: Any) -> Iterable[SequenceStep]:
        with planner_of(4) as planner:
            yield from steps([documents, other, documents], planner, handle, ahead=rank % 2 + 1)

    found = checked(net, 4, documents, take)
    plans = [[step.plan for _, step in of_rank] for of_rank in found]
    assert all(of_rank == plans[0] for of_rank in plans)
    assert [step.number for _, step in found[1]] == [0, 1, 2]
    degrees = {len(group.ranks) for plan in plans[0] for group in plan.groups}
    assert len(degrees) > 1
    assert found[0][2][1].new_groups == 0  # as in the first step, which has made them


def test_leaving_early_ends_what_was_begun(net: Net) -> None:
    begun, may_go = threading.Event(), threading.Event()

    def plans(lengths: tuple[int, ...]) -> SequencePlan:
        if len(lengths) == 2:
            begun.set()
            assert may_go.wait(60)
        return plan_of((0, [0], range(len(lengths))))

    with apply(copy.deepcopy(net)) as handle:
        batches = [documents_of(lengths) for lengths in ([3], [4, 5], [6, 7, 8])]
        coming = steps(batches, plans, handle, ahead=2)
        assert len(next(coming).lengths) == 1
        assert begun.wait(60)
        coming.close()  # as an exception in the loop does, or Ctrl-C; it does not wait for the plan
        may_go.set()

        def held(_: tuple[int, ...]) -> SequencePlan:
            may_go.clear()
            return plans((1, 1))

        late = steps(batches[1:], held, handle, patience_s=0)
        with pytest.raises(UsageError, match="no plan of 2 documents after 0 s"):
            next(late)
        may_go.set()


def refused(
    num_ranks: int, net: Net, take: Callable[[int, Any], Iterable[SequenceStep]]
) -> list[tuple[type[MycelError], str]]:
    def work(rank: int, group: Any) -> Any:
        with apply(copy.deepcopy(net), group) as handle, pytest.raises(MycelError) as caught:
            list(take(rank, handle))
        return type(caught.value), str(caught.value)

    said = on_ranks(num_ranks, work)
    assert all("\n" not in text for _, text in said)
    return said


def test_ranks_that_do_not_agree_are_named(net: Net) -> None:
    def other_documents(rank: int, handle: Any) -> Iterable[SequenceStep]:
        return steps([[3, 4] if rank != 2 else [3, 5]], planner_of(3), handle)

    def fewer_steps(rank: int, handle: Any) -> Iterable[SequenceStep]:
        documents = documents_of([4, 3])
        return steps([documents] * (2 if rank == 1 else 3), planner_of(3), handle)

    def other_plans(rank: int, handle: Any) -> Iterable[SequenceStep]:
        plan = plan_of((0, [rank // 2], [0]))
        return [planned_step(plan, documents_of([4]), handle)]

    for take, text in (
        (other_documents, "step 0: rank 2 is with documents of other lengths"),
        (fewer_steps, "step 2: rank 1 is without more documents"),
        (other_plans, "rank 2 is with another plan than most"),
    ):
        for kind, said in refused(3, net, take):
            assert kind is MismatchError and text in said


def test_what_one_rank_fails_with_all_say(net: Net) -> None:
    def broken(rank: int) -> Iterable[Documents]:
        yield documents_of([4, 3])
        if rank == 1:
            raise OSError("no such file: part 7")
        yield documents_of([4, 3])

    def of_data(rank: int, handle: Any) -> Iterable[SequenceStep]:
        return steps(broken(rank), planner_of(3), handle)

    def too_long(rank: int, handle: Any) -> Iterable[SequenceStep]:
        return steps([documents_of([17, 3])], planner_of(2), handle)

    def lost(rank: int, handle: Any) -> Iterable[SequenceStep]:
        def load(step: int, index: int) -> dict[str, Tensor]:
            return documents_of([3])[0] if rank == 1 else documents_of([4])[0]

        return steps([[3, 3]], planner_of(2), handle, load=load)

    def work(rank: int, group: Any) -> Any:
        with apply(copy.deepcopy(net), group) as handle, pytest.raises((OSError, CommunicationError)) as caught:
            list(of_data(rank, handle))
        return type(caught.value), str(caught.value)

    first, own, last = on_ranks(3, work)
    assert own == (OSError, "no such file: part 7")
    assert first == last == (CommunicationError, "step 1: rank 1 cannot go on: OSError: no such file: part 7")
    for kind, said in refused(2, net, too_long):
        assert (
            kind is UsageError
            and "lengths[0]: 17 tokens, and the largest group, 2 ranks, holds 16: 1 too many" in said
        )
    for kind, said in refused(2, net, lost):
        assert kind is UsageError and "document 0 has 4 tokens when loaded, and 3 were said" in said


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([(0, [0, 1], [0]), (0, [1], [1])], "groups 0 and 1 overlap: both have rank 1 in micro-batch 0"),
        ([(0, [0, 2], [0, 1])], "group 0: there is no rank 2 among 2"),
        ([(0, [0, 0], [0, 1])], "group 0 has a rank twice"),
        ([(0, [0], [0])], "sequence 1 is in no group"),
        ([(0, [0], [0, 1]), (0, [1], [1])], "sequence 1 is in groups 0 and 1"),
        ([(0, [0], [0, 1, 2])], "there is no sequence 2 among 2"),
        ([(1, [0], [0, 1])], "micro-batch 0 has no group"),
    ],
)
def test_plans_that_cannot_run(net: Net, groups: list[Any], text: str) -> None:
    plan = plan_of(*groups)
    with pytest.raises(VerificationError, match=text):
        check_groups(plan, [3, 3], 2)
    for kind, said in refused(2, net, lambda _, handle: [planned_step(plan, documents_of([3, 3]), handle)]):
        assert kind is VerificationError and text in said


@pytest.mark.parametrize(
    ("documents", "text"),
    [
        ([], "a step without documents"),
        ([torch.zeros(0)], "document 0 has 0 tokens"),
        ([torch.tensor(3)], "document 0: a document is a tensor without dimensions"),
        ([{"input_ids": [1, 2], "labels": [1]}], "document 0: a document has {'input_ids': 2, 'labels': 1} tokens"),
        (["abc"], "document 0: a document is str"),
        ([True], "a document is True or False"),
        ([3], "document 0 is a number of tokens: give load="),
        ([torch.zeros(1, dtype=torch.int64)], "no label of its 1 documents counts"),
        ([{"input_ids": [1, 2]}, torch.zeros(2)], "documents of one step differ: input_ids, and a tensor"),
    ],
)
def test_documents_that_are_none(net: Net, documents: list[Any], text: str) -> None:
    with apply(copy.deepcopy(net)) as handle, pytest.raises(UsageError) as caught:
        plan = plan_of((0, [0], range(max(1, len(documents)))))
        list(planned_step(plan, documents, handle).micro_batches())
    assert text in str(caught.value)


def test_handles_and_planners_that_do_not_fit(net: Net) -> None:
    with apply(copy.deepcopy(net)) as handle:
        with pytest.raises(UsageError, match="the planner is of 2 ranks, and sequences are divided over 1"):
            steps([], planner_of(2), handle)
        handle.num_averaged = 4
        with pytest.raises(UsageError, match="divided over 1 ranks and gradients averaged over 4"):
            steps([], planner_of(1), handle)
    silent = Silent().double()
    with apply(silent) as handle, pytest.raises(UsageError, match="Silent gave no loss: documents need labels"):
        planned_step(plan_of((0, [0], [0])), documents_of([3]), handle).run(silent)


# -- groups of processes ----------------------------------------------------------------------------------------


def test_few_groups_are_kept_and_those_of_a_plan_always() -> None:
    def work(rank: int, group: Any) -> Any:
        some = SomeRanks(group, most=2)
        made = [some.make(wanted) for wanted in ([(0, 1)], [(0, 1), (1, 2)], [(0, 2), (1,), (0, 1, 2)])]
        with pytest.raises(UsageError, match=r"ranks \[0, 1\]: no group of them was made"):
            some.get((0, 1))  # the longest unused
        sizes = [len(some)]
        made.append(some.make([(0, 1), (0, 2), (1, 2)]))
        again = some.get((0, 1)) if rank < 2 else None
        if again is not None:
            total = torch.ones(1)
            dist.all_reduce(total, group=again)
            assert float(total) == 2
        assert some.get((rank,)) is None and some.get((0, 1, 2)) is group
        return made, [*sizes, len(some)]

    assert on_ranks(3, work) == [([1, 1, 1, 1], [2, 3])] * 3
