"""Sets the size of named dims; shapes that depend on them become static too."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.protos import copied, graphs_of, name_open_dims, set_items, skeleton
from rlx_ort.converters.transforms.scope import typed_model
from rlx_ort.errors import ConversionError, near_names

_PLACE = re.compile(r"(?P<input>.+)\[(?P<axis>\d+)\]")


@dataclass(frozen=True, slots=True)
class DimsReport:
    """The sizes that `set_dims` was given, and `input[axis]` or name of each dim of the inputs that has no size yet."""

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
    proto = copied(bundle.proto)
    name_open_dims(proto.graph)
    named = {dim.dim_param for dim in _all_dims(proto.graph.input) if dim.dim_param}
    for key, size in sizes.items():
        if size < 1:
            raise ConversionError(f"dim {key!r} is given size {size}; a size is 1 or more")
        if key in named:
            _bind(proto, key, size)
        else:
            _place(proto, bundle.origin, key, size, named)
    for graph in graphs_of(proto):  # an old guess would hide the types that follow from the sizes
        kept = [info for info in graph.value_info if all(dim.HasField("dim_value") for dim in _dims(info.type))]
        set_items(graph.value_info, kept)
    error: Exception | None = None
    for made in (bundle.with_proto(proto), bundle.with_proto(_undeclared(proto))):
        try:
            typed = _strictly_typed(made)
            break
        except onnx.shape_inference.InferenceError as err:
            error = error or err
    else:
        with contextlib.suppress(onnx.shape_inference.InferenceError):
            _strictly_typed(bundle)  # the given model passes, so the error is due to the sizes
            given = ", ".join(f"{key}={size}" for key, size in sizes.items())
            reason = next(filter(None, map(str.strip, reversed(str(error).splitlines()))), type(error).__name__)
            raise ConversionError(f"{bundle.origin} does not take {given}: {reason}") from error
        made = bundle.with_proto(proto)
        typed = typed_model(made)
    proto = made.proto
    for graph, twin in zip(graphs_of(proto, functions=False), graphs_of(typed, functions=False), strict=True):
        set_items(graph.value_info, twin.value_info)
        inferred = {value.name: value.type for value in twin.output}
        for value in graph.output:
            if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
                value.type.CopyFrom(inferred[value.name])
            for dim, sharper in zip(_dims(value.type), _dims(inferred[value.name]), strict=False):
                if sharper.HasField("dim_value") and not dim.HasField("dim_value"):
                    dim.dim_value = sharper.dim_value
    return made, DimsReport(dict(sizes), tuple(_open(proto)))


def free_dims(
    bundle: ModelBundle, names: Mapping[str, Sequence[str]]
) -> tuple[ModelBundle, dict[str, list[tuple[str, int]]]]:
    """Return the model with fixed dims of its inputs opened, and the input and axis of each place that was.

    Whether the graph takes other sizes is not known afterwards: constants in it, such as the shapes of Reshape, may
    repeat the old one. Run the result on two sizes.

    Args:
        bundle: the model.
        names: name that a dim gets -> its places as `input[axis]`; without one, the first axis of every input.

    Raises:
        ConversionError: there is no such input or axis, it has no fixed size, or two places of a name differ in theirs.
    """
    proto = copied(bundle.proto)
    weights = {tensor.name for tensor in proto.graph.initializer}
    inputs = {value.name: [*_dims(value.type)] for value in proto.graph.input if value.name not in weights}
    opened: dict[str, list[tuple[str, int]]] = {}
    for name, given in names.items():
        sizes: dict[int, str] = {}
        for place in given or [f"{value}[0]" for value, dims in inputs.items() if dims]:
            match = _PLACE.fullmatch(place)
            if match is None or match["input"] not in inputs or int(match["axis"]) >= len(inputs[match["input"]]):
                known = [f"{value}[{axis}]" for value, dims in inputs.items() for axis in range(len(dims))]
                raise ConversionError(f"{bundle.origin} has no dim {place!r} in its inputs; {near_names(place, known)}")
            dim = inputs[match["input"]][int(match["axis"])]
            if not dim.HasField("dim_value"):
                raise ConversionError(
                    f"{place!r} of {bundle.origin} has no fixed size; it is {dim.dim_param or 'open'}"
                )
            sizes.setdefault(dim.dim_value, place)
            dim.dim_param = name
            opened.setdefault(name, []).append((match["input"], int(match["axis"])))
        if len(sizes) != 1:
            listed = ", ".join(f"{place} is {size}" for size, place in sizes.items()) or "it has no inputs with dims"
            raise ConversionError(f"{name!r} cannot be one dim of {bundle.origin}: {listed}; name its places")
    proto = _undeclared(proto)
    made = bundle.with_proto(proto)
    try:
        typed = _strictly_typed(made)
    except onnx.shape_inference.InferenceError:  # the run shows the mismatch
        return made, opened
    for value, twin in zip(proto.graph.output, typed.graph.output, strict=True):
        value.type.CopyFrom(twin.type)
    return bundle.with_proto(proto), opened


def _undeclared(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy without declared shapes but those of inputs; in some files they are of the sizes of a trace."""
    made = copied(proto)
    for graph in graphs_of(made):
        set_items(graph.value_info, [])
    for value in made.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
        for dim in _dims(value.type):
            dim.Clear()
    return made


def _strictly_typed(bundle: ModelBundle) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(skeleton(bundle.proto), strict_mode=True, data_prop=True)


def _all_dims(values: Iterable[onnx.ValueInfoProto]) -> Iterator[onnx.TensorShapeProto.Dimension]:
    return (dim for value in values for dim in _dims(value.type))


def _dims(kind: onnx.TypeProto) -> Iterator[onnx.TensorShapeProto.Dimension]:
    """Yield the dims of a type, those inside a sequence or optional included."""
    match kind.WhichOneof("value"):
        case "tensor_type" | "sparse_tensor_type" as field:
            yield from getattr(kind, field).shape.dim
        case "sequence_type" | "optional_type" as field:
            yield from _dims(getattr(kind, field).elem_type)


def _bind(proto: onnx.ModelProto, name: str, size: int) -> None:
    for graph in graphs_of(proto):
        for dim in _all_dims((*graph.input, *graph.output, *graph.value_info)):
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
        raise ConversionError(f"{key!r}: input {match['input']!r} has {len(dims)} dims, counted from 0")
    dim = dims[axis]
    if dim.HasField("dim_value") and dim.dim_value > 0 and dim.dim_value != size:
        raise ConversionError(f"{key!r} is given size {size}, and is {dim.dim_value} in the model")
    if dim.dim_param:
        _bind(proto, dim.dim_param, size)
    dim.dim_value = size


def _open(proto: onnx.ModelProto) -> list[str]:
    weights = {tensor.name for tensor in proto.graph.initializer}
    places = [
        dim.dim_param or f"{value.name}[{axis}]"
        for value in proto.graph.input
        if value.name not in weights
        for axis, dim in enumerate(_dims(value.type))
        if not (dim.HasField("dim_value") and dim.dim_value >= 0)
    ]
    return list(dict.fromkeys(places))
