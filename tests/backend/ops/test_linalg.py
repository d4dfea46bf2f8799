"""Matrix products against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from op_tests.harness import check, rand, run

from rlx_ort.device import Device


@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((5, 1, 2, 3), (4, 3, 2)), ((2, 2, 3), (3, 5)), ((2, 0), (0, 3))])
def test_matmul_broadcasts_its_batch(shapes: tuple[tuple[int, ...], tuple[int, ...]], device: Device) -> None:
    """Leading dimensions broadcast; an empty inner dimension gives zeros."""
    if 0 in shapes[0] and device.kind != "cpu":
        pytest.skip("empty products are checked on the CPU")
    check(device, lambda g, a, b: a @ b, np.matmul, rand(*shapes[0]), rand(*shapes[1]))


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.int64, np.uint8, np.int8])
def test_matmul_of_other_dtypes(dtype: type) -> None:
    """Integer products are exact."""
    a, b = np.arange(6).reshape(2, 3).astype(dtype), np.arange(6).reshape(3, 2).astype(dtype)
    check(Device.CPU, lambda g, a, b: a @ b, np.matmul, a, b)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_fused_matmul_bias_act(activation: str | None, device: Device) -> None:
    """act(x @ w + b), with an open batch."""
    functions = {
        None: lambda y: y,
        "relu": lambda y: np.maximum(y, 0),
        "gelu": lambda y: y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2))),
    }
    check(
        device,
        lambda g, x, w, b: g.fused_matmul_bias_act(x, w, b, activation=activation),
        lambda x, w, b: functions[activation](x @ w + b),
        rand(3, 4),
        rand(4, 5),
        rand(5),
        shapes=[["n", 4]],
        strict=True,
    )


def test_lora_matmul(device: Device) -> None:
    """X W + scale (x A) B."""
    check(
        device,
        lambda g, x, w, a, b: g.lora_matmul(x, w, a, b, 0.25),
        lambda x, w, a, b: x @ w + 0.25 * (x @ a) @ b,
        rand(3, 4),
        rand(4, 5),
        rand(4, 2),
        rand(2, 5),
    )


@pytest.mark.parametrize("open_dims", [False, True])
def test_dot_general_orders_its_axes(open_dims: bool, device: Device) -> None:
    """Batch, free axes of lhs, free axes of rhs; two axes are contracted."""
    lhs, rhs = rand(2, 3, 4, 5), rand(5, 2, 4, 6, 3)
    shapes = [["b", "m", 4, 5], [5, "b", 4, "n", 3]] if open_dims else []
    check(
        device,
        lambda g, a, b: g.dot_general(a, b, [2, 3], [2, 0], [0], [1]),
        lambda a, b: np.einsum("bmik,kbinj->bmnj", a, b),
        lhs,
        rhs,
        shapes=shapes,
    )


def test_dot_general_of_vectors_is_a_scalar(device: Device) -> None:
    """Nothing is left when all axes are contracted."""
    check(device, lambda g, a, b: g.dot_general(a, b, [0], [0]), np.dot, rand(7), rand(7, seed=1))


def test_half_precision_matmul_is_close() -> None:
    """f16 operands give an f16 result."""
    a, b = rand(4, 8).astype(np.float16), rand(8, 4).astype(np.float16)
    (result,) = run(Device.CPU, lambda g, a, b: a @ b, a, b)
    np.testing.assert_allclose(result.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64), atol=2e-2)
