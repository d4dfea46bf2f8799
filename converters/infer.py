"""ONNX's own shape inference, for the values whose type the IR does not know, and the light model it works on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlx_ort.converters.onnx_types import known_type_of
from rlx_ort.converters.protos import bodies_of
from rlx_ort.ir.types import UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

__all__ = ["infer_proto", "is_fully_typed", "skeleton", "with_types"]

_SMALL_BYTES = 1024
_LONGEST_VECTOR = 1 << 20


def infer_proto(proto: onnx.ModelProto) -> dict[str, ValueType]:
    """Return the type of every value that ONNX can infer, bodies included, whose names must not clash."""
    found: dict[str, ValueType] = {}
    for graph in _graphs(with_types(proto)):
        for info in (*graph.value_info, *graph.input, *graph.output):
            kind = known_type_of(info.type)
            if not isinstance(kind, UnknownType):
                found[info.name] = kind
    return found


def with_types(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of the model with the types that ONNX infers, in each graph's `value_info`.

    Inference never fails: a model that ONNX rejects is returned unchanged. ONNX's data propagation makes a message for
    each element of a vector, 140 bytes of memory apiece, also of vectors that are no shapes; it is left out where a
    vector is too long for that.
    """
    import onnx

    try:
        found = onnx.shape_inference.infer_shapes(proto)
        return found if _has_long_vector(found) else onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:
        # Besides its own errors, for models it finds inconsistent or above 2 GB, those of C++ come through: IndexError,
        # MemoryError. ONNX Runtime may still take the model.
        return proto


def _has_long_vector(model: onnx.ModelProto) -> bool:
    for graph in _graphs(model):
        shapes = [info.type.tensor_type.shape.dim for info in (*graph.input, *graph.value_info, *graph.output)]
        sizes = [dims[0].dim_value for dims in shapes if len(dims) == 1]
        sizes += [tensor.dims[0] for tensor in graph.initializer if len(tensor.dims) == 1]
        if any(size > _LONGEST_VECTOR for size in sizes):
            return True
    return False


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    graphs = [model.graph]
    while graphs:
        yield (graph := graphs.pop())
        for node in graph.node:
            if node.attribute:
                graphs += bodies_of(node)


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the data of large weights, which become inputs: shapes are inferred from it."""
    import onnx

    light = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    source, graph = model.graph, light.graph
    graph.name = source.name
    graph.node.extend(source.node)
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    inputs = {value.name for value in source.input}
    for tensor in source.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() < _SMALL_BYTES:
            graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for sparse in source.sparse_initializer:
        if sparse.values.name not in inputs:
            values = sparse.values
            graph.input.append(onnx.helper.make_tensor_value_info(values.name, values.data_type, sparse.dims))
    for part in _graphs(light):
        for info in (*part.input, *part.output, *part.value_info):
            for dim in info.type.tensor_type.shape.dim:
                if dim.dim_value < 0:  # some exporters write -1 for any size; inference of Slice aborts the process
                    dim.ClearField("dim_value")
    return light


def is_fully_typed(model: onnx.ModelProto) -> bool:
    """Return whether a model declares the type of each of its values, so that nothing needs to be inferred.

    Torch writes such models; inference costs as much time and memory as the rest of an import.
    """
    return not model.functions and _declares_all(model.graph)


def _declares_all(graph: onnx.GraphProto) -> bool:
    declared = {info.name for info in (*graph.value_info, *graph.output) if _is_ranked(info.type)}
    if any(name and name not in declared for node in graph.node for name in node.output):
        return False
    bodies = [attribute for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return not any(attribute.graphs for node in graph.node for attribute in node.attribute) and all(
        _declares_all(attribute.g) for attribute in bodies
    )


def _is_ranked(kind: onnx.TypeProto) -> bool:
    tensor = kind.tensor_type
    return bool(tensor.elem_type) and tensor.HasField("shape")
