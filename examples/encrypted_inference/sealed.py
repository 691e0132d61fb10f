"""The instructions on ciphertexts, by SEAL: CKKS through ``tenseal.sealapi``. All cryptography is the library's.

One side has the secret key, encrypts and decrypts. The other is made from what the first one shows, and computes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from hisa import Parameters, Vector, repeated

from mycel.errors import UsageError
from mycel.extras import needs


def library() -> Any:
    """SEAL's names.

    Raises:
        MissingExtraError: it is not installed.
    """
    needs("examples/encrypted_inference", "tenseal")
    import tenseal.sealapi

    return tenseal.sealapi


class Sealed:
    """Computes on ciphertexts. Made by ``with_keys`` or ``from_public``.

    Attributes:
        slots: numbers a vector.
        parameters: of the encryption.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._seal = library()
        self.parameters, self.slots = parameters, parameters.slots
        described = self._seal.EncryptionParameters(self._seal.SCHEME_TYPE.CKKS)
        described.set_poly_modulus_degree(parameters.degree)
        described.set_coeff_modulus(self._seal.CoeffModulus.Create(parameters.degree, list(parameters.bits)))
        self._context = self._seal.SEALContext(described, True, self._seal.SEC_LEVEL_TYPE.TC128)
        if not self._context.parameters_set():
            raise UsageError(f"SEAL refuses {parameters}: {self._context.parameters_error_message()}")
        self._encoder = self._seal.CKKSEncoder(self._context)
        self._evaluator = self._seal.Evaluator(self._context)
        self._public, self._again, self._turns = (
            self._seal.PublicKey(),
            self._seal.RelinKeys(),
            self._seal.GaloisKeys(),
        )
        self._has_turns = False
        self._decryptor: Any = None
        self._encryptor: Any = None

    @classmethod
    def with_keys(cls, parameters: Parameters, rotations: Iterable[int]) -> Sealed:
        """The side with the secret key.

        Args:
            parameters: of the encryption.
            rotations: for which keys are made, and for no others.
        """
        made = cls(parameters)
        keys = made._seal.KeyGenerator(made._context)
        keys.create_public_key(made._public)
        keys.create_relin_keys(made._again)
        steps = sorted(set(rotations))
        if steps:  # a rotation by s is the automorphism X -> X^(3^s)
            elements = [pow(3, s % made.slots, 2 * parameters.degree) for s in steps]
            keys.create_galois_keys(elements, made._turns)
            made._has_turns = True
        made._decryptor = made._seal.Decryptor(made._context, keys.secret_key())
        made._encryptor = made._seal.Encryptor(made._context, made._public)
        return made

    def public(self) -> tuple[bytes, bytes, bytes]:
        """What the other side needs: the keys to encrypt, to relinearise and to rotate; the last may be empty."""
        turns = _written(self._turns.save) if self._has_turns else b""
        return _written(self._public.save), _written(self._again.save), turns

    @classmethod
    def from_public(cls, parameters: Parameters, public: tuple[bytes, bytes, bytes]) -> Sealed:
        """The side that computes, without the secret key."""
        made = cls(parameters)
        for key, data in zip((made._public, made._again, made._turns), public, strict=True):
            if data:
                _read(lambda path, key=key: key.load(made._context, path), data)
        made._has_turns = bool(public[2])
        made._encryptor = made._seal.Encryptor(made._context, made._public)
        return made

    def encrypt(self, values: Vector) -> Any:
        """See ``hisa.Instructions``, and below."""
        plain, text = self._seal.Plaintext(), self._seal.Ciphertext()
        self._encoder.encode(repeated(values, self.slots).tolist(), 2.0**self.parameters.scale_bits, plain)
        self._encryptor.encrypt(plain, text)
        return text

    def decrypt(self, text: Any) -> Vector:
        """All slots.

        Raises:
            UsageError: this side has no secret key.
        """
        if self._decryptor is None:
            raise UsageError("this side has no secret key and cannot decrypt; the side that has it can")
        plain = self._seal.Plaintext()
        self._decryptor.decrypt(text, plain)
        return np.array(self._encoder.decode_double(plain))

    def rotate(self, text: Any, steps: int) -> Any:
        """To the left.

        Raises:
            UsageError: there is no key for these steps.
        """
        if steps % self.slots == 0:
            return text
        made = self._seal.Ciphertext()
        try:
            self._evaluator.rotate_vector(text, self._signed(steps), self._turns, made)
        except ValueError as error:
            raise UsageError(
                f"rotation by {steps % self.slots}: {error}; make keys for what a trace of the circuit names"
            ) from error
        return made

    def _signed(self, steps: int) -> int:
        """SEAL counts to the right with negative numbers, up to half of all slots."""
        left = steps % self.slots
        return left if left < self.slots // 2 else left - self.slots

    def add(self, one: Any, other: Any) -> Any:
        """Slot by slot."""
        made = self._seal.Ciphertext()
        self._evaluator.add(one, other, made)
        return made

    def multiply(self, one: Any, other: Any) -> Any:
        """Slot by slot, relinearised."""
        made = self._seal.Ciphertext()
        if one is other:
            self._evaluator.square(one, made)
        else:
            self._evaluator.multiply(one, other, made)
        self._evaluator.relinearize_inplace(made, self._again)
        return made

    def multiply_plain(self, text: Any, values: Vector | float) -> Any:
        """At the scale of the prime that rescaling takes away, so that the scale is what it was before."""
        made, plain = self._seal.Ciphertext(), self._seal.Plaintext()
        last = self._context.get_context_data(text.parms_id()).parms().coeff_modulus()[-1].value()
        self._encode(values, text, float(last), plain)
        self._evaluator.multiply_plain(text, plain, made)
        return made

    def add_plain(self, text: Any, values: Vector | float) -> Any:
        """At the ciphertext's scale."""
        made, plain = self._seal.Ciphertext(), self._seal.Plaintext()
        self._encode(values, text, text.scale, plain)
        self._evaluator.add_plain(text, plain, made)
        return made

    def _encode(self, values: Vector | float, like: Any, scale: float, plain: Any) -> None:
        numbers = float(values) if np.ndim(values) == 0 else repeated(values, self.slots).tolist()
        self._encoder.encode(numbers, like.parms_id(), scale, plain)

    def rescale(self, text: Any) -> Any:
        """One prime less."""
        made = self._seal.Ciphertext()
        self._evaluator.rescale_to_next(text, made)
        return made

    def pack(self, text: Any) -> bytes:
        """A ciphertext as bytes."""
        return _written(text.save)

    def unpack(self, data: bytes) -> Any:
        """A ciphertext from bytes."""
        text = self._seal.Ciphertext()
        _read(lambda path: text.load(self._context, path), data)
        return text


def _written(save: Callable[[str], None]) -> bytes:
    """What SEAL writes into a file; it writes nowhere else."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "object"
        save(str(file))
        return file.read_bytes()


def _read(load: Callable[[str], None], data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "object"
        file.write_bytes(data)
        load(str(file))
