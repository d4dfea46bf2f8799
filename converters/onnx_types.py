"""Element types, value types and tensors between the IR and ONNX, in both directions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, MapType, OptionalType, SequenceType, Shape, TensorType, UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

# How schemas spell element types, `tensor(float)`, in the order of their numbers in TensorProto.DataType, from 1 on:
# https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
_TEXT: dict[DType, str] = {
    DType.F32: "float", DType.U8: "uint8", DType.I8: "int8", DType.U16: "uint16", DType.I16: "int16",
    DType.I32: "int32", DType.I64: "int64", DType.STRING: "string", DType.BOOL: "bool", DType.F16: "float16",
    DType.F64: "double", DType.U32: "uint32", DType.U64: "uint64", DType.C64: "complex64", DType.C128: "complex128",
    DType.BF16: "bfloat16", DType.F8E4M3: "float8e4m3fn", DType.F8E4M3FNUZ: "float8e4m3fnuz",
    DType.F8E5M2: "float8e5m2", DType.F8E5M2FNUZ: "float8e5m2fnuz", DType.U4: "uint4", DType.I4: "int4",
    DType.F4E2M1: "float4e2m1", DType.F8E8M0: "float8e8m0", DType.U2: "uint2", DType.I2: "int2",
}  # fmt: skip
_DTYPES = dict(enumerate(_TEXT, 1))
_ELEM_TYPES = {dtype: number for number, dtype in _DTYPES.items()}
NO_NAME = "?"
"""What Paddle's exports call every dim of unknown size; two of them need not be equal."""


def elem_type(dtype: DType) -> int:
    """Return ONNX's number of an element type."""
    return _ELEM_TYPES[dtype]


def dtype_of(number: int) -> DType:
    """Return the element type of ONNX's number.

    Raises:
        ConversionError: the number is none, or one this library has no element type for.
    """
    if number not in _DTYPES:
        raise ConversionError(f"element type {number} of ONNX is not known here; convert the tensor to another type")
    return _DTYPES[number]


def type_proto_text(value: ValueType) -> str:
    """Return a type as operator schemas spell it, `seq(tensor(float))`; empty when it is unknown."""
    match value:
        case TensorType():
            return f"tensor({_TEXT[value.dtype]})"
        case SequenceType():
            return f"seq({type_proto_text(value.element)})"
        case OptionalType():
            return f"optional({type_proto_text(value.element)})"
        case MapType():
            return f"map({_TEXT[value.key]}, {type_proto_text(value.value)})"
        case _:
            return ""


def type_of(proto: onnx.TypeProto) -> ValueType:
    """Return the IR type of an ONNX type; open parts are unknown, and sparse tensors read as dense."""
    field = proto.WhichOneof("value")
    if field in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(proto, field)
        if not tensor.elem_type:
            return UnknownType()
        shape = Shape(_dim_of(dim) for dim in tensor.shape.dim) if tensor.HasField("shape") else None
        return TensorType(dtype_of(tensor.elem_type), shape)
    if field == "sequence_type":
        return SequenceType(type_of(proto.sequence_type.elem_type))
    if field == "optional_type":
        return OptionalType(type_of(proto.optional_type.elem_type))
    if field == "map_type":
        return MapType(dtype_of(proto.map_type.key_type), type_of(proto.map_type.value_type))
    return UnknownType()


def tensor_type(tensor: onnx.TensorProto) -> TensorType:
    """Return the type of a tensor; raises as `dtype_of`."""
    return TensorType(dtype_of(tensor.data_type), Shape(tensor.dims))


def known_type_of(proto: onnx.TypeProto) -> ValueType:
    """Return the IR type of an ONNX type; unknown also where the IR lacks the element type."""
    try:
        return type_of(proto)
    except ConversionError:
        return UnknownType()


@functools.lru_cache(maxsize=1024)
def type_proto(value: ValueType) -> onnx.TypeProto:
    """Return the ONNX type of an IR type, to copy: it is kept. Empty when the type is unknown."""
    from onnx import TypeProto, helper

    match value:
        case TensorType():
            return helper.make_tensor_type_proto(elem_type(value.dtype), value.shape)
        case SequenceType():
            return helper.make_sequence_type_proto(type_proto(value.element))
        case OptionalType():
            return helper.make_optional_type_proto(type_proto(value.element))
        case MapType():
            return helper.make_map_type_proto(elem_type(value.key), type_proto(value.value))
    return TypeProto()


def tensor_proto(data: TensorData, name: str = "") -> onnx.TensorProto:
    """Return a tensor with its data inside; copies the data."""
    import onnx

    proto = onnx.TensorProto(data_type=elem_type(data.dtype), dims=data.shape, name=name)
    if data.dtype is DType.STRING:
        proto.string_data.extend(str(item).encode("utf-8") for item in data.buffer)
    else:
        proto.raw_data = data.buffer.tobytes()
    return proto


def refer(tensor: onnx.TensorProto, location: str, offset: int, nbytes: int) -> None:
    """Make a tensor a reference to a range of bytes in a file beside the model."""
    tensor.data_location = tensor.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", nbytes)):
        tensor.external_data.add(key=key, value=str(value))


def relocated(
    model: onnx.ModelProto | bytes, places: Mapping[str, tuple[str, int, int]], inside: Mapping[str, TensorData]
) -> bytes:
    """Return a copy of a model whose external weights refer to (file, offset, length), or are `inside`."""
    import onnx

    made = onnx.ModelProto.FromString(model if isinstance(model, bytes) else model.SerializeToString())
    for tensor in made.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        if tensor.name in places:
            refer(tensor, *places[tensor.name])
        elif tensor.name in inside:
            tensor.CopyFrom(tensor_proto(inside[tensor.name], tensor.name))
    data: bytes = made.SerializeToString(deterministic=True)
    return data


@functools.cache
def schema_of(op_type: str, version: int, domain: str = "") -> onnx.defs.OpSchema | None:
    """Return the schema of an operator in an opset of its domain, by default ai.onnx; None where there is none."""
    import onnx

    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def text_of(data: bytes) -> str | bytes:
    """Return UTF-8 bytes as text; other bytes unchanged."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def _dim_of(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        # Some exporters write -1 for "any size".
        return dim.dim_value if dim.dim_value >= 0 else None
    if not isinstance(dim.dim_param, str):  # protobuf gives bytes where a text is damaged
        raise ConversionError(f"a dimension is named {dim.dim_param!r}, which is not UTF-8 text: the model is damaged")
    return None if dim.dim_param in ("", NO_NAME) else dim.dim_param
