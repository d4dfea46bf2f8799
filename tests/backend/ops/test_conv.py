"""Convolution, pooling, columns and resizing of images and volumes against loops in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from op_tests.harness import Array, check, rand

from rlx_ort.device import Device
from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.graph import Graph

CPU = Device.CPU


def conv2d(
    x: Array, w: Array, stride: tuple[int, int], pad: tuple[int, int], dilation: tuple[int, int], groups: int
) -> Array:
    x = np.pad(x, [(0, 0), (0, 0), (pad[0], pad[0]), (pad[1], pad[1])])
    (n, _, height, width), (out, per, kh, kw) = x.shape, w.shape
    rows = (height - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    columns = (width - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((n, out, rows, columns))
    for o in range(out):
        first = o // (out // groups) * per
        for i in range(kh):
            for j in range(kw):
                down = slice(i * dilation[0], i * dilation[0] + rows * stride[0], stride[0])
                along = slice(j * dilation[1], j * dilation[1] + columns * stride[1], stride[1])
                part = x[:, first : first + per, down, along][:, :, :rows, :columns]
                y[:, o] += np.einsum("nchw,c->nhw", part, w[o, :, i, j])
    return y


CONVS = [
    ((1, 1), (0, 0), (1, 1), 1),
    ((2, 1), (1, 2), (1, 1), 1),
    ((1, 2), (2, 0), (2, 1), 1),
    ((1, 1), (1, 1), (1, 1), 2),
    ((2, 2), (0, 0), (1, 1), 4),
]


@pytest.mark.parametrize(("stride", "pad", "dilation", "groups"), CONVS)
def test_conv2d(
    stride: tuple[int, int], pad: tuple[int, int], dilation: tuple[int, int], groups: int, device: Device
) -> None:
    """Cross-correlation with stride, padding, dilation and groups, of images of open size."""
    check(
        device,
        lambda g, x, w: g.conv2d(x, w, None, stride, pad, dilation, groups, kernel=(3, 2)),
        lambda x, w: conv2d(x, w, stride, pad, dilation, groups),
        rand(2, 4, 7, 6),
        rand(8, 4 // groups, 3, 2),
        shapes=[["n", 4, "h", "w"]],
    )


def test_conv2d_with_bias(device: Device) -> None:
    """The bias is added to each channel."""
    check(
        device,
        lambda g, x, w, b: g.conv2d(x, w, b, 1, 1),
        lambda x, w, b: conv2d(x, w, (1, 1), (1, 1), (1, 1), 1) + b[:, None, None],
        rand(1, 3, 5, 5),
        rand(2, 3, 3, 3),
        rand(2),
        strict=True,
    )


def test_conv1d_is_a_conv2d_of_height_one(device: Device) -> None:
    """A 1-D convolution is written with a kernel (1, k)."""
    check(
        device,
        lambda g, x, w: g.conv2d(x, w, None, 1, (0, 1)),
        lambda x, w: conv2d(x, w, (1, 1), (0, 1), (1, 1), 1),
        rand(1, 2, 1, 6),
        rand(3, 2, 1, 3),
    )


def conv_transpose2d(
    x: Array, w: Array, stride: int, pad: int, output_padding: int, dilation: int, groups: int
) -> Array:
    (n, channels, height, width), (_, per, kh, kw) = x.shape, w.shape
    full = np.zeros(
        (
            n,
            per * groups,
            (height - 1) * stride + dilation * (kh - 1) + 1 + output_padding,
            (width - 1) * stride + dilation * (kw - 1) + 1 + output_padding,
        )
    )
    for c in range(channels):
        group = c // (channels // groups)
        for o in range(per):
            for i in range(height):
                for j in range(width):
                    for a in range(kh):
                        for b in range(kw):
                            place = (slice(None), group * per + o, i * stride + a * dilation, j * stride + b * dilation)
                            full[place] += x[:, c, i, j] * w[c, o, a, b]
    return full[:, :, pad : full.shape[2] - pad, pad : full.shape[3] - pad]


@pytest.mark.parametrize(
    ("stride", "pad", "output_padding", "dilation", "groups"),
    [(1, 0, 0, 1, 1), (2, 1, 1, 1, 1), (2, 0, 0, 2, 1), (2, 1, 0, 1, 2)],
)
def test_conv_transpose2d(
    stride: int, pad: int, output_padding: int, dilation: int, groups: int, device: Device
) -> None:
    """Each input element adds a scaled copy of the kernel."""
    if device.kind != "cpu" and (output_padding or dilation > 1):
        pytest.skip("one plain and one strided case are enough on a slow device")
    check(
        device,
        lambda g, x, w, b: g.conv_transpose2d(x, w, b, stride, pad, output_padding, dilation, groups),
        lambda x, w, b: conv_transpose2d(x, w, stride, pad, output_padding, dilation, groups) + b[:, None, None],
        rand(1, 4, 3, 3),
        rand(4, 3, 3, 3),
        rand(3 * groups),
    )


def test_an_output_padding_of_a_whole_step_is_refused() -> None:
    """As in PyTorch and by the definition of ONNX; CUDA's kernel ends the process."""
    g = Graph("g")
    x, w = g.input("x", [1, 4, 3, 3]), g.input("w", [4, 3, 3, 3])
    with pytest.raises(GraphVerifyError, match="output_padding"):
        g.conv_transpose2d(x, w, stride=(3, 1), output_padding=1)


