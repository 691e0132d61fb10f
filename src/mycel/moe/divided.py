"""Which parameters of a model differ between ranks as experts are divided; what keeps DDP and FSDP2 from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from mycel.brief import brief
from mycel.comm.sharded import is_fully_sharded, param_groups
from mycel.errors import UsageError
from mycel.untraced import untraced

__all__ = ["DividedExperts", "divided_experts", "leave_alone", "refuse_shards", "stacks_of"]

_PARAMETRIZED, _ORIGINAL = "parametrizations.", ".original"


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedExperts:
    """A module of whose layer other ranks hold other experts, or other slices of them.

    Attributes:
        path: of the module in the model.
        experts: the module.
        stacks: parameters with a row for each expert here: name in the model, and the module's name for it.
        adapters: names in the model of parameters that change those, as parametrizations and PEFT's layers do.
    """

    path: str
    experts: nn.Module
    stacks: Mapping[str, str]
    adapters: tuple[str, ...]

    __repr__ = brief

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.stacks, *self.adapters)

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks that the experts are divided over. The first call may make a group: all of them make it.

        Raises:
            UsageError: the dispatcher was made elsewhere and does not say.
        """
        routed: Any = self.experts.routed
        group: dist.ProcessGroup | None = routed.group
        if group is None:
            raise UsageError(
                f"{self.path}: its dispatcher has no 'group' that says over which ranks the experts are divided; "
                "give ExpertParallel the mesh as well"
            )
        return group


def stacks_of(module: nn.Module) -> dict[str, str]:
    """Names of a module's stacked parameters, and what ``cuts`` calls them: parametrized ones are kept elsewhere."""
    found = {name: name for name, _ in module.named_parameters(recurse=False)}
    for name, _ in module.named_parameters():
        if name.startswith(_PARAMETRIZED) and name.endswith(_ORIGINAL):
            found[name] = name.removeprefix(_PARAMETRIZED).removesuffix(_ORIGINAL)
    return found


def divided_experts(model: nn.Module) -> Iterator[DividedExperts]:
    """Every module of a model whose experts are divided over ranks, in the model's order.

    Args:
        model: with MoE layers; or of Hugging Face, after ``mycel.moe.apply``; whatever is wrapped around them.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        routed = getattr(module, "routed", None)
        layout, owned = getattr(routed, "layout", None), getattr(module, "owned", None)
        if layout is None or layout.num_ranks == 1 or not isinstance(owned, range | tuple):
            continue
        stacks = stacks_of(module)
        # Other children, such as a norm after the experts, are alike on all ranks.
        own = [name for name, _ in module.named_parameters() if name.startswith(_PARAMETRIZED) and name not in stacks]
        adapters = [_joined(path, name) for name in own]
        wrapper, _, leaf = path.rpartition(".")
        while leaf == "base_layer":  # PEFT's layers stand in the place of what they adapt and keep it under this name
            around = (name for name, _ in modules[wrapper].named_parameters() if not name.startswith("base_layer."))
            adapters += [_joined(wrapper, name) for name in around]
            wrapper, _, leaf = wrapper.rpartition(".")
        named = {_joined(path, name): what for name, what in stacks.items()}
        yield DividedExperts(path=path, experts=module, stacks=named, adapters=tuple(adapters))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# -- DDP -------------------------------------------------------------------------------------------------------

_watching = False


def leave_alone() -> None:
    """From now on DDP leaves divided experts alone, or is refused, wherever in its module they are.

    DDP gives all ranks rank 0's parameters when it is made, and looks for exceptions on the outermost module only, of
    which a layer knows nothing. Torch tells those who ask of every module that gets a child: this one asks, once a
    process, as soon as there are divided experts.
    """
    global _watching
    if not _watching:
        _watching = True
        register_module_module_registration_hook(_registered)


def _registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if isinstance(parent, DistributedDataParallel) and name == "module" and child is not None:
        _spare(parent, child)


def _spare(ddp: Any, model: nn.Module) -> None:
    """Before DDP looks at parameters: those of divided experts are none of its.

    Raises:
        UsageError: DDP joins ranks that divide experts with ranks that have copies of them, nothing would be left
            to average, or this torch's DDP keeps its exceptions elsewhere.
    """
    names: list[str] = []
    for divided in divided_experts(model):
        if not set(divided.names) <= getattr(ddp, "parameters_to_ignore", set()) and _shared(ddp, divided):
            names += divided.names
    if not names:
        return
    if not isinstance(getattr(ddp, "parameters_to_ignore", None), set) or not hasattr(ddp, "_module_parameters"):
        raise UsageError(
            "this torch's DDP does not say which parameters it leaves alone, and would overwrite divided experts; "
            "call DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, "
            "mycel.moe.expert_parameter_names(model)) on the module that it is given"
        )
    ddp.parameters_to_ignore.update(names)
    for name in names:
        model.get_parameter(name)._ddp_ignored = True  # type: ignore[attr-defined]
    ddp._module_parameters = [p for n, p in model.named_parameters() if n not in ddp.parameters_to_ignore]
    if not any(parameter.requires_grad for parameter in ddp._module_parameters):
        raise UsageError(
            "all parameters that are trained belong to experts, which are divided over the ranks of DDP: there is "
            "nothing to average; train the model without DDP"
        )


def _shared(ddp: Any, divided: DividedExperts) -> bool:
    """Whether DDP's ranks are among those that divide these experts; if they have copies, averaging is right."""
    joined, experts = set(dist.get_process_group_ranks(ddp.process_group)), _ranks_of(divided)
    if len(joined & experts) == 1:
        return False
    if not joined <= experts:
        raise UsageError(
            f"{divided.path}: DDP is over ranks {_said(joined)}, of which {_said(joined & experts)} divide these "
            f"experts and the others have copies; DDP can neither average nor leave them. Shard the experts over the "
            "copies with fully_shard and the rest over all ranks, as the guide of the mixture-of-experts layer shows"
        )
    return True


def _ranks_of(divided: DividedExperts) -> set[int]:
    routed: Any = divided.experts.routed
    if routed.mesh is not None:
        return set(routed.mesh.mesh.flatten().tolist())
    return set(dist.get_process_group_ranks(divided.group))


def _said(ranks: Sequence[int] | set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


# -- FSDP2 -----------------------------------------------------------------------------------------------------


@untraced
def refuse_shards(experts: Any, mesh: DeviceMesh | None) -> None:
    """FSDP2 takes what each rank calls by one name for the same; of divided experts it would make a mixture.

    ``fully_shard`` asks nobody, and afterwards the module does not know over which ranks; torch's list of what it was
    called on does. Where a torch keeps that elsewhere, nothing is said.

    Args:
        experts: a module that ``fully_shard`` was told of.
        mesh: that the experts are divided over.

    Raises:
        UsageError: it shards them over ranks that hold other ones.
    """
    known: Any = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None)
    if mesh is None or known is None:
        return
    divided = set(mesh.mesh.flatten().tolist())
    for module in list(known):
        for record in param_groups(module) if is_fully_sharded(module) else ():
            held = [p for p in record.fsdp_params if p._module_info.module is experts]
            joined = divided & set(record.mesh_info.mesh.mesh.flatten().tolist())
            if held and len(joined) > 1:
                raise UsageError(
                    f"{type(experts).__name__}: fully_shard is over ranks {_said(joined)}, which hold other experts "
                    f"each: it would mix them. Give every fully_shard above them ignored_params="
                    "{model.get_parameter(name) for name in mycel.moe.expert_parameter_names(model)}"
                )
