"""Nodes that ONNX Runtime removes before assignment, by constant folding and dropout elimination; sizes from inputs.

Providers are asked about the remaining nodes only, with the constants that those read after folding. Where a model
computes shapes, its sizes follow from those of the inputs by the same folding.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from rlx_ort.converters.onnx_types import tensor_proto, type_proto
from rlx_ort.converters.protos import (
    LONGEST_VECTOR,
    bodies_of,
    copied,
    graphs_below,
    graphs_of,
    infer_proto,
    nodes_of,
    set_items,
    skeleton,
)
from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode, Outline
from rlx_ort.converters.to_onnx.exporter import Draft
from rlx_ort.converters.to_onnx.model import INLINE_BYTES, ExternalWeight
from rlx_ort.device import Device
from rlx_ort.errors import RlxError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, UnknownType, ValueType
from rlx_ort.options.compile_options import CacheUse, CompileOptions, OptimizationLevel
from rlx_ort.providers.base import EngineSession, SessionRequest
from rlx_ort.providers.registry import provider_of
from rlx_ort.selection.graph_cache import PerDraft

_log = logging.getLogger(__name__)
# ONNX Runtime does not fold random values, nor weights that are stored quantised:
# https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/optimizer/constant_folding.cc
_NOT_FOLDED = frozenset(
    {"Bernoulli", "DequantizeLinear", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
     "RandomUniformLike"}
)  # fmt: skip
_OF_SHAPE = frozenset({"Shape", "Size"})
_ROUNDS = 64  # at most, while better types let more be folded
_LARGEST_ELEMENTS = 1024
"""How many elements a value that is computed here may have: shapes, axes and scales, no weights."""
_FED = frozenset({DType.BOOL, DType.F32, DType.I32, DType.I64})
_SESSIONS = 4
"""How many sessions that compute shapes stay open for a model."""
_plans: PerDraft[_Plan] = PerDraft()
_lock = threading.Lock()


def folded_nodes(outline: Outline, options: CompileOptions, *, bodies: bool = False) -> dict[str, ExportedNode]:
    """Return the nodes whose results are constant, by name; those in bodies on request.

    Without optimisation there are none.
    """
    if options.optimization is OptimizationLevel.OFF:
        return {}
    known = {"", *outline.constants}
    folded = {}
    for node in outline.nodes:
        pattern, _, _, _, input_names, _ = node
        if not known.issuperset(input_names) and not (
            pattern.op_type in _OF_SHAPE and static_sizes(outline.types.get(input_names[0]), options.dims) is not None
        ):
            continue
        if (pattern.body and not bodies) or pattern.op_type in _NOT_FOLDED:
            continue
        if any(attribute.kind.startswith("GRAPH") for attribute in pattern.attributes.values()):
            continue
        folded[node.name] = node
        known.update(node.output_names)
    return folded


def idle_nodes(outline: Outline, options: CompileOptions) -> set[str]:
    """Return the names of the nodes that ONNX Runtime drops since they pass their input on: `Dropout` outside training.

    https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/optimizer/dropout_elimination.cc
    """
    if options.optimization is OptimizationLevel.OFF:
        return set()
    dropouts = {pattern for pattern in {node.pattern for node in outline.nodes} if pattern.op_type == "Dropout"}
    idle = [node for node in outline.nodes if node.pattern in dropouts and not any(node.input_names[2:])]
    if not idle:
        return set()
    read = {name for node in outline.nodes for name in node.input_names} | outline.output_types.keys()
    return {node.name for node in idle if read.isdisjoint(node.output_names[1:])}


def as_compiled(
    draft: Draft, weights: Mapping[str, TensorData], options: CompileOptions, *, only_sizes: bool = False
) -> tuple[Outline, dict[str, TensorData | ExternalWeight | None]]:
    """Return the nodes of a model with the types they have after folding, and the constants after folding.

    A constant has data if it is small and computed from small data; the CPU computes it. `weights` has the data of the
    parameters, as far as it is known. With `only_sizes`, values are computed only as long as types are open.
    """
    plan = _plan_of(draft)
    types, settled = dict(plan.types), set(plan.settled)

    def learn(kinds: Mapping[str, ValueType]) -> None:
        types.update(kinds)
        settled.update(name for name, kind in kinds.items() if _is_static(kind))

    learn({name: _bound_type(name, kind, options.dims) for name, kind in plan.open.items()})
    outline = replace(draft.outline, types=types)  # nodes get the types once all are known
    constants: dict[str, TensorData | ExternalWeight | None] = dict(outline.constants)
    for name, tensor in outline.constants.items():
        data = weights.get(name) if isinstance(tensor, ExternalWeight) else None
        if data is not None and data.nbytes < INLINE_BYTES:  # sessions have those in the model, too
            constants[name] = data
    proto, untaken = None, set[str]()
    if options.dims and not plan.read <= settled:  # the sizes alone may settle it, without computing any value
        proto = plan.bound(draft, options.dims)
        learn(_refined(proto, types, settled, {}, {}, untaken))
    branches = only_sizes and plan.branches
    for _ in range(_ROUNDS):
        if only_sizes and plan.read <= settled and not branches:
            break
        folded = folded_nodes(outline, options, bodies=only_sizes)
        values = _folded_values(draft, outline, folded, constants, options)
        constants.update(values)
        if (plan.read <= settled and not branches) or not any(values.values()):
            break
        proto = proto or plan.bound(draft, options.dims)
        refined = _refined(proto, types, settled, folded, values, untaken)
        if not refined:
            break
        learn(refined)
    outline = draft.outline.retyped(types)
    if only_sizes:
        outline = replace(outline, nodes=[node for node in outline.nodes if node.name not in untaken])
    return outline, constants


class _Plan:
    """What computing the sizes of a model needs of it whatever they are.

    Attributes:
        types: the types of all values.
        settled: the values whose sizes are fixed, or that have none.
        open: the types of the other values, as far as the outline has them.
        read: the values that nodes read.
        branches: whether some nodes run under a condition, which sizes may decide.
        sessions: those that compute shapes, by the nodes and their inputs.
    """

    def __init__(self, outline: Outline) -> None:
        self.types = outline.known_types()
        self.settled = frozenset(name for name, kind in self.types.items() if _is_static(kind))
        self.open = {name: kind for name, kind in outline.types.items() if name not in self.settled}
        self.read = frozenset(name for node in outline.nodes for name in node.input_names if name)
        self.branches = any(node.op_type == "If" for node in outline.nodes)
        self.sessions: dict[object, EngineSession] = {}
        self._skeleton: onnx.ModelProto | None = None

    def bound(self, draft: Draft, dims: Mapping[str, int]) -> onnx.ModelProto:
        """Return a copy of the model without inferred types and large weights, whose inputs have these sizes."""
        if self._skeleton is None:
            light = skeleton(draft.finished().model)
            del light.graph.value_info[:]
            for value in light.graph.output:  # follow from the inputs
                value.type.tensor_type.ClearField("shape")
            self._skeleton = light
        proto = copied(self._skeleton)
        for value in proto.graph.input:
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                key = dim.dim_param or f"{value.name}[{axis}]"
                if key in dims and not dim.HasField("dim_value"):
                    dim.dim_value = dims[key]
        return proto


def _plan_of(draft: Draft) -> _Plan:
    return _plans.get(draft, None, lambda: _Plan(draft.outline))


def sized_outline(draft: Draft, weights: Mapping[str, TensorData], sizes: Mapping[str, int]) -> Outline:
    """Return the nodes of a model with the sizes that follow from those of the inputs, shape computations included.

    Branches that these sizes rule out are left out. Dims that depend on data stay open. Where every dim is fixed or
    that of an input, and no node runs under a condition, nothing is computed and the outline comes back as it is; else
    it takes some 10 ms for 100 nodes (two cores, onnx 1.23).

    Args:
        draft: the model.
        weights: the data of the parameters, as far as it is known.
        sizes: the size of each dim of the inputs that has none: its name, or `input[axis]` where it is nameless.
    """
    if not (_has_open_dims(draft.outline) or _plan_of(draft).branches):
        return draft.outline
    outline, _ = as_compiled(draft, weights, CompileOptions(dims=sizes), only_sizes=True)
    inputs, outputs = (
        {name: outline.types.get(name, kind) for name, kind in types.items()}
        for types in (outline.input_types, outline.output_types)
    )
    return replace(outline, input_types=inputs, output_types=outputs)


def _bound_type(name: str, kind: ValueType, sizes: Mapping[str, int]) -> ValueType:
    """Return a type with sizes for its open dims, which are keyed by name, or by value and axis where nameless."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return kind
    dims = [
        sizes.get(dim or f"{name}[{at}]", dim) if isinstance(dim, str | None) else dim
        for at, dim in enumerate(kind.shape)
    ]
    return TensorType(kind.dtype, Shape(dims))


