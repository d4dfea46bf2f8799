"""Control flow and its bodies, and ops a user brings: functions written as graphs, and kernels of a custom-op library.

A body is a `Graph` of its own. Its `Input` leaves are its formal inputs, in order; `Capture` leaves name inputs of the
node that owns it. Weights of the enclosing graph reach a body as one or the other, never as parameters of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import TypeAlias, Unpack

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder
from rlx_ort.ir.core import Graph, NodeArgs, Operand, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Op, OpTypes, join_dims, known_shape, tensor_input
from rlx_ort.ir.ops.leaf import Input, Param
from rlx_ort.ir.ops.onnx import AttributeValue
from rlx_ort.ir.types import Shape, TensorType, ValueType, fits

Body: TypeAlias = "Graph | Callable[..., Value | Sequence[Value]]"
"""A body for the builders: a graph, or a function `(graph, *inputs)` that builds one and returns results."""


def as_body(body: Body, inputs: Iterable[tuple[str, ValueType]], name: str) -> Graph:
    """Return a body as a graph; a function is called with a new graph that has the named inputs."""
    if isinstance(body, Graph):
        return body
    graph = Graph(name)
    leaves = [graph.add_node(Input(label, kind), (), name=label)[0] for label, kind in inputs]
    results = body(graph, *leaves)
    graph.outputs = [results] if isinstance(results, Value) else list(results)
    return graph


def body_results(op: Op, body: Graph, label: str, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """Check a body's formal inputs against those its owner gives it, and return the types of its results."""
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
    """Return the types, all of which must be tensors."""
    return tuple(tensor_input(op, types, index, what) for index in range(len(types)))


def expect_same_type(op: Op, given: ValueType, wanted: TensorType, what: str) -> None:
    """Check that a type fits another: same dtype, same rank, no different sizes."""
    same = isinstance(given, TensorType) and given.dtype is wanted.dtype
    shapes = (given.shape, wanted.shape) if isinstance(given, TensorType) else ()
    if not same or (None not in shapes and not fits(*shapes)):
        raise GraphVerifyError(f"{op.kind} needs {what} to be {wanted}, got {given}")


def finer_type(first: TensorType, second: TensorType) -> TensorType:
    """Return a type with every size that either of two fitting types has; names stay if they agree."""
    if first.shape is None or second.shape is None:
        return first if second.shape is None else second
    dims = (join_dims(pair) for pair in zip(first.shape, second.shape, strict=True))
    return TensorType(first.dtype, Shape(dims))


class _Owner(Op):
    """Base of the ops whose fields hold bodies."""

    arity = (1, None)

    def bodies(self) -> tuple[Graph, ...]:
        """Return the bodies, in the order of the fields."""
        values = (getattr(self, item.name) for item in fields(self))
        return tuple(value for value in values if isinstance(value, Graph))