@pytest.mark.parametrize(
    ("stride", "pad", "output_padding", "dilation", "groups"),
    [(1, 0, 0, 1, 1), (2, 1, 1, 1, 1), (3, 0, 0, 2, 1), (3, 2, 2, 1, 2), (1, 3, 0, 1, 1)],
)
@pytest.mark.parametrize("dims", [[1, 4, 5, 6], ["n", 4, "h", "w"]])
def test_transposed_convolutions_of_f64_have_the_precision_of_f64(
    dims: list[Any], stride: int, pad: int, output_padding: int, dilation: int, groups: int
) -> None:
    """The CPU has no kernel for f64; the image with zeros in it is convolved instead."""
    how = (stride, pad, output_padding, dilation, groups)
    x, w, b = (rand(*shape) / 7 + np.float64(1e-9) for shape in ((1, 4, 5, 6), (4, 3, 3, 3), (3 * groups,)))
    check(
        Device.CPU,
        lambda g, x, w, b: g.conv_transpose2d(x, w, b, *how),
        lambda x, w, b: conv_transpose2d(x, w, *how) + b[:, None, None],
        x,
        w,
        b,
        shapes=[dims],
        bound=1e-13,
    )


def pool(name: str, x: Array, kernel: int, stride: int, pad: int) -> Array:
    fill = {"max": -np.inf, "min": np.inf}.get(name, 0.0)
    x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)], constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]
    return {"max": np.max, "min": np.min, "sum": np.sum, "mean": np.mean}[name](windows, axis=(4, 5))


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("name", ["max", "mean", "sum", "min"])
def test_pool(name: str, pad: int, device: Device) -> None:
    """Padding never wins in max and min, and counts as zeros in mean and sum."""
    check(
        device,
        lambda g, x: g.pool(name, x, 3, 2, pad),
        lambda x: pool(name, x, 3, 2, pad),
        rand(2, 2, 7, 7) - 3,
        shapes=[["n", 2, 7, 7]],
    )


@pytest.mark.parametrize("name", ["max", "mean"])
def test_pool_of_f64(name: str) -> None:
    """f64 images pool too."""
    check(
        Device.CPU, lambda g, x: g.pool(name, x, 2, 2), lambda x: pool(name, x, 2, 2, 0), rand(1, 1, 4, 4).astype("f8")
    )


def test_resize_nearest_2x(device: Device) -> None:
    """Each pixel becomes four."""
    check(
        device,
        lambda g, x: g.resize_nearest_2x(x),
        lambda x: x.repeat(2, 2).repeat(2, 3),
        rand(1, 2, 3, 4),
        shapes=[["n", 2, "h", "w"]],
    )


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
        shapes=[["n", "c", *(f"s{axis}" for axis in range(len(old)))]] if dtype == "f8" else (),
        bound={"f2": 3e-3, "f4": 1e-5, "f8": 1e-14}[dtype],
    )


@pytest.mark.parametrize(
    ("shape", "weight", "how"),
    [
        ((2, 6, 7, 6), (4, 6, 3, 2), {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}),
        ((2, 6, 5, 5), (4, 3, 3, 3), {"groups": 2}),
        ((1, 2, 4, 5, 4), (3, 2, 2, 2, 3), {"padding": (1, 0, 1), "stride": (1, 2, 1)}),
    ],
)
def test_convolutions_of_f64_have_the_precision_of_f64(
    shape: tuple[int, ...], weight: tuple[int, ...], how: dict[str, Any]
) -> None:
    """The CPU has no kernel for f64; sizes may be open."""
    x, w, b = (rand(*dims, seed=3) / 7 + np.float64(1e-9) for dims in (shape, weight, weight[:1]))
    spaces, groups = len(weight) - 2, how.get("groups", 1)
    stride, padding, dilation = (
        how.get(name, (default,) * spaces) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    padded = np.pad(x, [(0, 0), (0, 0), *((by, by) for by in padding)])
    spans = [(size - 1) * by + 1 for size, by in zip(weight[2:], dilation, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans, axis=tuple(range(2, 2 + spaces)))
    windows = windows[(..., *(slice(None, None, by) for by in stride), *(slice(None, None, by) for by in dilation))]
    parts = windows.reshape(shape[0], groups, weight[1], *windows.shape[2:])
    letters = "abc"[:spaces], "xyz"[:spaces]
    kernels = w.reshape(groups, weight[0] // groups, *weight[1:])
    expected = np.einsum(f"ngi{letters[0]}{letters[1]},goi{letters[1]}->ngo{letters[0]}", parts, kernels)
    expected = expected.reshape(shape[0], weight[0], *expected.shape[3:]) + b.reshape(-1, *[1] * spaces)
    for dims in (list(shape), ["n", shape[1], *(f"s{place}" for place in range(spaces))]):
        check(
            Device.CPU,
            lambda g, x, w, b: getattr(g, f"conv{spaces}d")(x, w, b, **how),
            lambda *_: expected,
            x,
            w,
            b,
            shapes=[dims],
            bound=1e-13,
        )


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_mean_pools_of_f64_have_the_precision_of_f64(kind: str) -> None:
    """The kernel is for f32; padding counts."""
    x = rand(1, 2, 6, 7, seed=3) / 7 + np.float64(1e-9)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)]), (3, 2), (2, 3))
    expected = windows[:, :, ::2].mean((-2, -1)) * (1 if kind == "mean" else 6)
    check(
        Device.CPU,
        lambda g, x: g.pool(kind, x, (3, 2), (2, 1), (1, 0)),
        lambda _: expected,
        x,
        shapes=[["n", 2, "h", "w"]],
        bound=1e-13,
    )
