"""Refuses nodes whose operands ONNX Runtime 1.31 does not survive, where shapes and constants show it at import.

Its kernels and its shape inference read the first element of a scalar without looking whether there is one, and divide
by some sizes. Feeds of a run are not looked at: a model that declares no shape for such an input can still be fed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from rlx_ort.errors import ConversionError
from rlx_ort.ir.core import Node
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.ops.onnx import OnnxNode, convolution_problem
from rlx_ort.ir.types import TensorType

_ONE_ELEMENT = {
    "DFT": (1, 2), "If": (0,), "Loop": (0, 1), "OneHot": (1,), "STFT": (1, 3), "SequenceAt": (1,),
    "SequenceErase": (1,), "SequenceInsert": (2,),
}  # fmt: skip
_NOT_EMPTY = {"GRU": (0,), "LSTM": (0,), "RNN": (0,), "STFT": (2,)}
_AXES = {("STFT", 2): 1}
_POSITIVE = {("STFT", 1), ("STFT", 3), ("SplitToSequence", 1)}


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
        if problem := convolution_problem(op, kinds):
            raise ConversionError(f"node {node.name!r} ({op.op_type}) {problem}")
        if op.op_type == "TfIdfVectorizer" and not _grams_fit(op):
            raise ConversionError(
                f"node {node.name!r} (TfIdfVectorizer) has another number of ngram_indexes than n-grams"
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