class If(_Owner):
    """One of two bodies, chosen by a bool; inputs are the predicate and the inputs of both bodies, in order.

    A predicate of one element runs one body. A larger one is elementwise: both bodies run, and each element of the
    broadcast result comes from one of them.
    """

    then_body: Graph
    else_body: Graph

    def elementwise(self, inputs: OpTypes) -> bool:
        """Return whether the predicate may have more than one element."""
        shape = tensor_input(self, inputs, 0, "predicate").shape
        return shape is None or shape.num_elements != 1

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the types on which both bodies agree."""
        predicate = tensor_input(self, inputs, 0, "predicate")
        if predicate.dtype is not DType.BOOL:
            raise GraphVerifyError(f"If needs a bool predicate, got {predicate}; cast it")
        given = tensor_types(self, inputs[1:], "captured value")
        yes = body_results(self, self.then_body, "then body", given)
        no = body_results(self, self.else_body, "else body", given)
        if len(yes) != len(no):
            raise GraphVerifyError(f"If needs as many results of both bodies, got {len(yes)} and {len(no)}")
        results = []
        for index, (left, right) in enumerate(zip(yes, no, strict=True)):
            if not self.elementwise(inputs):
                expect_same_type(self, right, left, f"result {index} of its else body")
                results.append(finer_type(left, right))
                continue
            if left.dtype is not right.dtype:
                raise GraphVerifyError(f"If needs results of one dtype, got {left} and {right}; cast one")
            results.append(TensorType(left.dtype, self.broadcast((predicate.shape, left.shape, right.shape))))
        return tuple(results)

    def describe(self) -> str:
        """Return the names of the bodies."""
        return f"If(then={self.then_body.name!r}, else={self.else_body.name!r})"


class While(_Owner):
    """A body repeated as long as a condition on the carried values holds, tested before each pass.

    Inputs are the carried values, then values that do not change; both bodies get all of them in that order. The
    body returns the next carried values, of unchanged types; every carried value is a result. There are at most
    `max_iterations` passes.
    """

    cond: Graph
    body: Graph
    carries: int
    max_iterations: int | None = None

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the types of the carried values."""
        given = tensor_types(self, inputs, "carried value")
        if not 1 <= self.carries <= len(given):
            raise GraphVerifyError(f"While carries {self.carries} of {len(given)} inputs; it must carry at least 1")
        if self.max_iterations is not None and self.max_iterations < 0:
            raise GraphVerifyError(f"While cannot stop after {self.max_iterations} iterations")
        test = body_results(self, self.cond, "condition", given)
        size = None if test[0].shape is None else test[0].shape.num_elements
        if len(test) != 1 or test[0].dtype is not DType.BOOL or size not in (1, None):
            got = ", ".join(map(str, test))
            raise GraphVerifyError(f"While needs a condition with one bool of one element as result, got {got}")
        following = body_results(self, self.body, "body", given)
        carried = given[: self.carries]
        if len(following) != self.carries:
            raise GraphVerifyError(f"While carries {self.carries} values, its body returns {len(following)}")
        for index, (following_type, wanted) in enumerate(zip(following, carried, strict=True)):
            expect_same_type(self, following_type, wanted, f"result {index} of its body")
        return carried

    def describe(self) -> str:
        """Return the names of the bodies and the numbers."""
        names = f"cond={self.cond.name!r}, body={self.body.name!r}"
        return f"While({names}, carries={self.carries}, max_iterations={self.max_iterations})"


