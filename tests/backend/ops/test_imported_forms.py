"""Imported nodes in another form where the device has no kernel for theirs, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from onnx import parser

from rlx_ort import CompileOptions, Device, GraphDevices, RlxError, Session, from_onnx, supports_graph, to_onnx

LOWEST = np.finfo(np.float32).min


def run(device: Device, text: str, **feeds: np.ndarray) -> np.ndarray:
    """Run a model of one output, of which every node has to be on the device."""
    graph = from_onnx(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {text}'))
    if not supports_graph(device, graph) and device.kind not in ("cpu", "webgpu"):
        pytest.skip(f"{device.label} refuses such a model; its own kernel lists have no form of it")
    assert supports_graph(device, graph)
    return np.asarray(Session(device).compile(graph).run(feeds)[0])


@pytest.mark.parametrize("axis", [-1, 1])
def test_attention_over_a_row_that_is_masked_out_gives_zeros(axis: int, device: Device) -> None:
    """Infinity masks; the lowest number, by which others mask, leaves equal shares in a row of its own."""
    text = f"""(float[n,4,3] x) => (float[n,4,3] y) <float zero = {{0.0}}> {{
      s = Softmax <axis = {axis}> (x)
      bad = IsNaN (s)
      y = Where (bad, zero, s)
    }}"""
    rows = np.array([[1, 2, 3], [-np.inf] * 3, [-np.inf, 0, -np.inf], [LOWEST] * 3, [np.inf, 1, 2]], np.float32)
    expected = np.array([np.exp([-2, -1, 0]) / np.exp([-2, -1, 0]).sum(), [0] * 3, [0, 1, 0], [1 / 3] * 3, [0] * 3])
    if axis == -1:
        x, wanted = (np.repeat(each[:, None], 4, axis=1) for each in (rows, expected))
    else:  # a column of 4, whose last element is masked
        last = np.full((5, 1, 3), -np.inf)
        x = np.concatenate([np.repeat(rows[:, :, None], 3, axis=2), last], axis=1)
        x[3, 3] = LOWEST
        wanted = np.concatenate([np.repeat(expected[:, :, None], 3, axis=2), np.zeros((5, 1, 3))], axis=1)
        wanted[3] = 1 / 4
    np.testing.assert_allclose(run(device, text, x=x.astype(np.float32)), wanted, rtol=1e-5)


@pytest.mark.parametrize("axis", [-1, 1])
def test_logarithms_of_shares_are_exact_where_shares_vanish(axis: int, device: Device) -> None:
    """As text recognisers end; the logarithm of a share that is rounded to 0 would be infinite."""
    text = f"(float[n,4,3] x) => (float[n,4,3] y) {{ y = LogSoftmax <axis = {axis}> (x) }}"
    x = np.random.default_rng(3).normal(0, 200, (2, 4, 3))
    below = x - x.max(axis, keepdims=True)
    wanted = below - np.log(np.exp(below).sum(axis, keepdims=True))
    np.testing.assert_allclose(run(device, text, x=x.astype(np.float32)), wanted, rtol=1e-5, atol=1e-4)


def test_bools_are_moved_by_coordinates_that_follow_from_sizes(device: Device) -> None:
    """As PyTorch's exporter looks up a mask."""
    text = """(float[n,3] x) => (bool[n] y) <float f = {0.0}, int64 zero = {0}, int64 one = {1}, int64[1] last = {1}> {
      positive = Greater (x, f)
      s = Shape (x)
      n = Gather (s, zero)
      r = Range (zero, n, one)
      column = Unsqueeze (r, last)
      size = Shape (column)
      ones = Expand (one, size)
      at = Concat <axis = 1> (column, ones)
      y = GatherND (positive, at)
    }"""
    x = np.array([[1, -1, 0], [0, 2, 0], [-1, 3, -1]], np.float32)
    assert run(device, text, x=x).tolist() == [False, True, True]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_first_state_is_filled_on_the_device(batch: int, device: Device) -> None:
    """As recurrent networks have it, of a size that follows from the input."""
    text = """(float[n,2] x) => (float[n,2] y) {
      s = Shape (x)
      state = ConstantOfShape <value = float[1] {1.5}> (s)
      y = Add (x, state)
    }"""
    x = np.arange(2 * batch, dtype=np.float32).reshape(batch, 2)
    np.testing.assert_array_equal(run(device, text, x=x), x + 1.5)


@pytest.mark.parametrize("size", ["2", "n"])
def test_a_shape_with_a_size_that_is_left_over_is_filled_in(size: str, device: Device) -> None:
    """As PyTorch's second exporter writes it, with `allowzero`, by which DirectML takes -1 for a size."""
    text = f"""(float[{size},3] x) => (float[a,b] y) <int64[2] s = {{-1, 2}}> {{
      y = Reshape <allowzero = 1> (x, s)
    }}"""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert run(device, text, x=x).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_sizes_are_joined_with_one_that_is_left_over(device: Device) -> None:
    """As PyTorch's second exporter writes a `view` of a tensor whose batch is open."""
    text = """(float[n,6] x) => (float[a,b,2] y) <int64[2] rest = {-1, 2}> {
      n = Shape <start = 0, end = 1> (x)
      s = Concat <axis = 0> (n, rest)
      y = Reshape <allowzero = 1> (x, s)
    }"""
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    np.testing.assert_array_equal(run(device, text, x=x), x.reshape(2, 3, 2))


