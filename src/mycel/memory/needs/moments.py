"""What a training step holds, moment by moment and by what it is: data, with JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["KINDS", "Block", "Kind", "Moment", "Needs", "Phase", "moment_name"]

Kind = Literal["parameters", "gradients", "optimizer", "inputs", "activations", "exchanges", "temporary"]
Phase = Literal["forward", "backward", "step"]
#: What memory is held for, in the order in which pictures stack it: longest held first.
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """From one block's beginning to the next one's.

    Attributes:
        phase: of the step.
        block: name of the module that runs; empty for what is between blocks, as the loss.
        parameters, gradients, optimizer, inputs, activations, exchanges, temporary: bytes at the fullest point of the
            moment. Activations are what forward leaves for backward, exchanges what FSDP gathers, temporary what is
            gone when the moment is over, or was made by backward or by the optimizer.
        working: bytes at the fullest point without parameters, optimizer and gradients that were there when the
            moment began: what has to be near whoever keeps those far.
        flops: operations of products and attention.
        gathers: names of the sharded units that are gathered meanwhile, so that their shards are read.
    """

    phase: Phase
    block: str
    parameters: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    exchanges: int
    temporary: int
    working: int
    flops: int
    gathers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.phase not in get_args(Phase):
            raise UsageError(f"phase {self.phase!r}: one of {', '.join(get_args(Phase))}")
        for name in (*KINDS, "working", "flops"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{name} of {self.phase} of {self.block!r} is {value!r}: a whole number from 0")

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A module that computes as a whole, forward and backward.

    Attributes:
        name: in the model.
        parameters: bytes of its parameters and buffers.
        saved: bytes that its forward leaves for its backward, its input not counted.
        input: bytes of its input.
        forward_flops, backward_flops: operations of products and attention; with recomputation, backward has both.
    """

    name: str
    parameters: int
    saved: int
    input: int
    forward_flops: int
    backward_flops: int


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Memory of one training step, in its steady state.

    Attributes:
        name: of the model.
        moments: in order.
        blocks: in order of forward.

    Raises:
        UsageError: there are no moments.

    Examples:
        >>> moment = Moment(phase="forward", block="", parameters=8, gradients=0, optimizer=16, inputs=2,
        ...     activations=4, exchanges=0, temporary=1, working=7, flops=0)
        >>> needs = Needs(name="two numbers", moments=(moment,), blocks=())
        >>> needs.peak, needs.fullest.block
        (31, '')
    """

    name: str
    moments: tuple[Moment, ...]
    blocks: tuple[Block, ...]

    __repr__ = brief

    def __post_init__(self) -> None:
        if not self.moments:
            raise UsageError(f"{self.name}: a step without moments")

    @property
    def fullest(self) -> Moment:
        """The first moment that holds most."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak(self) -> int:
        """Bytes that are held at most."""
        return self.fullest.total

    @property
    def flops(self) -> int:
        """Operations of the step."""
        return sum(moment.flops for moment in self.moments)

    def most(self, kind: Kind) -> int:
        """Bytes of one kind, where there are most of it.

        Args:
            kind: one of ``KINDS``.
        """
        return max(int(getattr(moment, kind)) for moment in self.moments)

    def to_json(self) -> dict[str, Any]:
        """As ``mycel memory show --json`` prints it."""
        columns = ("phase", "block", *KINDS, "working", "flops", "gathers")
        fields = ("name", "parameters", "saved", "input", "forward_flops", "backward_flops")
        return {
            "version": 1,
            "name": self.name,
            "peak": self.peak,
            "moments": [{column: getattr(moment, column) for column in columns} for moment in self.moments],
            "blocks": [{field: getattr(block, field) for field in fields} for block in self.blocks],
        }

    @classmethod
    def from_json(cls, data: Any) -> Needs:
        """What a JSON object says.

        Args:
            data: as ``to_json`` writes it.

        Raises:
            UsageError: it is of another version, or says something else.
        """
        if not isinstance(data, Mapping) or data.get("version") != 1:
            got = data.get("version") if isinstance(data, Mapping) else type(data).__name__
            raise UsageError(f"needs of a model: expected an object of version 1, got {got!r}")
        try:
            return cls(
                name=str(data["name"]),
                moments=tuple(
                    Moment(**{**moment, "gathers": tuple(moment.get("gathers", ()))}) for moment in data["moments"]
                ),
                blocks=tuple(Block(**block) for block in data["blocks"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"needs of a model: {type(error).__name__} {error}") from None


def moment_name(phase: str, block: str) -> str:
    """A moment, for people.

    Args:
        phase: of the step.
        block: name of its module; empty for what is between blocks.

    Examples:
        >>> moment_name("backward", "layers.3"), moment_name("step", "")
        ('backward of layers.3', 'step')
    """
    return f"{phase} of {block}" if block else phase
