"""`OnnxNode`: an ONNX node that has no IR op, complete enough to be exported unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeAlias

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import GraphCore, Value
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import UnknownType, ValueType

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["AttributeValue", "OnnxBuilders", "OnnxNode"]

AttributeValue: TypeAlias = (  # pyright: ignore[reportGeneralTypeIssues]  # one text in two lines
    "int | float | str | bytes | TensorData | Graph | ValueType "
    "| tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | tuple[bytes, ...] "
    "| tuple[TensorData, ...] | tuple[Graph, ...] | tuple[ValueType, ...]"
)


class OnnxNode(Op):
    """An ONNX node as it is in its model.

    Attributes:
        op_type: the ONNX operator.
        domain: its domain, empty for ai.onnx.
        version: the opset version of the domain it was written for.
        overload: the overload of a model-local function.
        attributes: name -> value. A body is a `Graph` whose `Input` leaves are its formal inputs and whose
            `Capture` leaves name this node's inputs from `formal_inputs` on.
        attribute_kinds: name -> ONNX attribute type name (`INTS`, `FLOATS`...), needed for empty tuples.
        formal_inputs: how many of the node's inputs are ONNX inputs; the others are captured by bodies.
        output_count: how many results the node has, absent ones at the end left out.
    """

    op_type: str
    domain: str = ""
    version: int = 21
    overload: str = ""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    attribute_kinds: Mapping[str, str] = field(default_factory=dict)
    formal_inputs: int = 0
    output_count: int = 1

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return unknown types; the importer passes those of ONNX's own inference instead."""
        return (UnknownType(),) * self.output_count

    def bodies(self) -> tuple[Graph, ...]:
        """Return the subgraphs among the attributes."""
        found: list[Any] = []
        for value in self.attributes.values():
            found += [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, GraphCore)]
        return tuple(found)

    def describe(self) -> str:
        """Return the domain and operator."""
        return f"{self.domain or 'ai.onnx'}::{self.op_type}-{self.version}"


class OnnxBuilders(GraphCore):
    """Builder of ONNX nodes."""

    __slots__ = ()

    def onnx_node(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        types: Sequence[ValueType],
        domain: str = "",
        version: int = 21,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Add an ONNX node that has no IR op and return its results; `types` are the types of the results.

        Raises:
            GraphVerifyError: no result type is given.
        """
        if not types:
            raise GraphVerifyError(f"onnx node {op_type} needs the type of each result")
        op = OnnxNode(op_type, domain, version, "", dict(attributes or {}), {}, len(inputs), len(types))
        return self.add_node(op, inputs, name=name or op_type.lower(), types=types)
