"""Passes over an imported graph: types are inferred, operands checked, and nodes of older opsets become those of 21.

Nodes are refused whose operands ONNX Runtime 1.31 does not survive, where shapes and constants show it. Its kernels and
its shape inference read the first element of a scalar without looking whether there is one, and divide by some sizes.
Feeds of a run are not looked at: a model that declares no shape for such an input can still be fed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlx_ort.converters.attention_patterns import Matcher, operator_of, perm_of
from rlx_ort.converters.protos import trimmed
from rlx_ort.converters.to_onnx.emitter import DEFAULT_OPSET
from rlx_ort.converters.to_onnx.opset import NodeForm, obsolete_attributes, obstacle
from rlx_ort.errors import ConversionError, GraphVerifyError
from rlx_ort.ir.core import Node, Ref, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.ops.onnx import OnnxNode, convolution_problem
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType, UnknownType, ValueType

_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare"
_INPUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "Clip": (11, ("min", "max")),
    "Pad": (11, ("pads", "value")),
    "ReduceSum": (13, ("axes",)),
    "Slice": (10, ("starts", "ends", "axes")),
    "Split": (13, ("split",)),
    "Squeeze": (13, ("axes",)),
    "TopK": (10, ("k",)),
    "Unsqueeze": (13, ("axes",)),
    **{f"Reduce{name}": (18, ("axes",)) for name in _REDUCTIONS.split()},
}
"""Operator -> the opset that made inputs of these attributes, which follow the first input."""
_SCALARS = {"Clip": ("min", "max"), "Pad": ("value",)}
"""Operator -> the attributes that became scalars of the first input's dtype; the others became vectors of int64."""
_FLATTENING = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
_SPLIT_COUNTS = 18
_ONE_ELEMENT = {
    "DFT": (1, 2), "If": (0,), "Loop": (0, 1), "OneHot": (1,), "STFT": (1, 3), "SequenceAt": (1,),
    "SequenceErase": (1,), "SequenceInsert": (2,),
}  # fmt: skip
_NOT_EMPTY = {"GRU": (0,), "LSTM": (0,), "RNN": (0,), "STFT": (2,)}
_AXES = {("STFT", 2): 1}
_POSITIVE = {("STFT", 1), ("STFT", 3), ("SplitToSequence", 1)}


@dataclass(frozen=True, slots=True)
class _Upgrade:
    """What a node becomes: an operator of opset 21, and inputs after its first, None where absent.

    With `flattens` it reads two dims, those before that axis and those from it on, and its result gets its dims back.
    """

    op: OnnxNode
    added: Sequence[TensorData | None] = ()
    flattens: int | None = None


def fill_types(graph: Graph) -> None:
    """Infer the types that ONNX leaves out inside functions; those it cannot infer stay unknown."""
    from rlx_ort.converters.to_onnx.exporter import export_model

    missing = [node for node in graph.nodes if any(_is_missing(*pair) for pair in _results(node))]
    if not missing:
        return
    try:
        model = export_model(graph)
    except (ConversionError, GraphVerifyError):
        return  # exporting the graph raises the error
    known = {
        name: kind
        for node in model.nodes
        for name, kind in zip(node.output_names, node.outputs, strict=False)
        if kind is not None and not node.body
    }
    for node in missing:
        node.types = tuple(known.get(name, kind) if _is_missing(kind, name) else kind for kind, name in _results(node))


def upgraded(graph: Graph) -> Graph:
    """Return the graph with its nodes of ai.onnx in the form of opset 21, whose kernels most providers have.

    That is done for a whole model or not at all: a model has one opset, and a node that opset 21 lacks keeps its own.
    """
    found: dict[int, _Upgrade] = {}
    for owner, node in all_nodes(graph):
        if isinstance(node.op, OnnxNode) and node.op.domain == "":
            upgrade = _upgrade(owner, node, node.op)
            if upgrade is None:
                return graph
            found[id(node)] = upgrade
    _apply(graph, found)
    return graph


