"""ONNX tensors, dense and sparse, as `TensorData`, and the attributes of imported nodes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.converters.from_onnx.tensor_files import TensorFiles
from rlx_ort.converters.onnx_types import dtype_of, text_of, type_of
from rlx_ort.converters.protos import copied
from rlx_ort.converters.to_onnx.model import ATTRIBUTE_FIELDS
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.onnx import AttributeValue
from rlx_ort.ir.tensor import TensorData

if TYPE_CHECKING:
    import onnx

_DENSE_LIMIT = 1 << 31
# Where elements may be beside `raw_data`: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto, `TensorProto`.
_FIELDS = {
    DType.F32: "float_data", DType.C64: "float_data", DType.F64: "double_data", DType.C128: "double_data",
    DType.I64: "int64_data", DType.U32: "uint64_data", DType.U64: "uint64_data", DType.STRING: "string_data",
}  # fmt: skip
_ANY_FIELD = ("float_data", "double_data", "int64_data", "uint64_data", "int32_data", "string_data")


def tensor_data(tensor: onnx.TensorProto, files: TensorFiles) -> TensorData:
    """Return the data of a tensor; external data stays mapped.

    Raises:
        ConversionError: the data does not fit the declared type and shape, or its file is not acceptable.
    """
    import onnx

    what = f"tensor {tensor.name!r}"
    texts = (tensor.name, *(text for entry in tensor.external_data for text in (entry.key, entry.value)))
    if not all(isinstance(text, str) for text in texts):
        raise ConversionError(f"{what} is damaged: its name or the place of its data is not UTF-8 text")
    dtype = dtype_of(tensor.data_type)
    shape = tuple(tensor.dims)
    if any(dim < 0 for dim in shape) or tensor.HasField("segment"):
        raise ConversionError(f"{what} of shape {list(shape)} is not a whole tensor")
    try:
        nbytes = 0 if dtype is DType.STRING else dtype.nbytes(math.prod(shape))
        if tensor.data_location == onnx.TensorProto.EXTERNAL and dtype is not DType.STRING:
            return TensorData(dtype, shape, *files.read(tensor, nbytes))
        _check_fields(tensor, dtype, nbytes)
        if dtype is DType.STRING:
            return TensorData.from_array(np.array([*tensor.string_data], object).reshape(shape), dtype)
        if tensor.HasField("raw_data"):
            return TensorData(dtype, shape, np.frombuffer(tensor.raw_data, np.uint8))
        return TensorData.from_array(onnx.numpy_helper.to_array(tensor), dtype)
    except (ValueError, TypeError, UnicodeDecodeError) as err:
        raise ConversionError(f"{what} of type {dtype.value}{list(shape)} does not hold such data: {err}") from err


def _check_fields(tensor: onnx.TensorProto, dtype: DType, nbytes: int) -> None:
    """Raise unless the data is in one field, that of its type, and is as much as the shape says.

    Raises:
        ValueError: it is not.
    """
    import onnx

    wanted = _FIELDS.get(dtype, "int32_data")
    filled = [name for name in _ANY_FIELD if len(getattr(tensor, name))]
    raw = tensor.HasField("raw_data")
    if dtype is DType.STRING and (raw or tensor.data_location == onnx.TensorProto.EXTERNAL):
        raise ValueError("strings are in string_data")
    if filled and (raw or filled != [wanted]):
        listed = " and ".join(["raw_data"] * raw + filled)
        raise ValueError(f"it is in {listed}, and must be in {wanted} or in raw_data")
    count = math.prod(tensor.dims)
    if dtype.is_packed:
        count = nbytes
    elif dtype in (DType.C64, DType.C128):
        count *= 2
    if not raw and len(getattr(tensor, wanted)) != count:
        raise ValueError(f"{wanted} has {len(getattr(tensor, wanted))} numbers, {count} are needed")


def dense_tensor(sparse: onnx.SparseTensorProto, files: TensorFiles) -> TensorData:
    """Return a sparse tensor as a dense one, since no execution provider computes on sparse weights.

    Raises:
        ConversionError: an index is out of range, or the dense tensor would be above 2 GB.
    """
    values, indices = tensor_data(sparse.values, files), tensor_data(sparse.indices, files).numpy()
    shape = tuple(sparse.dims)
    what = f"sparse tensor {sparse.values.name!r}"
    if any(dim < 0 for dim in shape) or values.dtype.nbytes(math.prod(shape)) > _DENSE_LIMIT:
        raise ConversionError(f"{what} has shape {list(shape)}, too large to make dense")
    dense = np.zeros(math.prod(shape), values.dtype.numpy)
    try:
        if indices.ndim == 2:
            indices = np.ravel_multi_index(tuple(indices.T), shape)
        if indices.size and int(indices.min()) < 0:
            raise IndexError("an index is negative")
        dense[indices] = values.numpy().reshape(-1)
    except (IndexError, ValueError) as err:
        raise ConversionError(f"{what} of shape {list(shape)} has indices that do not fit: {err}") from err
    return TensorData.from_array(dense.reshape(shape), values.dtype)


def constant_data(attribute: onnx.AttributeProto, files: TensorFiles) -> TensorData | None:
    """Return the value that an attribute gives a Constant node, None for an attribute that Constant does not have.

    Raises:
        ConversionError: a tensor in it is wrong.
    """
    name = attribute.name
    match name:
        case "value":
            return tensor_data(attribute.t, files)
        case "sparse_value":
            return dense_tensor(attribute.sparse_tensor, files)
        case "value_float" | "value_floats":
            values = attribute.floats if name.endswith("s") else attribute.f
            return TensorData.from_array(np.asarray(values, np.float32))
        case "value_int" | "value_ints":
            return TensorData.from_array(np.asarray(attribute.ints if name.endswith("s") else attribute.i, np.int64))
        case "value_string" | "value_strings":
            texts = [*attribute.strings] if name.endswith("s") else attribute.s
            return TensorData.from_array(np.array(texts, object), DType.STRING)
        case _:
            return None


def resolved(
    attributes: Iterable[onnx.AttributeProto], call: Mapping[str, onnx.AttributeProto | None] | None
) -> list[onnx.AttributeProto]:
    """Return attributes without references; one that refers to an omitted one is left out too.

    In a function, `call` maps each attribute that the function declares to its value in the call, None for no value.

    Raises:
        ConversionError: a reference is outside of functions, to nothing that is declared, or of another type.
    """
    result = []
    for attribute in attributes:
        if attribute.ref_attr_name:
            if call is None or attribute.ref_attr_name not in call:
                refers = f"attribute {attribute.name!r} refers to {attribute.ref_attr_name!r}"
                raise ConversionError(f"{refers}, which no function around it declares")
            given = call[attribute.ref_attr_name]
            if given is None:
                continue
            if given.type != attribute.type:
                refers = f"attribute {attribute.name!r} refers to {attribute.ref_attr_name!r}"
                raise ConversionError(f"{refers} of the call, which is of another type")
            name, attribute = attribute.name, copied(given)
            attribute.name = name
        result.append(attribute)
    return result


def attribute_value(
    attribute: onnx.AttributeProto, files: TensorFiles, read_body: Callable[[onnx.GraphProto], Graph]
) -> tuple[str, AttributeValue]:
    """Return the kind and the value of an attribute; `read_body` reads the graphs in it.

    Raises:
        ConversionError: the kind is unknown, or a tensor in it is wrong.
    """
    kind = _kind_names().get(attribute.type, "UNDEFINED")
    single = kind.removesuffix("S")
    if single not in ATTRIBUTE_FIELDS:
        raise ConversionError(f"attribute {attribute.name!r} is of kind {kind}, which this node cannot have")
    items = getattr(attribute, ATTRIBUTE_FIELDS[kind] if kind == single else kind.lower())
    match single:
        case "INT" | "FLOAT":
            return kind, items if kind == single else tuple(items)
        case "STRING":
            convert: Callable[[Any], Any] = text_of
        case "TENSOR":
            convert = functools.partial(tensor_data, files=files)
        case "GRAPH":
            convert = read_body
        case _:
            convert = type_of
    if kind == single:
        return kind, convert(items)
    values = tuple(map(convert, items))
    if kind == "STRINGS" and any(isinstance(value, bytes) for value in values):
        return kind, tuple(items)  # all bytes, where one is no text
    return kind, values


@functools.cache
def _kind_names() -> dict[int, str]:
    from onnx import AttributeProto

    return {number: name for name, number in AttributeProto.AttributeType.items()}
