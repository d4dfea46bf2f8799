"""The result of an export: the `ExportedModel`, and the `Outline` that is there before the protobuf.

A model has few patterns and many nodes of each: facts of the operator and the types are looked up once a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rlx_ort.converters.onnx_types import dtype_of, tensor_proto
from rlx_ort.converters.protos import graphs_of
from rlx_ort.converters.to_onnx.model import (
    INLINE_BYTES,
    ExternalWeight,
    ModelGraph,
    ModelNode,
    ModelValue,
    ModelWriter,
    types_of,
)
from rlx_ort.converters.to_onnx.model import ExportedNode as ExportedNode
from rlx_ort.errors import ParamError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

SCORED = frozenset({"Softmax"})
"""Operators that read and write the scores of attention, mostly a model's largest values: a session that knows their
shapes writes over them. Whisper's encoder, batch 4, took 1,547 MB on the CPU without, and takes 632."""
_BOUNDARY = re.compile(r"[^0-9A-Za-z]")
_INLINED = "_inlfunc_"
_FEW = 64  # elements; two paddings of each dim of a tensor are at most 16
_SHAPE_READERS = frozenset({"ConstantOfShape", "Shape", "Size"})
_UNKNOWN = UnknownType()


@dataclass(frozen=True)
class ExportedModel:
    """A model in the normal form every provider gets (ARCHITECTURE.md, "Normal form").

    Each weight in `model` is an external initializer whose location is the parameter's name; `params` lists these.
    Constants that are not small are external initializers too, with their data in `constants`. `nodes` are in
    topological order, bodies included. Inputs and outputs keep their order and the graph's names, but an output gets a
    number if an input or a parameter has its name.

    `origin_names` maps the id of a user's node to its name. `forms` has the nodes with a native and a common form: what
    each was written in, or both if its bodies differ. `stored_as` has the parameters that the model wants in another
    dtype than the declared one.
    """

    model: onnx.ModelProto
    params: tuple[str, ...]
    nodes: tuple[ExportedNode, ...]
    origin_names: Mapping[int, str]
    input_types: Mapping[str, ValueType]
    output_types: Mapping[str, ValueType] = field(default_factory=dict)
    constants: Mapping[str, TensorData] = field(default_factory=dict)
    forms: Mapping[int, frozenset[str]] = field(default_factory=dict)
    stored_as: Mapping[str, DType] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<ExportedModel {self.model.graph.name!r}, {len(self.nodes)} nodes, {len(self.params)} parameters>"

    @cached_property
    def known(self) -> dict[str, TensorData]:
        """The data of every constant, small ones, which are inside the model, included; computed once."""
        import onnx
        from onnx import numpy_helper

        tensors = (tensor for graph in graphs_of(self.model) for tensor in graph.initializer)
        inside = [each for each in tensors if each.data_location != onnx.TensorProto.EXTERNAL]
        return {each.name: TensorData.from_array(numpy_helper.to_array(each)) for each in inside} | dict(self.constants)

    @cached_property
    def opsets(self) -> dict[str, int]:
        """Domain -> opset version, ai.onnx as the empty domain."""
        return {entry.domain: entry.version for entry in self.model.opset_import}

    @cached_property
    def skeleton(self) -> bytes:
        """The serialized model; weights are references, so this is small. Computed once."""
        data: bytes = self.model.SerializeToString(deterministic=True)
        return data

    def model_bytes(self, weights: Mapping[str, TensorData]) -> bytes:
        """Return the serialized model for a session; tensors below 128 bytes are inside, the others stay references.

        ONNX Runtime copies small tensors anyway, and some of its shape logic only sees those inside. Between nodes it
        gets no shapes with open dims but those of `SCORED`: with all of them ONNX Runtime 1.31 moves fewer
        transpositions out of the way than with those that it infers itself (on two cores 0.99 of the time over 85
        models, 0.82 for an XCiT; `cpu-2026-11-27` in docs/results).

        Raises:
            ParamError: `weights` lacks a parameter, or has it with another dtype or shape.
        """
        import onnx

        model = onnx.ModelProto.FromString(self.skeleton)
        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL or tensor.name in self.constants:
                continue
            data = weights.get(tensor.name)
            declared = f"{dtype_of(tensor.data_type).value}{list(tensor.dims)}"
            if data is None:
                raise ParamError(f"parameter {tensor.name!r} ({declared}) has no data; set it before the first run")
            stored = f"{data.dtype.value}{list(data.shape)}"
            if stored != declared:
                raise ParamError(f"parameter {tensor.name!r} is declared {declared}, its data is {stored}")
            if data.nbytes < INLINE_BYTES:
                tensor.CopyFrom(tensor_proto(data, tensor.name))
        for graph in graphs_of(model):
            scores = {name for node in graph.node if node.op_type in SCORED for name in (*node.input, *node.output)}
            for info in graph.value_info:
                kind = info.type.tensor_type
                if info.name not in scores and not all(dim.HasField("dim_value") for dim in kind.shape.dim):
                    kind.ClearField("shape")
        serialized: bytes = model.SerializeToString(deterministic=True)
        return serialized

    @cached_property
    def sha256(self) -> str:
        """The hash of the skeleton, hexadecimal: the same graph gives the same hash; weights do not count."""
        import hashlib

        return hashlib.sha256(self.skeleton).hexdigest()

    def node_of(self, session_node: str) -> ExportedNode | None:
        """Return the exported node behind a node name of an open session, or None for one ONNX Runtime added.

        ONNX Runtime renames nodes it rewrites by adding to the name (`mm/MatMulAddFusion`, `conv_token_1`), so the
        longest exported name that is a prefix, and ends where a word ends, is the origin. Nodes of functions that
        ONNX Runtime expands have a prefix of their own (`_inlfunc_Mish_act`), so the origin is looked for after it.
        """
        inlined = session_node.startswith(_INLINED)
        starts = [match.end() for match in _BOUNDARY.finditer(session_node)] if inlined else []
        for start in [0, *starts]:
            for end in range(len(session_node), start, -1):
                known = self._by_name.get(session_node[start:end])
                whole = end == len(session_node) or _BOUNDARY.match(session_node[end])
                if known is not None and whole:
                    return known
        return None

    @cached_property
    def _by_name(self) -> dict[str, ExportedNode]:
        return {node.name: node for node in self.nodes}


