"""The first bytes on every connection: who connects, for which group, and what the connection is for.

Where the job has a secret, the listener's ``Challenge`` and the dialler's proof follow; see ``secret``.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

from mycel.errors import CommunicationError
from mycel.runtime.transport.secret import NONCE_BYTES, PROOF_BYTES, Secret

__all__ = ["CHALLENGE_BYTES", "HELLO_BYTES", "TOKEN_BYTES", "Challenge", "Hello", "Purpose", "path_digest"]

TOKEN_BYTES = 16
_FORMAT = struct.Struct("<8s16sIIII16s16s")
#: The last byte counts versions.
_MAGIC = b"mycel\x00\x00\x02"
HELLO_BYTES = _FORMAT.size
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES


class Purpose(IntEnum):
    """What a connection is for."""

    CHANNEL = 0
    CONTROL = 1
    #: Messages between two ranks; ``path`` is the number of theirs.
    MESSAGES = 2
    #: Messages of two ranks that go through others; ``path`` says whose, and to whom (``p2p_passage``).
    PASSAGE = 3


def path_digest(path: tuple[int, ...], epoch: int = 0) -> bytes:
    """Sixteen bytes that stand for a physical path, and for how often its group has got new channels."""
    return hashlib.sha256(f"{epoch}:{','.join(map(str, path))}".encode()).digest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a connecting rank says.

    Attributes:
        token: the group's, from the store; keeps other groups out, and whoever cannot read the store.
        src: rank that connects.
        dst: rank that it means to reach.
        purpose: what for.
        path: digest of the physical path of a data channel; zeros for control.
        nonce: where the job has a secret, what the listener's proof must be made of; zeros where it has none.
    """

    token: bytes
    src: int
    dst: int
    purpose: Purpose
    path: bytes = bytes(16)
    nonce: bytes = bytes(NONCE_BYTES)

    @property
    def has_secret(self) -> bool:
        """Whether the dialler wants the job's secret proved."""
        return any(self.nonce)

    @property
    def key(self) -> tuple[int, Purpose, bytes]:
        """What tells a rank's connections apart."""
        return self.src, self.purpose, self.path

    def pack(self) -> bytes:
        """``HELLO_BYTES`` bytes for the wire."""
        flags = int(self.has_secret)
        return _FORMAT.pack(_MAGIC, self.token, self.src, self.dst, self.purpose, flags, self.path, self.nonce)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Read ``HELLO_BYTES`` bytes.

        Raises:
            CommunicationError: they are not a hello of this version.
        """
        magic, token, src, dst, purpose, flags, path, nonce = _FORMAT.unpack(data)
        if magic != _MAGIC:
            raise CommunicationError("a connection did not begin with mycel's greeting (another program or version?)")
        if purpose not in Purpose.__members__.values() or flags != int(any(nonce)):
            raise CommunicationError("a connection's greeting makes no sense")
        return cls(token=token, src=src, dst=dst, purpose=Purpose(purpose), path=path, nonce=nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """What a listener answers where the job has a secret.

    Attributes:
        nonce: what the dialler's proof must be made of.
        proof: that the listener knows the secret.
    """

    nonce: bytes
    proof: bytes

    @classmethod
    def answer(cls, hello: Hello, secret: Secret) -> Challenge:
        """A listener's, with a fresh nonce."""
        nonce = Secret.nonce()
        return cls(nonce=nonce, proof=secret.proof("listener", hello.pack(), nonce))

    def is_right(self, hello: Hello, secret: Secret) -> bool:
        """For the dialler: whether who answers knows the secret."""
        return secret.proves(self.proof, "listener", hello.pack(), self.nonce)

    def reply(self, hello: Hello, secret: Secret) -> bytes:
        """The dialler's proof, ``PROOF_BYTES`` long."""
        return secret.proof("dialler", hello.pack(), self.nonce)

    def is_answered(self, proof: bytes, hello: Hello, secret: Secret) -> bool:
        """For the listener: whether who dialled knows the secret."""
        return secret.proves(proof, "dialler", hello.pack(), self.nonce)

    def pack(self) -> bytes:
        """``CHALLENGE_BYTES`` bytes for the wire."""
        return self.nonce + self.proof

    @classmethod
    def unpack(cls, data: bytes) -> Challenge:
        """Read ``CHALLENGE_BYTES`` bytes."""
        return cls(nonce=data[:NONCE_BYTES], proof=data[NONCE_BYTES:])
