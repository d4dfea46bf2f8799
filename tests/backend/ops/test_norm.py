"""Reductions and normalisations against numpy in float64, and sampling, which draws the tokens of a seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from interpreter.layers import rms_norm
from op_tests.harness import Array, check, rand, run
from op_tests.philox import stream

from rlx_ort import Device, DType, EngineError, Graph, Session, from_onnx
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.providers.claims import kernel_set
from rlx_ort.providers.registry import provider_of
from rlx_ort.selection.support import support_of

EPS = 1e-3


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norm_along_one_axis(name: str, axis: int, device: Device) -> None:
    """Only the axis is normalised, whichever it is."""
    size = (3, 4, 5)[axis]
    check(
        device,
        lambda g, x, a, b: getattr(g, name)(x, a, b, axis=axis, eps=EPS),
        rand(3, 4, 5) + 2,
        rand(size),
        rand(size, seed=1),
        shapes=[["n" if axis else 3, 4, 5]],
    )


def test_rms_norm_without_beta(device: Device) -> None:
    """No beta means zeros."""
    x, gamma = rand(3, 5), rand(5)
    reference = lambda x, a: rms_norm(x, a, np.zeros(5), EPS)  # noqa: E731
    check(device, lambda g, x, a: g.rms_norm(x, a, eps=EPS), x, gamma, reference=reference)


@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-12), (np.float16, 2e-3)])
@pytest.mark.parametrize("eps", [1.0, 1e-5])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norm_of_other_dtypes(name: str, eps: float, dtype: type, bound: float) -> None:
    """f64 keeps f64 accuracy, f16 its own, for any eps: fusions of the engine must not replace it."""
    x, gamma = rand(3, 5).astype(dtype), rand(5).astype(dtype)
    check(Device.CPU, lambda g, x, a: getattr(g, name)(x, a, a, eps=eps), x, gamma, bound=bound)


def test_beta_of_zeros_costs_no_node() -> None:
    """A constant beta of zeros is not added."""
    g = Graph("g")
    g.outputs = [g.rms_norm(g.input("x", ["n", 4]), g.input("gamma", [4]))]
    assert "Add" not in {node.op_type for node in export_model(g).nodes if node.outputs[0] == g.outputs[0].type}


def test_fused_residual_rms_norm_without_beta() -> None:
    """No beta means zeros, with a bias as well."""
    check(
        Device.CPU,
        lambda g, x, r, c, a: g.fused_residual_rms_norm(x, r, c, a, eps=EPS),
        *(rand(2, 4), rand(2, 4, seed=1), rand(4), rand(4, seed=1)),
        reference=lambda x, r, c, a: rms_norm(x + r + c, a, 0 * a, EPS),
    )


def test_rms_norm_of_large_halves() -> None:
    """Squares that f16 cannot hold do not overflow."""
    x = np.full((1, 4), 300.0, np.float16)
    check(Device.CPU, lambda g, x: g.rms_norm(x, np.ones(4, np.float16)), x, bound=1e-3)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(groups: int, device: Device) -> None:
    """Statistics over a group of channels and all pixels, gamma and beta for each channel."""
    arrays = rand(2, 4, 3, 5), rand(4), rand(4, seed=1)
    check(device, lambda g, x, a, b: g.group_norm(x, a, b, groups, EPS), *arrays, shapes=[["n", 4, "h", "w"]])


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x, a, b: g.layer_norm(x, a, b, eps=EPS),
        lambda g, x, a, b: g.rms_norm(x, a, b, eps=EPS),
        lambda g, x, a, b: g.group_norm(x, a, b, 3, eps=EPS),
        lambda g, x, a, b: g.batch_norm_inference(x, a, b, b, a * a, eps=EPS),
    ],
    ids=["layer_norm", "rms_norm", "group_norm", "batch_norm_inference"],
)
def test_norms_of_f64_have_the_precision_of_f64(build: Callable[..., Any]) -> None:
    """The eps of 1e-3 is rounded in the attribute of a kernel, which is an f32."""
    x, gamma, beta = (rand(*shape, seed=9) / 7.0 for shape in ((2, 6, 6), (6,), (6,)))
    check(Device.CPU, build, *(part.astype(np.float64) + 1e-9 for part in (x, gamma, beta)), bound=1e-14)


@pytest.mark.parametrize("gate_first", [False, True])
def test_fused_swiglu(gate_first: bool, device: Device) -> None:
    """Up * silu(gate); the low half is up unless the gate comes first."""
    check(device, lambda g, x: g.fused_swiglu(x, gate_first), rand(3, 8), shapes=[["n", 8]])


def test_fused_swiglu_casts_its_result() -> None:
    """`cast_to` gives the dtype of the result."""
    check(Device.CPU, lambda g, x: g.fused_swiglu(x, cast_to="f16"), rand(3, 4), bound=2e-3)


FUNCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axes", [(1,), (0, 2), (-1, 0), (0, 1, 2)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_reduction_over_axes(name: str, axes: tuple[int, ...], keep: bool, device: Device) -> None:
    """Axes that are no neighbours, negative ones and all of them."""
    if device.kind != "cpu" and axes != (0, 2):
        pytest.skip("one choice of axes is enough on a slow device")
    check(device, lambda g, x: g.reduce(x, name, axes, keep), rand(3, 4, 5), shapes=[["n", 4, 5]])


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_sums_and_products_of_integers_wrap_around(name: str, dtype: type) -> None:
    """As in numpy and PyTorch, for known and unknown sizes, over axes anywhere, none of their elements among them."""
    for place, (shape, axes) in enumerate(
        [((3, 4, 5), (2,)), ((3, 4, 5), (1,)), ((3, 4, 5), (0, 2)), ((2, 0), (1,)), ((0, 4, 5), (1,)), ((7,), (0,))]
    ):
        info = np.iinfo(dtype)
        x = np.random.default_rng(place).integers(info.min, info.max, shape, dtype, endpoint=True)
        for dims in (list(shape), [f"d{axis}" for axis in range(len(shape))]):
            (got,) = run(Device.CPU, lambda g, x, axes=axes: g.reduce(x, name, axes), x, shapes=[dims])
            np.testing.assert_array_equal(got, FUNCTIONS[name](x, axis=axes, dtype=dtype), strict=True)


def run_as_for_cuda(build: Any, x: Array) -> Array:
    """Run the form that is written for CUDA on the CPU, whose sums of i64 are computed in f64 as well."""
    g, cuda = Graph("made"), provider_of(Device.CUDA)
    g.outputs = [build(g, g.input("x", ["m", *x.shape[1:]], DType.from_numpy(x.dtype)))]
    assert cuda is not None
    written = export_model(g, None, kernel_set(cuda, g)).model.SerializeToString()
    (got,) = ort.InferenceSession(written, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return np.asarray(got)


@pytest.mark.parametrize("name", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_64_bit_reductions_for_cuda_do_not_depend_on_kernels_that_compute_in_f64(name: str, dtype: type) -> None:
    """They are exact beyond 2^53, and sums wrap around."""
    info = np.iinfo(dtype)
    near = [info.min, info.max, info.max - 1, info.max // 2 + 1, 2**53 + 1, 2**53 + 3]
    x = np.random.default_rng(1).permutation(np.array(near * 4, dtype)).reshape(2, 3, 4)
    for axes, keep in (((1,), False), ((0, 2), True), ((0, 1, 2), False)):
        got = run_as_for_cuda(lambda g, x, axes=axes, keep=keep: g.reduce(x, name, axes, keep), x)
        extra = {"dtype": dtype} if name == "sum" else {}
        np.testing.assert_array_equal(got, FUNCTIONS[name](x, axis=axes, keepdims=keep, **extra), strict=True)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("name", ["sum", "prod"])
def test_integers_for_cuda_wrap_around(name: str, dtype: type) -> None:
    """As they do on the CPU, where the kernels stop at the limits of integers as well."""
    info = np.iinfo(dtype)
    for place, (shape, axes) in enumerate([((3, 4, 5), (2,)), ((3, 4, 5), (0, 2)), ((7, 1), (0,))]):
        x = np.random.default_rng(place).integers(info.min, info.max, shape, dtype, endpoint=True)
        got = run_as_for_cuda(lambda g, x, axes=axes: g.reduce(x, name, axes), x)
        np.testing.assert_array_equal(got, FUNCTIONS[name](x, axis=axes, dtype=dtype), strict=True)


@pytest.mark.parametrize("name", ["sum", "prod"])
def test_sums_and_products_of_i32_wrap_around_on_each_device(name: str, device: Device) -> None:
    """Also where the kernel computes in floats, and for narrower integers, whose sums may leave i32."""
    for dtype, count in ((np.int32, 3), (np.int16, 70_000)):
        x = np.full((2, count), np.iinfo(dtype).max, dtype)
        x[1] = np.iinfo(dtype).min
        (got,) = run(device, lambda g, x: g.reduce(x, name, (1,)), x, shapes=[["rows", count]])
        np.testing.assert_array_equal(got, FUNCTIONS[name](x, axis=1, dtype=dtype), strict=True)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64, np.float32])
def test_places_of_extremes_for_cuda_need_no_kernel_for_integers(name: str, dtype: type) -> None:
    """The first one of equals is given, as in numpy."""
    x = np.array([[[5, 2, 2, 9], [9, 1, 9, 1]], [[7, 7, 7, 7], [0, 3, 1, 3]]], dtype)
    for axis, keep in ((0, False), (1, True), (-1, False)):
        got = run_as_for_cuda(lambda g, x, axis=axis, keep=keep: getattr(g, name)(x, axis, keep), x)
        np.testing.assert_array_equal(got, getattr(np, name)(x, axis=axis, keepdims=keep), strict=True)


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_integers_that_differ_in_their_lower_half_are_ordered(name: str, dtype: type) -> None:
    """The CPU's vector kernels take the lower 32 bits of an i64 for a signed number."""
    x = np.array([[5, 3_000_000_000, 7, 2**32 - 1, 9, 2**31, 1, 0]], dtype)
    check(Device.CPU, lambda g, x: [g.reduce(x, name, 1), g.reduce(x, name, (0, 1))], x)


