"""Conversion of values and raw bytes to arrays of a declared dtype, without silent loss, and of arrays to raw bytes.

The exact dtype passes as it is. A conversion that keeps every value of the source dtype is done
(`numpy.can_cast(..., "safe")`). Python numbers, lists and numpy scalars are judged by value. Everything else is refused
with the cast that would convert it. Raw bytes are little-endian, in C order, with packed types as ONNX packs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, ValueType

__all__ = [
    "TypedBytes",
    "arrays_from_typed",
    "as_array",
    "cast_hint",
    "is_literal",
    "saturating_cast",
    "typed_from_arrays",
]

TypedBytes: TypeAlias = "tuple[bytes | bytearray | memoryview, DType | str]"

_LITERALS = (bool, int, float, complex, list, tuple, range, np.generic)


def as_array(value: object, dtype: DType) -> npt.NDArray[Any]:
    """Return the value as a C-contiguous array of the dtype in the machine's byte order.

    An array of that kind is returned itself, not a copy.

    Raises:
        ValueError: the value is no array, or its conversion would lose something; the message names the remedy.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError("it is a masked array, whose mask would be lost; feed `.filled(value)`")
    if value is None:
        raise ValueError("it is None")
    try:
        array = value.view(np.ndarray) if isinstance(value, np.ndarray) else np.asarray(value)
    except (ValueError, TypeError) as err:  # ragged lists, objects whose conversion refuses
        raise ValueError(f"{type(value).__name__} is no array: {err}") from err
    if dtype is DType.STRING:
        return _strings(array)
    if array.dtype.kind in "OSUmM":
        raise ValueError(f"{_described(value, array)} holds no numbers")
    target = dtype.numpy
    if array.dtype == target:
        return array if array.flags.c_contiguous else array.copy(order="C")
    if is_literal(value):
        return _by_value(array, dtype)
    if not np.can_cast(array.dtype, target, "safe"):
        raise ValueError(f"{_described(value, array)} would lose values as {dtype.value}; cast it: {cast_hint(dtype)}")
    return array.astype(target, order="C")