class Scan(_Owner):
    """A body applied `length` times to a carried value.

    Inputs are the first carried value, `num_bcast` values that every step gets, and `num_xs` sequences `(length, ...)`
    of which step t gets row t. The body takes the carried value, the broadcast ones and the rows in that order and
    returns the next carried value, of unchanged type. With `save_trajectory`, the result is every carried value,
    stacked: row t is the one after step t + 1. With `num_checkpoints` K above 0, it is K rows of the trajectory, those
    at floor(t * length / K).
    """

    body: Graph
    length: int
    save_trajectory: bool = False
    num_bcast: int = 0
    num_xs: int = 0
    num_checkpoints: int = 0

    @property
    def checkpoint_rows(self) -> tuple[int, ...]:
        """Rows of the trajectory that are checkpoints."""
        return tuple(row * self.length // self.num_checkpoints for row in range(self.num_checkpoints))

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the type of the carried value, with the number of saved rows in front if any are."""
        if min(self.length, self.num_bcast, self.num_xs, self.num_checkpoints) < 0:
            raise GraphVerifyError(f"{self.describe()} has a negative number")
        if self.num_checkpoints and (self.save_trajectory or not self.length):
            raise GraphVerifyError("Scan saves checkpoints of at least one step, and then not the trajectory")
        if len(inputs) != 1 + self.num_bcast + self.num_xs:
            raise GraphVerifyError(f"Scan takes {1 + self.num_bcast + self.num_xs} inputs, got {len(inputs)}")
        results = body_results(self, self.body, "body", self.body_inputs(inputs))
        carry = tensor_input(self, inputs, 0, "carry")
        if len(results) != 1:
            raise GraphVerifyError(f"Scan needs one result of its body, the next carry, got {len(results)}")
        expect_same_type(self, results[0], carry, "the result of its body")
        if not self.save_trajectory and not self.num_checkpoints:
            return (carry,)
        rows = self.num_checkpoints or self.length
        return (TensorType(carry.dtype, Shape((rows, *known_shape(self, carry, "carry")))),)

    def body_inputs(self, inputs: OpTypes) -> tuple[TensorType, ...]:
        """Return the types of the body's inputs, one row of each sequence, whose lengths are checked."""
        given = list(tensor_types(self, inputs, "input"))
        for index in range(1 + self.num_bcast, len(given)):
            shape = known_shape(self, given[index], f"{index}, a sequence")
            if not shape.rank:
                raise GraphVerifyError(f"Scan needs a sequence as input {index}, got {given[index]}")
            self.expect_dim(shape[0], self.length, f"the length of input {index}")
            given[index] = TensorType(given[index].dtype, Shape(shape[1:]))
        return tuple(given)

    def describe(self) -> str:
        """Return the name of the body and the numbers."""
        saved = "trajectory" if self.save_trajectory else f"{self.num_checkpoints} rows" if self.num_checkpoints else ""
        numbers = f"length={self.length}, bcasts={self.num_bcast}, xs={self.num_xs}"
        return f"Scan({self.body.name!r}, {numbers}{saved and f', saves {saved}'})"


class Custom(Op):
    """A kernel of a custom-op library, which the session must load.

    `types` are those of the results, which only the library could infer.
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


class CustomFn(_Owner):
    """A function `fwd`, a graph with the node's inputs in order, which is inlined in place of the node."""

    fwd: Graph

    arity = (0, None)

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return the types of the function's results."""
        return body_results(self, self.fwd, "function", tensor_types(self, inputs, "input"))

    def describe(self) -> str:
        """Return the function's name."""
        return f"CustomFn({self.fwd.name!r})"


@builder
def if_(
    graph: Graph,
    predicate: Operand,
    then_body: Body,
    else_body: Body,
    captures: Sequence[Operand] = (),
    *,
    name: str | None = None,
) -> Value:
    """Return the result of `then_body` where the predicate holds, else of `else_body`; both get the captures.

    A predicate that may have more than one element chooses element by element, and both bodies run.
    """
    results = graph.if_multi(predicate, then_body, else_body, captures, name=name)
    return _only(results, "the bodies return", "if_multi")


@builder
def if_multi(
    graph: Graph,
    predicate: Operand,
    then_body: Body,
    else_body: Body,
    captures: Sequence[Operand] = (),
    *,
    name: str | None = None,
) -> tuple[Value, ...]:
    """Return the results of one of two bodies; see `if_`."""
    values = [graph._as_value(item) for item in captures]
    labels = _labelled("capture", values)
    op = If(as_body(then_body, labels, "then"), as_body(else_body, labels, "else"))
    test = graph._as_value(predicate).cast(DType.BOOL)
    return graph.add_node(op, (test, *values), name=name)


@builder
def while_(
    graph: Graph,
    carries: Sequence[Operand],
    cond: Body,
    body: Body,
    captures: Sequence[Operand] = (),
    max_iterations: int | None = None,
    *,
    name: str | None = None,
) -> tuple[Value, ...]:
    """Repeat `body` while `cond` holds and return the carried values; both get the carries, then the captures."""
    moving, fixed = [graph._as_value(item) for item in carries], [graph._as_value(item) for item in captures]
    labels = [*_labelled("carry", moving), *_labelled("capture", fixed)]
    op = While(as_body(cond, labels, "cond"), as_body(body, labels, "body"), len(moving), max_iterations)
    return graph.add_node(op, (*moving, *fixed), name=name)


@builder
def scan(graph: Graph, init: Operand, body: Body, length: int, **node: Unpack[NodeArgs]) -> Value:
    """Apply `body` `length` times to `init` and return the last carried value."""
    return graph.scan_with_bcasts_and_xs(init, (), (), body, length, **node)


@builder
def scan_trajectory(graph: Graph, init: Operand, body: Body, length: int, **node: Unpack[NodeArgs]) -> Value:
    """Apply `body` `length` times and return every carried value `(length, ...)`, the first step's first."""
    return graph.scan_with_bcasts_and_xs(init, (), (), body, length, save_trajectory=True, **node)


@builder
def scan_checkpointed(
    graph: Graph, init: Operand, body: Body, length: int, num_checkpoints: int, **node: Unpack[NodeArgs]
) -> Value:
    """Apply `body` `length` times and return K rows of the trajectory, those at floor(t * length / K)."""
    if num_checkpoints < 1:
        raise GraphVerifyError(f"scan_checkpointed saves at least 1 row, got {num_checkpoints}")
    return graph.scan_with_bcasts_and_xs(init, (), (), body, length, num_checkpoints=num_checkpoints, **node)


@builder
def scan_with_xs(
    graph: Graph,
    init: Operand,
    xs: Sequence[Operand],
    body: Body,
    length: int,
    save_trajectory: bool = False,
    **node: Unpack[NodeArgs],
) -> Value:
    """Apply `body` to the carried value and the rows of sequences `(length, ...)`, one row a step."""
    return graph.scan_with_bcasts_and_xs(init, (), xs, body, length, save_trajectory, **node)


@builder
def scan_with_bcasts_and_xs(
    graph: Graph,
    init: Operand,
    bcasts: Sequence[Operand],
    xs: Sequence[Operand],
    body: Body,
    length: int,
    save_trajectory: bool = False,
    num_checkpoints: int = 0,
    **node: Unpack[NodeArgs],
) -> Value:
    """Apply `body` to the carried value, values that stay the same, and rows of sequences; see `Scan`."""
    carry = graph._as_value(init)
    whole, rows = [graph._as_value(item) for item in bcasts], [graph._as_value(item) for item in xs]
    labels = [*_labelled("carry", [carry]), *_labelled("bcast", whole)]
    labels += [(label, _row(kind)) for label, kind in _labelled("x", rows)]
    step = as_body(body, labels, "step")
    op = Scan(step, length, save_trajectory, len(whole), len(rows), num_checkpoints)
    return graph._add(op, carry, *whole, *rows, **node)


@builder
def custom_op(
    graph: Graph,
    op_name: str,
    inputs: Sequence[Operand],
    types: Sequence[TensorType],
    *,
    domain: str,
    attributes: Mapping[str, AttributeValue] | None = None,
    version: int = 1,
    name: str | None = None,
) -> tuple[Value, ...]:
    """Add a kernel of a custom-op library and return its results, whose types are given."""
    op = Custom(op_name, domain, tuple(types), dict(attributes or {}), version)
    return graph.add_node(op, [graph._as_value(item) for item in inputs], name=name or op_name.lower())


@builder
def custom_fn(graph: Graph, inputs: Sequence[Operand], fwd_body: Body, *, name: str | None = None) -> Value:
    """Apply a function with one result: a graph, or a Python function `(graph, *inputs)` that builds one."""
    return _only(graph.custom_fn_multi(inputs, fwd_body, name=name), "the function returns", "custom_fn_multi")


@builder
def custom_fn_multi(
    graph: Graph, inputs: Sequence[Operand], fwd_body: Body, *, name: str | None = None
) -> tuple[Value, ...]:
    """Apply a function and return all its results; see `custom_fn`."""
    values = [graph._as_value(item) for item in inputs]
    labels: list[tuple[str, ValueType]] = [(f"x{index}", value.type) for index, value in enumerate(values)]
    return graph.add_node(CustomFn(as_body(fwd_body, labels, "fn")), values, name=name)


def _labelled(label: str, values: Sequence[Value]) -> list[tuple[str, ValueType]]:
    return [(label if len(values) == 1 else f"{label}{index}", value.type) for index, value in enumerate(values)]


def _row(kind: ValueType) -> ValueType:
    return TensorType(kind.dtype, Shape(kind.shape[1:])) if isinstance(kind, TensorType) and kind.shape else kind


def _only(values: tuple[Value, ...], what: str, multi: str) -> Value:
    if len(values) != 1:
        raise GraphVerifyError(f"{what} {len(values)} values; use {multi}, which returns them all")
    return values[0]
