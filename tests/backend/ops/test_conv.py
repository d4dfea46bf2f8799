"""Convolution, pooling, columns and resizing of images and volumes against loops in float64."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_text import parsed
from op_tests.harness import Array, check, rand

from rlx_ort import Device, Graph, GraphVerifyError, RlxError, Session, from_onnx, supports_graph

Pair = tuple[int, int]


def fine(*shape: int) -> Array:
    """Return f64 numbers that f32 cannot hold."""
    return rand(*shape, seed=3) / 7 + np.float64(1e-9)


@pytest.mark.parametrize(
    ("stride", "pad", "dilation", "groups"),
    [
        ((1, 1), (0, 0), (1, 1), 1),
        ((2, 1), (1, 2), (1, 1), 1),
        ((1, 2), (2, 0), (2, 1), 1),
        ((1, 1), (1, 1), (1, 1), 2),
        ((2, 2), (0, 0), (1, 1), 4),
    ],
)
def test_conv2d(stride: Pair, pad: Pair, dilation: Pair, groups: int, device: Device) -> None:
    """Cross-correlation with stride, padding, dilation and groups, of images of open size."""
    check(
        device,
        lambda g, x, w: g.conv2d(x, w, None, stride, pad, dilation, groups, kernel=(3, 2)),
        rand(2, 4, 7, 6),
        rand(8, 4 // groups, 3, 2),
        shapes=[["n", 4, "h", "w"]],
    )


def test_conv1d_is_a_conv2d_of_height_one(device: Device) -> None:
    """A 1-D convolution is written with a kernel (1, k)."""
    check(device, lambda g, x, w: g.conv2d(x, w, None, 1, (0, 1)), rand(1, 2, 1, 6), rand(3, 2, 1, 3))


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
        *(rand(1, 4, 3, 3), rand(4, 3, 3, 3), rand(3 * groups)),
    )


def test_an_output_padding_of_a_whole_step_is_refused() -> None:
    """As in PyTorch and by the definition of ONNX; CUDA's kernel ends the process."""
    g = Graph("g")
    x, w = g.input("x", [1, 4, 3, 3]), g.input("w", [4, 3, 3, 3])
    with pytest.raises(GraphVerifyError, match="output_padding"):
        g.conv_transpose2d(x, w, stride=(3, 1), output_padding=1)


@pytest.mark.parametrize(
    "how",
    [(1, 0, 0, 1, 1), (2, 1, 1, 1, 1), (3, 0, 0, 2, 1), (3, 2, 2, 1, 2), (1, 3, 0, 1, 1)],
    ids="stride {0[0]} pad {0[1]} extra {0[2]} dilation {0[3]} groups {0[4]}".format,
)
@pytest.mark.parametrize("dims", [[1, 4, 5, 6], ["n", 4, "h", "w"]])
def test_transposed_convolutions_of_f64_have_the_precision_of_f64(dims: list[Any], how: tuple[int, ...]) -> None:
    """The CPU has no kernel for f64; the image with zeros in it is convolved instead."""
    arrays = fine(1, 4, 5, 6), fine(4, 3, 3, 3), fine(3 * how[-1])
    check(Device.CPU, lambda g, x, w, b: g.conv_transpose2d(x, w, b, *how), *arrays, shapes=[dims], bound=1e-13)


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("name", ["max", "mean", "sum", "min"])
def test_pool(name: str, pad: int, device: Device) -> None:
    """Padding never wins in max and min, and counts as zeros in mean and sum."""
    check(device, lambda g, x: g.pool(name, x, 3, 2, pad), rand(2, 2, 7, 7) - 3, shapes=[["n", 2, 7, 7]])


FORMS = ("", ", ceil_mode = 1", ", pads = [0, 1, 0, 0]", ', auto_pad = "SAME_UPPER"')


