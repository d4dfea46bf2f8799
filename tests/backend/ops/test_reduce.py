"""Reductions against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from op_tests.harness import Array, check, rand, run

from rlx_ort.device import Device

FUNCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axes", [(1,), (0, 2), (-1, 0), (0, 1, 2)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_reduction_over_axes(name: str, axes: tuple[int, ...], keep: bool, device: Device) -> None:
    """Axes that are no neighbours, negative ones and all of them."""
    if device.kind != "cpu" and axes != (0, 2):
        pytest.skip("one choice of axes is enough on a slow device")
    check(
        device,
        lambda g, x: g.reduce(x, name, axes, keep),
        lambda x: FUNCTIONS[name](x, axis=axes, keepdims=keep),
        rand(3, 4, 5),
        shapes=[["n", 4, 5]],
    )


def test_reduction_over_no_axes_changes_nothing(device: Device) -> None:
    """An empty list of axes is not "all axes"."""
    check(device, lambda g, x: g.sum(x, []), lambda x: x, rand(3, 4))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.float64])
@pytest.mark.parametrize("name", ["sum", "max", "min", "prod"])
def test_reduction_of_other_dtypes(name: str, dtype: type) -> None:
    """Types the kernels lack are reduced in a wider one and come back."""
    x = np.array([[1, 2, 3], [3, 1, 2]], dtype)
    check(Device.CPU, lambda g, x: g.reduce(x, name, 1), lambda x: FUNCTIONS[name](x, axis=1).astype(dtype), x)


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax_along_any_axis(axis: int, device: Device) -> None:
    """Large scores do not overflow."""
    x = rand(3, 4, 2) * 30
    check(device, lambda g, x: g.softmax(x, axis), lambda x: softmax(x, axis), x, shapes=[["n", 4, 2]])


@pytest.mark.parametrize(("exclusive", "reverse"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("axis", [0, -1])
def test_cumsum(axis: int, exclusive: bool, reverse: bool, device: Device) -> None:
    """The running sum from either end, with or without the element itself."""

    def reference(x: Array) -> Array:
        turned = np.flip(x, axis) if reverse else x
        sums = np.cumsum(turned, axis) - (turned if exclusive else 0)
        return np.flip(sums, axis) if reverse else sums

    check(device, lambda g, x: g.cumsum(x, axis, exclusive, reverse), reference, rand(3, 4))


def test_cumsum_of_small_integers() -> None:
    """i8 runs in a wider type."""
    check(Device.CPU, lambda g, x: g.cumsum(x, 0), lambda x: np.cumsum(x).astype(np.int8), np.array([1, 2, 3], np.int8))


def test_topk_takes_the_smaller_index_of_equals() -> None:
    """Descending by value, ties in order of place."""
    x = np.array([[1.0, 3, 3, 2, 3], [5, 5, 5, 5, 5]], np.float32)
    (result,) = run(Device.CPU, lambda g, x: g.topk(x, 4, "i32"), x)
    np.testing.assert_array_equal(result, [[1, 2, 4, 3], [0, 1, 2, 3]])


def test_topk_matches_a_stable_sort() -> None:
    """Every k over an open batch."""
    x = rand(5, 7)
    for k in (1, 3, 7):
        expected = np.argsort(-x, axis=-1, kind="stable")[:, :k]
        check(Device.CPU, lambda g, x, k=k: g.topk(x, k), lambda _, e=expected: e, x, shapes=[["n", 7]])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_arg_reductions_take_the_first_of_equals(name: str, keep: bool, device: Device) -> None:
    """The first place wins, along any axis."""
    x = np.array([[1.0, 4, 4, 0, 0], [2, 2, 2, 2, 2]], np.float32)
    function = {"argmax": np.argmax, "argmin": np.argmin}[name]
    check(device, lambda g, x: getattr(g, name)(x, 1, keep), lambda x: function(x, axis=1, keepdims=keep), x)


@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.int64])
def test_argmax_of_integers(dtype: type) -> None:
    """Types the kernel lacks are compared in a wider one."""
    check(Device.CPU, lambda g, x: g.argmax(x), lambda x: np.argmax(x, -1), np.array([[1, 9, 3], [7, 2, 7]], dtype))
