"""What a run may be fed: every conversion that is done, and every one that is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import DType, InputError
from rlx_ort.execution.inputs import InputPlan
from rlx_ort.ir.types import MapType, OptionalType, SequenceType, Shape, TensorType, ValueType


def _plan(dtype: DType = DType.F32, shape: Any = ("n", 2), **more: ValueType) -> InputPlan:
    return InputPlan({"x": TensorType(dtype, None if shape is None else Shape(shape)), **more})


def _fed(plan: InputPlan, value: Any) -> Any:
    return plan.feeds({"x": value})["x"]


def test_an_exact_array_is_passed_on_itself() -> None:
    """An array that needs nothing is not copied."""
    array = np.ones((3, 2), np.float32)
    assert _fed(_plan(), array) is array


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (DType.F32, np.ones((3, 2), np.float16)),
        (DType.F32, np.ones((3, 2), ml_dtypes.bfloat16)),
        (DType.F32, np.ones((3, 2), np.int16)),
        (DType.F64, np.ones((3, 2), np.int32)),
        (DType.I64, np.ones((3, 2), np.int32)),
        (DType.F32, np.ones((3, 2), bool)),
        (DType.F32, np.ones((3, 2), ">f4")),
        (DType.F32, np.ones((3, 4), np.float32)[:, ::2]),
        (DType.F32, np.asfortranarray(np.ones((3, 2), np.float32))),
        (DType.F32, [[1, 1], [1.0, 1.0], [1, 1]]),
        (DType.F16, [[1.0, 1.0]]),
        (DType.BF16, [[1.0, 1.0]]),
        (DType.I32, [[1, 1]]),
        (DType.I8, ((1, 1),)),
        (DType.BOOL, [[True, True]]),
        (DType.I4, [[1, 1]]),
        (DType.U8, [[np.int64(1), 1]]),
    ],
)
def test_conversions_that_lose_nothing_are_done(dtype: DType, value: Any) -> None:
    """The result has the declared dtype, native byte order, C order, and the same values."""
    fed = _fed(_plan(dtype), value)
    assert fed.dtype == dtype.numpy
    assert fed.dtype.isnative
    assert fed.flags.c_contiguous
    np.testing.assert_array_equal(fed.astype(np.float64), np.ones(np.shape(value)))


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        (DType.F32, np.ones((3, 2), np.float64), r"\.astype\(numpy\.float32\)"),
        (DType.F32, np.ones((3, 2), np.int64), r"\.astype\(numpy\.float32\)"),
        (DType.BF16, np.ones((3, 2), np.float32), r"\.astype\(ml_dtypes\.bfloat16\)"),
        (DType.F16, np.ones((3, 2), ml_dtypes.bfloat16), "astype"),
        (DType.I32, np.ones((3, 2), np.int64), "astype"),
        (DType.I32, np.ones((3, 2), np.float32), "astype"),
        (DType.BOOL, np.ones((3, 2), np.uint8), r"numpy\.bool"),
        (DType.U8, np.ones((3, 2), np.int8), "astype"),
        (DType.F32, np.ma.masked_array(np.ones((3, 2), np.float32), mask=[[0, 1]] * 3), "mask"),
        (DType.F32, [[1, 2], [3]], "not an array"),
        (DType.F32, np.array([["a", "b"]]), "no numbers"),
        (DType.F32, None, "None"),
        (DType.F32, np.array([["2024-01-01", "2024-01-02"]], "M8[D]"), "no numbers"),
        (DType.I32, [[1.5, 2]], "fraction"),
        (DType.I8, [[1, 128]], "-128 to 127"),
        (DType.U8, [[-1, 0]], "0 to 255"),
        (DType.U64, [[-1, 0]], "0 to"),
        (DType.F16, [[1e9, 0.0]], "too large"),
        (DType.BOOL, [[0, 1]], "True and False"),
        (DType.F32, [[1j, 0]], "imaginary"),
        (DType.I64, [[2**70, 0]], "no numbers"),
    ],
)
def test_conversions_that_lose_something_are_refused(dtype: DType, value: Any, message: str) -> None:
    """The message names the input, what it is declared as, and what to do."""
    with pytest.raises(InputError, match=message) as caught:
        _fed(_plan(dtype), value)
    assert "input 'x' is " + dtype.value in str(caught.value)


def test_scalars_are_judged_by_value() -> None:
    """A Python number or numpy scalar fits an input of rank 0 when its value does."""
    plan = _plan(DType.F32, ())
    for value in (1, 1.5, np.float64(1.5), np.int64(7), np.float32(2)):
        fed = _fed(plan, value)
        assert (fed.shape, fed.dtype, float(fed)) == ((), np.float32, float(value))


def test_an_empty_list_fits_any_dtype() -> None:
    """Nothing can be lost from nothing."""
    assert _fed(_plan(DType.I64, ("n",)), []).dtype == np.int64
    assert _fed(_plan(DType.STRING, ("n",)), []).dtype == object


def test_non_contiguous_arrays_keep_rank_0() -> None:
    """A 0-d array stays 0-d."""
    assert _fed(_plan(DType.F32, ()), np.array(3, ">f4")).shape == ()


@pytest.mark.parametrize(
    "value",
    [np.array(["ä", "b"]), np.array(["ä".encode(), b"b"]), np.array(["ä", b"b"], object), ["ä", "b"]],
    ids=["U", "S", "object", "list"],
)
def test_text_of_any_kind_becomes_strings(value: Any) -> None:
    """Byte strings are read as UTF-8, since ONNX Runtime would read past their end."""
    fed = _fed(_plan(DType.STRING, ("n",)), value)
    assert fed.dtype == object
    assert fed.tolist() == ["ä", "b"]


@pytest.mark.parametrize("value", [np.array([b"\xff"]), np.array([1.0]), np.array([None], object)])
def test_what_is_no_text_is_refused_as_string(value: Any) -> None:
    """Bytes that are no UTF-8, numbers and None are no strings."""
    with pytest.raises(InputError, match="input 'x'"):
        _fed(_plan(DType.STRING, ("n",)), value)


@pytest.mark.parametrize("size", [1, 3])
def test_the_elements_of_a_string_array_are_checked_in_each_run(size: int) -> None:
    """An array that was right may hold something else by the next run, or be a part of another one."""
    plan, array = _plan(DType.STRING, ("n",)), np.array(["a"] * size, object)
    for _ in range(2):
        assert _fed(plan, array) is array
    array[-1] = b"\xc3\xa4"
    assert _fed(plan, array).tolist() == ["a"] * (size - 1) + ["ä"]
    array[-1] = 1.0
    with pytest.raises(InputError, match="input 'x'"):
        _fed(plan, array)
    strided = np.array(["a", "b"] * size, object)[::2]
    assert _fed(plan, strided).flags.c_contiguous
    assert _fed(plan, strided).tolist() == ["a"] * size


@pytest.mark.parametrize(
    ("shape", "got", "message"),
    [
        ((2,), (1, 2), "rank"),
        ((3, 2), (3, 3), "dim 1 is 3, not 2"),
        (("n", "n"), (2, 3), "'n'"),
        ((), (1,), "rank"),
    ],
)
def test_a_wrong_rank_or_dim_is_refused(shape: Any, got: tuple[int, ...], message: str) -> None:
    """The message has the declared and the given shape."""
    with pytest.raises(InputError, match=message) as caught:
        _fed(_plan(DType.F32, shape), np.zeros(got, np.float32))
    assert str(got) in str(caught.value)


def test_named_dims_must_agree_between_inputs() -> None:
    """ONNX Runtime would broadcast 1 against 3 without a word; here the second input is refused."""
    plan = _plan(DType.F32, ("n", 2), z=TensorType(DType.F32, Shape(["n", 2])))
    one, three = np.zeros((1, 2), np.float32), np.zeros((3, 2), np.float32)
    plan.feeds({"x": three, "z": three})
    with pytest.raises(InputError, match=r"input 'z'.*'n' 3, but input 'x' makes it 1"):
        plan.feeds({"x": one, "z": three})


def test_shapes_may_change_from_run_to_run() -> None:
    """A remembered shape neither hides a wrong one nor forbids another right one."""
    plan = _plan(DType.F32, ("n", 2))
    for rows in (1, 1, 5, 0):
        assert _fed(plan, np.zeros((rows, 2), np.float32)).shape == (rows, 2)
    for _ in range(2):
        with pytest.raises(InputError):
            _fed(plan, np.zeros((1, 3), np.float32))


def test_an_input_of_unknown_rank_takes_any_shape() -> None:
    """Without a declared shape there is nothing to check."""
    assert _fed(_plan(DType.F32, None), np.zeros((1, 2, 3), np.float32)).shape == (1, 2, 3)


def test_a_missing_input_is_named() -> None:
    """The message lists what was not fed, with its type."""
    plan = _plan(DType.F32, ("n", 2), z=TensorType(DType.I64, Shape(["n"])))
    with pytest.raises(InputError, match=r"'z' \(i64\(n,\)\)"):
        plan.feeds({"x": np.zeros((1, 2), np.float32)})


def test_an_unknown_input_is_named_with_the_nearest_one() -> None:
    """An extra name raises, also when nothing is missing."""
    plan = _plan(DType.F32, ("n", 2), mask=TensorType(DType.F32, Shape([1])))
    good = {"x": np.zeros((1, 2), np.float32), "mask": np.zeros(1, np.float32)}
    with pytest.raises(InputError, match="no input 'maks'; did you mean 'mask'"):
        plan.feeds(good | {"maks": np.zeros(1, np.float32)})


@pytest.mark.parametrize("inputs", [np.zeros(3), 5, "x"])
def test_inputs_that_are_no_dict_are_refused(inputs: Any) -> None:
    """The message asks for names."""
    with pytest.raises(InputError, match="dict"):
        _plan().feeds(inputs)


def test_sequences_optionals_and_maps_are_looked_into() -> None:
    """Tensors inside are converted; an optional may be None or left out; a sequence must be a list."""
    element = TensorType(DType.F32, Shape(["n"]))
    plan = InputPlan({"s": SequenceType(element), "o": OptionalType(element), "m": MapType(DType.I64, element)})
    fed = plan.feeds({"s": [np.ones(2, np.float16), [1.0]], "m": {1: np.ones(1, np.float32)}})
    assert [item.dtype for item in fed["s"]] == [np.float32, np.float32]
    assert fed["o"] is None
    assert plan.feeds({"s": [], "o": [2.0], "m": {}})["o"].tolist() == [2.0]
    with pytest.raises(InputError, match="give a list"):
        plan.feeds({"s": np.ones(2, np.float32), "m": {}})
    with pytest.raises(InputError, match=r"input 's\[1\]'"):
        plan.feeds({"s": [[1.0], np.ones(1)], "m": {}})
    with pytest.raises(InputError, match="give a dict"):
        plan.feeds({"s": [], "m": [1]})
