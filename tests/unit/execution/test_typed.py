"""Raw bytes in and out, and the saturating rule of typed reading."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import DType, InputError
from rlx_ort.execution.inputs import arrays_from_typed, saturating_cast, typed_from_arrays
from rlx_ort.ir.types import Shape, TensorType

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("source", "dtype", "expected"),
    [
        (np.array([1.9, -1.9, NAN, 300.0, -300.0, INF, -INF], np.float32), DType.I8, [1, -1, 0, 127, -128, 127, -128]),
        (np.array([-0.9, 255.9, 256.0, -1.0]), DType.U8, [0, 255, 255, 0]),
        (np.array([2.0**63, -(2.0**63), 2.0**62]), DType.I64, [2**63 - 1, -(2**63), 2**62]),
        (np.array([2.0**64, -5.0, 2.0**63]), DType.U64, [2**64 - 1, 0, 2**63]),
        (np.array([2.0**31, -(2.0**31) - 1]), DType.I32, [2**31 - 1, -(2**31)]),
        (np.array([1e5, -1e5], ml_dtypes.bfloat16), DType.I16, [32767, -32768]),
        (np.array([9.0, -9.0, 3.0], np.float16), DType.I4, [7, -8, 3]),
        (np.array([300, -300], np.int64), DType.I8, [127, -128]),
        (np.array([-1, 2**40], np.int64), DType.U32, [0, 2**32 - 1]),
        (np.array([2**64 - 1], np.uint64), DType.I64, [2**63 - 1]),
        (np.array([-8, 7]).astype(ml_dtypes.int4), DType.U8, [0, 7]),
        (np.array([True, False]), DType.I32, [1, 0]),
        (np.array([0.0, -0.0, 0.1, NAN], np.float32), DType.BOOL, [False, False, True, True]),
        (np.array([0, 5], np.int32), DType.BOOL, [False, True]),
        (np.array([1.5, 2.5], np.float64), DType.F32, [1.5, 2.5]),
        (np.array([3, 4], np.int64), DType.F16, [3.0, 4.0]),
        (np.array(300.7), DType.U8, 255),
    ],
)
def test_typed_reading_truncates_and_saturates(source: Any, dtype: DType, expected: Any) -> None:
    """Floats truncate towards zero, limits hold, NaN is 0, and anything but 0 is True."""
    result = saturating_cast(source, dtype)
    assert result.dtype == dtype.numpy
    wide = object if dtype in (DType.U64, DType.I64) else None
    np.testing.assert_array_equal(np.asarray(result.tolist(), wide), np.asarray(expected, wide))
    assert result.shape == source.shape


def test_bytes_take_the_declared_shape() -> None:
    """A static shape is filled row by row."""
    data = np.arange(6, dtype="<f4")
    arrays = arrays_from_typed({"x": TensorType(DType.F32, Shape([2, 3]))}, {"x": (data.tobytes(), "f32")})
    np.testing.assert_array_equal(arrays["x"], data.reshape(2, 3))


def test_named_dims_are_found_from_the_byte_counts() -> None:
    """One unknown dim at a time is solved, and a dim inferred from one input is used for the others."""
    types = {
        "x": TensorType(DType.F32, Shape(["b", "s"])),
        "lengths": TensorType(DType.I64, Shape(["b"])),
        "free": TensorType(DType.U8, Shape([None, 2])),
    }
    given = {
        "x": (bytes(4 * 6), DType.F32),
        "lengths": (bytes(8 * 2), "i64"),
        "free": (bytes(8), "u8"),
    }
    shapes = {name: array.shape for name, array in arrays_from_typed(types, given).items()}
    assert shapes == {"x": (2, 3), "lengths": (2,), "free": (4, 2)}


@pytest.mark.parametrize(
    ("shape", "data", "dtype", "message"),
    [
        (["b", "s"], bytes(24), "f32", "do not determine"),
        (["b", "b"], bytes(16), "f32", "do not determine"),
        (["b", 4], bytes(24), "f32", "whole rows"),
        (["b", 0], bytes(24), "f32", "whole rows"),
        ([2, 2], bytes(12), "f32", "needs 16 bytes"),
        ([2], bytes(7), "f32", "whole number"),
        ([2], bytes(8), "f33", "unknown dtype"),
        ([2], b"ab", "string", "no raw bytes"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(shape: Any, data: bytes, dtype: str, message: str) -> None:
    """The message names the input and why its bytes do not fill it."""
    with pytest.raises(InputError, match=message) as caught:
        arrays_from_typed({"x": TensorType(DType.F32, Shape(shape))}, {"x": (data, dtype)})
    assert "'x'" in str(caught.value)


def test_outputs_become_little_endian_bytes() -> None:
    """The bytes are those of the declared dtype, packed for 4-bit types."""
    rows = typed_from_arrays([np.array([1, 2], ">i4"), np.array([1, 2, 3])], [DType.I32, DType.U4])
    assert rows == [(np.array([1, 2], "<i4").tobytes(), DType.I32), (bytes([0x21, 0x03]), DType.U4)]


def test_outputs_without_numbers_have_no_bytes() -> None:
    """Strings and sequences are refused."""
    for output in (np.array(["a"], object), [np.zeros(1)]):
        with pytest.raises(InputError, match="output 0"):
            typed_from_arrays([output], [DType.STRING])
