"""Both ends of a connection show that they know a key, without sending it: HMAC over fresh nonces of both."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal

__all__ = ["new_nonce", "proof", "proves"]

Side = Literal["member", "server"]


def new_nonce() -> str:
    """32 hexadecimal digits that were never used before."""
    return secrets.token_hex(16)


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
    text = "\0".join([side, *(f"{len(str(part))}:{part}" for part in said)])
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def proves(shown: object, key: bytes, side: Side, *said: object) -> bool:
    """Whether what the other side shows is right."""
    return isinstance(shown, str) and hmac.compare_digest(shown, proof(key, side, *said))