@dataclass(frozen=True, slots=True)
class Outline:
    """The nodes of a model and its interface.

    `nodes` are in topological order, bodies included; all have names, and their patterns have types. `functions` holds
    domain and name of those in the model, `constants` the data of each initializer, or a reference. `types` has the
    values whose type is known.
    """

    nodes: Sequence[ExportedNode]
    input_types: Mapping[str, ValueType]
    output_types: Mapping[str, ValueType]
    functions: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    constants: Mapping[str, TensorData | ExternalWeight] = field(default_factory=dict)
    types: Mapping[str, ValueType] = field(default_factory=dict)

    @classmethod
    def of_model(cls, model: ExportedModel) -> Outline:
        """Return the outline of a model."""
        functions = frozenset((function.domain, function.name) for function in model.model.functions)
        return cls(model.nodes, model.input_types, model.output_types, functions)

    @classmethod
    def of_writer(
        cls,
        writer: ModelWriter,
        graph: ModelGraph,
        imports: Mapping[str, int],
        inferred: Mapping[str, ValueType] | None = None,
    ) -> Outline:
        """Return the outline of a main graph that was written for these opsets.

        `inferred` has the types by name where the writer lacks some; nodes that it gives other types get patterns of
        their own.
        """
        nodes = [node if node.name else node.named() for node in writer.records]
        patterns = {node.pattern for node in nodes}
        for pattern in patterns:
            pattern.version = imports[pattern.domain]
            if not pattern.outputs:
                pattern.inputs = types_of(pattern.reads, writer.types)
                pattern.outputs = types_of(pattern.writes, writer.types)
        if inferred is not None:
            nodes = _retyped(nodes, inferred)
            patterns = {node.pattern for node in nodes}
        if writer.sizes or any(map(_reads_shape, patterns)):
            constants = [(name, writer.types[value]) for name, value in writer.initializers.items()]
            constants += [(name, TensorType(data.dtype, Shape(data.shape))) for name, data in writer.inside.items()]
            small = {name for name, kind in constants if may_hold_sizes(kind)}
            fed = {value.name for value in graph.inputs if value.name and is_shape_type(writer.types.get(value))}
            nodes = shape_only_nodes(nodes, small, fed, writer.sizes)

        def interface(values: Sequence[ModelValue]) -> dict[str, ValueType]:
            kinds = {value.name or "": writer.types.get(value, _UNKNOWN) for value in values}
            return {name: (inferred or {}).get(name, kind) for name, kind in kinds.items()}

        types = {value.name: kind for value, kind in writer.types.items() if value.name} | dict(inferred or {})
        known = {**writer.tensors, **writer.inside}
        return cls(nodes, interface(graph.inputs), interface(graph.outputs), constants=known, types=types)

    def known_types(self) -> dict[str, ValueType]:
        """Return `types`, with those of the nodes' patterns for values that it lacks."""
        named = {
            name: kind
            for node in self.nodes
            for names, kinds in ((node.input_names, node.inputs), (node.output_names, node.outputs))
            for name, kind in zip(names, kinds, strict=False)
            if name and kind is not None
        }
        return {**named, **self.types}

    def with_types(self, types: Mapping[str, ValueType]) -> Outline:
        """Return the outline with better types for some values; nodes of other sizes have patterns of their own."""
        return self.retyped({**self.known_types(), **types})

    def retyped(self, types: Mapping[str, ValueType]) -> Outline:
        """Return the outline with these types, which are those of all values."""
        return replace(self, nodes=_retyped(self.nodes, types), types=types)