def saturating_cast(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Return the array as another dtype; the array itself if it has that dtype.

    Floats become integers by truncation towards zero. Values out of range become the nearest limit, and NaN becomes 0.
    Everything but 0 is True as a bool.
    """
    target = dtype.numpy
    if array.dtype == target:
        return array
    if dtype is DType.BOOL:
        return np.asarray(array != np.zeros((), array.dtype))
    if not dtype.is_integer:
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(target)
    lowest, highest = _limits(dtype)
    source = DType.from_numpy(array.dtype)
    if source.is_float:
        whole = np.trunc(array.astype(np.float64))
        # The upper limit of 64-bit types is not a float64, the power of two above it is.
        high = whole >= float(highest + 1)
        low = whole < float(lowest)
        inside = np.where(high | low | np.isnan(whole), 0.0, whole).astype(target)
        return np.where(high, np.array(highest, target), np.where(low, np.array(lowest, target), inside))
    if source is DType.BOOL:
        return array.astype(target)
    wide = array.astype(np.int16) if source.is_packed else array
    least, most = _limits(source)
    return np.asarray(np.clip(wide, max(lowest, least), min(highest, most))).astype(target)


def is_literal(value: object) -> bool:
    """Return whether a value is Python numbers, lists of them or a numpy scalar, which are judged by value."""
    return isinstance(value, _LITERALS)


def cast_hint(dtype: DType) -> str:
    """Return the numpy expression that casts an array to the dtype, such as `.astype(numpy.float32)`."""
    module = "numpy" if dtype.numpy.type.__module__ == "numpy" else "ml_dtypes"
    name = "bool_" if dtype is DType.BOOL else dtype.numpy.name
    return f".astype({module}.{name})"


def _limits(dtype: DType) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer type."""
    if dtype.value[0] == "i":
        return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
    return 0, (1 << dtype.bits) - 1


def _by_value(array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Convert literals: floats may be rounded, but never to infinity; integers stay exact."""
    if not array.size:
        return array.astype(dtype.numpy, order="C")
    source = DType.from_numpy(array.dtype)
    if dtype.is_integer and (source.is_float or source.is_complex):
        raise ValueError(f"{source.value} numbers would lose their fraction as {dtype.value}; write whole numbers")
    if dtype is DType.BOOL and source is not DType.BOOL:
        raise ValueError(f"{source.value} numbers are no truth values; write True and False")
    if source.is_complex and not dtype.is_complex:
        raise ValueError(f"complex numbers would lose their imaginary part as {dtype.value}")
    if dtype.is_integer and source is not DType.BOOL:
        lowest, highest = _limits(dtype)
        if int(array.min()) < lowest or int(array.max()) > highest:
            raise ValueError(f"a number is outside {dtype.value}, which goes from {lowest} to {highest}")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(dtype.numpy, order="C")
    if dtype.is_float and source.is_float and bool(np.any(np.isfinite(array) & ~np.isfinite(converted))):
        raise ValueError(f"a number is too large for {dtype.value}")
    return converted


def _strings(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind not in "OSUT":
        raise ValueError(f"{array.dtype} array of shape {array.shape} holds no strings")
    texts = np.empty(array.size, dtype=object)
    for index, item in enumerate(array.reshape(-1).tolist()):
        if isinstance(item, bytes):
            try:
                item = item.decode("utf-8")
            except UnicodeDecodeError as err:
                raise ValueError(f"item {index} is no UTF-8 text: {err}") from err
        if not isinstance(item, str):
            raise ValueError(f"item {index} is {type(item).__name__}, not a string")
        texts[index] = item
    return texts.reshape(array.shape)


def _described(value: object, array: npt.NDArray[Any]) -> str:
    what = "array" if isinstance(value, np.ndarray) else type(value).__name__
    return f"{array.dtype} {what} of shape {array.shape}"


def arrays_from_typed(types: Mapping[str, ValueType], inputs: Mapping[str, TypedBytes]) -> dict[str, npt.NDArray[Any]]:
    """Return each input as an array of the given dtype and the declared shape; unknown names come as flat arrays.

    Named dims are inferred from the number of elements, where that leaves one solution.

    Raises:
        InputError: a dtype is unknown, the bytes do not fill the shape, or a named dim cannot be inferred.
    """
    given: dict[str, tuple[DType, npt.NDArray[np.uint8], int]] = {}
    for name, (data, dtype) in inputs.items():
        try:
            kind = DType.parse(dtype)
        except ValueError as err:
            raise InputError(f"input {name!r}: {err}") from err
        if kind is DType.STRING:
            raise InputError(f"input {name!r}: strings have no raw bytes; use run")
        raw = np.frombuffer(data, np.uint8)
        if (raw.size * 8) % kind.bits:
            raise InputError(f"input {name!r}: {raw.size} bytes are not a whole number of {kind.value} elements")
        given[name] = (kind, raw, raw.size * 8 // kind.bits)
    shapes = _solved({name: types.get(name) for name in given}, {name: entry[2] for name, entry in given.items()})
    arrays = {}
    for name, (kind, raw, _) in given.items():
        try:
            arrays[name] = TensorData(kind, shapes[name], raw).numpy()
        except ValueError as err:
            raise InputError(f"input {name!r} is {types[name]}: {err}") from err
    return arrays


def typed_from_arrays(arrays: Sequence[Any], dtypes: Sequence[DType]) -> list[tuple[bytes, DType]]:
    """Return each array as raw bytes of a dtype, converted by `saturating_cast`.

    Raises:
        InputError: an output is no tensor of numbers.
    """
    result: list[tuple[bytes, DType]] = []
    for index, (array, dtype) in enumerate(zip(arrays, dtypes, strict=True)):
        if not isinstance(array, np.ndarray) or array.dtype.kind in "OSU" or dtype is DType.STRING:
            raise InputError(f"output {index} is no tensor of numbers and has no raw bytes; use run")
        result.append((TensorData.from_array(saturating_cast(array, dtype)).buffer.tobytes(), dtype))
    return result


def _solved(types: Mapping[str, ValueType | None], counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input; infers one named dim at a time from an element count."""
    shapes = {name: _shape(kind, counts[name]) for name, kind in types.items()}
    progress = True
    while progress:
        progress = False
        for name, shape in shapes.items():
            open_dims = [dim for dim in shape if not isinstance(dim, int)]
            if len(open_dims) != 1:
                continue
            rest = math.prod(dim for dim in shape if isinstance(dim, int))
            if rest == 0 or counts[name] % rest:
                raise InputError(f"input {name!r} is {types[name]}: {counts[name]} elements do not fill whole rows")
            size = counts[name] // rest
            symbol = open_dims[0]
            if symbol is None:
                shapes[name] = Shape(size if dim is None else dim for dim in shape)
            else:
                shapes = {other: known.bind({symbol: size}) for other, known in shapes.items()}
            progress = True
            break
    stuck = [name for name, shape in shapes.items() if not shape.is_static]
    if stuck:
        raise InputError(
            f"the bytes of input {stuck[0]!r} do not determine the dims of {types[stuck[0]]}; bind them or use run"
        )
    return {name: shape.static() for name, shape in shapes.items()}


def _shape(kind: ValueType | None, count: int) -> Shape:
    known = isinstance(kind, TensorType) and kind.shape is not None
    return kind.shape if known else Shape([count])  # type: ignore[union-attr,return-value]  # `known` narrows both
