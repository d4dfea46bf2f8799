"""Emulates bf16 on a CPU without kernels for it: nodes compute in f32, and every result is rounded to bf16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

from rlx_ort.converters.bundle import ModelBundle, graphs_of
from rlx_ort.converters.infer import infer_proto
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType

__all__ = ["holds_bf16", "with_f32_kernels"]

# Operators that ONNX Runtime 1.31 runs on bf16 on the CPU, or whose bodies are rewritten instead.
_RUN_AS_THEY_ARE = {"Cast", "Constant", "If", "Loop", "Scan"}
# Attributes that name an element type by its number.
_TYPE_ATTRIBUTES = {"dtype", "output_dtype", "softmax_precision", "stash_type"}


def holds_bf16(model: ModelBundle) -> bool:
    """Return whether a model has bf16 weights, inputs or outputs, or casts to bf16."""
    if any(data.dtype is DType.BF16 for data in model.weights.values()):
        return True
    if any(map(_is_bf16, (*model.input_types().values(), *model.output_types().values()))):
        return True
    nodes = (node for graph in graphs_of(model.proto, functions=False) for node in graph.node)
    to_bf16 = ("to", onnx.TensorProto.BFLOAT16)
    return any(n.op_type == "Cast" and any((a.name, a.i) == to_bf16 for a in n.attribute) for n in nodes)


def with_f32_kernels(model: ModelBundle) -> ModelBundle:
    """Return the model with casts around every node that reads or makes bf16, over the same weights.

    Each node computes in f32 and its results are rounded to bf16, as in kernels that accumulate in f32. Nodes keep
    their names, values their names and types. Functions are not rewritten. Open the model with optimisation off, which
    would fold the casts of weights and remove pairs of casts that round.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    types = infer_proto(proto)
    for graph in graphs_of(proto, functions=False):
        types |= {
            tensor.name: TensorType(DType.BF16, None)
            for tensor in graph.initializer
            if tensor.data_type == onnx.TensorProto.BFLOAT16
        }
    names = UniqueNames(
        name for graph in graphs_of(proto) for node in graph.node for name in (*node.input, *node.output)
    )
    for graph in reversed(list(graphs_of(proto, functions=False))):  # bodies first: their owners are copied
        nodes = [made for node in graph.node for made in _in_f32(node, types, names)]
        del graph.node[:]
        graph.node.extend(nodes)
    return model.with_proto(proto)


def _in_f32(node: onnx.NodeProto, types: Mapping[str, ValueType], names: UniqueNames) -> Iterator[onnx.NodeProto]:
    """Yield a node with the casts that it needs before and after it."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    if node.op_type in _RUN_AS_THEY_ARE:
        yield made
        return
    f32, bf16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16
    for index, name in enumerate(node.input):
        if _is_bf16(types.get(name)):
            made.input[index] = names.unique(f"{name}_f32")
            yield onnx.helper.make_node("Cast", [name], [made.input[index]], to=f32)
    behind = []
    for index, name in enumerate(node.output):
        if _is_bf16(types.get(name)):
            made.output[index] = names.unique(f"{name}_f32")
            behind.append(onnx.helper.make_node("Cast", [made.output[index]], [name], to=bf16))
    if behind:
        for attribute in made.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i == bf16:
                attribute.i = f32
            elif attribute.HasField("t") and attribute.t.data_type == bf16:
                array = onnx.numpy_helper.to_array(attribute.t).astype("float32")
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(array, attribute.t.name))
    yield made
    yield from behind


def _is_bf16(kind: ValueType | None) -> bool:
    return isinstance(kind, TensorType) and kind.dtype is DType.BF16
