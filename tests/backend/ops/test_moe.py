"""Products with a matrix for each row, and sums of rows, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from op_tests.harness import Array, check, rand

from rlx_ort.device import Device

CPU = Device.CPU


@pytest.mark.parametrize("rows", [0, 1, 3, 9])
@pytest.mark.parametrize("is_open", [True, False])
def test_grouped_matmul(rows: int, is_open: bool, device: Device) -> None:
    """Each row meets its expert's matrix; an expert without rows does no harm."""
    if device.kind != "cpu" and (rows == 0 or is_open):
        pytest.skip("loops and empty tensors are checked on the CPU")
    chosen = np.random.default_rng(rows).integers(0, 3, rows).astype(np.int32)  # expert 3 has no row
    check(
        device,
        lambda g, x, w, i: g.grouped_matmul(x, w, i),
        lambda x, w, i: np.einsum("mk,mkn->mn", x, w[i]),
        rand(rows, 4),
        rand(4, 4, 5),
        chosen,
        shapes=[["m", 4], None, ["m"]] if is_open else [],
        strict=False,
    )


def test_grouped_matmul_takes_float_experts() -> None:
    """Indices may travel as floats."""
    check(
        CPU,
        lambda g, x, w, i: g.grouped_matmul(x, w, i),
        lambda x, w, i: np.einsum("mk,mkn->mn", x, w[i.astype(int)]),
        rand(3, 4),
        rand(2, 4, 5),
        np.array([1.0, 0.0, 1.0], np.float32),
        strict=False,
    )


def summed(updates: Array, indices: Array, rows: int) -> Array:
    result = np.zeros((rows, *updates.shape[1:]), updates.dtype)
    np.add.at(result, indices.astype(int), updates)
    return result


@pytest.mark.parametrize(
    ("dtype", "bound"), [(np.float32, 1e-6), (np.float64, 1e-12), (np.float16, 2e-3), (np.int32, 0), (np.int64, 0)]
)
def test_scatter_add(dtype: type, bound: float) -> None:
    """Rows that meet are added; rows that nothing reaches are 0."""
    updates = (rand(6, 2) * 10).astype(dtype)
    indices = np.array([4, 0, 4, 4, 1, 0])
    check(CPU, lambda g, u, i: g.scatter_add(u, i, 6), lambda u, i: summed(u, i, 6), updates, indices, bound=bound)


@pytest.mark.parametrize("shape", [(0, 3), (4,), (3, 2, 2)])
def test_scatter_add_of_any_rank(shape: tuple[int, ...]) -> None:
    """No updates at all, numbers, and matrices."""
    indices = np.arange(shape[0], dtype=np.int64) % 2
    check(CPU, lambda g, u, i: g.scatter_add(u, i, 3), lambda u, i: summed(u, i, 3), rand(*shape), indices)


def test_scatter_add_undoes_a_gather_of_named_rows() -> None:
    """The number of rows may be a named dim of another input."""
    tokens, places = rand(5, 3), np.array([3, 0, 3], np.int64)

    def build(g: object, x: object, i: object) -> object:
        return g.scatter_add(g.gather(x, i), i, "t")  # type: ignore[attr-defined]  # a graph

    check(
        CPU,
        build,
        lambda x, i: summed(x[i], i, 5),
        tokens,
        places,
        shapes=[["t", 3], ["u"]],
    )