@pytest.mark.parametrize(
    ("op_type", "attributes"), [*itertools.product(("AveragePool", "MaxPool"), FORMS), ("LpPool", "")]
)
def test_a_pool_beyond_its_input_has_no_result(op_type: str, attributes: str, device: Device) -> None:
    """It is refused or has what the evaluator of `onnx` has; ONNX Runtime rounded the room for a window up."""
    pool = f"{op_type} <kernel_shape = [1, 3], strides = [1, 2]{attributes}> (x)"
    model = parsed(f"(float[n, 1, 1, width] x) => (float[n, 1, 1, w] y) {{ y = {pool} }}")
    graph = from_onnx(model)
    if not supports_graph(device, graph):
        pytest.skip(f"{device.label} has no such pool")
    compiled = Session(device).compile(graph)
    for width in (5, 2, 1, 2, 3, 1, 3):
        x = rand(1, 1, 1, width, seed=width).astype(np.float32)
        wanted = cast("list[Array]", ReferenceEvaluator(model).run(None, {"x": x}))[0]
        try:
            found = compiled.run({"x": x})[0]
        except RlxError:
            assert width < 3, f"{width} elements are enough for a window of 3"
            continue
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_resize_nearest_2x(device: Device) -> None:
    """Each pixel becomes four."""
    check(device, lambda g, x: g.resize_nearest_2x(x), rand(1, 2, 3, 4), shapes=[["n", 2, "h", "w"]])


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"), list(itertools.product([1, (2, 1, 1)], [0, (1, 0, 2)], [1, (1, 1, 2)]))
)
def test_conv3d(stride: int | tuple[int, ...], padding: int | tuple[int, ...], dilation: int | tuple[int, ...]) -> None:
    """Strides, padding and dilation by axis, in two groups, with a bias."""
    arrays = rand(2, 4, 4, 5, 6), rand(6, 2, 2, 3, 2), rand(6)
    check(Device.CPU, lambda g, x, w, b: g.conv3d(x, w, b, stride, padding, dilation, 2), *arrays)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ((3, 3), (1, 1), (0, 0), (1, 1)),
        ((2, 3), (2, 1), (1, 0), (1, 1)),
        ((2, 2), (1, 1), (0, 1), (2, 3)),
        ((1, 1), (2, 2), (0, 0), (1, 1)),
    ],
)
def test_im2col(kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, device: Device) -> None:
    """Rows are channel, then tap; columns are the windows, row by row."""
    x, dims = rand(2, 3, 6, 7), ["n", 3, 6, 7]
    check(device, lambda g, x: g.im2col(x, kernel, stride, padding, dilation), x, shapes=[dims], strict=False)


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8"])
@pytest.mark.parametrize(
    ("mode", "align_corners"), [("nearest", False), *itertools.product(["linear", "cubic"], [True, False])]
)
@pytest.mark.parametrize(
    ("old", "new"), [((5,), (8,)), ((5,), (3,)), ((4, 5), (7, 3)), ((4, 5), (7, 11)), ((3, 4, 5), (5, 4, 3))]
)
def test_interpolate(old: tuple[int, ...], new: tuple[int, ...], mode: str, align_corners: bool, dtype: str) -> None:
    """One dimension to three, larger and smaller, by the definition of each mode."""
    if mode == "cubic" and len(old) != 2:
        pytest.skip("cubic is for images")
    check(
        Device.CPU,
        lambda g, x: g.interpolate(x, new, mode, align_corners),
        rand(2, 3, *old).astype(dtype),
        shapes=[["n", "c", *(f"s{axis}" for axis in range(len(old)))]] if dtype == "f8" else (),
        bound={"f2": 3e-3, "f4": 1e-5, "f8": 1e-14}[dtype],
    )


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("shape", "weight", "how"),
    [
        ((2, 6, 7, 6), (4, 6, 3, 2), {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}),
        ((2, 6, 5, 5), (4, 3, 3, 3), {"groups": 2}),
        ((1, 2, 4, 5, 4), (3, 2, 2, 2, 3), {"padding": (1, 0, 1), "stride": (1, 2, 1)}),
    ],
)
def test_convolutions_of_f64_have_the_precision_of_f64(
    shape: tuple[int, ...], weight: tuple[int, ...], how: dict[str, Any], is_open: bool
) -> None:
    """The CPU has no kernel for f64; sizes may be open."""
    name, dims = f"conv{len(shape) - 2}d", ["n", shape[1], *"hwd"[: len(shape) - 2]]
    check(
        Device.CPU,
        lambda g, x, w, b: getattr(g, name)(x, w, b, **how),
        *(fine(*shape), fine(*weight), fine(weight[0])),
        shapes=[dims] if is_open else [],
        bound=1e-13,
    )


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_mean_pools_of_f64_have_the_precision_of_f64(kind: str) -> None:
    """The kernel is for f32; padding counts."""
    x, dims = fine(1, 2, 6, 7), ["n", 2, "h", "w"]
    check(Device.CPU, lambda g, x: g.pool(kind, x, (3, 2), (2, 1), (1, 0)), x, shapes=[dims], bound=1e-13)
