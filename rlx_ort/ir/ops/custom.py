"""Ops a user brings: nodes of a custom-op library, and functions written as graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.bodies import Body, as_body, body_results, tensor_types
from rlx_ort.ir.core import Value
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.ops.leaf import LeafBuilders, Operand
from rlx_ort.ir.ops.onnx import AttributeValue
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["Custom", "CustomBuilders", "CustomFn"]


@dataclass(frozen=True, slots=True)
class Custom(Op):
    """A kernel of a custom-op library, which the session must load.

    Attributes:
        name: the operator's name in the library.
        domain: the operator's domain in the library.
        types: types of the results, which nobody but the library could infer.
        attributes: the node's attributes.
        version: the version of the domain.
    """

    name: str
    domain: str
    types: tuple[TensorType, ...]
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    version: int = 1

    def __post_init__(self) -> None:
        if not self.name or self.domain in {"", "ai.onnx"}:
            raise GraphVerifyError(
                f"Custom needs an operator and the domain of its library, got {self.name!r} of {self.domain!r}; "
                "onnx_node adds operators of ai.onnx"
            )
        if not self.types:
            raise GraphVerifyError(f"Custom {self.domain}::{self.name} needs the type of each result")

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the declared types."""
        return self.types

    def describe(self) -> str:
        """Return the domain and operator."""
        return f"Custom({self.domain}::{self.name}-{self.version})"


@dataclass(frozen=True, slots=True)
class CustomFn(Op):
    """A function written as a graph; it is written out in place of the node.

    Attributes:
        fwd: the function; its inputs are the node's, in order.
    """

    fwd: Graph

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the types of the function's results."""
        return body_results(self, self.fwd, "function", tensor_types(self, inputs, "input"))

    def bodies(self) -> tuple[Graph, ...]:
        """Return the function."""
        return (self.fwd,)

    def describe(self) -> str:
        """Return the function's name."""
        return f"CustomFn({self.fwd.name!r})"


class CustomBuilders(LeafBuilders):
    """Builders of ops a user brings."""

    __slots__ = ()

    def custom_op(
        self,
        op_name: str,
        inputs: Sequence[Operand],
        types: Sequence[TensorType],
        *,
        domain: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        version: int = 1,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Add a kernel of a custom-op library and return its results, whose types are given.

        Raises:
            GraphVerifyError: the name, the domain or the types are missing.
        """
        op = Custom(op_name, domain, tuple(types), dict(attributes or {}), version)
        return self.add_node(op, [self._as_value(item) for item in inputs], name=name or op_name.lower())

    def custom_fn(self, inputs: Sequence[Operand], fwd_body: Body, *, name: str | None = None) -> Value:
        """Apply a function with one result: a graph, or a Python function `(graph, *inputs)` that builds one.

        Raises:
            GraphVerifyError: the function does not take the inputs or has another number of results.
        """
        results = self.custom_fn_multi(inputs, fwd_body, name=name)
        if len(results) != 1:
            raise GraphVerifyError(
                f"the function returns {len(results)} values; use custom_fn_multi, which returns all"
            )
        return results[0]

    def custom_fn_multi(
        self, inputs: Sequence[Operand], fwd_body: Body, *, name: str | None = None
    ) -> tuple[Value, ...]:
        """Apply a function and return all its results; see `custom_fn`.

        Raises:
            GraphVerifyError: the function does not take the inputs.
        """
        values = [self._as_value(item) for item in inputs]
        labels: list[tuple[str, ValueType]] = [(f"x{index}", value.type) for index, value in enumerate(values)]
        return self.add_node(CustomFn(as_body(fwd_body, labels, "fn")), values, name=name)
