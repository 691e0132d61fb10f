"""What people pass wrongly is refused where they pass it, by one line of ours, before any backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mycel
from mycel import elastic
from mycel.collectives.spec import Collective
from mycel.data_parallel import (
    QSDP,
    QSR,
    Adasum,
    CompressionPolicy,
    Delayed,
    DeMo,
    Dion,
    Periodic,
    PostLocal,
    PowerSGD,
    Quantised,
    Streaming,
    TopK,
    combine_gradients,
    compress,
    diloco,
    local_updates,
    make_compressor,
)
from mycel.data_parallel.fsdp import FSDPCompression
from mycel.errors import UsageError
from mycel.moe import ExpertParallel, MoE, SwitchLoss, Tuner, read_tutel, upcycled
from mycel.moe.stacks import require_no_graph
from mycel.settings import read_settings


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def replicated() -> nn.Module:
    return DistributedDataParallel(nn.Linear(32, 16))


def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    return model


def layer() -> MoE:
    return MoE(dim=64, hidden=64, num_experts=4, top_k=2)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(4, 4).parameters(), 0.1)


RING = mycel.load_topology("ring:ranks=4")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: compress(replicated(), PowerSGD), r"PowerSGD is a class, .* make one, PowerSGD\(\.\.\.\)"),
        (lambda: compress(replicated(), CompressionPolicy), "CompressionPolicy is a class"),
        (lambda: compress(replicated(), QSDP()), "QSDP .* fully_shard has sharded; this one is wrapped in"),
        (lambda: compress(replicated(), "qsdp"), "QSDP .* fully_shard has sharded"),
        (lambda: compress(replicated(), QSDP), "QSDP .* fully_shard has sharded"),
        (lambda: compress(replicated(), "powersdg"), r"did you mean 'powersgd'\?"),
        (lambda: compress(replicated(), 4), "expected a compressor, the name of one, or a policy, got int"),
        (lambda: compress(replicated(), None), "got NoneType"),
        (
            lambda: compress(replicated(), TopK(0.1), feedbak=True),
            r"no option 'feedbak' \(did you mean 'feedback'\?\)",
        ),
        (lambda: compress(sharded(), QSDP), r"QSDP is a class, .* make one, QSDP\(\.\.\.\)"),
        (lambda: compress(sharded(), PowerSGD(rank=4)), "several rounds of sums"),
        (lambda: compress(sharded(), QSDP(), replica=3), "no option 'replica'"),
        (lambda: compress(nn.Linear(3, 3), TopK(0.1)), "wrap it first"),
        (lambda: Quantised(3.5), "bits a value: 3.5 is not a whole number"),  # type: ignore[arg-type]
        (lambda: Quantised("4"), "bits a value: '4' is not a whole number"),  # type: ignore[arg-type]
        (lambda: Quantised(8, bucket_size=0), "elements a bucket: 0 is not at least 1"),
        (lambda: PowerSGD(rank=1.5), "rank: 1.5 is not a whole number"),  # type: ignore[arg-type]
        (lambda: PowerSGD(rank=0), "rank: 0 is not at least 1"),
        (lambda: TopK(2.0), "share of elements that is sent: 2.0 is not at most 1"),
        (lambda: TopK(float("nan")), "nan is not a number"),
        (lambda: local_updates(nn.Linear(4, 4), QSR(alpha=0.1), model=nn.Linear(4, 4)), "the optimizer"),  # type: ignore[arg-type]
        (lambda: layer()(torch.randn(8, 32)), r"tokens of \[8, 32\], torch.float32: expected \[\.\.\., 64\]"),
        (lambda: layer()(torch.ones(8, 64, dtype=torch.long)), "torch.int64: expected"),
        (lambda: MoE(dim=64.5, hidden=64, num_experts=4), "width of tokens: 64.5"),  # type: ignore[arg-type]
        (lambda: MoE(dim=64, hidden=64, num_experts=4, top_k=0), "top_k, experts a token: 0 is not at least 1"),
        (lambda: ExpertParallel(3), "expected a DeviceMesh as mesh, got int"),  # type: ignore[arg-type]
        (lambda: mycel.bound("ring:ranks=4", "all_gather"), "expected a topology, got str"),  # type: ignore[arg-type]
        (lambda: mycel.synthesize(None, "all_gather"), "expected a topology, got NoneType"),  # type: ignore[arg-type]
        (lambda: mycel.select(RING, "all_gather", ["1MB"]), "size in bytes: '1MB' is not a whole number"),  # type: ignore[list-item]
        (lambda: mycel.simulate(mycel.synthesize(RING, "all_gather"), 1.5), "size in bytes: 1.5"),  # type: ignore[arg-type]
        (lambda: mycel.verify_schedule(None), "expected a schedule, got NoneType"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_call_is_refused_in_one_line(call: Callable[[], object], why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        call()
    assert "\n" not in str(caught.value)


def apart(rule: Any, **options: Any) -> object:
    model = nn.Linear(4, 4)
    return local_updates(torch.optim.SGD(model.parameters(), 0.1), rule, model=model, **options)


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4, 8))]


def applied(**options: Any) -> object:
    from mycel.moe import apply

    return apply(nn.Linear(4, 4), **options)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        # local updates
        (lambda: apart(QSR(alpha=0.1)), r"QSR's rounds get longer .* pass total_steps="),
        (lambda: apart(Delayed(QSR(alpha=0.1))), "pass total_steps="),
        (lambda: apart(QSR), r"QSR is a class, .* make one, QSR\(\.\.\.\)"),
        (lambda: apart(8), r"expected a rule of rounds, got int: such as Periodic\(8\)"),
        (lambda: apart("qsr"), "expected a rule of rounds, got str"),
        (lambda: apart(Periodic(8), total_steps="100"), "total_steps, of the training: '100' is not a whole number"),
        (lambda: apart(Periodic(8), total_steps=0), "total_steps, of the training: 0 is not at least 1"),
        (lambda: apart(Periodic(8), outer=diloco), r"call it, outer=diloco\(\)"),
        (lambda: apart(Periodic(8), outer="diloco"), r"got str: such as diloco\(\)"),
        (lambda: apart(Periodic(8), outer=optimizer()), "got SGD: such as diloco"),
        (lambda: apart(Periodic(8), combiner=Adasum), r"Adasum is a class, .* make one, Adasum\(\)"),
        (lambda: apart(Periodic(8), combiner="mean"), r"expected a combiner, such as Adasum\(\), got str"),
        (lambda: apart(Periodic(8), compressor=TopK), r"TopK is a class, .* make one"),
        (lambda: apart(Periodic(8), compressor="int5"), r"unknown compressor 'int5' \(did you mean"),
        (lambda: apart(Periodic(8), optimizer_state="avg"), "optimizer_state 'avg' is none of"),
        (lambda: local_updates(optimizer(), Periodic(8), model=nn.Linear(4, 4)), "are not the model's"),
        (lambda: local_updates(optimizer(), Periodic(8), model=[nn.Linear(4, 4)]), "expected the model, got list"),  # type: ignore[arg-type]
        (lambda: Periodic(2.5), "steps of a round: 2.5 is not a whole number"),  # type: ignore[arg-type]
        (lambda: Periodic(0), "steps of a round: 0 is not at least 1"),
        (lambda: QSR(alpha="0.1"), "QSR: alpha, a learning rate: '0.1' is not a number"),  # type: ignore[arg-type]
        (lambda: QSR(alpha=-1), "QSR: alpha, a learning rate: -1 is not above 0"),
        (lambda: QSR(alpha=1, warm_up=-1), "QSR: warm_up, first steps: -1 is not at least 0"),
        (lambda: Delayed(8), "expected a rule of rounds, got int"),  # type: ignore[arg-type]
        (lambda: Delayed(Delayed(Periodic(8))), "results of Delayed come a round late already"),
        (lambda: PostLocal(begin=0.5, steps=8), "0.5 is not a whole number"),  # type: ignore[arg-type]
        (lambda: Streaming(steps=10.5), "Streaming: steps: 10.5 is not a whole number"),  # type: ignore[arg-type]
        # compression
        (lambda: compress(replicated(), Quantised(4), residuals="int8"), "but none are kept: .* pass feedback=True"),
        (lambda: compress(replicated(), TopK(0.1), feedback=False, residuals="int8"), "feedback=False; pass"),
        (lambda: compress(sharded(), QSDP(), residuals="int8"), "but none are kept"),
        (lambda: compress(replicated(), TopK(0.1), residuals="int4"), "residuals in 'int4'"),
        (lambda: compress(replicated(), TopK(0.1), decay=2.0), "decay 2.0"),
        (lambda: compress(replicated(), TopK(0.1), fuse_bytes="1MB"), "fuse_bytes, .*: '1MB' is not a whole number"),
        (lambda: CompressionPolicy(PowerSGD), r"PowerSGD is a class"),  # type: ignore[arg-type]
        (lambda: CompressionPolicy("powersdg"), r"did you mean 'powersgd'\?"),
        (lambda: CompressionPolicy(4), "expected a compressor or the name of one, got int"),  # type: ignore[arg-type]
        (lambda: CompressionPolicy(TopK(0.1), rules={"*": TopK}), "TopK is a class"),  # type: ignore[dict-item]
        (lambda: CompressionPolicy(TopK(0.1), start_step=1.5), "start_step, .*: 1.5 is not a whole"),  # type: ignore[arg-type]
        (lambda: make_compressor("top_k", densty=0.1), "compressor top_k: .*densty"),
        (lambda: combine_gradients(replicated(), Adasum), "such as Adasum"),  # type: ignore[arg-type]
        (lambda: combine_gradients(nn.Linear(3, 3), Adasum()), "needs a DistributedDataParallel model"),  # type: ignore[arg-type]
        # optimizers
        (lambda: Dion(matrices(), lr="0.1"), "lr: '0.1' is not a number"),  # type: ignore[arg-type]
        (lambda: Dion(matrices(), lr=float("nan")), "lr: nan is not a number"),
        (lambda: Dion(matrices(), rank=1.5), "rank 1.5: want a share"),
        (lambda: Dion(matrices(), betas=0.9), "betas 0.9: want two"),  # type: ignore[arg-type]
        (lambda: Dion([nn.Parameter(torch.zeros(4))]), "is no matrix, which dion needs"),
        (lambda: DeMo(matrices(), top_k=0), "top_k 0"),
        (lambda: DeMo(matrices(), chunk=4096), "chunks of 4096"),
        (lambda: Dion(matrices()).attach(nn.Linear(8, 4)), "DistributedDataParallel"),  # type: ignore[arg-type]
        # experts
        (lambda: MoE(64, 64, 4, capacity=1.25), r"expected a capacity, got float .*CapacityPolicy\(factor=1.25\)"),  # type: ignore[arg-type]
        (lambda: MoE(64, 64, 4, balancing="switch"), r"expected a balancing policy, got str .*SwitchLoss\(\)"),  # type: ignore[arg-type]
        (lambda: MoE(64, 64, 4, balancing=SwitchLoss), "SwitchLoss is a class"),  # type: ignore[arg-type]
        (lambda: MoE(64, 64, 4, top_k=5), "top_k 5 of 4 experts"),
        (lambda: MoE(64, 64, 4, router="topk2"), "unknown router 'topk2'"),
        (lambda: MoE(64, 64, 4, activation="swigloo"), r"did you mean 'swiglu'\?"),
        (lambda: MoE(64, 64, 4, shared_hidden=0.5), "width of the shared expert: 0.5"),  # type: ignore[arg-type]
        (lambda: MoE(64, 64, 4, parallel=4), "expected a DeviceMesh as mesh, got int"),  # type: ignore[arg-type]
        (lambda: layer()(torch.randn(8, 64), top_k=9), "top_k 9 of 4 experts"),
        (lambda: layer()([[1.0] * 64]), r"expected tokens in a tensor of \[\.\.\., 64\], got list"),
        (lambda: layer()(torch.randn(8, 64), r=2), "r = 2|no such r|whole"),
        (lambda: ExpertParallel(degree=1.5), "degree, chunks of tokens: 1.5"),  # type: ignore[arg-type]
        (lambda: ExpertParallel(tensor_shards=0), "tensor_shards, .*: 0 is not at least 1"),
        (lambda: ExpertParallel(tuner=Tuner), "Tuner is a class"),  # type: ignore[arg-type]
        (lambda: ExpertParallel(gradients="avg"), "gradients 'avg'"),  # type: ignore[arg-type]
        (lambda: MoE(64, 64, 4, parallel=ExpertParallel(codec="int9")), "unknown codec 'int9'"),
        (lambda: MoE(64, 64, 4, parallel=ExpertParallel(dispatcher="alltoal")), "unknown dispatcher 'alltoal'"),
        (lambda: applied(), "Linear is no Hugging Face model with exchangeable experts"),
        (lambda: upcycled(nn.Linear(4, 4), 4), "expected a feed-forward network"),
        (lambda: upcycled(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), 2.5), "2.5 is not a whole"),  # type: ignore[arg-type]
        (lambda: read_tutel({}), "no tensors of a layer of Tutel"),
        (lambda: read_tutel(layer()), "expected the state_dict of a layer, .* got MoE"),  # type: ignore[arg-type]
        # groups
        (lambda: elastic.shrink_group([5]), "only groups of backend mycel"),
        # the plan side
        (lambda: mycel.load_topology("strar:ranks=4"), r"did you mean 'star'\?"),
        (lambda: mycel.load_topology("star:rnaks=4"), "rnaks"),
        (lambda: mycel.load_topology("star:ranks=four"), "four"),
        (lambda: mycel.bound(RING, "al_reduce"), r"did you mean 'all_reduce'\?"),  # type: ignore[arg-type]
        (lambda: mycel.bound(RING, Collective("all_gather", 3)), "over 3 ranks"),
        (lambda: mycel.synthesize(RING, "all_gather", "forrest"), r"did you mean 'forest'\?"),
        (lambda: mycel.synthesize(RING, "all_gather", k="2"), "'2' is not a whole number"),
        (lambda: mycel.select(RING, "all_gather", []), "no sizes"),
        (lambda: mycel.export(mycel.synthesize(RING, "all_gather"), "msccl"), "unknown format 'msccl'"),
        (lambda: mycel.lower(mycel.synthesize(RING, "all_gather"), -1, piece_elements=16), "-1"),
    ],
)
def test_more_wrong_calls_are_refused_in_one_line(call: Callable[[], object], why: str) -> None:
    with pytest.raises(mycel.MycelError, match=why) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("MYCEL_TIMEOUT", "nan", "must be positive"),
        ("MYCEL_TIMEOUT", "30s", "'30s' is not a number"),
        ("MYCEL_PIECE_BYTES", "inf", "must be positive and finite"),
        ("MYCEL_PIECE_BYTES", "1.5", "must be a whole number"),
        ("MYCEL_PACE", "-1", "must be positive"),
        ("MYCEL_RANKS", "3-1", "expected ranks and ranges of them"),
        ("MYCEL_RANKS", "0,0", "names a rank twice"),
        ("MYCEL_LOCAL", "shm", "is not one of: memory, unix, tcp"),
        ("MYCEL_VERIFY", "yes", "is not one of"),
        ("MYCEL_DEBUG", "2", "is not one of: info, warning"),
        ("MYCEL_ON_LINK_FAILURE", "ignore", "is not one of: raise, replan"),
        ("MYCEL_FLIGHT_RECORDER", "off", "'off' is not a number"),
        ("MYCEL_CONF_FILE", "/no/such/file", "cannot be read"),
    ],
)
def test_variables_that_mean_nothing_are_refused(name: str, value: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        read_settings({name: value})
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [replicated, sharded])
def test_a_second_compression_is_refused_until_the_first_is_closed(make: Callable[[], nn.Module]) -> None:
    model = make()
    first = compress(model, "int8")
    with pytest.raises(UsageError, match=r"already: close\(\) that handle first"):
        compress(model, "int4")
    first.close()
    compress(model, "int4").close()


@pytest.mark.parametrize("name", ["powersgd", "Top_K", "int4"])
def test_names_stand_for_compressors_with_their_usual_settings(name: str) -> None:
    model = replicated()
    with compress(model, name) as handle:
        model(torch.ones(1, 32)).sum().backward()
    assert handle.step == 1


def test_qsdp_has_a_name_for_sharded_models_that_have_run_before() -> None:
    model = sharded()
    model(torch.ones(1, 32))  # leaves the root's parameters whole
    with compress(model, "qsdp") as handle:
        assert isinstance(handle, FSDPCompression)
        assert next(segment.name for segment in handle.units[0].segments) == "0.weight"
        model(torch.ones(1, 32)).sum().backward()


# -- an earlier pass whose graph is alive -----------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.up * x).sum()


def test_experts_in_a_graph_are_not_divided_and_others_are() -> None:
    experts = Stack()
    require_no_graph(experts, "mlp.experts")
    kept = experts(torch.ones(2))
    with pytest.raises(UsageError, match=r"mlp\.experts\.up: the graph of an earlier forward pass is alive.*no_grad"):
        require_no_graph(experts, "mlp.experts")
    kept.backward()
    with pytest.raises(UsageError, match="is alive"):
        require_no_graph(experts, "mlp.experts")
    del kept
    with torch.no_grad():
        _also_kept = experts(torch.ones(2))
        require_no_graph(experts, "mlp.experts")
    with torch.inference_mode():
        require_no_graph(experts, "mlp.experts")
        require_no_graph(Stack(), "mlp.experts")
    experts.up.requires_grad_(False)
    require_no_graph(experts, "mlp.experts")
