"""Removes nodes that a model can do without, with the passes of onnx-ir, and folds small constants.

ONNX's reference evaluator computes the constants. Weights are left alone: a folded transposed weight would be stored
twice if something else reads the original, and sessions fold it anyway when they open.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx.reference import ReferenceEvaluator

from rlx_ort.converters.bundle import ModelBundle, placed
from rlx_ort.converters.onnx_ir_bridge import bundle_from_ir, bundle_to_ir, foreign_errors
from rlx_ort.converters.onnx_types import tensor_proto
from rlx_ort.converters.protos import copied, graphs_of, nodes_of, set_items, skeleton
from rlx_ort.converters.transforms.scope import Scope, model_scope, typed_model
from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

_MOST_ROUNDS = 4  # folding uncovers identities and the other way round; models settle in two
_LARGEST_BYTES = 4096  # no result above this is made, whatever a model asks for
_SIZES = frozenset({"Shape", "Size"})
# Deterministic, with one result, and the same in the reference evaluator as in ONNX Runtime.
_FOLDED = _SIZES | {
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Flatten", "Floor",
    "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mul", "Neg", "Not", "Or",
    "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Tile",
    "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SimplifyReport:
    """The result of `simplify`: nodes, bodies included, values that are constants now, and operator -> nodes gone."""

    nodes_before: int
    nodes_after: int
    folded: tuple[str, ...]
    removed_ops: dict[str, int]


def simplify(bundle: ModelBundle) -> tuple[ModelBundle, SimplifyReport]:
    """Return a smaller model that computes the same; inputs, outputs and the names of the remaining nodes are kept.

    Identities, nodes and weights nothing reads, repeated computations, repeated small constants and constant
    computations are gone, and inferred shapes are written into the model. Fused operators are left to sessions. The
    result is checked by ONNX's checker, if the source passes it, and for the same inputs and outputs.

    Raises:
        ConversionError: onnx-ir is not installed or fails on the model, or the result is not valid.
    """
    folded: list[str] = []
    made = bundle
    for _ in range(_MOST_ROUNDS):
        made, newly = fold_constants(_passes(made))
        folded += newly
        if not newly:
            break
    proto, typed = copied(made.proto), typed_model(made)
    for graph, twin in zip(graphs_of(proto, functions=False), graphs_of(typed, functions=False), strict=True):
        weights = {tensor.name for tensor in graph.initializer}
        set_items(graph.value_info, [info for info in twin.value_info if info.name not in weights])
    made = made.with_proto(proto)
    _check(bundle, made)
    before, after = (Counter(node.op_type for node in nodes_of(model.proto)) for model in (bundle, made))
    gone = dict((before - after).most_common())
    return made, SimplifyReport(bundle.node_count, made.node_count, tuple(folded), gone)


def _passes(bundle: ModelBundle) -> ModelBundle:
    """Run the passes of onnx-ir, which touch no weight above a kilobyte."""
    model = bundle_to_ir(bundle)
    from onnx_ir.passes import Sequential
    from onnx_ir.passes import common as passes

    order = Sequential(
        passes.IdentityEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.DeduplicateInitializersPass(size_limit=1024),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]  # onnx-ir types all its passes but this
    )
    with foreign_errors(f"{bundle.origin}: onnx-ir cannot simplify it"):
        model = order(model).model
    return bundle_from_ir(model, bundle.origin)


def _check(before: ModelBundle, after: ModelBundle) -> None:
    old, new = ((model.input_types().keys(), list(model.output_types())) for model in (before, after))
    if old != new:
        raise ConversionError(f"{before.origin}: simplifying changed its inputs or outputs; convert it as it is")
    problem = _problem(after)
    if problem and not _problem(before):
        raise ConversionError(f"{before.origin}: simplifying made it invalid ({problem}); convert it as it is")


def _problem(bundle: ModelBundle) -> str:
    """Return the error of ONNX's checker, or an empty string."""
    try:
        onnx.checker.check_model(skeleton(bundle.proto))
        return ""
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as err:
        return str(err).strip().splitlines()[0]


def fold_constants(bundle: ModelBundle) -> tuple[ModelBundle, list[str]]:
    """Return the model with initializers in place of nodes of the main graph that only read small constants.

    A shape known by inference counts as a constant. Nodes that produce an output of the model stay.
    Returns the names of the values that are constant now, too.
    """
    scope = model_scope(bundle)
    proto = copied(bundle.proto)
    outputs = {value.name for value in proto.graph.output}
    folded: list[str] = []
    kept: list[onnx.NodeProto] = []
    weights = dict(bundle.weights)
    for node in proto.graph.node:
        name = node.output[0] if len(node.output) == 1 else ""
        value = _folded(node, scope, bundle.opset) if name and name not in outputs else None
        if value is None:
            kept.append(node)
            continue
        data = TensorData.from_array(value)
        scope.constants[name] = tensor_proto(data, name)
        proto.graph.initializer.append(placed(name, data, weights, f"{name}/folded"))
        folded.append(name)
    if not folded:
        return bundle, []
    set_items(proto.graph.node, kept)
    set_items(proto.graph.value_info, [info for info in proto.graph.value_info if info.name not in set(folded)])
    return ModelBundle(proto, weights, bundle.origin).with_proto(proto), folded


def _folded(node: onnx.NodeProto, scope: Scope, opset: int) -> npt.NDArray[Any] | None:
    """Return the value of a node, or None where it is not constant, not small, or not sure."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in _FOLDED:
        return None
    if node.op_type in _SIZES:
        return _size(node, scope)
    kind = scope.types.get(node.output[0])
    if not isinstance(kind, TensorType) or kind.shape is None or kind.dtype.is_packed:
        return None
    elements = kind.shape.num_elements
    if elements is None or kind.dtype.nbytes(elements) > _LARGEST_BYTES:
        return None
    read = [name for name in node.input if name]
    if not read or any(name not in scope.constants for name in read):
        return None
    arrays = {name: onnx.numpy_helper.to_array(scope.constants[name]) for name in read}
    if any(array.dtype.hasobject for array in arrays.values()) or not _is_sure(node.op_type, arrays):
        return None
    try:
        with np.errstate(all="ignore"):
            (value,) = ReferenceEvaluator(node, opsets={"": opset}).run(None, arrays)
    except Exception:  # numpy and the evaluator raise anything at a node that they cannot compute; the node then stays
        return None
    value = np.asarray(value)
    right = value.dtype == kind.dtype.numpy and value.shape == tuple(kind.shape)
    return value if right and np.all(np.isfinite(value)) else None


def _is_sure(op_type: str, arrays: dict[str, npt.NDArray[Any]]) -> bool:
    """Return whether every engine gives the same: integers divide towards zero or down, and casts wrap or saturate."""
    if op_type == "Div":
        return all(array.dtype.kind == "f" or bool(np.all(array > 0)) for array in arrays.values())
    if op_type == "Cast":
        return all(bool(np.all(np.abs(array.astype(np.float64)) < 2**24)) for array in arrays.values())
    return True


def _size(node: onnx.NodeProto, scope: Scope) -> npt.NDArray[Any] | None:
    kind = scope.types.get(node.input[0])
    if not isinstance(kind, TensorType) or kind.shape is None:
        return None
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    dims = tuple(kind.shape)[slice(attributes.get("start", 0), attributes.get("end"))]
    if not all(isinstance(dim, int) for dim in dims):
        return None
    if node.op_type == "Size":
        return np.array(math.prod(int(dim or 0) for dim in dims), np.int64)
    return np.array(dims, np.int64)
