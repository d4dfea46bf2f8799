"""Elementwise ops against numpy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interpreter.elementwise import ACTIVATION
from op_tests.harness import Array, check, rand, run

from rlx_ort.device import Device
from rlx_ort.ir.ops.elementwise import ACTIVATIONS

POSITIVE = {"log", "sqrt", "rsqrt"}
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
POINTS = np.array([[-6.0, -3.0, -2.5, -1.5, -0.5], [0.25, 0.5, 1.5, 2.5, 4.75]], np.float32)


def test_every_activation_has_a_reference() -> None:
    """An activation that is added must be checked here."""
    assert set(ACTIVATIONS) == set(ACTIVATION)


@pytest.mark.parametrize("name", ACTIVATION)
def test_activation_matches_its_formula(name: str, device: Device) -> None:
    """Each activation on negative and positive numbers, with an open batch dim."""
    x = np.abs(POINTS) if name in POSITIVE else POINTS
    check(device, lambda g, x: g.activation(name, x), x, shapes=[["n", 5]])


def test_round_goes_half_to_even(device: Device) -> None:
    """Ties go to the even neighbour on both sides of 0."""
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.4999], np.float32)
    (result,) = run(device, lambda g, x: g.activation("round", x), x)
    np.testing.assert_array_equal(result, [-2, -2, 0, 0, 2, 2, 3])


@pytest.mark.parametrize("name", ["softplus", "log_sigmoid", "mish", "sigmoid", "silu", "elu"])
def test_activation_is_stable_far_from_zero(name: str, device: Device) -> None:
    """Large arguments neither overflow nor become NaN."""
    check(device, lambda g, x: g.activation(name, x), np.array([-200.0, -90.0, 90.0, 200.0], np.float32))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "max", "min", "mod", "atan2"])
def test_binary_broadcasts(name: str, device: Device) -> None:
    """Shapes (3, 1) and (4,) meet in (3, 4), with an open dim."""
    check(device, lambda g, a, b: g.binary(name, a, b), rand(3, 1), rand(4, seed=1), shapes=[["n", 1], None])


def test_pow(device: Device) -> None:
    """Bases above 0 to any power."""
    check(device, lambda g, a, b: a**b, np.abs(rand(3, 4)) + 0.1, rand(3, 4, seed=1))


@pytest.mark.parametrize(
    "build",
    [
        lambda g, a, b: g.binary("max", a, b),
        lambda g, a, b: g.binary("min", a, b),
        lambda g, a, b: g.activation("relu", a),
        lambda g, a, b: g.activation("sign", a),
        lambda g, a, b: g.clamp(a, -1, 3_900_000_000),
        lambda g, a, b: g.cummax(a, axis=0),
    ],
    ids=["max", "min", "relu", "sign", "clamp", "cummax"],
)
def test_i64_that_differ_in_their_lower_half_are_ordered(build: Callable[..., Any]) -> None:
    """The CPU's vector kernels take the lower 32 bits for a signed number."""
    a = np.array([5, 3_000_000_000, -1, -3_000_000_000, 2**40, 0, 2**40 + 2**31, 4_200_000_000])
    b = np.array([4_000_000_000, 5, -3_000_000_000, -1, 2**40 + 2**31, -1, 2**40, 4_100_000_000])
    check(Device.CPU, build, a, b)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_division_and_remainder_drop_the_fraction(dtype: type) -> None:
    """The quotient goes toward 0, so the remainder has the sign of the dividend."""
    signs = [1, 1] if dtype(0).dtype.kind == "u" else [-1, 1]
    a, b = np.array([7 * signs[0], 7], dtype), np.array([2, 2 * signs[0]], dtype)
    check(Device.CPU, lambda g, a, b: [a / b, g.binary("%", a, b)], a, b)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_shifts_match_numpy(dtype: type) -> None:
    """Left shifts drop high bits; right shifts of negative numbers keep the sign."""
    values = [1, 3, 100, 0] if dtype(0).dtype.kind == "u" else [-1, -77, 100, 3]
    a, b = np.array(values, dtype), np.array([1, 2, 3, 0], dtype)
    check(Device.CPU, lambda g, a, b: [g.binary("<<", a, b), g.binary(">>", a, b)], a, b)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparison(name: str, device: Device) -> None:
    """All six comparisons, equal elements among them."""
    a, b = np.array([1.0, 2.0, 3.0], np.float32), np.array([2.0, 2.0, 2.0], np.float32)
    check(device, lambda g, a, b: g.compare(name, a, b), a, b, shapes=[["n"], ["n"]])


