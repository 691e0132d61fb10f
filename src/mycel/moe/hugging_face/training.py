"""A callback for transformers' ``Trainer``: balance after each step, and clipping by one norm."""

from __future__ import annotations

from typing import Any

from torch import nn

from mycel.errors import UsageError
from mycel.moe.hugging_face.applied import applied_to
from mycel.moe.hugging_face.transformers_api import trainer_callback_class
from mycel.moe.layer import update_balancing
from mycel.moe.training import clip_grad_norm

__all__ = ["trainer_callback"]


def trainer_callback(model: nn.Module) -> Any:
    """A callback for ``transformers.Trainer``: ``update_balancing`` after each step, and norms over all ranks.

    It takes ``max_grad_norm`` from the trainer's arguments for the time of training, because the trainer would clip
    each rank by a norm of its own.

    Args:
        model: to which ``mycel.moe.apply`` was applied, and which the trainer trains.

    Raises:
        UsageError: ``apply`` was not called on it; when training begins, if the trainer is to write checkpoints,
            which would be of one rank's experts.
    """
    applied = applied_to(model)
    base: Any = trainer_callback_class()

    class MoECallback(base):  # type: ignore[misc]
        max_norm: float | None = None

        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            if applied.group is None:
                return
            if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
                raise UsageError(
                    f"save_strategy={args.save_strategy!r}: the trainer writes the experts of one rank only; set it "
                    "to 'no', and save full_state_dict(model) or restore the model before it is saved"
                )
            self.max_norm, args.max_grad_norm = args.max_grad_norm, 0.0

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if self.max_norm:
                clip_grad_norm(model, self.max_norm)

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            update_balancing(model)

        def on_train_end(self, args: Any, *_: Any, **__: Any) -> None:
            if self.max_norm is not None:
                args.max_grad_norm, self.max_norm = self.max_norm, None

    return MoECallback()
