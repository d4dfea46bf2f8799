"""`Emitter`: writes the ONNX nodes of a lowering, and the table of lowerings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.protos import trimmed
from rlx_ort.converters.to_onnx.dispatch import Asks, Lowering, NoNativeForm, asking, load_family
from rlx_ort.converters.to_onnx.model import ExportedNode, ModelGraph, ModelNode, ModelValue, ModelWriter, attribute
from rlx_ort.converters.to_onnx.repeats import Repeats
from rlx_ort.errors import ConversionError, GraphVerifyError
from rlx_ort.ir.core import Node
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, live_nodes
from rlx_ort.ir.op import Op, known_shape
from rlx_ort.ir.ops.leaf import Capture, Constant, Input, Param
from rlx_ort.ir.ops.norm import Softmax
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.ops.shape import Concat
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, Shape, TensorType, UnknownType, ValueType

DEFAULT_OPSET = 21
"""The opset that lowerings write for: execution providers have the most kernels there."""

_lowerings: dict[type[Op], Lowering] = {}
_NOTHING: Mapping[int, Any] = {}


def lowers(*ops: type[Op], asks: Asks | None = None) -> Callable[[Lowering], Lowering]:
    """Declare the decorated function to be the lowering of op classes, which asks for kernels if it says so."""

    def declare(function: Lowering) -> Lowering:
        if asks is not None:
            asking.update(dict.fromkeys(ops, asks))
        _lowerings.update(dict.fromkeys(ops, function))
        return function

    return declare


def lowering_of(op: Op) -> Lowering | None:
    """Return the lowering of an op, or None when it has none (leaves, refused kinds)."""
    load_family(type(op).__module__)
    return _lowerings.get(type(op))


@dataclass(slots=True)
class _Frame:
    """One IR graph while it is being lowered; an inlined body has the frame around it as `outer`."""

    graph: Graph
    outer: _Frame | None = None
    values: dict[int, Sequence[ModelValue]] = field(default_factory=dict)  # node -> its results
    current: Sequence[ModelValue | None] = ()
    named: bool = False
    outputs: set[ModelValue] = field(default_factory=set)
    symbols: dict[str, ModelValue] = field(default_factory=dict)


class Emitter:
    """Writes the ONNX nodes of one graph (or body), and answers a lowering's questions about its node.

    Inputs that are asked for by type must be tensors. A lowering that reads only element types, ranks and names is not
    repeated for nodes of other sizes.
    """

    def __init__(self, writer: ModelWriter, parent: Emitter | None = None) -> None:
        self.nodes: list[ExportedNode] = []  # written so far, without those of bodies
        self._writer = writer
        self._parent = parent
        self._depth: int = 0 if parent is None else parent._depth + 1
        self._loops: int = 0 if parent is None else parent._loops
        self._body = 0 if parent is None else writer.body()
        self.initializers: dict[str, TensorData] = {}  # of a body; those of the main graph are the writer's
        self._repeats = Repeats(writer, self.nodes)
        self._constants: list[ModelValue] = []  # that the node being lowered has asked for
        self._frame: _Frame
        self._node: Node
        self._asks_around = False  # whether its lowering depends on more than the node itself
        self._asks_sizes = False  # whether it may depend on more of the node's types than element types and ranks

    @property
    def node(self) -> Node:
        """The IR node that is being lowered; `node.types` are the types its results must have."""
        self._asks_sizes = True
        return self._node

    def input_type(self, index: int) -> TensorType:
        """Return the IR type of input `index`."""
        self._asks_sizes = True
        return self._tensor(index)

    @property
    def input_types(self) -> list[TensorType]:
        """The IR types of all inputs."""
        return [self.input_type(index) for index in range(len(self._node.inputs))]

    def input_dtype(self, index: int) -> DType:
        """Return the element type of input `index`."""
        return self._tensor(index).dtype

    def input_rank(self, index: int, name: str) -> int:
        """Return the rank of input `index`, which must be known; messages call the input `name`."""
        return known_shape(self._node.op, self._tensor(index), name).rank

    def known_dtype(self, index: int) -> DType | None:
        """Return the element type of input `index`, None for one that is absent or no tensor."""
        kind = self.known_type(index)
        return kind.dtype if isinstance(kind, TensorType) else None

    def _source(self, index: int) -> tuple[Node, int] | None:
        """Return the node that input `index` is a result of, and which; None for an absent input."""
        ref = self._node.inputs[index] if index < len(self._node.inputs) else None
        return None if ref is None else (self._frame.graph.nodes[ref.node], ref.output)

    def known_type(self, index: int) -> ValueType | None:
        """Return the type of input `index`, None for one that is absent."""
        source = self._source(index)
        return None if source is None else source[0].types[source[1]]

    def _tensor(self, index: int) -> TensorType:
        kind = self.known_type(index)
        if not isinstance(kind, TensorType):
            raise GraphVerifyError(f"{self._node} needs a tensor as input {index}, got {kind or 'nothing'}")
        return kind

    def input_data(self, index: int) -> TensorData | None:
        """Return the data of input `index` if it is a constant, else None."""
        source = self._source(index)
        if source is None or not isinstance(source[0].op, Constant):
            return None
        self._asks_around = True
        return source[0].op.data

    def joined_data(self, index: int) -> list[TensorData]:
        """Return the constants that input `index` is joined of, itself if it is one."""
        whole, source = self.input_data(index), self._source(index)
        if whole is not None or source is None:
            return [] if whole is None else [whole]
        self._asks_around = True
        makers = [None if ref is None else self._frame.graph.nodes[ref.node].op for ref in source[0].inputs]
        joins = isinstance(source[0].op, Concat) or getattr(source[0].op, "op_type", "") == "Concat"
        return [op.data for op in makers if isinstance(op, Constant)] if joins else []

    def softmax_before(self, index: int) -> tuple[ModelValue, TensorType, int] | None:
        """Return what the Softmax that made input `index` reads, with its type, and its axis; None if none made it.

        One in a model that stays at an opset before 18 does not count: its reductions would need another form.
        """
        self._asks_around = True
        source = self._source(index)
        ref = source[0].inputs[0] if source is not None and source[0].inputs else None
        if source is None or ref is None:
            return None
        op, kind = source[0].op, self._frame.graph.nodes[ref.node].types[ref.output]
        if isinstance(op, OnnxNode) and (op.domain, op.op_type) == ("", "Softmax") and op.version >= 18:
            axis = cast(int, op.attributes.get("axis", -1))
        elif isinstance(op, Softmax):
            axis = op.axis
        else:
            return None
        return (self._frame.values[ref.node][ref.output], kind, axis) if isinstance(kind, TensorType) else None

    def op(
        self,
        op_type: str,
        *inputs: ModelValue | None,
        domain: str = "",
        version: int | None = None,
        outputs: int = 1,
        types: Sequence[ValueType | None] | None = None,
        **attributes: Any,
    ) -> Any:
        """Append a node and return its result, or a tuple when `outputs` is above 1.

        `version` is the opset version this form of the op needs, if above 21 for ai.onnx (1 for com.microsoft).
        `types` are the result types where known. Attributes: int, float, str, numpy array, lists of these, Graph;
        a dtype is written as its number, and None leaves the attribute out.
        """
        given = {
            name: attribute(name, value, lower=lambda body: self.subgraph(body, inputs))
            for name, value in attributes.items()
            if value is not None
        }
        node = ModelNode(domain, op_type, trimmed(inputs), given, tuple([ModelValue() for _ in range(outputs)]))
        self.append(node, max(version or 1, DEFAULT_OPSET if domain == "" else 1))
        for value, kind in zip(node.writes, types or (), strict=False):
            if kind is not None:
                self._writer.types[value] = kind
        return node.writes[0] if outputs == 1 else node.writes

    def imported(
        self,
        op: OnnxNode,
        inputs: Sequence[ModelValue | None],
        op_type: str = "",
        attributes: Mapping[str, Any] | None = None,
        types: Mapping[int, ValueType] = _NOTHING,
    ) -> tuple[ModelValue, ...]:
        """Append a node in the form of the model it came from; an absent result is a value without a name.

        `op_type` and `attributes` stand for those of the op, `types` has those of results that are not the op's.
        Inputs after the formal ones are captured by bodies.
        """
        given = {
            name: attribute(name, value, op.attribute_kinds.get(name, ""), lambda body: self.subgraph(body, inputs))
            for name, value in (op.attributes if attributes is None else attributes).items()
        }
        names = self._node.output_names
        results = tuple(ModelValue(name=None if name else "") for name in names)
        present = max((index + 1 for index, name in enumerate(names) if name), default=0)
        reads = trimmed(inputs if op_type else inputs[: op.formal_inputs])
        node = ModelNode(op.domain, op_type or op.op_type, reads, given, results[:present], op.overload)
        self.append(node, op.version, imported=True)
        self._writer.types.update((results[place], kind) for place, kind in types.items())
        return results

    def maker(self, value: ModelValue) -> str:
        """Return the operator of the node that a value is a result of, empty for none."""
        self._asks_around = True
        return "" if value.node is None else value.node.op_type

    def append(self, node: ModelNode, written: int, *, imported: bool = False, name: str = "") -> None:
        """Append a finished node whose form belongs to opset version `written` of its domain."""
        writer = self._writer
        if not name:
            name = f"{self._node.name}/{node.op_type}" if self._frame.named else self._node.name
            self._frame.named = True
        node.name = writer.node_names.unique(name + self._mark())
        node.written, node.imported, node.depth, node.loops = written, imported, self._depth, self._loops
        record = ExportedNode(node, writer.origin, writer.source)
        self.nodes.append(record)
        writer.records.append(record)

    def constant(self, data: npt.ArrayLike, dtype: DType | None = None) -> ModelValue:
        """Return a constant (an initializer), one for equal data; Python floats are f32 by default."""
        if dtype is None and not isinstance(data, np.ndarray | np.generic):
            dtype = DType.F32 if np.asarray(data).dtype == np.float64 else None
        value = self._own_constant(TensorData.from_array(data, dtype), f"{self._node.name}/constant")
        self._constants.append(value)
        return value

    def _own_constant(self, data: TensorData, name: str) -> ModelValue:
        return self._writer.constant(data, name, self._body, self.initializers)

    def i64(self, values: Sequence[int]) -> ModelValue:
        """Return a constant int64 vector, as axes and static shapes are."""
        return self.constant(np.asarray(values, np.int64).reshape(-1))

    def dims(self, dims: Sequence[Dim]) -> ModelValue:
        """Return an int64 vector of dimensions; named ones are read at run time from a value that has them.

        Raises:
            ConversionError: a dimension is unknown, or no earlier value has a dimension of that name.
        """
        parts: list[ModelValue] = []
        for known, group in itertools.groupby(dims, lambda dim: isinstance(dim, int)):
            sizes = list(group)
            parts += [self.i64(cast(list[int], sizes))] if known else map(self._symbol, sizes)
        if len(parts) < 2:
            return parts[0] if parts else self.i64([])
        joined: ModelValue = self.op("Concat", *parts, axis=0, types=[TensorType(DType.I64, Shape([len(dims)]))])
        return joined

    def cast(self, value: ModelValue, dtype: DType) -> ModelValue:
        """Return the value as another dtype; the same value when it already is."""
        known = self._writer.types.get(value)
        if isinstance(known, TensorType) and known.dtype is dtype:
            return value
        kind = TensorType(dtype, known.shape if isinstance(known, TensorType) else None)
        converted: ModelValue = self.op("Cast", value, to=dtype, types=[kind])
        return converted

    def has_kernel(
        self, op_type: str, *inputs: ValueType | None, outputs: Sequence[ValueType | None] = (), domain: str = ""
    ) -> bool:
        """Return whether the provider that the model is for has a kernel that computes this; true for any provider."""
        kernels = self._writer.dispatcher.kernels
        return kernels is None or kernels.takes(domain, op_type, 1 if domain else DEFAULT_OPSET, inputs, outputs)

    def require_kernel(self, op_type: str, *inputs: ValueType | None, domain: str = "") -> None:
        """Raise `NoNativeForm` if the model is for one provider that has no kernel for a native form, or a slow one.

        A slow one will do where the native form is forced, or there is no kernel for the nodes it stands for.
        """
        dispatcher = self._writer.dispatcher
        kernels = dispatcher.kernels
        if kernels is None:
            return
        faster = kernels.slow.get((domain, op_type), ())
        forced = dispatcher.config.forces_native(self.node.op.kind)
        if faster and not forced and all(self.has_kernel(each, inputs[0]) for each in faster):
            raise NoNativeForm(f"{kernels.name} is slower with {op_type} than with {' and '.join(faster)}")
        if not self.has_kernel(op_type, *inputs, domain=domain):
            kinds = ", ".join(dict.fromkeys(str(kind) for kind in inputs if kind is not None))
            raise NoNativeForm(f"{kernels.name} has no kernel for {domain or 'ai.onnx'}::{op_type} ({kinds})")

    def inline(self, body: Graph, inputs: Sequence[ModelValue]) -> tuple[ModelValue, ...]:
        """Lower a body into this graph with its `Input` leaves replaced by `inputs`; captures resolve as well."""
        self._asks_around = True
        frame, node = self._frame, self._node
        results = self.lower(body, inputs, frame.current, outer=frame)
        self._frame, self._node = frame, node
        return results

    def subgraph(self, body: Graph, node_inputs: Sequence[ModelValue | None]) -> ModelGraph:
        """Lower a body into an ONNX subgraph for If, Loop or Scan; captures refer to `node_inputs`."""
        self._asks_around = True
        inner = Emitter(self._writer, parent=self)
        leaves = [node for node in body.nodes if isinstance(node.op, Input)]
        inner._loops += bool(leaves)  # branches of an If have no inputs
        inputs = [self._writer.value(leaf.output_names[0], leaf.types[0]) for leaf in leaves]
        results = inner.lower(body, inputs, node_inputs)
        outputs = [inner.output(value, name) for value, name in zip(results, body.output_names, strict=True)]
        return ModelGraph(inputs, outputs, inner.nodes, body.name or "body", inner.initializers)

    def block(
        self,
        name: str,
        inputs: Sequence[tuple[str, ValueType]],
        build: Callable[[Emitter, Sequence[ModelValue]], Sequence[ModelValue]],
    ) -> ModelGraph:
        """Return a subgraph that a function writes: `build(emitter, formal inputs)` returns the values it results in.

        It may use values of this graph; bodies that it inlines capture the inputs of the node being lowered.
        """
        self._asks_around = True
        inner = Emitter(self._writer, parent=self)
        inner._node = self._node
        inner._frame = _Frame(self._frame.graph, current=self._frame.current, named=True)
        formal = [self._writer.value(f"{self._node.name}/{label}", kind) for label, kind in inputs]
        results = [inner.output(value, f"{self._node.name}/{name}") for value in build(inner, formal)]
        inner._name_results(0)
        return ModelGraph(formal, results, inner.nodes, name, inner.initializers)

    def lower(
        self,
        graph: Graph,
        inputs: Sequence[ModelValue],
        captured: Sequence[ModelValue | None] = (),
        *,
        names: Mapping[int, Mapping[int, str]] = _NOTHING,
        outer: _Frame | None = None,
        live: Collection[int] | None = None,
    ) -> tuple[ModelValue, ...]:
        """Write every node of a graph that its outputs need and return the values of the outputs.

        `names` holds names, already reserved, for some of the results, by node and place; `live` is `live_nodes(graph)`
        where it is known.

        Raises:
            ConversionError: a node has no ONNX form.
        """
        frame, formal = _Frame(graph, outer), iter(inputs)
        live = live_nodes(graph) if live is None else live
        main = self._parent is None and outer is None
        writer, repeats, values, self._frame = self._writer, self._repeats, frame.values, frame
        for node in graph.nodes:
            place, kind = node.id, type(node.op)
            if kind is Input:
                values[place] = (next(formal),)
            elif place not in live:
                continue
            elif kind is Param:
                values[place] = (writer.param(cast(Param, node.op)),)
            elif not main:
                self._frame, self._node = frame, node
                self._lower_node(node, captured, _NOTHING)
                continue
            else:
                read = [None if ref is None else values[ref.node][ref.output] for ref in node.inputs]
                writer.origin, writer.source = writer.origins.get(place, place), node
                key, form = repeats.find(node, read)
                if form is None:
                    self._lower_first(node, read, key, names.get(place, _NOTHING))
                else:
                    values[place] = repeats.repeat(form, node, read, names.get(place, _NOTHING))
                continue
            if main:
                repeats.mark(node, values[place])
        self._frame = frame
        return tuple(values[value.ref.node][value.ref.output] for value in graph.outputs)

    def output(self, value: ModelValue, name: str, *, reserved: bool = False) -> ModelValue:
        """Return a value that may be an output of this graph: the value, or an Identity of it.

        An output must be a result of a node of this very graph, and only one output may be it; `reserved` also
        demands the name, which may be that of an input or an initializer of the main graph.
        """
        node, frame = value.node, self._frame
        owned = value not in frame.outputs and (reserved if node is None else node.depth == self._depth)
        if not (owned and (not reserved or value.name == name)):
            copy = ModelValue(name=name if reserved else self._writer.value_names.unique(name))
            identity = ModelNode("", "Identity", (value,), writes=(copy,))
            self.append(identity, DEFAULT_OPSET, name=f"{copy.name}/Identity")
            if value in self._writer.types:
                self._writer.types[copy] = self._writer.types[value]
            value = copy
        frame.outputs.add(value)
        return value

    def _lower_first(
        self, node: Node, inputs: Sequence[ModelValue | None], key: tuple[Any, ...] | None, names: Mapping[int, str]
    ) -> None:
        """Lower a node of the main graph, and cache how it was written for nodes like it."""
        writer, repeats, dispatcher = self._writer, self._repeats, self._writer.dispatcher
        start, refused = len(writer.records), len(dispatcher.refused)
        self._node = node
        self._constants.clear()
        self._asks_around = self._asks_sizes = False
        dispatcher.latest = None
        self._lower_node(node, (), names)
        results = self._frame.values[node.id]
        repeats.mark(node, results)
        # A refusal names each node, so each is lowered.
        if key is not None and not self._asks_around and len(dispatcher.refused) == refused:
            records, any_size = writer.records[start:], not self._asks_sizes
            repeats.learn(key, node, inputs, results, records, self._constants, dispatcher.latest, any_size=any_size)

    def _lower_node(self, node: Node, captured: Sequence[ModelValue | None], names: Mapping[int, str]) -> None:
        frame, start = self._frame, len(self.nodes)
        results = self._results(node, captured)
        frame.current, frame.named = (), False
        frame.values[node.id] = results
        for index, value in enumerate(results):
            if value.node is not None and value.name is None:
                wanted = node.output_names[index]
                value.name = names[index] if index in names else wanted and self._writer.value_names.unique(wanted)
                if not isinstance(node.types[index], UnknownType):
                    self._writer.types[value] = node.types[index]
        self._name_results(start)

    def _mark(self) -> str:
        """Return the text after an @ in the name of the node around a body, by which its nodes are placed like it."""
        if self._parent is None:
            return ""
        return self._parent._mark() or "".join(self._parent._node.name.partition("@")[1:])

    def _name_results(self, start: int) -> None:
        """Name the results, which have no name yet, of the nodes from `start` on."""
        for written in self.nodes[start:]:
            for value in written.pattern.writes:
                if value.name is None:
                    value.name = self._writer.value_names.unique(f"{self._node.name}/{written.op_type}")

    def _results(self, node: Node, captured: Sequence[ModelValue | None]) -> Sequence[ModelValue]:
        op = node.op
        if isinstance(op, Constant):
            return (self._own_constant(op.data, node.output_names[0]),)
        if isinstance(op, Capture):
            value = captured[op.index]
            if value is None:
                raise ConversionError(f"{node} captures input {op.index} of the node around it, which is absent")
            data = self._writer.small(value)
            return (value if data is None else self._own_constant(data, f"{value.name}"),)
        values = self._frame.values
        current = [None if ref is None else values[ref.node][ref.output] for ref in node.inputs]
        self._frame.current = current
        lowering = lowering_of(op)
        if lowering is None:
            raise ConversionError(f"{node} has no ONNX form")
        results = self._writer.dispatcher.native(self, self._writer.origin, op, current)
        if results is None:
            results = lowering(self, op, current)
        return results if isinstance(results, tuple) else (results,)

    def _symbol(self, name: Dim) -> ModelValue:
        """Return the size of a named dimension as an int64 vector of one element."""
        if name is None:
            raise ConversionError(f"{self._node} needs, at run time, a dimension nothing is known about; name it")
        self._asks_around = True
        for frame in self._frames():  # innermost first: a body may use a name for another size than its surroundings
            if str(name) in frame.symbols:
                return frame.symbols[str(name)]
            known = (zip(frame.graph.nodes[at].types, values, strict=False) for at, values in frame.values.items())
            for holder, value in itertools.chain.from_iterable(known):
                if isinstance(holder, TensorType) and holder.shape is not None and name in holder.shape:
                    axis, kind = holder.shape.index(name), TensorType(DType.I64, Shape([1]))
                    size: ModelValue = self.op("Shape", value, start=axis, end=axis + 1, types=[kind])
                    self._frame.symbols[str(name)] = size
                    return size
        raise ConversionError(f"{self._node} needs the size of dimension {name!r}, which no earlier value has")

    def _frames(self) -> Iterator[_Frame]:
        """Yield the graphs being lowered, from the innermost out."""
        frame: _Frame | None = self._frame
        while frame is not None:
            yield frame
            frame = frame.outer
        if self._parent is not None:
            yield from self._parent._frames()
