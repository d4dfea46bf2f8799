"""Names while a model is read: which value a name means in a graph, a body, or an inlined function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlx_ort.errors import ConversionError
from rlx_ort.ir.core import Ref, Value
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.leaf import Capture
from rlx_ort.ir.types import UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

__all__ = ["Captures", "Scope"]


@dataclass(slots=True)
class Captures:
    """The values that the bodies of one node take from around them: the node's inputs after its formal ones."""

    formal: int
    values: list[Value] = field(default_factory=list)
    _indices: dict[Ref, int] = field(default_factory=dict)

    def index_of(self, value: Value) -> int:
        """Return the place of a captured value among the node's inputs, adding it when it is new."""
        if value.ref not in self._indices:
            self._indices[value.ref] = self.formal + len(self.values)
            self.values.append(value)
        return self._indices[value.ref]


@dataclass(slots=True)
class Scope:
    """The names visible in one graph, body or function call.

    Attributes:
        graph: the IR graph that nodes are added to; a function call shares that of its caller.
        opsets: domain -> version that nodes here are written for.
        where: what messages call it.
        types: value name -> type, as far as inference knows.
        values: name -> value; None for a function's formal input that the call leaves out.
        outer: the scope around a body; functions see nothing around them.
        captures: what the owner of this body collects.
        attributes: in a function: the attributes of the call.
        in_function: whether the nodes come from a function, so that their names may come more than once.
    """

    graph: Graph
    opsets: Mapping[str, int]
    where: str
    types: Mapping[str, ValueType] = field(default_factory=dict)
    values: dict[str, Value | None] = field(default_factory=dict)
    outer: Scope | None = None
    captures: Captures | None = None
    attributes: Mapping[str, onnx.AttributeProto] | None = None
    in_function: bool = False

    def resolve(self, name: str, reader: str) -> Value | None:
        """Return the value of a name, captured from around the body where it is not its own.

        Raises:
            ConversionError: nothing defines the name.
        """
        if name in self.values:
            return self.values[name]
        if self.outer is None or self.captures is None:
            raise ConversionError(f"{reader} in {self.where} reads {name!r}, which nothing defines")
        found = self.outer.resolve(name, reader)
        if found is None:
            return None
        index = self.captures.index_of(found)
        self.values[name] = self.graph.add_node(Capture(index, found.type), (), name=name)[0]
        return self.values[name]

    def define(self, name: str, value: Value | None) -> None:
        """Give a name its value.

        Raises:
            ConversionError: the name is already taken here.
        """
        if name in self.values:
            raise ConversionError(f"{self.where} defines {name!r} twice")
        self.values[name] = value

    def type_of(self, name: str) -> ValueType:
        """Return the type that inference found for a name here."""
        return self.types.get(name, UnknownType())