def _retyped(nodes: Sequence[ExportedNode], types: Mapping[str, ValueType]) -> list[ExportedNode]:
    """Return the nodes with a pattern for each combination of types, which are those of the values by name."""
    patterns: dict[object, ModelNode] = {}
    retyped = []
    for node in nodes:
        reads, writes = (
            tuple([types.get(name, _UNKNOWN) if name else None for name in names])
            for names in (node.input_names, node.output_names)
        )
        look = (node.pattern, reads, writes)
        if look not in patterns:
            patterns[look] = node.pattern.alike(reads, writes, shape_only=node.pattern.shape_only)
        retyped.append(node._replace(pattern=patterns[look]))
    return retyped


def shape_only_nodes(
    nodes: Sequence[ExportedNode], constants: Collection[str], fed: Collection[str], sizes: Collection[str] = ()
) -> list[ExportedNode]:
    """Return the nodes with `shape_only` set on those that only compute shapes.

    A node only computes shapes when it reads a shape, or nothing but results of such nodes, `fed`, which are integer
    graph inputs of rank 0 or 1, `constants` that `may_hold_sizes`, and results of these alone, which ONNX Runtime
    computes beforehand; and so may its results, unless it is a Cast. `sizes` are inputs that such nodes of another
    graph have computed. Exporters compute positions in this way, and from them masks and the places to gather from.
    ONNX Runtime pins what of this has rank 0 or 1, and the rest where the device has no kernel:
    https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/framework/fallback_cpu_capability.cc
    """
    from_shapes, known = {*sizes}, {*constants}
    marked: dict[ModelNode, ModelNode] = {}
    names = []
    for node in nodes:
        pattern = node.pattern
        read = [name for name in node.input_names if name]
        follows = not from_shapes.isdisjoint(read) and all(
            name in from_shapes or name in known or name in fed for name in read
        )
        fits = pattern.op_type == "Cast" or all(may_hold_sizes(kind) for kind in pattern.outputs if kind)
        if fits and (follows or _reads_shape(pattern)):
            from_shapes.update(name for name in node.output_names if name)
            if pattern not in marked:
                marked[pattern] = pattern.alike(pattern.inputs, pattern.outputs, shape_only=True)
            node = node._replace(pattern=marked[pattern])
        elif fits and known.issuperset(read) and (read or pattern.op_type == "Constant") and not _has_body(pattern):
            known.update(name for name in node.output_names if name)
        names.append(node)
    return names


def _has_body(pattern: ModelNode) -> bool:
    return any(each.kind.startswith("GRAPH") for each in pattern.attributes.values())


def is_shape_type(kind: ValueType | None) -> bool:
    """Return whether a value may hold sizes, axes or indices: an integer or bool tensor of rank 0 or 1."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return False
    return kind.shape.rank <= 1 and (kind.dtype.is_integer or kind.dtype is DType.BOOL)


def may_hold_sizes(kind: ValueType | None) -> bool:
    """Return whether a value may be computed from sizes alone: integers, bools, or a few floats, as DeBERTa's scale."""
    if not isinstance(kind, TensorType):
        return False
    if kind.dtype.is_integer or kind.dtype is DType.BOOL:
        return True
    count = None if kind.shape is None else kind.shape.num_elements
    return kind.dtype.is_float and count is not None and count <= _FEW


def _reads_shape(pattern: ModelNode) -> bool:
    return pattern.domain == "" and pattern.op_type in _SHAPE_READERS