def test_the_mean_of_u64_knows_the_upper_half() -> None:
    """It is computed in f64, as numpy's."""
    x = np.array([[2**63, 2**63 + 2**40]], np.uint64)
    (mean,) = run(Device.CPU, lambda g, x: g.mean(x, 1), x)
    assert mean.tolist() == [2**63 + 2**39]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 0), (1,)), ((0,), (0,)), ((2, 0), (0, 1)), ((2, 0, 3), (0,)), ((2, 3), (1,))]
)
def test_the_mean_of_no_elements_is_nan(
    shape: tuple[int, ...], axes: tuple[int, ...], dtype: type, device: Device
) -> None:
    """Known and unknown sizes; a device that finds out in the run may refuse the run."""
    x = np.ones(shape, dtype)
    empty = 0 in [shape[axis] for axis in axes]
    expected = np.full(FUNCTIONS["sum"](x, axis=axes).shape, np.nan if empty else 1, dtype)
    for dims in (list(shape), [f"d{axis}" for axis in range(len(shape))]):
        refuses = device != Device.CPU and 0 in shape and "d0" in dims
        with contextlib.suppress(EngineError) if refuses else contextlib.nullcontext():
            (got,) = run(device, lambda g, x: g.mean(x, axes), x, shapes=[dims])
            np.testing.assert_array_equal(got, expected, strict=True)


