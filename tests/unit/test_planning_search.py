"""Search for plans: the same as trying everything, limits that keep the optimum, what is said when nothing goes."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plan_trials
from brute_force import brute_force, random_case
from mycel.errors import UsageError
from mycel.pipeline import known_order, simulate
from mycel.planning.cluster import Cluster, load_cluster
from mycel.planning.cuts import Chain, best_cut, cut_bound, cuts_below, one_f_one_b_bound
from mycel.planning.job import Job, Mesh
from mycel.planning.machines import load_machine
from mycel.planning.memory import memory_of
from mycel.planning.models import ModelShape, named
from mycel.planning.predict import predict_step
from mycel.planning.search import Candidate, Failure, Found, Limits, Trial, refine, search
from mycel.planning.search.bounds import least_seconds, room_of
from mycel.planning.search.score import candidate_of, pipeline_seconds, unhindered_seconds
from mycel.planning.search.shares import best_shares, least_of_shares, shared_chain, shares_below
from mycel.planning.search.space import space_of
from mycel.planning.search.stages import Stages, stages_of
from mycel.topology import parse_topology
from mycel.topology.builders import full_mesh

TINY = ModelShape(
    name="tiny", num_layers=8, hidden=1024, num_heads=8, num_kv_heads=8, head_dim=128, ffn=4096, vocab=32000
)


def same_as_everything(seed: int) -> None:
    """A search finds what trying everything finds."""
    case = random_case(seed)
    best = brute_force(case)
    assert best is not None
    found = search(case.cluster, case.shape, batch=case.batch, seq=case.seq, limits=case.limits)
    assert found.is_proved
    assert found.best.seconds.seconds == pytest.approx(best[0], rel=1e-9)
    assert found.bound_s <= best[0] * (1 + 1e-9)


def test_short_sequences_are_shared_by_request_only() -> None:
    cluster = load_cluster("h100:nodes=1,ranks_per_node=2")
    base = Job(mesh=Mesh(), global_batch=8, micro_batch=1, seq=1024)
    assert set(space_of(cluster, TINY, base, Limits()).columns["cp"]) == {1}
    for text in ("cp=2", "cp>1", "cp!=1"):
        found = search(cluster, TINY, batch=8, seq=1024, limits=Limits.from_text(text))
        assert found.best.job.mesh.cp == 2
    assert set(space_of(cluster, TINY, base, Limits.from_text("cp<=2")).columns["cp"]) == {1}


@pytest.mark.parametrize("seed", range(24))
def test_finds_what_trying_everything_finds(seed: int) -> None:
    """On small clusters, unequal ones included, over the simulator."""
    same_as_everything(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(24, 200))
def test_finds_what_trying_everything_finds_at_length(seed: int) -> None:
    """The same, many times."""
    same_as_everything(seed)


@pytest.mark.parametrize("text", ["coshard<=4", "coshard=4"])
@pytest.mark.parametrize("seed", range(4))
def test_finds_what_trying_everything_finds_in_pieces(seed: int, text: str) -> None:
    """The same with layers in pieces, by request: recomputed or not, as goes with them."""
    case = random_case(seed)
    texts = [one for one in case.limits.texts if not one.startswith("recompute")]
    case = replace(case, limits=Limits.from_text(*texts, "recompute=none|full", text))
    best = brute_force(case)
    if best is None:
        with pytest.raises(UsageError, match="fit"):
            search(case.cluster, case.shape, batch=case.batch, seq=case.seq, limits=case.limits)
        return
    found = search(case.cluster, case.shape, batch=case.batch, seq=case.seq, limits=case.limits)
    assert found.is_proved and found.best.seconds.seconds == pytest.approx(best[0], rel=1e-9)
    assert (found.best.job.coshard == 4) or text == "coshard<=4"


def test_layers_are_in_pieces_where_nothing_else_is_faster() -> None:
    """Long sequences on ranks that share none: whole layers leave room for a pipeline only, pieces for none."""
    base = Job(mesh=Mesh(), global_batch=8, micro_batch=1, seq=65536, is_loss_fused=True)
    times, pieces = {}, {}
    for text in ("coshard=1", "coshard<=8"):
        limits = Limits.from_text("tp=1", "cp=1", text)
        found = search(load_cluster("h100"), named("llama3-8b"), batch=8, seq=65536, limits=limits, base=base)
        times[text], pieces[text] = found.best.seconds.seconds, found.best.job.coshard
        assert max(found.best.memory) <= 80 << 30
    assert pieces == {"coshard=1": 1, "coshard<=8": 2}
    assert times["coshard<=8"] < 0.97 * times["coshard=1"]
    plain = space_of(load_cluster("h100"), named("llama3-8b"), base, Limits())
    assert set(plain.columns["coshard"]) == {1}


@given(
    layers=st.integers(2, 9),
    batches=st.integers(1, 6),
    stages=st.lists(
        st.tuples(st.floats(0.1, 4), st.floats(0, 3), st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=4
    ),
    message=st.floats(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_cuts_are_all_and_the_best_first(
    layers: int, batches: int, stages: list[tuple[float, float, int, int]], message: float
) -> None:
    """Every cut that fits and is below a time comes once, with its bound; the best has the least."""
    chain = Chain(
        num_layers=layers,
        batches=batches,
        layer_s=tuple(stage[0] for stage in stages),
        extra_s=tuple(stage[1] for stage in stages),
        message_s=(message,) * (len(stages) - 1),
        most=tuple(stage[2] for stage in stages),
        least=tuple(stage[3] for stage in stages),
    )
    every: list[tuple[int, ...]] = [()]
    for stage in stages:
        every = [(*cut, n) for cut in every for n in range(stage[3], stage[2] + 1)]
    every = [cut for cut in every if sum(cut) == layers]
    best = best_cut(chain)
    if not every:
        assert best is None
        return
    assert best is not None
    bounds = {cut: cut_bound(chain, cut) for cut in every}
    assert cut_bound(chain, best) == pytest.approx(min(bounds.values()))
    limit = sorted(bounds.values())[len(bounds) // 2] + 1e-9
    listed = list(cuts_below(chain, limit))
    assert len({cut for _, cut in listed}) == len(listed)
    assert {cut for _, cut in listed} == {cut for cut, bound in bounds.items() if bound < limit}
    assert all(bound == pytest.approx(bounds[cut]) for bound, cut in listed)


@pytest.mark.parametrize(("pp", "chunks", "batches"), [(2, 1, 5), (4, 1, 8), (4, 2, 8), (3, 2, 6)])
def test_messages_that_hinder_nobody_are_the_simulators(pp: int, chunks: int, batches: int) -> None:
    """Where every pair of ranks has a cable of its own, the quick answer is the simulator's."""
    mesh = full_mesh(num_ranks=max(2, pp), bandwidth="1 GB/s")
    cluster = load_cluster(mesh, machine="generic")
    job = Job(mesh=Mesh(pp=pp), global_batch=batches, micro_batch=1, seq=1024, chunks=chunks)
    shape = replace(TINY, num_layers=12)
    stages = stages_of(cluster, shape, job, tuple(range(pp)), cluster.memory_bytes)
    cut = tuple(12 // pp for _ in range(pp))
    quick = unhindered_seconds(stages, cut)
    whole = pipeline_seconds(stages, cut)
    # The simulator adds what a message costs beyond its bytes.
    assert quick <= whole * (1 + 1e-9)
    assert whole == pytest.approx(quick, rel=0.01)
    free = unhindered_seconds(stages, cut, is_free=True)
    order = known_order("1f1b", pp, batches) if chunks == 1 else known_order("interleaved", pp, batches, chunks)
    times = stages.seconds(cut)
    alone = simulate(order, lambda action: times[action.stage][0 if action.kind.value == "F" else 1])
    assert free == pytest.approx(alone.makespan)


@pytest.mark.parametrize("executor", ["megatron", "mycel"])
def test_equal_stages_cost_what_the_closed_form_says(executor: str) -> None:
    """An even cut on nodes that are all alike is the formula that was fitted to measured steps."""
    machine = load_machine("a100")
    cluster = load_cluster("a100:nodes=4")
    shape = replace(TINY, num_layers=16, is_tied=True)
    job = Job(
        mesh=Mesh(pp=4, dp=2, tp=4), global_batch=64, micro_batch=2, seq=2048, zero=1, recompute="full",
        is_sequence_parallel=True, is_scattered=True, executor=executor,  # type: ignore[arg-type]
    )  # fmt: skip
    stages = stages_of(cluster, shape, job, tuple(range(32)), cluster.memory_bytes)
    cut = (4, 4, 4, 4)
    found = candidate_of(stages, cut, pipeline_seconds(stages, cut))
    closed = predict_step(shape, job, machine)
    assert closed.parts is not None and found.seconds.parts is not None
    if executor == "megatron":
        assert found.seconds.seconds == pytest.approx(closed.seconds, rel=1e-3)
    else:  # messages go beside computation
        assert closed.seconds - closed.parts["boundary"] <= found.seconds.seconds * (1 + 1e-3)
        assert found.seconds.seconds <= closed.seconds
    assert max(found.memory) == pytest.approx(memory_of(shape, job).total, rel=1e-6)


def test_bounds_are_below_what_is_found() -> None:
    """Of every job on nodes that are alike, with every placement and the best cut."""
    cluster = load_cluster("h100:nodes=2")
    base = Job(mesh=Mesh(), global_batch=32, micro_batch=1, seq=2048)
    space = space_of(cluster, replace(TINY, num_layers=12), base, Limits.from_text("recompute=none", "zero=1"))
    shape = replace(TINY, num_layers=12)
    points = space.points(shape)
    room = room_of(points, cluster.memory_bytes[0])
    least = least_seconds(points, cluster, room.fullest_layers)
    for row in range(0, len(space), 7):
        job = space.job(row)
        stages = stages_of(cluster, shape, job, tuple(range(16)), cluster.memory_bytes)
        best = best_cut(stages.chain())
        assert (best is not None) == bool(room.fits[row])
        if best is not None:
            found = candidate_of(stages, best, pipeline_seconds(stages, best))
            assert least[row] <= found.seconds.seconds * (1 + 1e-9)


def test_columns_are_the_jobs() -> None:
    """Points made of columns are those made of jobs, one by one."""
    cluster = load_cluster("h100:nodes=1")
    base = Job(mesh=Mesh(), global_batch=16, micro_batch=1, seq=4096, is_compiled=True)
    moe = replace(TINY, num_experts=4, top_k=2, expert_ffn=512)
    space = space_of(cluster, moe, base, Limits())
    rows = np.arange(0, len(space), max(1, len(space) // 25))
    from_columns = space.take(rows).points(moe)
    from_jobs = type(from_columns).of([(moe, space.job(int(row))) for row in rows])
    for name in from_columns.__dataclass_fields__:
        if name != "held":
            np.testing.assert_allclose(getattr(from_columns, name), getattr(from_jobs, name), err_msg=name)


CHOICES = ("tp<=2", "pp>=2", "dp=2", "recompute=none", "zero<=1", "micro_batch=1", "tp in node", "chunks=1")


@given(texts=st.lists(st.sampled_from(CHOICES), max_size=3, unique=True))
@settings(max_examples=6, deadline=None)
def test_limits_keep_the_best_that_they_allow(texts: list[str]) -> None:
    """The best under limits is the best of those that keep them; where the best of all does, it is that one."""
    cluster = load_cluster("h100:nodes=2,ranks_per_node=2")
    limits = Limits.from_text(*texts)
    free = _whole()
    found = search(cluster, TINY, batch=8, seq=1024, limits=limits)
    assert found.best.seconds.seconds >= free.best.seconds.seconds * (1 - 1e-9)
    for candidate in found.candidates:
        assert limits.broken_by(candidate.job) is None
        assert limits.broken_by_ranks(cluster, candidate.job, candidate.ranks) is None
    if limits.broken_by(free.best.job) is None and (
        limits.broken_by_ranks(cluster, free.best.job, free.best.ranks) is None
    ):
        assert found.best.seconds.seconds == pytest.approx(free.best.seconds.seconds)


_FREE: dict[str, Found] = {}


def _whole() -> Found:
    if "free" not in _FREE:
        cluster = load_cluster("h100:nodes=2,ranks_per_node=2")
        _FREE["free"] = search(cluster, TINY, batch=8, seq=1024)
    return _FREE["free"]


UNEVEN = """
boxes:
  - {name: fast, ranks: 2, device: {name: quick, flops: 60e12, memory: 24GiB, memory_gbps: 900},
     inside: {bandwidth: 20 GB/s}, uplink: {to: core, bandwidth: 1 GB/s, per: box}}
  - {name: slow, ranks: 2, device: {name: lame, flops: 20e12, memory: 12GiB, memory_gbps: 400},
     inside: {bandwidth: 20 GB/s}, uplink: {to: core, bandwidth: 1 GB/s, per: box}}
switches: [core]
"""


def uneven(ranks: int = 4) -> Cluster:
    """Two boxes, one of them three times slower and with half of the memory."""
    text = UNEVEN.replace("ranks: 2", f"ranks: {ranks // 2}")
    return load_cluster(parse_topology(text, source="uneven.yaml"), machine="generic")


def test_slow_ranks_get_fewer_layers() -> None:
    """A pipeline over unequal boxes is cut by speed."""
    found = search(
        uneven(),
        replace(TINY, num_layers=12),
        batch=16,
        seq=1024,
        limits=Limits.from_text("pp=2", "tp=1", "zero=1", "recompute=none"),
    )
    stage = {found.best.ranks[0] // 2: found.best.cut[0], found.best.ranks[-1] // 2: found.best.cut[-1]}
    if len(stage) == 2:
        assert stage[0] > stage[1]
    assert found.is_proved


def test_slow_replicas_get_less_of_the_batch() -> None:
    """Replicas of unlike speed have unlike many micro-batches, and the step is shorter than with equal ones."""
    cluster, texts = uneven(), ("pp=1", "tp=1", "zero=1", "micro_batch=1")
    found = search(cluster, TINY, batch=16, seq=1024, limits=Limits.from_text(*texts))
    assert found.is_proved and found.best.job.mesh.dp == 4
    shares = dict(zip(found.best.ranks, found.best.job.shares, strict=True))
    assert sum(shares.values()) == 16
    assert min(shares[0], shares[1]) > max(shares[2], shares[3])
    equal = search(cluster, TINY, batch=16, seq=1024, limits=Limits.from_text(*texts, "shares=equal"))
    assert equal.best.job.shares == ()
    assert found.best.bound_s < 0.6 * equal.best.bound_s
    assert found.best.seconds.seconds < equal.best.seconds.seconds
    # Nobody is done sooner with one micro-batch more, given by any other replica.
    seconds = [sum(times[0]) for times in found.best.replica_seconds]
    slowest = max(share * each for share, each in zip(found.best.job.shares, seconds, strict=True))
    assert all((share + 1) * each >= slowest for share, each in zip(found.best.job.shares, seconds, strict=True))


def test_a_batch_need_not_divide_by_replicas_of_unlike_speed() -> None:
    """Seven sequences over four replicas; ranks that are all alike are refused instead."""
    limits = Limits.from_text("pp=1", "tp=1", "zero=1")
    found = search(uneven(), TINY, batch=7, seq=1024, limits=limits)
    assert sum(found.best.job.shares) == 7 and found.best.job.micro_batch == 1
    with pytest.raises(UsageError, match="batch of"):
        search(load_cluster("h100:nodes=1"), TINY, batch=7, seq=1024, limits=limits)


@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    speeds=st.lists(st.lists(st.floats(0.5, 4.0), min_size=3, max_size=3), min_size=3, max_size=3),
    pp=st.integers(1, 3),
    total=st.integers(6, 12),
    message=st.floats(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_shares_are_the_best_and_all(
    counts: list[int], speeds: list[list[float]], pp: int, total: int, message: float
) -> None:
    """What the greedy hand-out reaches no other shares beat; those below a time are all there, each once."""
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)][:4]
    layers = (2,) * pp
    stages = shared_by_hand([tuple(row[:pp]) for row in speeds[: max(kinds) + 1]], kinds, total, message)
    chains = [replace(stages.replicas[kind].chain(), batches=1) for kind in kinds]

    def bound(shares: tuple[int, ...]) -> float:
        return max(
            one_f_one_b_bound(replace(chain, batches=share), layers)
            for chain, share in zip(chains, shares, strict=True)
        )

    every = [
        tuple(b - a for a, b in pairwise((0, *marks, total)))
        for marks in combinations(range(1, total), len(kinds) - 1)
    ]
    least = min(map(bound, every))
    assert least_of_shares(stages, layers) == pytest.approx(least)
    best = best_shares(stages, layers)
    assert sum(best) == total and bound(best) == pytest.approx(least)
    assert cut_bound(shared_chain(stages), layers) <= least * (1 + 1e-9)
    limit = least * 1.3

    def alike(shares: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(zip(kinds, shares, strict=True)))

    listed = list(shares_below(stages, layers, limit))
    expected = {alike(shares) for shares in every if len(set(shares)) > 1 and bound(shares) < limit}
    assert len(listed) == len({alike(shares) for shares in listed})
    assert {alike(shares) for shares in listed} == expected


def shared_by_hand(speeds: list[tuple[float, ...]], kinds: list[int], total: int, message: float) -> Stages:
    """Stages whose replicas take so long for a layer, by kind and place."""
    cluster, pp, dp = load_cluster("h100:nodes=2"), len(speeds[0]), len(kinds)
    each, more = divmod(total, dp)
    shares = tuple(each + (replica < more) for replica in range(dp))
    job = Job(mesh=Mesh(pp=pp, dp=dp), global_batch=total, micro_batch=1, seq=64, shares=shares)
    shape, between = replace(TINY, num_layers=2 * pp), (message,) * (pp - 1)
    plain = stages_of(cluster, shape, job, tuple(range(pp * dp)), (1 << 50,) * 16)
    whole = replace(plain, head_s=0.0, message_s=between, message_alone_s=between)
    replicas = tuple(
        replace(whole, forward_s=tuple(s / 3 for s in row), backward_s=tuple(2 * s / 3 for s in row))
        for row in speeds
    )
    return replace(whole, replicas=replicas, kind_of=tuple(kinds))


def test_a_stage_stays_where_it_is_said() -> None:
    """``stage 0 on slow`` puts the first stage there."""
    cluster = uneven()
    found = search(cluster, TINY, batch=16, seq=1024, limits=Limits.from_text("stage 0 on slow", "pp=2", "zero=1"))
    assert {cluster.nodes[rank] for rank in found.best.ranks[:2]} == {"slow"}
    with pytest.raises(UsageError, match=r"no node or rank 'slwo' \(did you mean 'slow'"):
        search(cluster, TINY, batch=16, seq=1024, limits=Limits.from_text("stage 0 on slwo"))


def test_memory_of_each_rank_is_kept() -> None:
    """No rank of any candidate holds more than it may, under the user's limit too."""
    cluster = uneven()
    limits = Limits.from_text("memory<=10GiB", "recompute=none", "zero=1")
    found = search(cluster, TINY, batch=8, seq=1024, limits=limits)
    for candidate in found.candidates:
        assert all(
            held <= min(size, 10 << 30) for held, size in zip(candidate.memory, cluster.memory_bytes, strict=True)
        )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("tp=3",), r"nothing keeps the limit 'tp=3' on 8 ranks: .* tp can be 1, 2, 4, 8"),
        (("coshard=3",), r"'coshard=3' on 8 ranks: tiny is cut into 2, 4 or 8 pieces, with tp=1"),
        (("coshard=2", "tp=2"), r"limits 'coshard=2' and 'tp=2' contradict each other"),
        (("tp>=4", "pp>=4"), r"limits 'tp>=4' and 'pp>=4' contradict each other"),
        (("pp<=2", "dp<=2", "tp=1", "cp=1"), r"though any two go together|contradict"),
        (("offload=yes", "pp=3"), r"nothing keeps the limit 'pp=3'"),
    ],
)
def test_limits_that_nothing_meets(texts: tuple[str, ...], message: str) -> None:
    """Which limit, or which two, and what would do."""
    with pytest.raises(UsageError, match=message):
        search(load_cluster("h100"), TINY, batch=16, seq=1024, limits=Limits.from_text(*texts))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpp<=8", r"'tpp' is nothing that can be limited \(did you mean 'tp'"),
        ("tp about 8", r"cannot read the limit"),
        ("recompute=ful", r"did you mean 'full'"),
        ("memory>=3GiB", r"bounded from above"),
        ("tp=a", r"must be a whole number"),
        ("zero<=1|2", r"go with = only"),
        ("offload<yes", r"compared by ="),
        ("x" * 300, r"too many for a limit"),
    ],
)
def test_limits_that_cannot_be_read(text: str, message: str) -> None:
    """One line that says what is wrong."""
    with pytest.raises(UsageError, match=message) as error:
        Limits.from_text(text)
    assert "\n" not in str(error.value)


