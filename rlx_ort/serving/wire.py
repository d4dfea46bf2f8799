"""Large gRPC requests and answers in protobuf's wire format, so that raw tensors are not copied into messages.

Decoding a message may take far more memory than its bytes, and the time of each entry while the interpreter lock is
held; so the entries of large requests are counted before. https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlx_ort.errors import ServingError

DECODED_FACTOR = 16
"""The most bytes that a message takes in memory for each of its bytes, once its entries were counted."""
_MOST_ENTRIES = 4096  # tensors, dims, and parameters
_MOST_ELEMENTS = 1 << 20  # that are written one by one
_LONGEST_SHAPE = 512  # bytes
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_INPUTS, _RAW_INPUTS, _RAW_OUTPUTS = 5, 7, 6  # fields of ModelInferRequest and ModelInferResponse
_SHAPE, _CONTENTS = 3, 5  # of an input
_WHOLE_NUMBERS = range(1, 6)  # fields of contents whose elements take a byte or more, and up to eight in memory


class Encoded:
    """A message as the pieces of its wire format; it has the methods that servers call to send one."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        """Return its size in bytes."""
        return sum(map(len, self.parts))

    def SerializeToString(self) -> bytes:  # noqa: N802  # protobuf's name
        """Return it as one."""
        return b"".join(self.parts)


def with_raw_outputs(response: Any, raw: Sequence[bytes | memoryview]) -> Encoded:
    """Return a ModelInferResponse with raw contents."""
    parts = [response.SerializeToString()]
    for data in raw:
        parts += [_head(_RAW_OUTPUTS, len(data)), data]
    return Encoded(parts)


def nested(field: int, message: Encoded) -> Encoded:
    """Return a message with another one as a field."""
    return Encoded([_head(field, len(message)), *message.parts])


def _head(field: int, size: int) -> bytes:
    head = bytearray([field << 3 | _DELIMITED])
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*head, size])


def split_request(data: bytes) -> tuple[bytes, list[memoryview]]:
    """Return a ModelInferRequest without its raw contents, and these, which share memory with it.

    Raises:
        ServingError: it is no such message (400), or has too many entries (413).
    """
    view = memoryview(data)
    rest, raw = list[memoryview](), list[memoryview]()
    for number, start, inner, end in _fields(view, _MOST_ENTRIES):
        if number == _RAW_INPUTS:
            raw.append(view[inner:end])
        else:
            rest.append(view[start:end])
    return b"".join(rest), raw


def check_inputs(request: bytes, most_numbers: int) -> None:
    """Check how many entries and elements the inputs of a ModelInferRequest have.

    Args:
        request: the message.
        most_numbers: the most bytes of whole numbers in `contents`, which take up to eight times as many in memory.

    Raises:
        ServingError: it is no such message (400), or has too many of them (413).
    """
    for number, _, inner, end in _fields(memoryview(request), _MOST_ENTRIES):
        if number != _INPUTS:
            continue
        for place, _, start, stop in _fields(tensor := memoryview(request)[inner:end], _MOST_ENTRIES):
            if place == _SHAPE and stop - start > _LONGEST_SHAPE:
                raise ServingError("a shape has too many dims", 400)
            if place != _CONTENTS:
                continue
            for kind, _, first, last in _fields(tensor[start:stop], _MOST_ELEMENTS):
                if kind in _WHOLE_NUMBERS and last - first > most_numbers:
                    raise ServingError(
                        f"an input has {last - first} bytes of whole numbers as contents; {most_numbers} are allowed; "
                        "send raw_input_contents",
                        413,
                    )


def _fields(view: memoryview, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number of each field, where it begins, and where its value begins and ends."""
    at = count = 0
    while at < len(view):
        count += 1
        if count > most:
            raise ServingError(f"the message has more than {most} entries of a kind; send raw_input_contents", 413)
        start = at
        key, at = _varint(view, at)
        kind, inner = key & 7, at
        if kind == _DELIMITED:
            size, inner = _varint(view, at)
            at = inner + size
        elif kind == _VARINT:
            _, at = _varint(view, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise _cut_short()
        if at > len(view):
            raise _cut_short()
        yield key >> 3, start, inner, at


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for place, byte in enumerate(view[at : at + 10]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    raise _cut_short()


def _cut_short() -> ServingError:
    return ServingError("the request is not a valid ModelInferRequest: its wire format is broken", 400)