def test_a_mean_of_known_size_and_a_file_have_the_plain_reduction() -> None:
    """The forms that avoid a kernel cost nodes, and are written for its provider alone."""
    g = Graph("plain")
    x, i = g.input("x", ["n", 4]), g.input("i", ["n", 4], "i64")
    g.outputs = [g.mean(x, 1), g.mean(x, 0), g.sum(i, 1), g.reduce(i, "max", 1)]
    written = [node.op_type for node in export_model(g).nodes]
    assert written == ["ReduceMean", "ReduceMean", "ReduceSum", "ReduceMax"]


def imported(op_type: str, dtype: type, opset: int = 21, **attributes: Any) -> Graph:
    """Return a graph of one imported node, whose axes are an input unless it is an Einsum."""
    number = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = onnx.helper.make_tensor_value_info("x", number, ["n", 3])
    axes = onnx.helper.make_tensor_value_info("axes", onnx.TensorProto.INT64, [1])
    inputs = [x] if op_type == "Einsum" else [x, axes]
    y = onnx.helper.make_tensor_value_info("y", number, None)
    node = onnx.helper.make_node(op_type, [value.name for value in inputs], ["y"], **attributes)
    graph = onnx.helper.make_graph([node], "imported", inputs, [y])
    opsets = [onnx.helper.make_opsetid("", opset)]
    return from_onnx(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))