def _upgrade(graph: Graph, node: Node, op: OnnxNode) -> _Upgrade | None:
    """Return the form of a node in opset 21, None if it has none there that means the same."""
    if op.op_type == "Dropout" and _drops_nothing(graph, node, op):
        return _Upgrade(OnnxNode("Identity", formal_inputs=1))
    form = _form(graph, node, op)
    if not obstacle(form, op.version, DEFAULT_OPSET):
        obsolete = obsolete_attributes(op.op_type, op.attributes, op.version, DEFAULT_OPSET)
        kept = {name: value for name, value in op.attributes.items() if name not in obsolete}
        return _Upgrade(replace(op, attributes=kept, version=DEFAULT_OPSET))
    first = form.inputs[0] if form.inputs else None
    rank = first.shape.rank if isinstance(first, TensorType) and first.shape is not None else None
    attributes: dict[str, Any] = dict(op.attributes)
    since, added = op.version, list[TensorData | None]()
    if op.op_type in _FLATTENING and op.version < 13 and rank and attributes.get("axis", 1) % rank == rank - 1:
        attributes["axis"], since = -1, 13  # where nothing is flattened
    elif op.op_type in _FLATTENING and op.version < 13 and isinstance(first, TensorType) and first.shape is None:
        flat = replace(op, attributes={"axis": 1}, version=DEFAULT_OPSET)
        return _Upgrade(flat, flattens=op.integer("axis", 1))
    if op.op_type in _INPUTS and op.version < _INPUTS[op.op_type][0]:
        since, names = _INPUTS[op.op_type]
        if len(form.inputs) != 1 or not isinstance(first, TensorType):
            return None
        for name in names:
            value = attributes.pop(name, None)
            is_scalar = name in _SCALARS.get(op.op_type, ())
            array = np.asarray(value, first.dtype.numpy if is_scalar else np.int64) if value is not None else None
            added.append(None if array is None else TensorData.from_array(array if is_scalar else array.reshape(-1)))
        added = trimmed(added)
    if op.op_type == "Split" and since < _SPLIT_COUNTS and not added and len(form.inputs) == 1:
        attributes["num_outputs"], since = len(form.outputs), _SPLIT_COUNTS
    kinds = [None if data is None else TensorType(data.dtype, Shape(data.shape)) for data in added]
    newer = NodeForm(op.op_type, attributes, [*form.inputs, *kinds], form.outputs)
    if since == op.version or obstacle(newer, since, DEFAULT_OPSET):
        return None
    obsolete = obsolete_attributes(op.op_type, attributes, since, DEFAULT_OPSET)
    attributes = {name: value for name, value in attributes.items() if name not in obsolete}
    count = op.formal_inputs if not added else 1 + len(added)
    return _Upgrade(replace(op, attributes=attributes, version=DEFAULT_OPSET, formal_inputs=count), added)


def _drops_nothing(graph: Graph, node: Node, op: OnnxNode) -> bool:
    """Return whether a Dropout is of a form for inference, and nothing reads its mask."""
    if op.version >= 12 or (op.version < 7 and not op.attributes.get("is_test", 0)):
        return False
    read = {ref for other in graph.nodes for ref in other.inputs} | {value.ref for value in graph.outputs}
    return not any(Ref(node.id, place) in read for place in range(1, len(node.types)))


def _apply(graph: Graph, upgrades: Mapping[int, _Upgrade]) -> None:
    """Change the nodes of a graph and its bodies, and put the constants that are their new inputs before them."""
    nodes, places = graph.nodes, dict[int, int]()
    graph.nodes = []
    for node in nodes:
        for body in node.op.bodies():
            _apply(body, upgrades)
        inputs = [None if ref is None else Ref(places[ref.node], ref.output) for ref in node.inputs]
        upgrade = upgrades.get(id(node))
        if upgrade is not None:
            inputs[1:1] = [None if data is None else graph.constant(data).ref for data in upgrade.added]
            node.op, node.types = upgrade.op, node.types[: upgrade.op.output_count]
            node.output_names = node.output_names[: upgrade.op.output_count]
            if not upgrade.op.bodies():
                inputs = inputs[: upgrade.op.formal_inputs]
            if upgrade.flattens is not None and inputs[0] is not None:
                inputs = [*_flatten(graph, node, upgrade.op, inputs[0], upgrade.flattens)]
        places[node.id] = len(graph.nodes)
        node.id = len(graph.nodes)
        node.inputs = tuple(inputs)
        graph.nodes.append(node)
    outputs = [graph.value(Ref(places[value.ref.node], value.ref.output)) for value in graph.outputs]
    graph.set_outputs(outputs, graph.output_names)


def _flatten(graph: Graph, node: Node, op: OnnxNode, source: Ref, axis: int) -> list[Ref]:
    """Let a node give a result its dims back, that of its operator on two dims, and return what it reads then."""
    read = graph.value(source)
    kind = read.type
    assert isinstance(kind, TensorType)  # noqa: S101  # else it has no such form

    def added(op_type: str, value: Value, dims: Sequence[int | None], attributes: Mapping[str, Any]) -> Value:
        made = OnnxNode(op_type, attributes=attributes, formal_inputs=1)
        dtype = DType.I64 if op_type == "Shape" else kind.dtype
        return graph.add_node(made, [value], name=f"{node.name}/{op_type}", types=[TensorType(dtype, Shape(dims))])[0]

    shape = added("Shape", read, [None], {})
    flat = added("Flatten", read, [None, None], {"axis": axis})
    result = added(op.op_type, flat, [None, None], op.attributes)
    node.op = OnnxNode("Reshape", attributes={"allowzero": 1}, formal_inputs=2)
    return [result.ref, shape.ref]


