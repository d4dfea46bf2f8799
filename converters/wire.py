"""The two pieces of protobuf's wire format that writing a model by hand needs."""

from __future__ import annotations

__all__ = ["field_key", "varint"]


def field_key(number: int) -> bytes:
    """Return the key of a field that has a length: a message, text or bytes."""
    return varint(number << 3 | 2)


def varint(number: int) -> bytes:
    """Return a number as protobuf writes lengths: seven bits a byte, lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
