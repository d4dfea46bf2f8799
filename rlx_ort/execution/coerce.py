"""Conversion of what people feed into arrays of a declared dtype, without losing anything in silence.

The rule, for inputs and weights alike: the exact dtype passes as it is; a conversion that keeps every value of the
source dtype is done (`numpy.can_cast(..., "safe")`); Python numbers, lists and numpy scalars have no dtype worth
keeping, so they are judged by value; everything else is refused with the cast that would do it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.ir.dtype import DType

__all__ = ["as_array", "cast_hint", "is_literal", "saturating_cast"]

_LITERALS = (bool, int, float, complex, list, tuple, range, np.generic)


def as_array(value: object, dtype: DType) -> npt.NDArray[Any]:
    """Return the value as a C-contiguous array of the dtype in the machine's byte order.

    An array that already is one is returned itself, not a copy.

    Raises:
        ValueError: the value is no array, or its conversion would lose something; the message says what to do.
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
    """Return the array as another dtype by the rule of typed reading; the array itself when it already is.

    A float becomes an integer by truncation towards zero, out-of-range values become the nearest limit and NaN
    becomes 0; an integer out of range becomes the nearest limit too; anything but 0 is True as a bool.
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
        # The upper limit of 64-bit types is no float64; the next one, a power of two, is.
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
    """Convert numbers written by hand: floats may be rounded, but never to infinity; integers stay exact."""
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
