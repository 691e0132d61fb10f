"""What people pass wrongly is refused where they pass it, by one line of ours, before any backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mycel
from mycel.data_parallel import QSDP, QSR, CompressionPolicy, PowerSGD, Quantised, TopK, compress, local_updates
from mycel.data_parallel.fsdp import FSDPCompression
from mycel.errors import UsageError
from mycel.moe import ExpertParallel, MoE
from mycel.moe.stacks import require_no_graph


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