@pytest.mark.parametrize(
    ("op_type", "dtype", "attributes"),
    [
        ("ReduceSum", np.int64, {}),
        ("ReduceProd", np.int32, {}),
        ("ReduceSumSquare", np.int64, {}),
        ("ReduceL1", np.int32, {}),
        ("ReduceMax", np.int64, {}),
        ("Einsum", np.int64, {"equation": "ij->i"}),
    ],
)
def test_imported_reductions_of_integers_that_are_no_ops_are_refused(
    op_type: str, dtype: type, attributes: dict[str, Any]
) -> None:
    """Axes that come with the run leave no other form; floats are taken."""
    assert "has no kernel for" in str(support_of(Device.CPU, imported(op_type, dtype, **attributes)).blocker)
    assert support_of(Device.CPU, imported(op_type, np.float32, **attributes)).supported


def test_an_imported_mean_of_no_elements_is_refused_in_the_run() -> None:
    """Its axes come with the run as well."""
    compiled = Session("cpu").compile(imported("ReduceMean", np.float32))
    (got,) = compiled.run({"x": np.ones((2, 3), np.float32), "axes": np.array([0])})
    assert got.tolist() == [[1, 1, 1]]
    with pytest.raises(EngineError, match="not NaN"):
        compiled.run({"x": np.ones((0, 3), np.float32), "axes": np.array([0])})


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax_along_any_axis(axis: int, device: Device) -> None:
    """Large scores do not overflow."""
    check(device, lambda g, x: g.softmax(x, axis), rand(3, 4, 2) * 30, shapes=[["n", 4, 2]])


@pytest.mark.parametrize(("exclusive", "reverse"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("axis", [0, -1])
def test_cumsum(axis: int, exclusive: bool, reverse: bool, device: Device) -> None:
    """The running sum from either end, with or without the element itself."""
    check(device, lambda g, x: g.cumsum(x, axis, exclusive, reverse), rand(3, 4))


def test_topk_takes_the_smaller_index_of_equals() -> None:
    """Descending by value, ties in order of place."""
    x = np.array([[1.0, 3, 3, 2, 3], [5, 5, 5, 5, 5]], np.float32)
    (result,) = run(Device.CPU, lambda g, x: g.topk(x, 4, "i32"), x)
    np.testing.assert_array_equal(result, [[1, 2, 4, 3], [0, 1, 2, 3]])


@pytest.mark.parametrize("k", [1, 3, 7])
def test_topk_matches_a_stable_sort(k: int) -> None:
    """Every k over an open batch."""
    check(Device.CPU, lambda g, x: g.topk(x, k), rand(5, 7), shapes=[["n", 7]])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_arg_reductions_take_the_first_of_equals(name: str, keep: bool, device: Device) -> None:
    """The first place wins, along any axis."""
    x = np.array([[1.0, 4, 4, 0, 0], [2, 2, 2, 2, 2]], np.float32)
    check(device, lambda g, x: getattr(g, name)(x, 1, keep), x)


VOCABULARY = 50


def logits(rows: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).normal(size=(rows, VOCABULARY)) * 2).astype(np.float32)


def draw(device: Device, values: Array, rows: Any, **settings: Any) -> Array:
    """Sample strictly on the device; `rows` declares the number of rows, or a name for it."""
    g = Graph()
    x = g.input("x", [*([rows] if values.ndim == 2 else []), values.shape[-1]])
    g.outputs = [g.sample(x, **settings)]
    return Session(device).compile(g).run({"x": values})[0]


def chances(row: Array, top_k: int, top_p: float, temperature: float) -> Array:
    """Return the probability of each token by the definition, in float64."""
    scaled = row.astype(np.float64) / max(temperature, 1e-6)
    kept = scaled >= np.sort(scaled)[-top_k] if 0 < top_k < row.size else np.ones(row.size, bool)
    weights = np.where(kept, np.exp(scaled - scaled.max()), 0)
    weights /= weights.sum()
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        count = int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1
        weights[order[count:]] = 0
    return weights / weights.sum()


def expected(values: Array, seed: int, top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0) -> list[int]:
    running = [np.cumsum(chances(row, top_k, top_p, temperature)) for row in values]
    return [int(np.argmax(sums > number)) for sums, number in zip(running, stream(seed, len(values)), strict=True)]


SETTINGS = [
    {"seed": 1},
    {"seed": 3, "top_k": 5, "temperature": 0.7},
    {"seed": 4, "top_p": 0.8, "temperature": 1.3},
    {"seed": 2**40 + 7, "top_k": 10, "top_p": 0.5},
]


@pytest.mark.parametrize("rows", [9, "rows"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_those_of_the_definition(device: Device, rows: int | str, settings: dict[str, Any]) -> None:
    """Whether the number of rows is known or not, each device draws the same tokens as float64 does."""
    values = logits(9)
    assert draw(device, values, rows, **settings).tolist() == expected(values, **settings)


def test_many_seeds_agree_with_the_definition() -> None:
    """A thousand rows at once, more than one block of the generator each."""
    values = logits(1000, seed=5)
    assert draw(Device.CPU, values, "rows", seed=77, top_p=0.9).tolist() == expected(values, 77, top_p=0.9)


def test_the_seed_0_stands_for_another_one() -> None:
    """A seed of 0 draws what 0xDEADBEEF draws."""
    values = logits(40)
    assert draw(Device.CPU, values, 40, seed=0).tolist() == draw(Device.CPU, values, 40, seed=0xDEADBEEF).tolist()


def test_the_same_seed_draws_the_same_in_every_run_and_other_seeds_do_not() -> None:
    """Sampling has no state."""
    g = Graph()
    x = g.input("x", ["rows", VOCABULARY])
    g.outputs = [g.sample(x, seed=11), g.sample(x, seed=12)]
    compiled = Session("cpu").compile(g)
    first, second = compiled.run({"x": logits(64)}), compiled.run({"x": logits(64)})
    assert first[0].tolist() == second[0].tolist()
    assert first[0].tolist() != first[1].tolist()


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}])
def test_settings_that_leave_one_token_take_the_most_likely(device: Device, settings: dict[str, Any]) -> None:
    """No temperature, no probability and one token in play all mean ArgMax."""
    values = logits(6, seed=2)
    assert draw(device, values, 6, seed=9, **settings).tolist() == values.argmax(-1).tolist()


