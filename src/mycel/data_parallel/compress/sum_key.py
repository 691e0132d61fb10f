"""A key with which gradients are encrypted so that others can add them: SEAL's BFV scheme, whose sums are exact.

A plaintext holds 4,096 whole numbers below the plain modulus ``t``, about 2^39; a ciphertext is two elements of the
ring ``Z_q[x] / (x^4096 + 1)``, 8,192 words below ``q``, about 2^54, and its sum with another, word by word modulo
``q``, is the ciphertext of the sum. An int64 has room for the plain sum of 512 such words, so that whoever adds need
not even reduce: an ordinary all_reduce of int64 does, and the ranks reduce modulo ``q`` in the end.

All cryptography is the library's, with its parameters for 128 bits of security; only its words are moved here.

References:
    J. Fan, F. Vercauteren, "Somewhat Practical Fully Homomorphic Encryption", IACR ePrint 2012/144 (BFV); SEAL's
    manual; M. Albrecht et al., "Homomorphic Encryption Standard", 2018 (parameters); R. Dathathri et al., "CHET",
    PLDI 2019.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.errors import UsageError
from mycel.extras import needs

__all__ = ["SLOTS", "SLOT_BITS", "WORDS", "SumKey"]

#: Whole numbers in a ciphertext, and int64 words of it.
SLOTS, WORDS = 4096, 8192
#: Of the plain modulus: the sum in a slot stays below 2^38.
_PLAIN_BITS, SLOT_BITS = 39, 38
_COEFFICIENT_BITS = (54, 54)
_MAGIC = b"mycel sum key 1\n"
#: Of a file of SEAL: magic number, its own length, version; then how it is compressed, and how long all of it is.
_HEADER_BYTES, _PLAIN = 5, b"\0\0\0"


class SumKey:
    """The secret that ranks share, and which whoever carries and adds must not have.

    Make it once, hand the file to every rank by a way that you trust, such as a secret of the cluster's scheduler.

    Args:
        secret: what ``save`` has written, without its first line; of SEAL's form.

    Raises:
        MissingExtraError: tenseal is not installed.
        UsageError: the secret is none, or of other parameters.

    Examples:
        >>> key = SumKey.make()
        >>> words = key.encrypt(np.arange(4096)) + key.encrypt(np.full(4096, 7))
        >>> key.decrypt(words)[:3].tolist()
        [7, 8, 9]
    """

    def __init__(self, secret: bytes) -> None:
        needs("Encrypted", "tenseal")
        from tenseal import sealapi

        self._seal = sealapi
        parameters = sealapi.EncryptionParameters(sealapi.SCHEME_TYPE.BFV)
        parameters.set_poly_modulus_degree(SLOTS)
        parameters.set_coeff_modulus(sealapi.CoeffModulus.Create(SLOTS, list(_COEFFICIENT_BITS)))
        parameters.set_plain_modulus(sealapi.PlainModulus.Batching(SLOTS, _PLAIN_BITS))
        self._context = sealapi.SEALContext(parameters, True, sealapi.SEC_LEVEL_TYPE.TC128)
        self.modulus = int(parameters.coeff_modulus()[0].value())
        self._secret = secret or self._made()
        key = sealapi.SecretKey()
        try:
            self._through_file(self._secret, lambda path: key.load(self._context, path))
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"not the secret of a SumKey, or of other parameters: {error}") from None
        self._encryptor = sealapi.Encryptor(self._context, key)
        self._decryptor = sealapi.Decryptor(self._context, key)
        self._encoder = sealapi.BatchEncoder(self._context)
        self._head = self._head_of_ciphertexts()

    @staticmethod
    def make() -> SumKey:
        """A new one, from the operating system's randomness."""
        return SumKey(b"")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SumKey:
        """The one in a file.

        Raises:
            UsageError: the file cannot be read, holds none, or can be read by other users.
        """
        file = Path(path)
        try:
            mode, text = file.stat().st_mode, file.read_bytes()
        except OSError as error:
            raise UsageError(
                f"key {file}: cannot be read: {error.strerror}; SumKey.make().save(...) makes one"
            ) from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(f"key {file}: other users may read it or write to it; chmod 600 {file}")
        if not text.startswith(_MAGIC):
            raise UsageError(f"key {file}: not a SumKey; SumKey.make().save(path) makes one")
        return SumKey(text[len(_MAGIC) :])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a new file that only this user may read.

        Raises:
            UsageError: the file is there already, or cannot be made.
        """
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise UsageError(f"key {os.fspath(path)}: cannot be made: {error.strerror}") from None
        with os.fdopen(opened, "wb") as file:
            file.write(_MAGIC + self._secret)

    @property
    def fingerprint(self) -> int:
        """62 bits that tell keys apart and say nothing else of them."""
        digest = hashlib.blake2b(self._secret, digest_size=8, person=b"mycel sumkey").digest()
        return int.from_bytes(digest, "little") >> 2

    @property
    def most_sums(self) -> int:
        """Ciphertexts whose words an int64 can add without being reduced."""
        return ((1 << 63) - 1) // (self.modulus - 1)

    def encrypt(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Words of the ciphertexts of some whole numbers.

        Args:
            slots: ``[n]``, from 0 to below 2^38.

        Returns:
            ``[8192 * ceil(n / 4096)]``.
        """
        made = []
        for begin in range(0, len(slots), SLOTS):
            plain, cipher = self._seal.Plaintext(), self._seal.Ciphertext(self._context)
            self._encoder.encode(slots[begin : begin + SLOTS].tolist(), plain)
            self._encryptor.encrypt_symmetric(plain, cipher)
            words = cipher.dyn_array()
            made.append(np.fromiter(map(words.at, range(WORDS)), np.int64, WORDS))
        return np.concatenate(made) if made else np.zeros(0, np.int64)

    def decrypt(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers in sums of ciphertexts' words, ``[4096 * ciphertexts]``.

        Raises:
            UsageError: they were not made with this key, or have been changed, or too many were added.
        """
        reduced = (words.view(np.uint64) % np.uint64(self.modulus)).reshape(-1, WORDS)
        found = []
        for number, one in enumerate(reduced):
            cipher, plain = self._seal.Ciphertext(self._context), self._seal.Plaintext()
            self._through_file(self._head + one.tobytes(), lambda path, into=cipher: into.load(self._context, path))
            if not number and self._decryptor.invariant_noise_budget(cipher) <= 0:
                raise UsageError(
                    "sums cannot be decrypted: made with another key, changed on the way, or of too many ranks; "
                    "give every rank the same key"
                )
            self._decryptor.decrypt(cipher, plain)
            found.append(np.array(self._encoder.decode_uint64(plain), dtype=np.int64))
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def noise_bits_left(self, words: npt.NDArray[np.int64]) -> int:
        """Bits by which the noise of the first ciphertext may grow before sums are wrong; 0: they are."""
        cipher = self._seal.Ciphertext(self._context)
        first = (words[:WORDS].view(np.uint64) % np.uint64(self.modulus)).tobytes()
        self._through_file(self._head + first, lambda path: cipher.load(self._context, path))
        return int(self._decryptor.invariant_noise_budget(cipher))

    def __deepcopy__(self, memo: object) -> SumKey:
        """Itself: it never changes, and a secret is better not copied."""
        return self

    def __repr__(self) -> str:
        return f"SumKey(fingerprint={self.fingerprint:x})"

    def _made(self) -> bytes:
        return _written(self._seal.KeyGenerator(self._context).secret_key().save)

    def _head_of_ciphertexts(self) -> bytes:
        """What stands before the words of a ciphertext in a file that is not compressed."""
        cipher = self._seal.Ciphertext(self._context)
        plain = self._seal.Plaintext()
        self._encoder.encode([0], plain)
        self._encryptor.encrypt_symmetric(plain, cipher)
        begin = _written(cipher.save)[:_HEADER_BYTES] + _PLAIN
        inner = begin + struct.pack("<QQ", 24 + 8 * WORDS, WORDS)
        # Which parameters; not in NTT form; two elements of so many coefficients of one modulus; scale and factor 1.
        about = struct.pack("<4Q", *self._context.first_parms_id()) + struct.pack("<BQQQdQ", 0, 2, SLOTS, 1, 1.0, 1)
        return begin + struct.pack("<Q", 16 + len(about) + len(inner) + 8 * WORDS) + about + inner

    @staticmethod
    def _through_file(content: bytes, read: Any) -> None:
        """SEAL reads files alone: one in memory, which nobody else sees."""
        descriptor = os.memfd_create("mycel")
        try:
            os.write(descriptor, content)
            read(f"/proc/self/fd/{descriptor}")
        finally:
            with suppress(OSError):
                os.close(descriptor)


def _written(save: Any) -> bytes:
    descriptor = os.memfd_create("mycel")
    try:
        save(f"/proc/self/fd/{descriptor}")
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)