def _has_open_dims(outline: Outline) -> bool:
    """Return whether some value has a dim that is neither fixed nor a named one of an input."""
    inputs = [kind.shape for kind in outline.input_types.values() if isinstance(kind, TensorType)]
    given = {dim for shape in inputs for dim in shape or (None,) if not isinstance(dim, int)}
    if None in given:
        return True
    for pattern in {node.pattern for node in outline.nodes}:
        for kind in pattern.outputs:
            if isinstance(kind, UnknownType) or (
                isinstance(kind, TensorType)
                and (kind.shape is None or not all(isinstance(dim, int) or dim in given for dim in kind.shape))
            ):
                return True
    return False


def _folded_values(
    draft: Draft,
    outline: Outline,
    folded: Mapping[str, ExportedNode],
    constants: Mapping[str, object],
    options: CompileOptions,
) -> dict[str, TensorData | None]:
    values: dict[str, TensorData | None] = {}
    tensors = {name: data for name, data in constants.items() if isinstance(data, TensorData)}
    known = {name: data for name, data in tensors.items() if data.num_elements <= _LARGEST_ELEMENTS}
    computed: list[ExportedNode] = []
    made: dict[str, None] = {}
    for node in folded.values():
        written = [name for name in node.output_names if name]
        values.update((name, known.get(name)) for name in written)
        if known.keys() >= set(written):
            continue
        sizes = _sizes(node, outline.types, options.dims)
        if sizes is not None:
            known[node.output_names[0]] = values[node.output_names[0]] = sizes
        elif all(not name or name in known or name in made for name in node.input_names) and all(
            isinstance(kind, TensorType) and num_elements(kind) <= _LARGEST_ELEMENTS
            for kind in map(outline.types.get, written)
        ):
            computed.append(node)
            made.update((name, None) for name in written)
    if computed:
        values.update(_computed(draft, computed, known, list(made)))
    return values


