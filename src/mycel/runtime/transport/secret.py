"""The job's secret: what ranks prove to each other, so that what stands in an open store lets nobody in.

Whoever dials sends a fresh nonce; whoever listens answers with one of its own and with its proof, and gets the
dialler's. A proof is HMAC-SHA256, under a key made of the secret, over both nonces, the side it comes from, both
ranks, the group's token, and what the connection is for. So neither a proof heard before, nor one's own sent back,
nor one made for another rank, group or purpose is of any use. The secret itself never leaves the process. What ranks
write into the store carries such a proof too.

References:
    Krawczyk, Bellare, Canetti: HMAC: Keyed-Hashing for Message Authentication, RFC 2104. The exchange is the
    three-pass mutual authentication of ISO/IEC 9798-4 with both identities in both proofs.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import stat
import struct
from functools import cache
from pathlib import Path

from mycel.errors import UsageError
from mycel.settings import Settings

__all__ = ["NONCE_BYTES", "PROOF_BYTES", "Secret", "job_secret"]

_log = logging.getLogger(__name__)

NONCE_BYTES = 16
PROOF_BYTES = 32
#: A shorter secret can be guessed by whoever has heard one proof.
_SHORT = 16
_LONGEST = 1 << 16


class Secret:
    """A job's secret; shows nobody what it is.

    Args:
        text: what all ranks were given.
    """

    __slots__ = ("_key",)

    def __init__(self, text: bytes) -> None:
        self._key = hashlib.sha256(b"mycel: secret of a job\0" + text).digest()

    def proof(self, purpose: str, *parts: bytes) -> bytes:
        """``PROOF_BYTES`` that only who knows the secret can make, of these parts for this purpose alone."""
        made = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            made.update(struct.pack("<Q", len(part)))
            made.update(part)
        return made.digest()

    def proves(self, proof: bytes, purpose: str, *parts: bytes) -> bool:
        """Whether a proof is that of these parts for this purpose."""
        return hmac.compare_digest(proof, self.proof(purpose, *parts))

    @staticmethod
    def nonce() -> bytes:
        """``NONCE_BYTES`` that were never used before."""
        return secrets.token_bytes(NONCE_BYTES)


def job_secret(settings: Settings) -> Secret | None:
    """The secret that the environment names; ``None`` where there is none. Read once a process.

    Raises:
        UsageError: the file cannot be read, is empty, or can be changed by other users.
    """
    if settings.secret_file is not None:
        return Secret(_read(settings.secret_file))
    return None if settings.secret is None else Secret(_long_enough(settings.secret.encode(), "MYCEL_SECRET"))


@cache
def _read(file: Path) -> bytes:
    what = f"MYCEL_SECRET_FILE={file}"
    try:
        with file.open("rb") as opened:
            mode = file.stat().st_mode
            if not stat.S_ISREG(mode):
                raise UsageError(f"{what}: not a file")
            text = opened.read(_LONGEST + 1).strip()
    except OSError as error:
        raise UsageError(f"{what}: cannot be read: {error.strerror}") from None
    if not 0 < len(text) <= _LONGEST:
        raise UsageError(f"{what}: holds {len(text)} bytes; expected 1 to {_LONGEST}")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(f"{what}: other users may write to it, and so choose the secret; chmod 600 {file}")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        # Not refused: secrets that a container gets mounted are commonly readable by all inside it.
        _log.warning("%s: other users of this machine may read it; chmod 600 %s", what, file)
    return _long_enough(text, what)


@cache
def _long_enough(text: bytes, what: str) -> bytes:
    if len(text) < _SHORT:
        _log.warning("%s: a secret of %d bytes can be guessed; take one of %d or more", what, len(text), _SHORT)
    return text
