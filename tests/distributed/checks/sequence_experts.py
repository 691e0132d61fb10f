"""Experts divided over the ranks that share sequences: losses and gradients of one process, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.distributed.checks.sequence_models import alone, batch_of, make
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mycel.moe
import mycel.sequence
from mycel.errors import UsageError
from mycel.moe import ExpertParallel, MoE, expert_parameter_names, moe_loss
from mycel.moe.balance import AdaptiveL1, GShardLoss, LoadImportanceLoss, SequenceLoss, SwitchLoss, ZLoss
from mycel.planning.grouping import PlannedGroup, SequencePlan
from mycel.sequence.grouped import planned_step

EXPERTS, DIM, HEADS = 6, 8, 2
LENGTHS = [14, 1, 2, 11]


class Block(nn.Module):
    """Attention and a mixture of experts, over tokens that are vectors."""

    def __init__(self, parallel: Any, policies: Any, options: dict[str, Any]) -> None:
        super().__init__()
        like: dict[str, Any] = {"parallel": parallel, "dtype": torch.float64, **options}
        self.qkv = nn.Linear(DIM, 3 * DIM, dtype=torch.float64)
        self.moe = MoE(DIM, 12, EXPERTS, 2, balancing=policies, **like)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, documents: list[int] | None = None) -> Tensor:
        """Over several documents in one process, each attends to itself."""
        parts = [x] if documents is None else x.split(documents, 1)
        x = torch.cat([self.attend(part) for part in parts], 1)
        mixed: Tensor = x + self.moe(x)
        return mixed


class Mixed(nn.Module):
    """Two of them, which are computed again in the backward pass if ``again``."""

    def __init__(self, parallel: Any = None, *, policies: Any = (), again: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(parallel, policies, options) for _ in range(2))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def tokens_of(total: int, rows: int = 2, seed: int = 11) -> Tensor:
    return torch.randn(rows, total, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def losses_of(y: Tensor) -> Tensor:
    return y.square().sum(-1)


def far(model: nn.Module, whole: nn.Module) -> float:
    """The farthest gradient from that of the same name in one process; of experts those that this rank holds."""
    owned: Any = next(m for m in model.modules() if isinstance(m, MoE)).experts.owned
    found = 0.0
    for name, parameter in model.named_parameters():
        wanted, gradient = whole.get_parameter(name).grad, parameter.grad
        assert wanted is not None and gradient is not None
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[operator]
        wanted = wanted[list(owned)] if ".experts." in name else wanted
        found = max(found, float((gradient - wanted).norm() / wanted.norm()))
    return found


def by_ddp(model: Mixed, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def by_fsdp(model: Mixed, mesh: DeviceMesh) -> nn.Module:
    apart = {model.get_parameter(name) for name in expert_parameter_names(model)}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=apart)
    fully_shard(model, mesh=mesh, ignored_params=apart)
    return model


POLICIES: dict[str, Callable[[], Any]] = {
    "none": lambda: (),
    "switch": lambda: SwitchLoss(0.5),
    "gshard": lambda: GShardLoss(0.5),
    "z": lambda: ZLoss(0.1),
    "importance": lambda: LoadImportanceLoss(0.5),
    "sequence": lambda: SequenceLoss(0.5),
}
#: How experts are divided and exchanged, what is wrapped around, recomputation, tokens a row, layout.
CASES: dict[str, tuple[dict[str, Any], Callable[[Mixed, DeviceMesh], nn.Module], bool, int, str]] = {
    "plain": ({}, by_ddp, False, 29, "per_document_zigzag"),
    "all_gather": ({"dispatcher": "all_gather"}, by_ddp, False, 29, "contiguous"),
    "chunks": ({"degree": 2}, by_ddp, True, 29, "balanced"),
    "fsdp2": ({}, by_fsdp, True, 29, "per_document_zigzag"),
    "few tokens": ({}, by_ddp, False, 2, "contiguous"),
}


def divided(rank: int, world_size: int) -> dict[str, float]:
    """By case and policy of balance how far loss and gradients are from one process."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for case, (options, wrap, again, total, layout) in CASES.items():
        for policy, policies in POLICIES.items():
            x = tokens_of(total)
            whole = Mixed(policies=policies())
            wanted = losses_of(whole(x)).mean() + moe_loss(whole)
            wanted.backward()
            model = Mixed(ExpertParallel(mesh, **options), policies=policies(), again=again)
            with mycel.sequence.apply(model, layout=layout) as handle:
                wrapped = wrap(model, mesh)
                loss = handle.mean(losses_of(wrapped(handle.shard(x))), 2 * total) + moe_loss(model)
                loss.backward()
                error = abs(float(handle.average(loss) / wanted.detach()) - 1)
            found[f"{case}, {policy}"] = max(error, far(model, whole))
    return found


def relu(rank: int, world_size: int) -> float:
    """Routing by ReLU, with its own penalty."""
    mesh = init_device_mesh("cpu", (world_size,))
    options: dict[str, Any] = {"router": "relu", "policies": AdaptiveL1(EXPERTS, 2, initial=0.5)}
    x, whole, model = tokens_of(29), Mixed(**options), Mixed(mesh, **copy.deepcopy(options))
    (losses_of(whole(x)).mean() + moe_loss(whole)).backward()
    with mycel.sequence.apply(model) as handle:
        wrapped = DistributedDataParallel(model)
        (handle.mean(losses_of(wrapped(handle.shard(x))), 58) + moe_loss(model)).backward()
    return far(model, whole)