def _form(graph: Graph, node: Node, op: OnnxNode) -> NodeForm:
    refs = trimmed(node.inputs[: op.formal_inputs])
    inputs = [None if ref is None else graph.nodes[ref.node].types[ref.output] for ref in refs]
    outputs = [kind if name else None for kind, name in _results(node)]
    return NodeForm(op.op_type, op.attributes, inputs, outputs)


def _results(node: Node) -> list[tuple[ValueType, str]]:
    return list(zip(node.types, node.output_names, strict=True))


def _is_missing(kind: ValueType, name: str) -> bool:
    return bool(name) and isinstance(kind, UnknownType)


def transpose_at_once(graph: Graph) -> None:
    """Let one Transpose swap the last two axes of a value where all others are joined for it.

    PyTorch's exporter of 2.5 and later writes the keys of attention so. ONNX Runtime makes the one Transpose a part of
    the product that reads it. Of joined heads it is slow on the CPU: all threads are started and awaited for each head
    (1.31.1; docs/results, h200-2026-11-27-fifth).
    """
    if not any(operator_of(node) == "Transpose" and perm_of(node) == (0, 2, 1) for node in graph.nodes):
        return
    matcher = Matcher(graph, graph.weights)
    for node in graph.nodes:
        whole = matcher.swapped(node)
        kind = matcher.kind(whole)
        if whole is not None and kind is not None and isinstance(node.op, OnnxNode):
            *lead, height, width = matcher.shape(whole)
            perm = (*range(len(lead)), len(lead) + 1, len(lead))
            node.op = OnnxNode("Transpose", "", node.op.version, attributes={"perm": perm}, formal_inputs=1)
            node.inputs, node.types = (whole,), (TensorType(kind.dtype, Shape((*lead, width, height))),)


def check_operands(graph: Graph) -> None:
    """Raise if an operand of a node, in the graph or a body, would end the process.

    Raises:
        ConversionError: one would; the message names the node and the operand.
    """
    for owner, node in all_nodes(graph):
        op = node.op
        if not isinstance(op, OnnxNode) or op.domain != "":
            continue
        if op.op_type in _CHECKED:
            _check(owner, node, op.op_type, op.formal_inputs)
        kinds = [None if ref is None else owner.nodes[ref.node].types[ref.output] for ref in node.inputs]
        if problem := convolution_problem(op.op_type, op.attributes, kinds):
            raise ConversionError(f"node {node.name!r} ({op.op_type}) {problem}")
        if op.op_type == "TfIdfVectorizer" and not _grams_fit(op):
            raise ConversionError(
                f"node {node.name!r} (TfIdfVectorizer) has a different number of ngram_indexes and n-grams"
            )


def all_nodes(graph: Graph) -> Iterator[tuple[Graph, Node]]:
    """Yield each node with the graph or body that it is in."""
    for node in graph.nodes:
        yield graph, node
        for body in node.op.bodies():
            yield from all_nodes(body)


def _check(graph: Graph, node: Node, op_type: str, formal: int) -> None:
    for place, ref in enumerate(node.inputs[:formal]):
        kind = None if ref is None else graph.nodes[ref.node].types[ref.output]
        if ref is None or not isinstance(kind, TensorType) or kind.shape is None:
            continue
        count, wanted = kind.shape.num_elements, ""
        if place in _ONE_ELEMENT.get(op_type, ()) and count not in (1, None):
            wanted = "one element"
        elif place in _NOT_EMPTY.get(op_type, ()) and count == 0:
            wanted = "elements"
        elif _AXES.get((op_type, place), kind.shape.rank) != kind.shape.rank:
            wanted = "one axis"
        op = graph.nodes[ref.node].op
        if (op_type, place) in _POSITIVE and isinstance(op, Constant) and any(op.data.numpy().reshape(-1) < 1):
            wanted = "positive numbers"
        if wanted:
            raise ConversionError(f"node {node.name!r} ({op_type}) needs {wanted} as input {place}, it has {kind}")


def _grams_fit(op: OnnxNode) -> bool:
    """Return whether a node has an index for each n-gram of its pool, where `ngram_counts` has the start of each n."""
    given: Mapping[str, Any] = op.attributes
    pool = given.get("pool_int64s") or given.get("pool_strings") or ()
    starts, indexes = given.get("ngram_counts", ()), given.get("ngram_indexes", ())
    spans = [end - start for start, end in itertools.pairwise((0, *starts[1:], len(pool)))]
    if min(spans) < 0 or starts[:1] not in ((), (0,)) or any(size % n for n, size in enumerate(spans, 1)):
        return False
    return min(indexes, default=0) >= 0 and len(indexes) == sum(size // n for n, size in enumerate(spans, 1))


_CHECKED = {*_ONE_ELEMENT, *_NOT_EMPTY, *(op_type for op_type, _ in _POSITIVE)}
