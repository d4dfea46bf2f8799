"""Convolution in three dimensions, columns and resizing against numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from op_tests.harness import Array, check, rand

from rlx_ort.device import Device

CPU = Device.CPU


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), list(itertools.product([1, (2, 1, 1)], [0, (1, 0, 2)], [1, (1, 1, 2)]))
)
def test_conv3d(stride: int | tuple[int, ...], padding: int | tuple[int, ...], dilation: int | tuple[int, ...]) -> None:
    """Strides, padding and dilation by axis, in two groups, with a bias."""
    steps, pads, gaps = ((value,) * 3 if isinstance(value, int) else value for value in (stride, padding, dilation))

    def reference(x: Array, w: Array, b: Array) -> Array:
        volume = np.pad(x, [(0, 0), (0, 0), *((pad, pad) for pad in pads)])
        spans = [gap * (size - 1) + 1 for gap, size in zip(gaps, w.shape[2:], strict=True)]
        sizes = [(volume.shape[2 + i] - spans[i]) // steps[i] + 1 for i in range(3)]
        result = np.zeros((x.shape[0], w.shape[0], *sizes))
        for channel, *place in itertools.product(range(w.shape[0]), *map(range, sizes)):
            first = channel // 3 * 2
            cut = [slice(p * s, p * s + span, gap) for p, s, span, gap in zip(place, steps, spans, gaps, strict=True)]
            window = volume[(slice(None), slice(first, first + 2), *cut)]
            result[(slice(None), channel, *place)] = (window * w[channel]).sum((1, 2, 3, 4)) + b[channel]
        return result

    check(
        CPU,
        lambda g, x, w, b: g.conv3d(x, w, b, stride, padding, dilation, 2),
        reference,
        rand(2, 4, 4, 5, 6),
        rand(6, 2, 2, 3, 2),
        rand(6),
    )


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ((3, 3), (1, 1), (0, 0), (1, 1)),
        ((2, 3), (2, 1), (1, 0), (1, 1)),
        ((2, 2), (1, 1), (0, 1), (2, 3)),
        ((1, 1), (2, 2), (0, 0), (1, 1)),
    ],
)
def test_im2col(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    device: Device,
) -> None:
    """Rows are channel, then tap; columns are the windows, row by row."""

    def reference(x: Array) -> Array:
        image = np.pad(x, [(0, 0), (0, 0), *((pad, pad) for pad in padding)])
        spans = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
        rows, columns = ((image.shape[2 + i] - spans[i]) // stride[i] + 1 for i in (0, 1))
        windows = [
            image[
                :,
                :,
                i * stride[0] : i * stride[0] + spans[0] : dilation[0],
                j * stride[1] : j * stride[1] + spans[1] : dilation[1],
            ].reshape(len(x), -1)
            for i in range(rows)
            for j in range(columns)
        ]
        return np.stack(windows, axis=-1)

    check(
        device,
        lambda g, x: g.im2col(x, kernel, stride, padding, dilation),
        reference,
        rand(2, 3, 6, 7),
        shapes=[["n", 3, 6, 7]],
        strict=False,
    )


def positions(old: int, new: int, align_corners: bool) -> Array:
    if align_corners:
        return np.arange(new) * ((old - 1) / max(new - 1, 1))
    return (np.arange(new) + 0.5) * old / new - 0.5


def cubic(distance: float) -> float:
    a, x = -0.75, abs(distance)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def mixing(old: int, new: int, mode: str, align_corners: bool) -> Array:
    """Return the matrix that makes `new` elements of `old` ones; places outside count as the edge."""
    matrix = np.zeros((new, old))
    if mode == "nearest":
        matrix[np.arange(new), np.floor(np.arange(new) * old / new).astype(int)] = 1
        return matrix
    for row, place in enumerate(positions(old, new, align_corners)):
        if mode == "linear":
            place = min(max(place, 0.0), old - 1.0)
        first = math.floor(place)
        taps = range(first - 1, first + 3) if mode == "cubic" else range(first, first + 2)
        for tap in taps:
            share = cubic(place - tap) if mode == "cubic" else max(1 - abs(place - tap), 0.0)
            matrix[row, min(max(tap, 0), old - 1)] += share
    return matrix


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8"])
@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize(
    ("old", "new", "mode"),
    [
        ((5,), (8,), "linear"),
        ((5,), (3,), "nearest"),
        ((4, 5), (7, 3), "linear"),
        ((4, 5), (7, 3), "cubic"),
        ((4, 5), (7, 11), "nearest"),
        ((3, 4, 5), (5, 4, 3), "linear"),
        ((3, 4, 5), (5, 4, 9), "nearest"),
    ],
)
def test_interpolate(old: tuple[int, ...], new: tuple[int, ...], mode: str, align_corners: bool, dtype: str) -> None:
    """One dimension to three, larger and smaller, by the definition of each mode."""
    if align_corners and mode == "nearest":
        pytest.skip("nearest has no corners to align")

    def reference(x: Array) -> Array:
        for axis, (before, after) in enumerate(zip(old, new, strict=True), 2):
            matrix = mixing(before, after, mode, align_corners)
            x = np.moveaxis(np.moveaxis(x, axis, -1) @ matrix.T, -1, axis)
        return x

    check(
        CPU,
        lambda g, x: g.interpolate(x, new, mode, align_corners),
        reference,
        rand(2, 3, *old).astype(dtype),
        bound=3e-3 if dtype == "f2" else 1e-5,
    )
