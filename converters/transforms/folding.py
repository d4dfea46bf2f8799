"""Folds small constant computations, as shapes and scales are made of; ONNX's reference evaluator does the arithmetic.

Weights are left alone: folding a transposed weight would store it twice as long as something reads the old one, and
sessions do it anyway when they open.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.bundle import INLINE_BYTES, ModelBundle, reference
from rlx_ort.converters.onnx_types import tensor_proto
from rlx_ort.converters.protos import copied, set_items
from rlx_ort.converters.transforms.scope import Scope, model_scope, typed_model
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType

if TYPE_CHECKING:
    import onnx

__all__ = ["fold_constants"]

_LARGEST_BYTES = 4096  # no result above this is made, whatever a model asks for
_SIZES = frozenset({"Shape", "Size"})
# Deterministic, with one result, and the same in the reference evaluator as in ONNX Runtime.
_FOLDED = _SIZES | {
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Expand", "Flatten", "Floor",
    "Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mul", "Neg", "Not", "Or",
    "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Tile",
    "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


def fold_constants(bundle: ModelBundle) -> tuple[ModelBundle, list[str]]:
    """Return the model with initializers in place of nodes of the main graph that only read small constants.

    Also a shape that inference knows is a constant. Nodes that give an output of the model stay.
    Returns the names of the values that are constant now, too.
    """
    typed = typed_model(bundle)
    scope = model_scope(bundle, typed)
    proto = copied(bundle.proto)
    outputs = {value.name for value in proto.graph.output}
    opset = bundle.opset
    folded: list[str] = []
    kept: list[onnx.NodeProto] = []
    weights = dict(bundle.weights)
    for node in proto.graph.node:
        name = node.output[0] if len(node.output) == 1 else ""
        value = _folded(node, scope, opset) if name and name not in outputs else None
        if value is None:
            kept.append(node)
            continue
        data = TensorData.from_array(value)
        scope.constants[name] = tensor_proto(data, name)
        if data.nbytes < INLINE_BYTES:
            proto.graph.initializer.append(scope.constants[name])
        else:
            weights[f"{name}/folded"] = data
            proto.graph.initializer.append(reference(name, data, f"{name}/folded"))
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
    import onnx
    from onnx.reference import ReferenceEvaluator

    arrays = {name: onnx.numpy_helper.to_array(scope.constants[name]) for name in read}
    if any(array.dtype.hasobject for array in arrays.values()) or not _is_sure(node.op_type, arrays):
        return None
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node],
            "fold",
            [onnx.helper.make_tensor_value_info(name, scope.constants[name].data_type, None) for name in read],
            [onnx.helper.make_tensor_value_info(node.output[0], 0, None)],
        ),
        opset_imports=[onnx.helper.make_opsetid("", opset)],
    )
    try:
        with np.errstate(all="ignore"):
            (value,) = ReferenceEvaluator(model).run(None, arrays)
    except Exception:  # numpy and the evaluator raise anything for what they cannot compute; the node then stays
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
