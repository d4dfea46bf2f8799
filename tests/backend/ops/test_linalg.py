"""Matrix products and solvers against the reference interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from op_tests.harness import Array, check, rand, run

from rlx_ort.device import Device

CPU = Device.CPU


@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((5, 1, 2, 3), (4, 3, 2)), ((2, 2, 3), (3, 5)), ((2, 0), (0, 3))])
def test_matmul_broadcasts_its_batch(shapes: tuple[tuple[int, ...], tuple[int, ...]], device: Device) -> None:
    """Leading dimensions broadcast; an empty inner dimension gives zeros."""
    if 0 in shapes[0] and device.kind != "cpu":
        pytest.skip("empty products are checked on the CPU")
    check(device, lambda g, a, b: a @ b, rand(*shapes[0]), rand(*shapes[1]))


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.int64, np.uint8, np.int8])
def test_matmul_of_other_dtypes(dtype: type) -> None:
    """Integer products are exact."""
    a, b = np.arange(6).reshape(2, 3).astype(dtype), np.arange(6).reshape(3, 2).astype(dtype)
    check(Device.CPU, lambda g, a, b: a @ b, a, b)


@pytest.mark.parametrize("open_dims", [False, True])
def test_dot_general_orders_its_axes(open_dims: bool, device: Device) -> None:
    """Batch, free axes of lhs, free axes of rhs; two axes are contracted."""
    lhs, rhs = rand(2, 3, 4, 5), rand(5, 2, 4, 6, 3)
    shapes = [["b", "m", 4, 5], [5, "b", 4, "n", 3]] if open_dims else []
    check(
        device,
        lambda g, a, b: g.dot_general(a, b, [2, 3], [2, 0], [0], [1]),
        lhs,
        rhs,
        shapes=shapes,
        reference=lambda a, b: np.einsum("bmik,kbinj->bmnj", a, b),
    )


def test_dot_general_of_vectors_is_a_scalar(device: Device) -> None:
    """Nothing is left when all axes are contracted."""
    check(device, lambda g, a, b: g.dot_general(a, b, [0], [0]), rand(7), rand(7, seed=1))


def test_half_precision_matmul_is_close() -> None:
    """f16 operands give an f16 result."""
    a, b = rand(4, 8).astype(np.float16), rand(8, 4).astype(np.float16)
    (result,) = run(Device.CPU, lambda g, a, b: a @ b, a, b)
    np.testing.assert_allclose(result.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64), atol=2e-2)


def matrices(*shape: int) -> Array:
    """Return well-conditioned matrices: random ones with more weight on the diagonal."""
    return (rand(*shape) + 3 * np.eye(shape[-1])).astype(np.float32)


@pytest.mark.parametrize("n", [1, 2, 8, 9, 30])
@pytest.mark.parametrize("columns", [(), (1,), (3,)])
def test_dense_solve(n: int, columns: tuple[int, ...]) -> None:
    """Written out up to 8 unknowns, as a loop above."""
    check(CPU, lambda g, a, b: g.dense_solve(a, b), matrices(n, n), rand(n, *columns), bound=1e-4, strict=False)


def test_dense_solve_on_the_device(device: Device) -> None:
    """A small system needs basic ops only."""
    check(device, lambda g, a, b: g.dense_solve(a, b), matrices(3, 3), rand(3, 2), bound=1e-4, strict=False)


@pytest.mark.parametrize("n", [5, 12])
def test_dense_solve_in_f64(n: int) -> None:
    """Doubles keep their precision."""
    a, b = matrices(n, n).astype(np.float64), rand(n).astype(np.float64)
    check(CPU, lambda g, a, b: g.dense_solve(a, b), a, b, bound=1e-11, strict=False)


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
    check(CPU, lambda g, a, b: g.dense_solve(a, b), a, np.arange(1, len(a) + 1, dtype=np.float32))


@pytest.mark.parametrize("batch", [(4,), (2, 3), (0,)])
@pytest.mark.parametrize("n", [3, 12])
@pytest.mark.parametrize("columns", [(), (2,)])
def test_batched_dense_solve(batch: tuple[int, ...], n: int, columns: tuple[int, ...]) -> None:
    """Each matrix of the batch exchanges its own rows."""
    a, b = matrices(*batch, n, n), rand(*batch, n, *columns)
    a[..., 0, 0] = 0
    check(CPU, lambda g, a, b: g.batched_dense_solve(a, b), a, b, bound=1e-4, strict=False)


def test_batched_dense_solve_with_named_dims() -> None:
    """Batch and columns may be known to the run only."""
    shapes = [["b", 4, 4], ["b", 4, "k"]]
    check(
        CPU,
        lambda g, a, b: g.batched_dense_solve(a, b),
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
