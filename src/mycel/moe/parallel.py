"""How the experts of a layer or of a whole model are divided over ranks, in one description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from mycel.arguments import the, whole_number
from mycel.brief import brief
from mycel.errors import UsageError
from mycel.moe.dispatch import TokenDispatcher
from mycel.moe.schedule import Tuner
from mycel.wire import WireCodec

__all__ = ["ExpertParallel"]


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Experts over the ranks of a mesh: for ``MoE(..., parallel=...)`` and ``mycel.moe.apply(model, parallel=...)``.

    A bare mesh may stand in its place and means ``ExpertParallel(mesh)``.

    ``replicas`` are ranks that have the same tokens, as those of a tensor-parallel group. Replicas of an expert are
    another matter, that of placements (``mycel.planning.placement.ExpertPlacement``).

    Attributes:
        mesh: ranks to divide experts over, of one dimension or of two (nodes, ranks of a node); ``None``: this one.
        dispatcher: a key of ``mycel.moe.dispatch.DISPATCHERS``; ``None``: what the mesh suggests; or a dispatcher
            made before, or what makes one from a layer's number of experts, which then is the only one.
        codec: of rows on the wire: a key of ``mycel.wire.CODECS``, or a codec.
        tensor_shards: ranks that share an expert, each with a slice of its hidden width; ``None``: 1, or where there
            are fewer experts than ranks, and it is whole, W/E. With more than 1, a call's ``r`` has a choice.
        replicas: dimension of the mesh whose ranks have the same tokens, routers and loss; each sends its share
            of them.
        degree: chunks of tokens whose exchanges overlap the experts' work on other chunks.
        tuner: chooses ``r``, ``degree`` and ``algorithm`` of every call that does not say them, by its load;
            ``None``: ``r = tensor_shards``, ``degree``, and the dispatcher named.
        gradients: ``"mean"`` or ``"sum"`` of the ranks' losses.

    Raises:
        UsageError: no such gradients, or fewer than one chunk.

    Examples:
        >>> ExpertParallel(tensor_shards=1, degree=2).gradients
        'mean'
    """

    mesh: DeviceMesh | None = None
    _: KW_ONLY
    dispatcher: str | TokenDispatcher | Callable[[int], TokenDispatcher] | None = None
    codec: str | WireCodec = "identity"
    tensor_shards: int | None = None
    replicas: DeviceMesh | None = None
    degree: int = 1
    tuner: Tuner | None = None
    gradients: Literal["mean", "sum"] = "mean"

    __repr__ = brief

    def __post_init__(self) -> None:
        for name in ("mesh", "replicas"):
            if getattr(self, name) is not None:
                the(
                    DeviceMesh,
                    getattr(self, name),
                    f"a DeviceMesh as {name}",
                    hint="torch's init_device_mesh makes one",
                )
        if self.gradients not in ("mean", "sum"):
            raise UsageError(f"gradients {self.gradients!r}; expected 'mean' or 'sum'")
        whole_number(self.degree, "degree, chunks of tokens", least=1)
        if self.tensor_shards is not None:
            whole_number(self.tensor_shards, "tensor_shards, ranks that share an expert", least=1)
        if self.tuner is not None:
            the(Tuner, self.tuner, "a tuner", hint="such as Tuner()")

    @staticmethod
    def of(parallel: ExpertParallel | DeviceMesh | None) -> ExpertParallel:
        """The description, of which a mesh or nothing is a short form."""
        return parallel if isinstance(parallel, ExpertParallel) else ExpertParallel(parallel)
