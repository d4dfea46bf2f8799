"""Protobuf messages of ONNX: copies, the graphs inside a node, and two pieces of the wire format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import onnx

__all__ = ["bodies_of", "copied", "field_key", "read_names", "set_items", "varint"]

Message = TypeVar("Message")


def copied(message: Message) -> Message:
    """Return a copy of a message."""
    copy: Any = type(message)()
    copy.CopyFrom(message)
    return copy  # type: ignore[no-any-return]  # protobuf ships no types


def set_items(field: Any, items: Iterable[Any]) -> None:
    """Replace the messages of a repeated field; the new ones may be among the old ones."""
    kept = [copied(item) for item in items]  # clearing the field clears its messages
    del field[:]
    field.extend(kept)


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among the attributes of a node, in order."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def read_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names that the nodes, the bodies and the outputs of a graph read."""
    found = {value.name for value in graph.output}
    for node in graph.node:
        found.update(node.input)
        for body in bodies_of(node):
            found |= read_names(body)
    return found


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
