"""Number formats on the wire, and the random numbers they are rounded with.

Formats (``mycel.wire.formats``) turn numbers into codes; compressors of gradients use them by buckets. A *codec*
turns each row into a row of its own, and back. Dispatchers encode what they send, in both directions and in the
backward pass as well; what stays on the rank passes through the codec too, so that a token's result does not depend
on where its expert lives.
"""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.wire", "torch")

from collections.abc import Callable

from mycel.names import spelled
from mycel.wire.base import WireCodec
from mycel.wire.plain import BFloat16Codec, IdentityCodec
from mycel.wire.scaled import Float8Codec, Int4Codec, Int8Codec

__all__ = [
    "CODECS",
    "BFloat16Codec",
    "Float8Codec",
    "IdentityCodec",
    "Int4Codec",
    "Int8Codec",
    "WireCodec",
    "make_codec",
]

#: Codecs by name.
CODECS: dict[str, Callable[[], WireCodec]] = {
    "identity": IdentityCodec,
    "bf16": BFloat16Codec,
    "fp8": Float8Codec,
    "int8": Int8Codec,
    "int4": Int4Codec,
}


def make_codec(name: str) -> WireCodec:
    """A codec with its usual settings.

    Raises:
        UsageError: no codec has that name.
    """
    return CODECS[spelled(name, sorted(CODECS), "codec")]()
