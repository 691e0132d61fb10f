"""Both ends of a connection show that they know a key, without sending it: HMAC over fresh nonces of both."""

from __future__ import annotations

import hmac
from typing import Literal

from mycel.runtime.transport.secret import Secret

__all__ = ["new_nonce", "proof", "proves"]

Side = Literal["member", "server"]


def new_nonce() -> str:
    """32 hexadecimal digits that were never used before."""
    return Secret.nonce().hex()


def proof(key: bytes, side: Side, *said: object) -> str:
    """What one side shows: bound to its role and to all that both have said, so neither turned round nor replayed.

    Args:
        key: that both know.
        side: who shows it.
        said: nonces of both, and what the connection is for.

    Examples:
        >>> proof(b"key", "member", "a", "b") == proof(b"key", "server", "a", "b")
        False
    """
    return Secret(key).proof(f"handle: {side}", *(str(part).encode() for part in said)).hex()


def proves(shown: object, key: bytes, side: Side, *said: object) -> bool:
    """Whether what the other side shows is right."""
    return isinstance(shown, str) and hmac.compare_digest(shown, proof(key, side, *said))
