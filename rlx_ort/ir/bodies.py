"""Subgraphs of ops: the bodies that control flow carries, and the graphs that composite ops stand for.

A body is a `Graph` of its own. Its `Input` leaves are its formal inputs, in order; `Capture` leaves name inputs of the
node that owns it. Weights of the enclosing graph reach a body as one or the other, never as parameters of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import GraphCore, Value
from rlx_ort.ir.op import Op, OpTypes, join_dims, tensor_input
from rlx_ort.ir.ops.leaf import Input, Param
from rlx_ort.ir.shape import Shape, fits
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["Body", "Composite", "as_body", "body_results", "expect_same_type", "finer_type", "tensor_types"]

Body: TypeAlias = "Graph | Callable[..., Value | Sequence[Value]]"
"""What the builders take as a body: a graph, or a function `(graph, *inputs)` that builds one and returns results."""


def as_body(body: Body, inputs: Iterable[tuple[str, ValueType]], name: str) -> Graph:
    """Return a body as a graph; a function is called with a new graph that has the named inputs."""
    if isinstance(body, GraphCore):
        return body
    graph = GraphCore.graph_class(name)
    leaves = [graph.add_node(Input(label, kind), (), name=label)[0] for label, kind in inputs]
    results = body(graph, *leaves)
    graph.outputs = [results] if isinstance(results, Value) else list(results)
    return graph


def body_results(op: Op, body: Graph, label: str, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """Return the types of a body's results.

    Raises:
        GraphVerifyError: its formal inputs are not those of the owner, it has no result, a result is no tensor, or it
            has parameters of its own.
    """
    formal = [node for node in body.nodes if isinstance(node.op, Input)]
    if len(formal) != len(inputs):
        raise GraphVerifyError(f"{op.kind} gives its {label} {len(inputs)} inputs, {body.name!r} has {len(formal)}")
    for node, given in zip(formal, inputs, strict=True):
        expect_same_type(op, node.types[0], given, f"input {node.name!r} of its {label}")
    own = [node.name for node in body.nodes if isinstance(node.op, Param)]
    if own:
        raise GraphVerifyError(
            f"{op.kind} has parameters in its {label}: {', '.join(own)}; make them parameters of the graph around it "
            "and pass them in"
        )
    if not body.outputs:
        raise GraphVerifyError(f"{op.kind} needs results of its {label}; set the outputs of {body.name!r}")
    return tensor_types(op, [value.type for value in body.outputs], f"result of its {label}")


def tensor_types(op: Op, types: OpTypes, what: str) -> tuple[TensorType, ...]:
    """Return the types, all of which must be tensors.

    Raises:
        GraphVerifyError: one is not.
    """
    return tuple(tensor_input(op, types, index, what) for index in range(len(types)))


def expect_same_type(op: Op, found: ValueType, wanted: TensorType, what: str) -> None:
    """Check that a type fits another: same dtype, same rank, no different sizes.

    Raises:
        GraphVerifyError: it cannot.
    """
    same = isinstance(found, TensorType) and found.dtype is wanted.dtype
    if not same or (
        isinstance(found, TensorType)
        and found.shape is not None
        and wanted.shape is not None
        and not fits(found.shape, wanted.shape)
    ):
        raise GraphVerifyError(f"{op.kind} needs {what} to be {wanted}, got {found}")


def finer_type(first: TensorType, second: TensorType) -> TensorType:
    """Return a type with every size that either of two fitting types has; names stay if they agree."""
    if first.shape is None or second.shape is None:
        return first if second.shape is None else second
    dims = (join_dims(pair) for pair in zip(first.shape, second.shape, strict=True))
    return TensorType(first.dtype, Shape(dims))


class Composite(Op):
    """Base of the ops that stand for a graph of other ops.

    Such an op keeps its name in reports and JSON; its type, its cost and its ONNX form are those of the graph that
    `expand` builds.
    """

    kind = ""  # a base, no op

    def build(self, graph: Graph, *values: Value) -> Value:
        """Write the ops this one stands for into a graph and return the result."""
        raise NotImplementedError(f"{type(self).__name__} defines no `build`")

    def check(self, inputs: OpTypes) -> None:
        """Check what `build` would report unclearly.

        Raises:
            GraphVerifyError: the inputs do not fit the op.
        """

    def expand(self, inputs: OpTypes) -> Graph:
        """Return the graph this op stands for, with an input for each of its inputs.

        Raises:
            GraphVerifyError: the inputs do not fit the op.
        """
        self.check(inputs)
        types = tensor_types(self, inputs, "a tensor")
        try:
            return as_body(self.build, [(f"in{place}", kind) for place, kind in enumerate(types)], self.kind)
        except GraphVerifyError as err:
            raise GraphVerifyError(f"{self.describe()}: {err}") from err

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the graph's result."""
        return tuple(value.type for value in self.expand(inputs).outputs)