def test_a_stage_on_two_nodes_is_a_contradiction() -> None:
    """Said before anything is searched; a rank of the node is none."""
    cluster = load_cluster("h100:nodes=2,ranks_per_node=2")
    for second, is_refused in (
        ("stage 0 on node1", True),
        ("stage 0 on node0/1", False),
        ("stage 1 on node1", False),
    ):
        limits = Limits.from_text("stage 0 on node0", second)
        if is_refused:
            with pytest.raises(UsageError, match=r"'stage 0 on node0' and 'stage 0 on node1' contradict each other"):
                search(cluster, TINY, batch=8, seq=1024, limits=limits)
            continue
        limits.check(cluster)


def test_limits_from_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A list alone or under ``limits``; errors name the file."""
    good = tmp_path / "limits.yaml"
    good.write_text("limits:\n  - tp<=8\n  - stage 0 on left\n")
    assert Limits.from_file(good).texts == ("tp<=8", "stage 0 on left")
    good.write_text("- tp<=8\n")
    assert Limits.from_file(good).texts == ("tp<=8",)
    for text in ("a: b", "limits: 3", "- [tp]", "- tp<<8", "{", "limits: [tp<=8]\nother: 1"):
        good.write_text(text)
        with pytest.raises(UsageError, match=r"limits\.yaml"):
            Limits.from_file(good)
    with pytest.raises(UsageError, match="cannot be read"):
        Limits.from_file(tmp_path / "none.yaml")


def test_nothing_fits() -> None:
    """The smallest overshoot, on which rank, of what, and three ways to save it."""
    with pytest.raises(UsageError) as error:
        search(load_cluster("h100"), named("llama3-405b"), batch=8, seq=8192)
    text = str(error.value)
    assert "does not fit on h100_x1" in text and "GiB over the 80 GiB of rank node0/" in text and "most of it" in text
    assert text.count(";") >= 3 and "\n" not in text


def test_unequal_shares_that_do_not_fit() -> None:
    """Ways to save are those that go with unequal shares."""
    with pytest.raises(UsageError) as error:
        search(uneven(), named("llama3-8b"), batch=8, seq=2048, limits=Limits.from_text("shares=unequal"))
    text = str(error.value)
    assert "does not fit" in text and "saves" in text and "zero=3" not in text


def test_batches_and_heads_that_do_not_divide() -> None:
    """The nearest that do."""
    odd = replace(TINY, num_layers=2, num_heads=7, num_kv_heads=7)
    with pytest.raises(UsageError, match=r"5 ranks do not divide: .* a batch of 5 or 4 ranks|a batch of"):
        search(load_cluster("h100:ranks_per_node=5"), odd, batch=3, seq=1024)


def test_clusters_that_say_too_little() -> None:
    """Speeds missing for some ranks, relative capacities, memory of a rank that is not there."""
    with pytest.raises(UsageError, match=r"speed and memory of 2 of 4 ranks are not known \(slow/0, slow/1\)"):
        text = UNEVEN.replace("device: {name: lame, flops: 20e12, memory: 12GiB, memory_gbps: 400},", "")
        load_cluster(parse_topology(text, source="some.yaml"))
    with pytest.raises(UsageError, match="relative capacities only"):
        load_cluster("ring:ranks=4", machine="h100")
    with pytest.raises(UsageError, match="memory of rank 9"):
        load_cluster("h100", memory_bytes={9: 1 << 30})
    with pytest.raises(UsageError, match=r"cannot read 'nods=2' \(did you mean 'nodes'"):
        load_cluster("h100:nods=2")


def test_interrupted_search_gives_the_best_so_far() -> None:
    """Ctrl-C: what is known, and a bound that is no higher than the best of all."""
    calls = 0

    def press(_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise KeyboardInterrupt

    cluster = uneven()
    limits = Limits.from_text("zero=1", "recompute=none")
    found = search(cluster, TINY, batch=8, seq=1024, limits=limits, progress=press)
    whole = search(cluster, TINY, batch=8, seq=1024, limits=limits)
    assert found.interrupted and not whole.interrupted
    assert found.bound_s <= whole.best.seconds.seconds * (1 + 1e-9) <= found.best.seconds.seconds * (1 + 1e-8)
    assert found.gap >= 0


def test_time_limit_gives_something_at_once() -> None:
    """A search that may take no time at all still answers, with its distance from the bound."""
    found = search(load_cluster("h100:nodes=2"), named("llama3-8b"), batch=64, seq=8192, limit_s=0.0)
    assert found.interrupted and found.best.seconds.seconds >= found.bound_s > 0


@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("text", ["shares=unequal", "shares=equal"])
def test_a_time_limit_is_kept_inside_of_a_job(text: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only work moves on: one job has many placements, cuts and shares, and any may be the last.

    On sixteen ranks not all placements are tried, and one way of every job with shares is played first.
    """
    module = importlib.import_module("mycel.planning.search.search")
    now = 0.0

    def costly(name: str, seconds: float) -> None:
        does = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return does(*args, **kwargs)

        monkeypatch.setattr(module, name, timed)

    costs = {"stages_of": 1.0, "with_shares": 1.0, "least_of_shares": 0.1, "pipeline_seconds": 2.0}
    for name, seconds in costs.items():
        costly(name, seconds)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    cluster, limits = uneven(ranks), Limits.from_text(text, "zero=1", "recompute=none", "micro_batch=1")
    whole = search(cluster, TINY, batch=24, seq=1024, limits=limits)
    all_of_it, gaps = now, []
    for limit_s in (0.0, 3.5, 10.0, 20.0, all_of_it + 1.0):
        now = 0.0
        found = search(cluster, TINY, batch=24, seq=1024, limits=limits, limit_s=limit_s)
        # What was begun is ended; where nothing was known, one way is looked at whole.
        assert now <= limit_s + 6.0
        assert found.bound_s <= whole.best.seconds.seconds * (1 + 1e-9) <= found.best.seconds.seconds * (1 + 1e-8)
        gaps.append(found.gap)
    assert all_of_it > 24.0 and not found.interrupted and found.best.seconds == whole.best.seconds
    assert gaps[0] > gaps[-1] == whole.gap


