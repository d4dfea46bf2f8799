"""Solvers against numpy.linalg.solve in float64."""

from __future__ import annotations

import numpy as np
import pytest
from op_tests.harness import Array, check, rand, run

from rlx_ort.device import Device

CPU = Device.CPU


def matrices(*shape: int) -> Array:
    """Return well-conditioned matrices: random ones with more weight on the diagonal."""
    return (rand(*shape) + 3 * np.eye(shape[-1])).astype(np.float32)


def solved(a: Array, b: Array) -> Array:
    if b.ndim < a.ndim:
        return np.linalg.solve(a, b[..., None])[..., 0]
    return np.linalg.solve(a, b)


@pytest.mark.parametrize("n", [1, 2, 8, 9, 30])
@pytest.mark.parametrize("columns", [(), (1,), (3,)])
def test_dense_solve(n: int, columns: tuple[int, ...]) -> None:
    """Written out up to 8 unknowns, as a loop above."""
    check(CPU, lambda g, a, b: g.dense_solve(a, b), solved, matrices(n, n), rand(n, *columns), bound=1e-4, strict=False)


def test_dense_solve_on_the_device(device: Device) -> None:
    """A small system needs basic ops only."""
    check(device, lambda g, a, b: g.dense_solve(a, b), solved, matrices(3, 3), rand(3, 2), bound=1e-4, strict=False)


@pytest.mark.parametrize("n", [5, 12])
def test_dense_solve_in_f64(n: int) -> None:
    """Doubles keep their precision."""
    a, b = matrices(n, n).astype(np.float64), rand(n).astype(np.float64)
    check(CPU, lambda g, a, b: g.dense_solve(a, b), solved, a, b, bound=1e-11, strict=False)


@pytest.mark.parametrize(
    "matrix",
    [
        [[0, 1], [2, 3]],
        [[0, 0, 1], [0, 2, 5], [4, 1, 1]],
        [[1e-12, 1], [1, 1]],
        [[0, 2, 1], [3, 1, 0], [3, 2, 0]],
    ],
)
def test_rows_are_exchanged(matrix: list[list[float]]) -> None:
    """A zero or tiny pivot would lose everything without partial pivoting."""
    a = np.array(matrix, np.float32)
    check(CPU, lambda g, a, b: g.dense_solve(a, b), solved, a, np.arange(1, len(a) + 1, dtype=np.float32))


@pytest.mark.parametrize("batch", [(4,), (2, 3), (0,)])
@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize("columns", [(), (2,)])
def test_batched_dense_solve(batch: tuple[int, ...], n: int, columns: tuple[int, ...]) -> None:
    """Each matrix of the batch exchanges its own rows."""
    a, b = matrices(*batch, n, n), rand(*batch, n, *columns)
    a[..., 0, 0] = 0
    check(CPU, lambda g, a, b: g.batched_dense_solve(a, b), solved, a, b, bound=1e-4, strict=False)


def test_batched_dense_solve_with_named_dims() -> None:
    """Batch and columns may be known to the run only."""
    shapes = [["b", 4, 4], ["b", 4, "k"]]
    check(
        CPU,
        lambda g, a, b: g.batched_dense_solve(a, b),
        solved,
        matrices(3, 4, 4),
        rand(3, 4, 2),
        shapes=shapes,
        bound=1e-4,
        strict=False,
    )


def test_a_singular_matrix_gives_no_finite_solution() -> None:
    """ONNX cannot raise, so the result says it."""
    ones = np.ones((2, 2), np.float32)
    (result,) = run(CPU, lambda g, a, b: g.dense_solve(a, b), ones, np.array([1, 2], np.float32))
    assert not np.isfinite(result).any()
