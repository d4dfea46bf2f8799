"""Protobuf messages of ONNX: copies, walks over graphs and their bodies, inferred types, two pieces of the wire format.

While tens of thousands of nodes are built, Python's garbage collector scans all earlier ones again and again, so it is
paused while a large graph is read or written.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rlx_ort.converters.onnx_types import NO_NAME, known_type_of
from rlx_ort.ir.types import UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

Message = TypeVar("Message")
Value = TypeVar("Value")
_SMALL_BYTES = 1024
LONGEST_VECTOR = 1 << 20


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the collector from running in the block; where it was off already, it stays off afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def copied(message: Message) -> Message:
    """Return a copy of a message."""
    copy: Any = type(message)()
    copy.CopyFrom(message)
    return copy  # type: ignore[no-any-return]  # protobuf ships no types


def set_items(field: Any, items: Iterable[Any]) -> None:
    """Replace the messages of a repeated field; the new ones may be among the old ones."""
    kept = [copied(item) for item in items]  # clearing the field clears its messages
    del field[:]
    field.extend(kept)


def trimmed(values: Sequence[Value]) -> list[Value]:
    """Return a node's inputs or outputs without the absent ones at the end, which crash some fusions of the engine."""
    present = [place for place, value in enumerate(values, 1) if value]
    return list(values[: max(present, default=0)])


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among the attributes of a node, in order."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def graphs_below(*owners: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among the owners and every body below them, outer ones first."""
    waiting = [*owners]
    while waiting:
        owner = waiting.pop(0)
        if hasattr(owner, "initializer"):
            yield owner
        for node in owner.node:
            waiting.extend(bodies_of(node))


def graphs_of(model: onnx.ModelProto, *, functions: bool = True) -> Iterator[onnx.GraphProto]:
    """Yield the main graph and every body below it, outer ones first; on request also the bodies in functions."""
    return graphs_below(model.graph, *(model.functions if functions else ()))


def nodes_of(model: onnx.ModelProto, *, functions: bool = True) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of `graphs_of`: those of bodies, and not those that are directly in a function."""
    return (node for graph in graphs_of(model, functions=functions) for node in graph.node)


def infer_proto(
    proto: onnx.ModelProto, known: Collection[str] = (), *, few_elements: bool = False
) -> dict[str, ValueType]:
    """Return the type of every value that ONNX can infer, bodies included, whose names must not clash.

    Those in `known` are left out. `few_elements` says that no vector is too long for `with_types`, which saves half.
    """
    types: dict[str, ValueType] = {}
    for graph in graphs_of(with_types(proto, few_elements=few_elements), functions=False):
        for info in (*graph.value_info, *graph.input, *graph.output):
            if info.name in known:
                continue
            kind = known_type_of(info.type)
            if not isinstance(kind, UnknownType):
                types[info.name] = kind
    return types


def with_types(proto: onnx.ModelProto, *, few_elements: bool = False) -> onnx.ModelProto:
    """Return a copy of the model with the types that ONNX infers, in each graph's `value_info`.

    Inference never fails: a model that ONNX rejects is returned unchanged. ONNX's data propagation makes a message for
    each element of a vector, 140 bytes of memory apiece, also of vectors that are no shapes; it is left out where a
    vector is too long for that.
    """
    import onnx

    try:
        if not few_elements and _has_long_vector(inferred := onnx.shape_inference.infer_shapes(proto)):
            return inferred
        return onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:
        # Besides its own errors, for models it finds inconsistent or above 2 GB, those of C++ come through: IndexError,
        # MemoryError. ONNX Runtime may still take the model.
        return proto


def _has_long_vector(model: onnx.ModelProto) -> bool:
    for graph in graphs_of(model):
        shapes = (info.type.tensor_type.shape.dim for info in (*graph.input, *graph.value_info, *graph.output))
        sizes = [dims[0].dim_value for dims in shapes if len(dims) == 1]
        sizes += [tensor.dims[0] for tensor in graph.initializer if len(tensor.dims) == 1]
        if any(size > LONGEST_VECTOR for size in sizes):
            return True
    return False


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without the data of large weights, which become inputs: shapes are inferred from it."""
    import onnx

    light = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    source, graph = model.graph, light.graph
    graph.name = source.name
    for name in ("node", "input", "output", "value_info"):
        getattr(graph, name).extend(getattr(source, name))
    name_open_dims(graph)
    inputs = {value.name for value in source.input}
    for tensor in source.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() < _SMALL_BYTES:
            graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for sparse in source.sparse_initializer:
        values = sparse.values
        if values.name not in inputs:
            graph.input.append(onnx.helper.make_tensor_value_info(values.name, values.data_type, sparse.dims))
    for part in graphs_of(light, functions=False):
        for info in (*part.input, *part.output, *part.value_info):
            for dim in info.type.tensor_type.shape.dim:
                # Some exporters write -1 for any size, with which inference of Slice aborts the process.
                if dim.dim_value < 0 or dim.dim_param == NO_NAME:
                    dim.Clear()
    return light


def name_open_dims(graph: onnx.GraphProto) -> None:
    """Name each dim of an input that has neither a size nor a name by its place, as `x[0]`."""
    for name, dim in _open_dims(graph):
        dim.dim_param = name


def _open_dims(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorShapeProto.Dimension]]:
    for value in graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value < 0 or (not dim.HasField("dim_value") and dim.dim_param in ("", NO_NAME)):
                yield f"{value.name}[{axis}]", dim


def declared_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose `value_info` has the type of each value: the declared ones, with those that ONNX infers.

    Each open dim of its inputs has a name.

    PyTorch's exporter (2.13) declares the example's length for the outputs of an LSTM whose length is open. So where a
    named dim of the inputs is in no output, sizes are inferred without the declared ones, and replace them if they
    differ.
    """
    typed = model if is_fully_typed(model) and not any(_open_dims(model.graph)) else with_types(skeleton(model))
    named = {dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim} - {""}
    outputs = [dim for value in model.graph.output for dim in value.type.tensor_type.shape.dim]
    if named <= {dim.dim_param for dim in outputs} or not any(dim.dim_value > 1 for dim in outputs):
        return typed
    bare = skeleton(model)
    for graph in graphs_of(bare):
        del graph.value_info[:]
    for value in bare.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    inferred = with_types(bare)
    pairs = zip(model.graph.output, inferred.graph.output, strict=True)
    dims = [(one.type.tensor_type.shape.dim, other.type.tensor_type.shape.dim) for one, other in pairs]
    wrong = any(
        old.dim_value and new.dim_param in named for one, other in dims for old, new in zip(one, other, strict=False)
    )
    return inferred if wrong else typed


def is_fully_typed(model: onnx.ModelProto) -> bool:
    """Return whether a model declares the type of each of its values, so that nothing needs to be inferred.

    Torch writes such models; inference costs as much time and memory as the rest of an import.
    """
    return not model.functions and all(map(_declares_all, graphs_of(model)))


def _declares_all(graph: onnx.GraphProto) -> bool:
    kinds = ((info.name, info.type.tensor_type) for info in (*graph.value_info, *graph.output))
    declared = {name for name, kind in kinds if kind.elem_type and kind.HasField("shape")}
    return all(name in declared for node in graph.node for name in node.output if name)


def field_key(number: int) -> bytes:
    """Return the key of a field that has a length: a message, text or bytes."""
    return varint(number << 3 | 2)


def varint(number: int) -> bytes:
    """Return a number as protobuf writes lengths: seven bits a byte, lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