def test_degrees_that_lost_are_said_why() -> None:
    """Every other value of every degree is too large by so many bytes, or slower by a bound."""
    found = search(load_cluster("h100"), named("llama3-8b"), batch=16, seq=8192)
    assert f"tp={found.best.job.mesh.tp}" not in found.refused
    for refusals in found.refused.values():
        for refusal in refusals:
            assert refusal.count > 0
            assert (refusal.reason == "memory") == (refusal.least_bytes > 0)
    assert any(refusal.reason == "memory" for refusals in found.refused.values() for refusal in refusals)


def test_another_node_like_the_last() -> None:
    """What-ifs: a node more, links that are faster, memory."""
    cluster = uneven()
    more = cluster.with_another_node()
    assert more.num_ranks == 6 and more.devices[-1] == cluster.devices[-1]
    assert len(set(more.rank_names)) == 6
    assert cluster.with_memory(1 << 30).memory_bytes[0] == cluster.memory_bytes[0] + (1 << 30)
    quick = cluster.with_faster_links(2, is_inside=False)
    assert quick.topology is not None and cluster.topology is not None
    changed = [a.capacity // b.capacity for a, b in zip(quick.topology.links, cluster.topology.links, strict=True)]
    assert sorted(set(changed)) == [1, 2] and changed.count(2) == 4


def test_refine_finds_the_best_where_the_model_is_wrong() -> None:
    """A model that is off for one kind of plan is corrected by a few trials; failures are counted."""
    found = _whole()
    assert len(found.candidates) >= 4

    def run(candidate: Candidate) -> float | Failure:
        if candidate is found.candidates[0]:
            return Failure(reason="out of memory")
        factor = 1.4 if candidate.job.mesh.pp == 1 else 1.0
        return candidate.seconds.seconds * factor

    told: list[Trial] = []
    refined = refine(found, run, told=told.append)
    rest = [one.seconds.seconds * (1.4 if one.job.mesh.pp == 1 else 1.0) for one in found.candidates[1:]]
    assert refined.seconds <= min(rest) * 1.05
    assert refined.num_failures == 1 and tuple(told) == refined.trials
    assert any(trial.failure == "out of memory" for trial in refined.trials)


def test_refine_stops_when_no_other_can_win() -> None:
    """A model that is right needs few trials; one that may be much wrong needs more."""
    found = _whole()
    sure = [replace(one, seconds=replace(one.seconds, error=0.001)) for one in found.candidates]
    unsure = [replace(one, seconds=replace(one.seconds, error=0.5)) for one in found.candidates]
    few = refine(sure, lambda one: one.seconds.seconds)
    many = refine(unsure, lambda one: one.seconds.seconds)
    assert few.is_settled and few.best is sure[0]
    assert len(few.trials) <= len(many.trials)
    assert not refine(unsure, lambda one: one.seconds.seconds, max_trials=1).is_settled


def test_refine_refuses_what_is_no_trial() -> None:
    """No candidates, no success, no time."""
    found = _whole()
    with pytest.raises(UsageError, match="no candidates"):
        refine([], lambda _: 1.0)
    with pytest.raises(UsageError, match=r"none of \d+ trials gave a time: crashed"):
        refine(found, lambda _: Failure(reason="crashed"))
    with pytest.raises(UsageError, match="a number above 0"):
        refine(found, lambda _: 0.0)


def test_trials_on_published_runs_are_a_third_of_random_ones() -> None:
    """Led by the model, over a few groups of measured configurations."""
    groups = [group for group in plan_trials.groups_of() if len(group.seconds) >= 14][:12]
    ours = np.mean([plan_trials.trials_to(group, plan_trials.guided) for group in groups])
    random = np.mean([plan_trials.trials_to(g, plan_trials.random_order(s)) for g in groups for s in range(5)])
    assert ours <= random / 3
