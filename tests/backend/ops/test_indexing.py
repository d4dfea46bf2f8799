"""Sorting, lookups, updates and running products against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from op_tests.harness import Array, check, rand

from rlx_ort.device import Device

CPU = Device.CPU
DTYPES = ["f4", "f2", "f8", "i1", "u1", "i2", "u2", "i4", "i8", "u4"]


def few(dtype: str, *shape: int) -> Array:
    """Return small numbers with many equal ones."""
    return np.random.default_rng([*shape]).integers(0, 5, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("descending", [True, False])
def test_sort_and_argsort(dtype: str, axis: int, descending: bool) -> None:
    """Equal elements stay in order of place, both ways."""
    sign = -1 if descending else 1
    x = few(dtype, 3, 7)
    check(
        CPU,
        lambda g, x: g.sort(x, axis, descending),
        lambda x: (sign * np.sort(sign * x.astype(np.float64), axis)).astype(x.dtype),
        x,
    )
    check(
        CPU,
        lambda g, x: g.argsort(x, axis, descending),
        lambda x: np.argsort(sign * x.astype(np.float64), axis, kind="stable"),
        x,
        shapes=[["n", "m"]],
        strict=False,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_running_products_and_maxima(dtype: str, size: int) -> None:
    """Any size, power of two or not."""
    x = few(dtype, 2, size)
    check(CPU, lambda g, x: g.cumprod(x), lambda x: np.cumprod(x, -1, dtype=x.dtype), x)
    check(CPU, lambda g, x: g.cummax(x, 1), lambda x: np.maximum.accumulate(x, 1), x)


def test_running_product_along_the_first_axis(device: Device) -> None:
    """The axis may have others behind it, with names."""
    x = rand(5, 3)
    check(device, lambda g, x: g.cumprod(x, 0), lambda x: np.cumprod(x, 0), x, shapes=[[5, "n"]], strict=False)


@pytest.mark.parametrize("axes", [0, (1,), (0, -1), ()])
def test_reverse(axes: int | tuple[int, ...], device: Device) -> None:
    """One axis, several, or none."""
    named = (axes,) if isinstance(axes, int) else axes
    check(device, lambda g, x: g.reverse(x, axes), lambda x: np.flip(x, named), rand(2, 3, 4), strict=False)


@pytest.mark.parametrize("dtype", [*DTYPES, "?"])
@pytest.mark.parametrize("diagonal", [-1, 0, 2])
def test_trilu(dtype: str, diagonal: int) -> None:
    """Both triangles of every matrix of a batch, from any diagonal on."""
    x = few(dtype, 2, 3, 4)
    check(CPU, lambda g, x: g.trilu(x, True, diagonal), lambda x: np.triu(x, diagonal), x)
    check(CPU, lambda g, x: g.trilu(x, False, diagonal), lambda x: np.tril(x, diagonal), x)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.float32])
def test_gather_elements(kind: type) -> None:
    """Indices along an axis, negative ones from the end; floats drop their fraction."""
    indices = np.array([[0, 2, 1], [-1, 0, 0]]).astype(kind)
    check(
        CPU,
        lambda g, x, i: g.gather_elements(x, i, 0),
        lambda x, i: np.take_along_axis(x, i.astype(int), 0),
        rand(3, 3),
        indices,
    )


def test_gather_nd() -> None:
    """Whole slices, single elements, and elements within each of a batch."""
    x = rand(2, 3, 4)
    rows, places = np.array([[1], [-1], [0]]), np.array([[1, 2, 3], [0, 0, 0]])
    inner = np.array([[[0, 2], [1, -1]], [[2, 0], [0, 3]]])
    check(CPU, lambda g, x, i: g.gather_nd(x, i), lambda x, i: x[i[:, 0]], x, rows)
    check(CPU, lambda g, x, i: g.gather_nd(x, i), lambda x, i: x[tuple(i.T)], x, places)
    check(
        CPU,
        lambda g, x, i: g.gather_nd(x, i, 1),
        lambda x, i: np.stack([x[b][tuple(i[b].T)] for b in range(2)]),
        x,
        inner,
    )


COMBINED: dict[str, Callable[[float, float], float]] = {
    "set": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": max,
    "min": min,
}


@pytest.mark.parametrize("mode", COMBINED)
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i1", "u1", "i4", "i8"])
def test_scatter(mode: str, dtype: str) -> None:
    """Places that repeat are all combined; under `set` they do not repeat."""
    x, updates = few(dtype, 4, 3), few(dtype, 2, 3)
    places = np.array([[0, 1, 2], [3, 0, 1]]) if mode == "set" else np.array([[0, 1, 2], [0, 0, -1]])
    rows = np.array([[0], [2]]) if mode == "set" else np.array([[2], [2]])

    def elements(x: Array, i: Array, u: Array) -> Array:
        result = x.copy()
        for row, column in np.ndindex(i.shape):
            result[i[row, column], column] = COMBINED[mode](result[i[row, column], column], u[row, column])
        return result

    def slices(x: Array, i: Array, u: Array) -> Array:
        return elements(x, np.repeat(i, 3, 1), u)

    check(CPU, lambda g, x, i, u: g.scatter_elements(x, i, u, 0, mode), elements, x, places, updates)
    check(CPU, lambda g, x, i, u: g.scatter_nd(x, i, u, mode), slices, x, rows, updates)