def test_where_takes_a_number_as_condition(device: Device) -> None:
    """Anything but 0 picks the first branch."""
    c = np.array([0.0, -1.0, 0.25], np.float32)
    reference = lambda c, a, b: np.where(c != 0, a, b)  # noqa: E731
    check(device, lambda g, c, a, b: g.where_(c, a, b), c, rand(2, 3), rand(3), reference=reference)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_where_keeps_the_largest_number(dtype: type) -> None:
    """No branch passes through a type that cannot hold it."""
    a = np.array([3, np.iinfo(dtype).max], dtype)
    check(Device.CPU, lambda g, c, a, b: g.where_(c, a, b), np.array([False, True]), a, a[::-1].copy())


@pytest.mark.parametrize("to", ["i32", "i8", "bool", "f64"])
def test_cast_drops_the_fraction(to: str) -> None:
    """Float to integer goes toward 0, to bool is != 0."""
    check(Device.CPU, lambda g, x: g.cast(x, to), np.array([-2.9, -0.5, 0.0, 0.5, 2.9], np.float32))


def test_mixed_dtypes_compute_in_the_promoted_one() -> None:
    """i64 + f32 is f64, f16 + bf16 would lose nothing in f32."""
    a, b = np.array([2**40 + 1], np.int64), np.array([0.5], np.float32)
    check(Device.CPU, lambda g, a, b: a + b, a, b, reference=np.add)


@pytest.mark.parametrize(("low", "high"), [(-0.5, 0.5), (None, 0.25), (0.0, None)])
def test_clamp(low: float | None, high: float | None, device: Device) -> None:
    """Either bound may be left out."""
    check(device, lambda g, x: g.clamp(x, low, high), rand(3, 4))


def test_elementwise_of_nothing() -> None:
    """An empty tensor stays empty."""
    check(Device.CPU, lambda g, x: g.gelu(x) + 1, np.zeros((0, 3), np.float32), shapes=[["n", 3]])


_SIZES = np.concatenate([np.logspace(-12, 2.8, 150), [0.5, 1.0, 2.0, 20.0, 40.0, 700.0]])


# The formulas above lose the digits of small results to 1 + tanh, 1 + erf and the like.
PRECISE: dict[str, Callable[[Array], Array]] = {
    **ACTIVATION,
    "gelu": lambda x: 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2)),
    "gelu_approx": lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("name", ACTIVATION)
def test_activations_of_f64_have_the_precision_of_f64(name: str) -> None:
    """Near 0 and far from it, without the digits that 1 + x and exp(x) - 1 lose."""
    x = np.concatenate([_SIZES, -_SIZES])
    x = np.abs(x) if name in POSITIVE else x
    x = x[x > -8] if name == "gelu" else x  # 1e-15 and less beyond
    (got,) = run(Device.CPU, lambda g, x: g.activation(name, x), x)
    with np.errstate(over="ignore", under="ignore"):
        expected = PRECISE[name](x)
    np.testing.assert_allclose(got, expected, rtol=1e-12 if name == "gelu" else 5e-14, atol=1e-300)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_atan2_of_signed_zeros_and_infinities(dtype: type) -> None:
    """As IEEE 754 has them."""
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.5], dtype)
    y, x = (part.reshape(-1) for part in np.meshgrid(special, special))
    (angle,) = run(Device.CPU, lambda g, y, x: g.binary("atan2", y, x), y, x)
    np.testing.assert_allclose(angle, np.arctan2(y, x), rtol=1e-6 if dtype is np.float32 else 1e-15)


def test_an_f64_factor_near_1_counts() -> None:
    """ONNX Runtime's optimiser removes a product with what is within 1e-8 of 1."""
    x = np.array([5.0, 7.0])
    for factor in (1 + 4e-9, 1 - 1e-10):
        (got,) = run(Device.CPU, lambda g, x, by=factor: g.abs(x) * by / (2 - by), x)
        np.testing.assert_allclose(got, x * factor / (2 - factor), rtol=1e-15)


def test_an_f64_product_is_scaled_in_f64() -> None:
    """ONNX Runtime's optimiser would put the factor into an attribute, which is an f32."""
    a, b = np.random.default_rng(0).normal(size=(2, 3, 3))
    check(Device.CPU, lambda g, a, b: (a @ b) * 0.1 / 0.3, a, b, bound=1e-13)


def test_angles_of_f64_have_the_precision_of_f64() -> None:
    """Atan and atan2 are within two rounding errors of numpy, for numbers of all sizes."""
    sizes = np.concatenate([np.logspace(-300, 300, 121), [np.inf, 1.0, 0.3, 7.7]])
    x = np.concatenate([sizes, -sizes, [0.0, np.nan]])
    (angle,) = run(Device.CPU, lambda g, x: g.activation("atan", x), x)
    np.testing.assert_allclose(angle, np.arctan(x), rtol=4.5e-16, atol=0)
    y = np.random.default_rng(0).normal(size=200)
    x = np.random.default_rng(1).normal(size=200)
    (angle,) = run(Device.CPU, lambda g, y, x: g.binary("atan2", y, x), y, x)
    np.testing.assert_allclose(angle, np.arctan2(y, x), rtol=1e-15, atol=4e-16)
