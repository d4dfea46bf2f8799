"""`GraphBuilder`: walks an ONNX model, adds each node to an IR graph and inlines functions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlx_ort.converters.from_onnx.structure import (
    domain_of,
    module_path,
    node_label,
    opsets_of,
    sorted_nodes,
    value_problem,
)
from rlx_ort.converters.from_onnx.tensor_files import TensorFiles
from rlx_ort.converters.from_onnx.tensors import attribute_value, constant_data, dense_tensor, resolved, tensor_data
from rlx_ort.converters.onnx_types import known_type_of, type_of
from rlx_ort.converters.protos import trimmed
from rlx_ort.converters.to_onnx.model import INLINE_BYTES, UniqueNames
from rlx_ort.errors import ConversionError
from rlx_ort.ir.core import Ref, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.leaf import Capture, Input, Param
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

# 8-bit integers are left out: they are quantised weights, whatever their size.
_INDEX_TYPES = {DType.BOOL, DType.I16, DType.I32, DType.I64, DType.U16, DType.U32, DType.U64}


@dataclass(slots=True)
class Scope:
    """The names visible in one graph, body or function call.

    Nodes are added to `graph`; a function call shares that of its caller. `opsets` maps a domain to the version its
    nodes are written for, and `where` is the scope's name in messages. `values` has None for a function's formal input
    that the call leaves out. `outer` is the scope around a body, and `captures` has what the body reads of it, with the
    places among the inputs of the node that owns the body; functions see nothing around them.

    In a function, `attributes` maps each attribute that it declares to its value in the call. With `in_function`, names
    of nodes may occur more than once.
    """

    graph: Graph
    opsets: Mapping[str, int]
    where: str
    types: Mapping[str, ValueType] = field(default_factory=dict)
    values: dict[str, Value | None] = field(default_factory=dict)
    outer: Scope | None = None
    captures: defaultdict[Ref, int] | None = None
    attributes: Mapping[str, onnx.AttributeProto | None] | None = None
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
        outer_value = self.outer.resolve(name, reader)
        if outer_value is None:
            return None
        capture = Capture(self.captures[outer_value.ref], outer_value.type)
        self.values[name] = self.graph.add_node(capture, (), name=name)[0]
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


class GraphBuilder:
    """Builds the IR graph of one model.

    `typed` is the model with the types that inference found, or the model itself; `model` has the weights.
    """

    def __init__(self, model: onnx.ModelProto, typed: onnx.ModelProto, files: TensorFiles) -> None:
        self._model = model
        self._typed = typed
        self._files = files
        self._functions = {(domain_of(f.domain), f.name, f.overload): f for f in model.functions}
        self._names = UniqueNames(_all_names(model.graph))

    def build(self) -> Graph:
        """Return the graph.

        Raises:
            ConversionError: the model breaks a rule of ONNX that its meaning depends on.
        """
        model, source = self._model, self._model.graph
        graph = Graph(source.name or "graph")
        graph.metadata = {entry.key: entry.value for entry in model.metadata_props}
        graph.doc = source.doc_string or model.doc_string
        scope = Scope(graph, opsets_of(model, model.opset_import), "the model", _types(self._typed.graph))
        weights = self._initializers(source)
        for value in source.input:
            if value.name not in weights:
                self._named_leaf(scope, value.name, Input(value.name, scope.type_of(value.name)))
        overridable = {value.name: type_of(value.type) for value in source.input}
        for name, data in weights.items():
            declared = overridable.get(name)
            if isinstance(declared, TensorType) and declared.dtype is not data.dtype:
                raise ConversionError(f"input {name!r} is {declared.dtype.value}, its default {data.dtype.value}")
            self._weight(scope, name, data, name in overridable)
        self._add_nodes(scope, self._typed.graph.node)
        values = [self._output(scope, value.name) for value in source.output]
        names = [value.name for value in source.output]
        if len(set(names)) != len(names):
            raise ConversionError(f"the model names an output twice: {', '.join(names)}")
        graph.set_outputs(values, names)
        return graph

    def _initializers(self, graph: onnx.GraphProto) -> dict[str, TensorData]:
        tensors: dict[str, TensorData] = {}
        dense = [(tensor.name, tensor_data(tensor, self._files)) for tensor in graph.initializer]
        sparse = [(tensor.values.name, dense_tensor(tensor, self._files)) for tensor in graph.sparse_initializer]
        for name, data in [*dense, *sparse]:
            if name in tensors or not name:
                raise ConversionError(f"graph {graph.name!r} has {'two' if name else 'nameless'} initializers {name!r}")
            tensors[name] = data
        return tensors

    def _weight(self, scope: Scope, name: str, data: TensorData, overridable: bool) -> None:
        """Add an initializer: a constant where it is about indices and shapes, else a parameter."""
        small = data.nbytes < INLINE_BYTES and data.dtype in _INDEX_TYPES and not overridable
        if small or data.dtype is DType.STRING:
            scope.define(name, scope.graph.constant(data, name=name))
            return
        self._named_leaf(scope, name, Param(name, TensorType(data.dtype, Shape(data.shape))))
        scope.graph.weights[name] = data

    def _named_leaf(self, scope: Scope, name: str, op: Input | Param) -> None:
        if not name or name in scope.values:
            raise ConversionError(f"{scope.where} has an input or initializer {name!r} that is nameless or there twice")
        scope.define(name, scope.graph.add_node(op, (), name=name, output_names=[name])[0])

    def _add_nodes(self, scope: Scope, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in sorted_nodes(nodes, scope.values, scope.where):
            key = (domain_of(node.domain), node.op_type, node.overload)
            if key in self._functions:
                self._call(scope, node, key)
            elif key[:2] == ("", "Constant"):
                self._constant(scope, node)
            elif any(node.output):
                self._node(scope, node)

    def _node(self, scope: Scope, node: onnx.NodeProto) -> None:
        formal = [scope.resolve(name, node_label(node)) if name else None for name in node.input]
        captures: defaultdict[Ref, int] = defaultdict(itertools.count(len(formal)).__next__)  # each gets the next place
        attributes = {}
        for attribute in resolved(node.attribute, scope.attributes):
            if scope.in_function and (problem := value_problem(attribute)):  # one that a call gives
                raise ConversionError(f"{node_label(node)} {problem}")
            attributes[attribute.name] = attribute_value(
                attribute, self._files, lambda body: self._body(scope, body, captures, node_label(node))
            )
        outputs = trimmed(node.output)
        domain = domain_of(node.domain)
        op = OnnxNode(
            op_type=node.op_type,
            domain=domain,
            version=self._version(scope, node, domain),
            overload=node.overload,
            attributes={name: value for name, (_, value) in attributes.items()},
            attribute_kinds={name: kind for name, (kind, _) in attributes.items()},
            formal_inputs=len(formal),
            output_count=len(outputs),
        )
        types = [scope.type_of(name) if name else UnknownType() for name in outputs]
        names = [self._fresh(scope, name) for name in outputs]
        results = scope.graph.add_node(
            op,
            [*formal, *map(scope.graph.value, captures)],
            name=node.name or next(filter(None, names)),
            types=types,
            output_names=names,
        )
        if path := module_path(node):
            scope.graph.scopes[results[0].node.name] = path
        for output, value in zip(outputs, results, strict=True):
            if output:
                scope.define(output, value)

    def _version(self, scope: Scope, node: onnx.NodeProto, domain: str) -> int:
        if domain in scope.opsets:
            return scope.opsets[domain]
        if domain == "":
            raise ConversionError(
                f"{node_label(node)} is an operator of ai.onnx, but {scope.where} imports no opset of it"
            )
        return 1

    def _constant(self, scope: Scope, node: onnx.NodeProto) -> None:
        attributes = {a.name: a for a in resolved(node.attribute, scope.attributes)}
        if len(attributes) != 1 or len(node.output) != 1:
            raise ConversionError(f"{node_label(node)} needs one attribute and one output")
        data = constant_data(next(iter(attributes.values())), self._files)
        if data is None:
            raise ConversionError(f"{node_label(node)} has an unknown attribute {next(iter(attributes))!r}")
        scope.define(node.output[0], scope.graph.constant(data, name=node.output[0]))

    def _body(self, scope: Scope, body: onnx.GraphProto, captures: defaultdict[Ref, int], owner: str) -> Graph:
        inner = Scope(
            Graph(body.name or "body"),
            scope.opsets,
            f"body {body.name!r} of {owner}",
            _types(body),
            outer=scope,
            captures=captures,
            attributes=scope.attributes,
            in_function=scope.in_function,
        )
        weights = self._initializers(body)
        for value in body.input:
            if value.name not in weights:
                self._named_leaf(inner, value.name, Input(value.name, inner.type_of(value.name)))
        for name, data in weights.items():
            inner.define(name, inner.graph.constant(data, name=name))
        self._add_nodes(inner, body.node)
        outputs = [self._output(inner, value.name) for value in body.output]
        inner.graph.set_outputs(outputs)
        return inner.graph

    def _call(self, scope: Scope, node: onnx.NodeProto, key: tuple[str, str, str]) -> None:
        """Add the nodes of a model-local function in place of the node that calls it."""
        function, label = self._functions[key], node_label(node)
        if len(node.input) > len(function.input) or len(node.output) > len(function.output):
            raise ConversionError(f"{label} has more inputs or outputs than the function {function.name!r} declares")
        call: dict[str, onnx.AttributeProto | None] = dict.fromkeys(function.attribute)
        call |= {a.name: a for a in function.attribute_proto}
        given = {a.name: a for a in resolved(node.attribute, scope.attributes)}
        if not given.keys() <= call.keys():
            raise ConversionError(f"{label} has attributes that the function {function.name!r} does not declare")
        call |= given
        inner = Scope(
            scope.graph,
            opsets_of(self._model, function.opset_import) or scope.opsets,
            f"function {function.name!r}",
            {name: scope.type_of(outer) for name, outer in zip(function.output, node.output, strict=False) if outer},
            attributes=call,
            in_function=True,
        )
        for index, name in enumerate(function.input):
            fed = node.input[index] if index < len(node.input) else ""
            inner.define(name, scope.resolve(fed, label) if fed else None)
        self._add_nodes(inner, function.node)
        for outer_name, inner_name in zip(node.output, function.output, strict=False):
            if outer_name:
                scope.define(outer_name, self._output(inner, inner_name))

    def _fresh(self, scope: Scope, name: str) -> str:
        """Return the name a result keeps: its own, but numbered inside a function, which may be called twice."""
        return self._names.unique(name) if name and scope.in_function else name

    def _output(self, scope: Scope, name: str) -> Value:
        value = scope.resolve(name, "the output list")
        if value is None:
            raise ConversionError(f"{scope.where} returns its input {name!r}, which the call leaves out")
        return value


def _all_names(graph: onnx.GraphProto) -> Iterable[str]:
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (name for node in graph.node for name in node.output)


def _types(graph: onnx.GraphProto) -> Mapping[str, ValueType]:
    """Return the declared type of each value of one graph, its bodies left out."""
    return {info.name: known_type_of(info.type) for info in (*graph.value_info, *graph.output, *graph.input)}