def _refined(
    proto: onnx.ModelProto,
    types: Mapping[str, ValueType],
    settled: Collection[str],
    folded: Mapping[str, ExportedNode],
    values: Mapping[str, TensorData | None],
    untaken: set[str],
) -> dict[str, ValueType]:
    """Return the types that are known better once the folded values replace their nodes, as they do in `proto` now.

    Adds the nodes of branches that are not taken to `untaken`.
    """
    there = {name: data for name, data in values.items() if data is not None}
    gone = {name for name, node in folded.items() if there.keys() >= {each for each in node.output_names if each}}
    for graph in graphs_of(proto, functions=False):  # inference reads the data of a graph's own constants alone
        places = [at for at, node in enumerate(graph.node) if node.name in gone]
        made = [name for at in places for name in graph.node[at].output if name]
        for place in places[::-1]:
            del graph.node[place]
        graph.initializer.extend(tensor_proto(there[name], name) for name in made)
    untaken |= _inline_taken(proto.graph, there)
    # The first inference, which has no values yet, looks for long vectors.
    few = bool(values) and all(num_elements(types[name]) <= LONGEST_VECTOR for name in settled)
    found: dict[str, ValueType] = {
        name: TensorType(data.dtype, Shape(data.shape)) for name, data in there.items() if name not in settled
    }
    found |= infer_proto(proto, settled, few_elements=few)
    return {name: kind for name, kind in found.items() if _is_static(kind)}


def _inline_taken(graph: onnx.GraphProto, values: Mapping[str, TensorData]) -> set[str]:
    """Put the nodes of each branch that is sure to be taken in place of its `If`, whose type ONNX then infers.

    Returns the names of the nodes in the other branches.
    """
    nodes, untaken, known = list[onnx.NodeProto](), set[str](), 0
    for node in graph.node:
        bodies = [*bodies_of(node)]
        untaken.update(name for body in bodies for name in _inline_taken(body, values))
        condition = values.get(node.input[0]) if node.op_type == "If" and not node.domain else None
        if condition is None:
            nodes.append(node)
            continue
        branches = {attribute.name: attribute.g for attribute in node.attribute}
        taken = branches.pop("then_branch" if condition.numpy().item() else "else_branch")
        untaken.update(each.name for other in graphs_below(*branches.values()) for each in other.node)
        results = zip(taken.output, node.output, strict=True)
        nodes += [
            *taken.node,
            *(onnx.helper.make_node("Identity", [had.name], [gives]) for had, gives in results if gives),
        ]
        graph.initializer.extend(taken.initializer)
        known += 1
    if known:
        set_items(graph.node, nodes)
    return untaken


