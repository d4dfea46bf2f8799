"""Quantisation and integer products against the reference: rounding half to even, saturation, zero points."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from op_tests.harness import Array, check, run

from rlx_ort.device import Device

CPU = Device.CPU
TIES = np.array([[-2.5, -1.5, -0.5, 0.5], [1.5, 2.5, 3.25, -0.0], [6e4, -6e4, 63.5, -64.5]])


def integers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).integers(-128, 128, shape).astype(np.int8)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_quantize_rounds_half_to_even_and_saturates(dtype: type) -> None:
    """Ties go to the even number; what is too large stays at the end."""
    check(CPU, lambda g, x: [g.quantize(x, 0.5, 3), g.quantize(x, 1.0)], TIES.astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axis", [0, -2])
def test_quantize_per_channel(dtype: type, axis: int) -> None:
    """Each row has its scale and zero point."""
    scales, zeros = [0.5, 1.0, 2.0], [-128, 0, 127]
    check(CPU, lambda g, x: g.quantize_per_channel(x, axis, scales, zeros), TIES.astype(dtype))


def test_quantize_of_nothing_and_of_a_scalar() -> None:
    """No element, and no dimension."""
    for x in (np.zeros((0, 3), np.float32), np.asarray(1.3, np.float32)):
        check(CPU, lambda g, x: g.quantize(x, 0.5), x)


def test_dequantize() -> None:
    """(q - zero point) * scale, for one scale and for one a column."""
    scales, zeros = [0.25, 1.5, 3.0], [-128, 5, 127]
    build = lambda g, q: [g.dequantize(q, 0.25, -7), g.dequantize_per_channel(q, 1, scales, zeros)]  # noqa: E731
    check(CPU, build, integers(4, 3))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_fake_quantize_takes_its_scale_from_the_input(bits: int, axis: int | None, device: Device) -> None:
    """The largest element becomes qmax exactly, in whole or along an axis."""
    x = np.random.default_rng(bits).normal(size=(3, 4)).astype(np.float32)
    check(device, lambda g, x: g.fake_quantize(x, bits, axis), x, strict=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_fake_quantize_of_zeros_is_zeros(dtype: type) -> None:
    """The smallest scale is 1e-12, so nothing is divided by 0, not even in f16."""
    check(CPU, lambda g, x: g.fake_quantize(x), np.zeros((2, 3), dtype))


def test_fake_quantize_of_nothing_is_nothing() -> None:
    """There is no largest element to take a scale from."""
    check(CPU, lambda g, x: g.fake_quantize(x), np.zeros((0, 3), np.float32))


@pytest.mark.parametrize("mode", ["fixed", "ema"])
def test_fake_quantize_with_a_state_takes_it_as_scale(mode: str) -> None:
    """A moving average is not moved by a run: the state is the scale."""
    state = np.array([0.5, 1.0, 2.0], np.float32)
    check(CPU, lambda g, x: g.fake_quantize(x, 4, 0, state, mode), TIES.astype(np.float32))


def test_fake_quantize_lsq(device: Device) -> None:
    """A learned scale is an input; ties go to the even number."""
    x, scale = TIES.astype(np.float32), np.asarray([0.5], np.float32)
    check(device, lambda g, x, s: g.fake_quantize_lsq(x, s, 4), x, scale, strict=False)


@pytest.mark.parametrize("zeros", [(0, 0, 0), (3, -7, 5), (-128, 127, -128), (127, -128, 127)])
@pytest.mark.parametrize("shape", [(2, 8), (3, 2, 8), (0, 8), (2, 0)])
def test_q_matmul(zeros: tuple[int, int, int], shape: tuple[int, ...]) -> None:
    """Exact sums, then one rounding, for every zero point and for empty matrices."""
    bias = np.array([-1000, 0, 7, 99, 12345], np.int32)
    x, w = integers(*shape), integers(shape[-1], 5, seed=1)
    check(CPU, lambda g, x, w: g.q_matmul(x, w, bias, *zeros, 0.0031), x, w)


def test_q_matmul_rounds_a_tie_to_even_and_needs_no_bias() -> None:
    """1 * 1 * 0.5 is 0.5, which is 0; 3 * 0.5 is 1.5, which is 2; 5 * 0.5 is 2.5, which is 2."""
    (result,) = run(CPU, lambda g, x, w: g.q_matmul(x, w, None, 0, 0, 0, 0.5), *map(as_i8, ([[1], [3], [5]], [[1]])))
    assert result.reshape(-1).tolist() == [0, 2, 2]


def test_q_matmul_keeps_sums_that_f32_cannot_hold() -> None:
    """5 * 2^23 + 1 times 2^-24 is a little above 2.5, which is 3; as f32 it would be 2.5, which is 2."""
    bias = np.array([5 * 2**23 + 1], np.int32)
    zero = np.zeros((1, 1), np.int8)
    (result,) = run(CPU, lambda g, x, w: g.q_matmul(x, w, bias, 0, 0, 0, 2.0**-24), zero, zero)
    assert result.tolist() == [[3]]


def as_i8(numbers: list[list[int]]) -> Array:
    return np.asarray(numbers, np.int8)


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"),
    list(itertools.product([(1, 1), (2, 1)], [(0, 0), (1, 2)], [(1, 1), (1, 3)], [1, 3])),
)
def test_q_conv2d(stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int], groups: int) -> None:
    """Padded taps contribute nothing, although the zero point of x is not 0."""
    x, w = integers(2, 6, 7, 8), integers(9, 6 // groups, 3, 2, seed=1)
    bias = np.arange(-400, 500, 100, dtype=np.int32)
    how = (3, -7, 5, 0.0007, stride, padding, dilation, groups)
    check(CPU, lambda g, x, w: g.q_conv2d(x, w, bias, *how), x, w)