def test_axes_beyond_the_rank_are_a_typed_error() -> None:
    """The form that avoids wrong reductions leaves them to the engine."""
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[1, 2] x) => (float[a, b] y)
    { axes = Constant <value_ints = [7]> () y = ReduceMean <keepdims = 1> (x, axes) }"""
    with pytest.raises(RlxError), GraphDevices(from_onnx(parser.parse_model(text))) as runner:
        runner.run("cpu", {"x": np.ones((1, 2), np.float32)})


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelus_run_on_the_device(approximate: str, device: Device) -> None:
    """DirectML has no Gelu of ONNX, and exporters write one from opset 20 on."""
    x = np.linspace(-6, 6, 21, dtype=np.float32).reshape(7, 3)
    exact = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.reshape(-1).tolist()]
    cubic = [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x.reshape(-1).tolist()]
    text = f'(float[n,3] x) => (float[n,3] y) {{ y = Gelu <approximate = "{approximate}"> (x) }}'
    wanted = np.reshape(exact if approximate == "none" else cubic, x.shape)
    np.testing.assert_allclose(run(device, text, x=x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("opset", "form"),
    [
        (12, "ReduceSum <axes = [-1], keepdims = 0> (x)"),
        (20, "ReduceSum <keepdims = 0> (x, last)"),
        (20, "ReduceL2 <keepdims = 0> (x, last)"),
        (20, "ReduceMean <keepdims = 0> (x, last)"),
        (20, "ArgMax <axis = -1, keepdims = 0> (x)"),
    ],
)
def test_a_negative_axis_is_reduced_where_there_are_no_rows(opset: int, form: str) -> None:
    """The CPU's kernels return what they read, with its axes, unless the axis is counted from the first."""
    kind = "int64" if "Arg" in form else "float"
    text = f"(float[n,m] x) => ({kind}[n] y) <int64[1] last = {{-1}}> {{ y = {form} }}"
    graph = from_onnx(parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}'))
    for rows in (0, 2):
        assert GraphDevices(graph).run("cpu", {"x": np.ones((rows, 4), np.float32)})[0].shape == (rows,)


@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_an_old_softmax_is_taken_over_its_axis_and_those_behind_it(
    op_type: str, axis: int, ranked: bool, device: Device
) -> None:
    """Before opset 13; where the rank of what it reads is open, the model is exported at 21."""
    nodes = f"r = Reshape (x, s) y = {op_type} <axis = {axis}> (r)"
    text = f"(float[n,3,4] x, int64[{3 if ranked else 'k'}] s) => (y) {{ {nodes} }}"
    graph = from_onnx(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 11]> g {text}'))
    assert ranked or to_onnx(graph).opset_import[0].version == 21
    x = np.random.default_rng(axis + 9).standard_normal((2, 3, 4)).astype(np.float32)
    rows = x.reshape(math.prod(x.shape[: axis % 3]), -1).astype(np.float64)
    shares = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
    wanted = {"Softmax": shares, "LogSoftmax": np.log(shares), "Hardmax": rows == rows.max(-1, keepdims=True)}[op_type]
    options = CompileOptions(placement="assisted")
    (found,) = Session(device, options).compile(graph).run({"x": x, "s": np.array([2, 3, 4])})
    np.testing.assert_allclose(found, wanted.reshape(x.shape), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ([2], [-(2**63)], [1], [-1]),
        ([3], [0], [1], [-2]),
        ([1, 9], [-(2**63), 1], [0, -1], [-1, -2]),
        ([0, 2], [2, -(2**31)], [0, 1], [1, -1]),
        ([-1], [-(2**63)], [1], [-1]),
    ],
)
def test_a_slice_walks_backwards_from_any_element(
    starts: list[int], ends: list[int], axes: list[int], steps: list[int], device: Device
) -> None:
    """WebGPU's kernel is right from the last element alone."""
    bounds = {"a": starts, "b": ends, "c": axes, "d": steps}
    listed = ", ".join(f"int64[{len(each)}] {name} = {{{', '.join(map(str, each))}}}" for name, each in bounds.items())
    x = np.arange(40, dtype=np.float32).reshape(2, 5, 4)
    wanted = x
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        wanted = np.moveaxis(np.moveaxis(wanted, axis, 0)[start : None if end < -100 else end : step], 0, axis)
    found = run(device, f"(float[n,m,4] x) => (y) <{listed}> {{ y = Slice (x, a, b, c, d) }}", x=x)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 4, 1), (5,), (1,), (3, 4, 5)])
@pytest.mark.parametrize("known", [True, False])
def test_slopes_of_prelu_are_repeated_along_any_axis(shape: tuple[int, ...], known: bool, device: Device) -> None:
    """A slope a channel is the usual form; WebGPU's kernel does not repeat it along the last axis."""
    rng = np.random.default_rng(0)
    x, slope = (rng.standard_normal(each).astype(np.float32) for each in ((2, 3, 4, 5), shape))
    listed = ", ".join(map(repr, slope.ravel().tolist()))
    dims = ",".join(map(str, shape))
    head = f"(float[n,3,4,5] x) => (y) <float[{dims}] s = {{{listed}}}>"
    text = head if known else f"(float[n,3,4,5] x, float[{dims}] s) => (y)"
    found = run(device, f"{text} {{ y = PRelu (x, s) }}", **({"x": x} if known else {"x": x, "s": slope}))
    np.testing.assert_allclose(found, np.where(x < 0, x * slope, x), rtol=1e-6)