def _computed(
    draft: Draft, nodes: Sequence[ExportedNode], known: Mapping[str, TensorData], wanted: Sequence[str]
) -> dict[str, TensorData]:
    """Return the values that nodes give, computed on the CPU; nothing where that fails.

    The session stays open for other sizes: its inputs are the values that may differ between them.
    """
    fixed = {name for name, data in draft.outline.constants.items() if isinstance(data, TensorData)}
    read = {name for node in nodes for name in node.input_names} & known.keys()
    given = {name: known[name] for name in sorted(read) if name not in fixed and known[name].dtype in _FED}
    key = (tuple(node.name for node in nodes), tuple(given))
    plan = _plan_of(draft)
    session = plan.sessions.get(key)
    try:
        if session is None:
            session = _session(draft, nodes, {name: known[name] for name in read - given.keys()}, given, wanted)
            if session is None:
                return {}
            if read - given.keys() <= fixed:
                with _lock:
                    plan.sessions[key] = session
                    while len(plan.sessions) > _SESSIONS:
                        plan.sessions.pop(next(iter(plan.sessions)))
        results = session.run(list(wanted), {name: data.numpy() for name, data in given.items()})
    except RlxError as err:
        _log.info("constant values of a model cannot be computed beforehand: %s", err)
        return {}
    return {name: TensorData.from_array(result) for name, result in zip(wanted, results, strict=True)}


def _session(
    draft: Draft,
    nodes: Sequence[ExportedNode],
    fixed: Mapping[str, TensorData],
    given: Mapping[str, TensorData],
    wanted: Sequence[str],
) -> EngineSession | None:
    """Return a session of some nodes of a model with fixed and given inputs, or None if there is no CPU provider."""
    provider = provider_of(Device.CPU)
    if provider is None:
        return None
    names, model = {node.name for node in nodes}, draft.finished().model
    part = onnx.ModelProto(ir_version=model.ir_version, producer_name="rlx_ort")
    part.opset_import.extend(model.opset_import)
    part.functions.extend(model.functions)
    part.graph.name = "folded"
    part.graph.node.extend(node for node in nodes_of(model, functions=False) if node.name in names)
    part.graph.initializer.extend(tensor_proto(data, name) for name, data in fixed.items())
    kinds = {name: TensorType(data.dtype, Shape([None] * len(data.shape))) for name, data in given.items()}
    part.graph.input.extend(onnx.ValueInfoProto(name=name, type=type_proto(kind)) for name, kind in kinds.items())
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    options = CompileOptions(optimization=OptimizationLevel.OFF, cache=CacheUse.OFF, intra_op_threads=1)
    return provider.open(SessionRequest(Device.CPU, ExportedModel(part, (), (), {}, {}), {}, options))


def _sizes(node: ExportedNode, types: Mapping[str, ValueType], dims: Mapping[str, int]) -> TensorData | None:
    """Return the result of a Shape or Size whose input has a known shape."""
    if node.op_type not in _OF_SHAPE or node.pattern.domain:
        return None
    sizes = static_sizes(types.get(node.input_names[0]), dims)
    if sizes is None:
        return None
    if node.op_type == "Size":
        return TensorData.from_array(np.array(np.prod(sizes, dtype=np.int64), np.int64))
    given = {name: attribute.value for name, attribute in node.pattern.attributes.items()}
    return TensorData.from_array(np.array(sizes[slice(given.get("start", 0), given.get("end"))], np.int64))


def static_sizes(kind: ValueType | None, dims: Mapping[str, int]) -> tuple[int, ...] | None:
    """Return the sizes of a type, those of named dims from `dims`, or None where one is not known."""
    if not isinstance(kind, TensorType) or kind.shape is None:
        return None
    shape = kind.shape.bind(dims)
    return shape.static() if shape.is_static else None


def num_elements(kind: ValueType) -> int:
    """Return the number of elements of a type, 0 where it is not known."""
    return (kind.shape.num_elements or 0) if isinstance(kind, TensorType) and kind.shape is not None else 0


def _is_static(kind: ValueType | None) -> bool:
    return not isinstance(kind, TensorType | UnknownType) or (
        isinstance(kind, TensorType) and kind.shape is not None and kind.shape.is_static
    )