def grouped(rank: int, world_size: int) -> dict[str, float]:
    """Three ranks: two share documents, one has others, and then one is idle; experts are divided over all."""
    mesh = init_device_mesh("cpu", (world_size,))
    lengths, found = [9, 5, 7], {}
    documents = [tokens_of(n, rows=1, seed=n)[0] for n in lengths]
    side_by_side = (
        PlannedGroup(micro_batch=0, ranks=(0, 1), sequences=(0,)),
        PlannedGroup(micro_batch=0, ranks=(2,), sequences=(1, 2)),
    )
    with_idle = (PlannedGroup(micro_batch=0, ranks=(0, 2), sequences=(0, 1, 2)),)
    in_turn = (
        PlannedGroup(micro_batch=0, ranks=(1, 2), sequences=(2,)),
        PlannedGroup(micro_batch=1, ranks=(0,), sequences=(0,)),
        PlannedGroup(micro_batch=1, ranks=(1, 2), sequences=(1,)),
    )
    for name, groups in {"side by side": side_by_side, "idle": with_idle, "in turn": in_turn}.items():
        policies: Any = () if name == "in turn" else SwitchLoss(0.5)  # which is of the tokens of a micro-batch
        whole, model = Mixed(policies=policies), Mixed(mesh, policies=policies)
        y = torch.cat(documents)[None]
        for block in whole.blocks:
            y = block(y, lengths)
        (losses_of(y).mean() + moe_loss(whole)).backward()
        with mycel.sequence.apply(model) as handle:
            plan = SequencePlan(groups=groups, total_us=1.0, lower_bound_us=0.0)
            step = planned_step(plan, documents, handle)

            def loss(called: nn.Module, part: Any, share: float = step.num_labels / 21) -> Tensor:
                return part.mean(losses_of(called(part.batch))) * share + moe_loss(called)

            step.run(DistributedDataParallel(model), loss)
        found[name] = far(model, whole)
    return found


def hugging_face(rank: int, world_size: int, families: list[str]) -> dict[str, float]:
    """Models of transformers with experts of ours, packed documents, and the loss of balance in the model's own."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for family in families:
        model = make(family, num_experts=EXPERTS, num_local_experts=EXPERTS).double()
        whole, batch = copy.deepcopy(model), batch_of(LENGTHS)
        mycel.moe.apply(whole, balancing=SwitchLoss(0.0))
        wanted, gradients = alone(whole, batch, LENGTHS)
        mycel.moe.apply(model, parallel=mesh, balancing=SwitchLoss(0.0))
        with mycel.sequence.apply(model) as handle:
            wrapped = DistributedDataParallel(model)
            loss = wrapped(**handle.shard(batch)).loss
            loss.backward()
            errors = [abs(float(handle.average(loss)) / wanted - 1)]
        far = size = 0.0
        for name, parameter in model.named_parameters():
            right, gradient = gradients[name], parameter.grad
            assert gradient is not None
            here = len(gradient)
            right = right if right.shape == gradient.shape else right[rank * here : (rank + 1) * here]
            far += float((gradient - right).norm()) ** 2
            size += float(right.norm()) ** 2
        errors.append((far / size) ** 0.5)  # together: states of gated delta rules are float32 in any model
        found[family] = max(errors)
    return found


def balanced(rank: int, world_size: int, family: str) -> float:
    """One document of a model of transformers, whose balancing loss counts."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = make(family, num_experts=EXPERTS, num_local_experts=EXPERTS).double()
    whole, batch = copy.deepcopy(model), batch_of([29])
    mycel.moe.apply(whole, balancing=SwitchLoss(1.0))
    wanted, gradients = alone(whole, batch, [29])
    mycel.moe.apply(model, parallel=mesh, balancing=SwitchLoss(1.0))
    with mycel.sequence.apply(model) as handle:
        wrapped = DistributedDataParallel(model)
        loss = wrapped(**handle.shard(batch)).loss
        loss.backward()
        error = abs(float(handle.average(loss)) / wanted - 1)
    routers = [name for name in gradients if name.endswith("gate.weight")]
    assert routers
    for name in routers:
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        error = max(error, float((gradient - gradients[name]).norm() / gradients[name].norm()))
    return error


def refused(rank: int, world_size: int) -> list[str]:
    """Ranks that share a sequence taken for ranks with the same tokens, and divided experts given to FSDP2."""
    mesh, said = init_device_mesh("cpu", (world_size,)), []
    for parallel in (ExpertParallel(mesh, dispatcher="all_reduce"), ExpertParallel(mesh, replicas=mesh), mesh):
        model = Mixed(parallel)
        if parallel is mesh:
            fully_shard(model.blocks[1], mesh=mesh)
            fully_shard(model, mesh=mesh)
        with mycel.sequence.apply(model) as handle:
            try:
                model(handle.shard(tokens_of(8)))
            except UsageError as error:
                said.append(str(error))
    return said