def test_ties_with_the_last_token_in_play_stay() -> None:
    """With two equal second-best tokens, top_k=2 leaves three in play."""
    values = np.tile(np.asarray([0.0, 1.0, 2.0, 1.0, 0.5], np.float32), (300, 1))
    assert set(draw(Device.CPU, values, 300, seed=1, top_k=2).tolist()) == {1, 2, 3}


def test_of_equal_tokens_top_p_takes_the_first(device: Device) -> None:
    """Four equal tokens and half of the probability leave the first two."""
    values = np.zeros((40, 4), np.float32)
    assert set(draw(device, values, 40, seed=1, top_p=0.5).tolist()) == {0, 1}


def test_frequencies_follow_the_probabilities() -> None:
    """Over 20 000 draws each token comes as often as it should, within five standard deviations."""
    row, count = np.asarray([0.0, 1.0, -1.0, 2.0], np.float32), 20_000
    drawn = draw(Device.CPU, np.tile(row, (count, 1)), "rows", seed=123, temperature=1.5)
    wanted = chances(row, 0, 1.0, 1.5)
    found = np.bincount(drawn, minlength=4) / count
    assert np.all(np.abs(found - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / count))


@pytest.mark.parametrize("dtype", ["i32", "i64", "u32", "f32"])
def test_one_row_without_a_batch_gives_a_scalar_of_the_asked_dtype(dtype: str) -> None:
    """Logits (V,) give one id."""
    values = logits(1)
    result = draw(Device.CPU, values[0], 1, seed=21, dtype=dtype)
    assert result.shape == ()
    assert int(result) == expected(values, 21)[0]


def test_tokens_with_the_logit_minus_infinity_are_never_drawn() -> None:
    """A caller's mask holds."""
    values = np.where(np.arange(VOCABULARY) % 2, -np.inf, logits(200)).astype(np.float32)
    assert not np.any(draw(Device.CPU, values, 200, seed=6, top_p=0.95) % 2)


_TOP_HALF = np.array([[3, 2**63 + 5, 2**64 - 1, 2**63, 0, 2**63 - 1]], np.uint64)


@pytest.mark.parametrize("name", ["argmax", "argmin", "max", "min", "sort", "argsort"])
def test_unsigned_numbers_from_2_63_on_keep_their_order(name: str) -> None:
    """Numbers of both halves of u64 are compared as unsigned ones."""
    axis = [-1] if name in {"max", "min"} else -1
    check(Device.CPU, lambda g, x: getattr(g, name)(x, axis), _TOP_HALF)


def test_topk_of_unsigned_numbers_from_2_63_on() -> None:
    """The places of the three largest, the largest first."""
    (places,) = run(Device.CPU, lambda g, x: g.topk(x, 3), _TOP_HALF)
    assert places.tolist() == [[2, 1, 3]]
