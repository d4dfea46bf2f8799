"""Sets the size of named dims; shapes that depend on them become static too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.converters.bundle import ModelBundle, graphs_of
from rlx_ort.converters.infer import skeleton
from rlx_ort.converters.protos import copied, set_items
from rlx_ort.converters.transforms.scope import near_names, typed_model
from rlx_ort.errors import ConversionError

if TYPE_CHECKING:
    import onnx

__all__ = ["DimsReport", "set_dims"]

_PLACE = re.compile(r"(?P<input>.+)\[(?P<axis>\d+)\]")


@dataclass(frozen=True, slots=True)
class DimsReport:
    """What `set_dims` did.

    Attributes:
        sizes: dim -> the size it has now, as the caller wrote it.
        still_open: `input[axis]` or name of each dim of the inputs that has no size yet.
    """

    sizes: Mapping[str, int]
    still_open: tuple[str, ...]


def set_dims(bundle: ModelBundle, sizes: Mapping[str, int]) -> tuple[ModelBundle, DimsReport]:
    """Return the model with sizes for dims of its inputs, and with the shapes inferred from them.

    Args:
        bundle: the model.
        sizes: name of a dim -> size; a dim without a name is addressed as `input[axis]`, such as `x[0]`.

    Raises:
        ConversionError: there is no such dim, a size is below 1, a place has another size, or the model does not take
            these sizes.
    """
    import onnx

    proto = copied(bundle.proto)
    named = _names(proto.graph.input)
    for key, size in sizes.items():
        if size < 1:
            raise ConversionError(f"dim {key!r} is given size {size}; a size is 1 or more")
        if key in named:
            _bind(proto, key, size)
        else:
            _place(proto, bundle.origin, key, size, named)
    for graph in graphs_of(proto):
        _forget_open(graph)  # an old guess would hide what follows from the sizes
    try:
        typed = onnx.shape_inference.infer_shapes(_light(bundle, proto), strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as err:
        if _infers(bundle):
            given = ", ".join(f"{key}={size}" for key, size in sizes.items())
            raise ConversionError(f"{bundle.origin} does not take {given}: {_reason(err)}") from err
        typed = typed_model(bundle.with_proto(proto))
    for graph, twin in zip(graphs_of(proto, functions=False), graphs_of(typed, functions=False), strict=True):
        _take_shapes(graph, twin)
    return bundle.with_proto(proto), DimsReport(dict(sizes), tuple(_open(proto)))


def _names(values: object) -> set[str]:
    return {dim.dim_param for value in values for dim in _dims(value.type) if dim.dim_param}  # type: ignore[attr-defined]  # protobuf's containers have no common type


def _dims(kind: onnx.TypeProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    """Yield the dims of a type, those of what a sequence or optional holds included."""
    match kind.WhichOneof("value"):
        case "tensor_type" | "sparse_tensor_type" as field:
            yield from getattr(kind, field).shape.dim
        case "sequence_type" | "optional_type" as field:
            yield from _dims(getattr(kind, field).elem_type)


def _bind(proto: onnx.ModelProto, name: str, size: int) -> None:
    for graph in graphs_of(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in _dims(value.type):
                if dim.dim_param == name:
                    dim.dim_value = size


def _place(proto: onnx.ModelProto, origin: str, key: str, size: int, named: set[str]) -> None:
    """Give a size to one place, `input[axis]`; a named dim there gets it everywhere."""
    match = _PLACE.fullmatch(key)
    inputs = {value.name: [*_dims(value.type)] for value in proto.graph.input}
    if match is None or match["input"] not in inputs:
        raise ConversionError(f"{origin} has no dim {key!r} in its inputs; {near_names(key, [*named, *_open(proto)])}")
    dims, axis = inputs[match["input"]], int(match["axis"])
    if axis >= len(dims):
        raise ConversionError(f"{key!r}: input {match['input']!r} has {len(dims)} dims of known place, counted from 0")
    dim = dims[axis]
    if dim.HasField("dim_value") and dim.dim_value > 0 and dim.dim_value != size:
        raise ConversionError(f"{key!r} is given size {size}, and is {dim.dim_value} in the model")
    if dim.dim_param:
        _bind(proto, dim.dim_param, size)
    dim.dim_value = size


def _open(proto: onnx.ModelProto) -> list[str]:
    weights = {tensor.name for tensor in proto.graph.initializer}
    found = [
        dim.dim_param or f"{value.name}[{axis}]"
        for value in proto.graph.input
        if value.name not in weights
        for axis, dim in enumerate(_dims(value.type))
        if not (dim.HasField("dim_value") and dim.dim_value >= 0)
    ]
    return list(dict.fromkeys(found))


def _forget_open(graph: onnx.GraphProto) -> None:
    kept = [info for info in graph.value_info if all(dim.HasField("dim_value") for dim in _dims(info.type))]
    if len(kept) != len(graph.value_info):
        set_items(graph.value_info, kept)


def _light(bundle: ModelBundle, proto: onnx.ModelProto) -> onnx.ModelProto:
    return skeleton(bundle.with_proto(proto).proto)


def _infers(bundle: ModelBundle) -> bool:
    """Return whether strict inference accepts the given model, so that an error after a change is due to the change."""
    import onnx

    try:
        onnx.shape_inference.infer_shapes(_light(bundle, bundle.proto), strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return False
    return True


def _reason(err: Exception) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[-1] if lines else type(err).__name__


def _take_shapes(graph: onnx.GraphProto, twin: onnx.GraphProto) -> None:
    """Copy the inferred types of intermediate values, and set inferred dims of outputs."""
    set_items(graph.value_info, twin.value_info)
    inferred = {value.name: value.type for value in twin.output}
    for value in graph.output:
        for dim, sharper in zip(_dims(value.type), _dims(inferred[value.name]), strict=False):
            if sharper.HasField("dim_value") and not dim.HasField("dim_value"):
                dim.dim_value = sharper.dim_value
