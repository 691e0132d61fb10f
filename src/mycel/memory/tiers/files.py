"""Tensors whose numbers are in a file, mapped into memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["on_disk"]


def on_disk(folder: str | Path) -> Callable[[Tensor, torch.dtype], Tensor]:
    """What makes tensors whose numbers are in a file of a folder, mapped into memory.

    The operating system keeps in memory what was used last, and writes the rest out. Files have no names any more
    when they are in use: their space is free again when the tensor is gone, whatever ends the process.

    Args:
        folder: of a file system on a disk; ``/tmp`` often is memory.

    Returns:
        A function that gives zeros in the shape of a tensor, of a type: for ``TiledOptimizer(state_like=...)``.

    Raises:
        UsageError: no file can be made there.

    Examples:
        >>> make = on_disk(tempfile.gettempdir())
        >>> make(torch.empty(2, 3), torch.float32).sum()
        tensor(0.)
    """

    def make(like: Tensor, dtype: torch.dtype) -> Tensor:
        if like.numel() == 0:
            return torch.zeros_like(like, dtype=dtype, device="cpu")
        try:
            handle, name = tempfile.mkstemp(prefix="mycel-", dir=folder)
        except OSError as error:
            raise UsageError(f"{folder}: no file for numbers can be made there: {error}") from error
        try:
            os.posix_fallocate(handle, 0, like.numel() * dtype.itemsize)  # a full disk is an error now, not later
            with torch.inference_mode(False):  # made in that mode, nobody could train with it
                flat = torch.from_file(name, shared=True, size=like.numel(), dtype=dtype)
                return flat.as_strided(like.shape, _packed(like))
        except (OSError, RuntimeError) as error:
            raise UsageError(f"{folder}: no room for {like.numel() * dtype.itemsize} bytes: {error}") from error
        finally:
            os.close(handle)
            Path(name).unlink()

    return make


def _packed(like: Tensor) -> tuple[int, ...]:
    """Strides of a tensor without gaps whose dimensions are in the same order in memory."""
    strides, step = [0] * like.dim(), 1
    for dim in sorted(range(like.dim()), key=lambda dim: (like.stride(dim), -dim)):
        strides[dim], step = step, step * like.shape[dim]
    return tuple(strides)
