"""Text to train on that every machine with Python has: the source of the standard library, as bytes.

A file belongs either to the training text or to the held-out text, never to both, and to which is decided by its
name alone; so two machines with the same Python see the same corpus.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["Corpus", "is_held_out", "load_corpus", "load_documents", "sample_batch"]

#: One file in so many is held out.
HELD_OUT_ONE_IN = 12

#: Not prose or code that a person reads: test data, generated tables, other people's packages.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "lib-dynload"}

_SEPARATOR = b"\n\x00\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Bytes as ``uint8`` tensors.

    Attributes:
        train: text to train on, shape ``[bytes]``.
        held_out: text of other files, shape ``[bytes]``.
        num_files: files of train and held-out text.
        source: folder it came from.
    """

    train: Tensor
    held_out: Tensor
    num_files: tuple[int, int]
    source: str

    __repr__ = brief


def is_held_out(name: str) -> bool:
    """Whether the file of this relative name (with ``/``) belongs to the held-out text.

    Examples:
        >>> sum(is_held_out(f"module_{i}.py") for i in range(1200)) in range(60, 150)
        True
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def load_corpus(folder: str | Path | None = None, *, max_bytes: int = 8 << 20) -> Corpus:
    """The Python files under a folder, in the order of their names.

    Args:
        folder: where to look; the standard library of this Python when not given.
        max_bytes: read no more files once the training text is this long.

    Raises:
        UsageError: the folder has no readable Python text on both sides of the split.
    """
    train, held_out = load_documents(folder, max_bytes=max_bytes)
    return Corpus(
        train=_tensor(train),
        held_out=_tensor(held_out),
        num_files=(len(train), len(held_out)),
        source=str(_root(folder)),
    )


def load_documents(folder: str | Path | None = None, *, max_bytes: int = 8 << 20) -> tuple[list[bytes], list[bytes]]:
    """The files of ``load_corpus``, each for itself.

    Args:
        folder, max_bytes: as for ``load_corpus``.

    Returns:
        Files to train on, and others to hold out.

    Raises:
        UsageError: the folder has no readable Python text on both sides of the split.
    """
    root = _root(folder)
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for file in _python_files(root):
        if total >= max_bytes:
            break
        try:
            text = file.read_bytes()
        except OSError:
            continue
        held_out = is_held_out(file.relative_to(root).as_posix())
        sides[held_out].append(text)
        total += 0 if held_out else len(text)
    if not sides[False] or not sides[True]:
        raise UsageError(f"{root}: too few Python files to split into training and held-out text")
    return sides[False], sides[True]


def sample_batch(text: Tensor, batch_size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows at random places, and the same windows one byte later.

    Args:
        text: shape ``[bytes]``, ``uint8``, longer than ``length``.
        generator: decides the places; the same state gives the same batch.

    Returns:
        Inputs and targets, each ``int64`` of shape ``[batch_size, length]``.

    Raises:
        UsageError: the text is too short.
    """
    if len(text) <= length:
        raise UsageError(f"a text of {len(text)} bytes has no window of {length + 1}")
    starts = torch.randint(0, len(text) - length, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _root(folder: str | Path | None) -> Path:
    return Path(folder or sysconfig.get_path("stdlib"))


def _python_files(root: Path) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name.lower() not in _SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(_SEPARATOR.join(texts)), dtype=torch.uint8)
