"""What attaching something to a model or an optimizer returns: the way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

__all__ = ["Handle"]


class Handle(ABC):
    """Something at work on a model or an optimizer, until ``close()``; also the end of a ``with`` block.

    Examples:
        >>> class Watched(Handle):
        ...     def __init__(self, module):
        ...         self.hook = module.register_forward_hook(lambda *_: print("a forward pass"))
        ...     def close(self):
        ...         self.hook.remove()
        >>> from torch.nn import Identity
        >>> with Watched(layer := Identity()):
        ...     _ = layer(1)
        a forward pass
        >>> layer(2)  # as it was
        2
    """

    @abstractmethod
    def close(self) -> None:
        """Leave the model or the optimizer as it was, from the next step on. May be called again, between steps."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
