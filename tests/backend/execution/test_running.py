"""Running on real providers: results, weights before and after runs, placement, and no answer from elsewhere."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from rlx_ort import Device, DevicePolicy, DType, Graph, GraphDevices, Session, environment, is_available
from rlx_ort.converters.onnx_types import elem_type
from rlx_ort.errors import DeviceUnavailableError, EngineError, InputError, ParamError, PlacementError, RunError
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.options.compile_options import CompileOptions, PlacementRule, WeightSharing

RNG = np.random.default_rng(7)
X = RNG.standard_normal((3, 4)).astype(np.float32)
W = RNG.standard_normal((4, 16)).astype(np.float32)
V = RNG.standard_normal((16, 8)).astype(np.float32)


def _f32(*dims: Any) -> TensorType:
    return TensorType(DType.F32, Shape(dims))


def _mlp(data: bool = True) -> Graph:
    """Return `max(x @ w, 0) @ v`, with weights above and below the size ONNX Runtime copies."""
    graph = Graph("mlp")
    x = graph.input("x", ["n", 4])
    w = graph.param("w", [4, 16], data=W if data else None)
    v = graph.param("v", [16, 8], data=V if data else None)
    (hidden,) = graph.onnx_node("MatMul", [x, w], types=[_f32("n", 16)], name="up")
    (active,) = graph.onnx_node("Relu", [hidden], types=[_f32("n", 16)], name="act")
    graph.outputs = list(graph.onnx_node("MatMul", [active, v], types=[_f32("n", 8)], name="down"))
    return graph


def _expected(x: Any, w: Any = W, v: Any = V) -> Any:
    return np.maximum(x.astype(np.float64) @ w.astype(np.float64), 0) @ v.astype(np.float64)


def _with_determinant() -> Graph:
    """Return a graph whose `det` node no GPU provider has a kernel for."""
    graph = Graph("det")
    x = graph.input("x", [2, 2])
    (doubled,) = graph.onnx_node("Add", [x, x], types=[_f32(2, 2)], name="double")
    graph.outputs = list(graph.onnx_node("Det", [doubled], types=[_f32()], name="my_det"))
    return graph


def test_a_graph_runs(device: Device) -> None:
    """The result equals a float64 reference, and every node is on the requested device."""
    compiled = Session(device).compile(_mlp())
    np.testing.assert_allclose(compiled.run({"x": X})[0], _expected(X), rtol=1e-4, atol=1e-5)
    assert compiled.placement.requested_share == 1.0
    assert compiled.placement.boundary_copies == 0
    assert {node.origin for nodes in compiled.placement.nodes_by_ep.values() for node in nodes} <= {"up", "act", "down"}


def test_weights_may_be_set_before_and_after_runs(device: Device) -> None:
    """Unset weights are an error, set ones count, and changed ones count from the next run on."""
    compiled = Session(device).compile(_mlp(data=False))
    with pytest.raises(ParamError, match="'w', 'v'"):
        compiled.run({"x": X})
    compiled.set_param("w", W)
    compiled.set_param_typed("v", V.tobytes(), "f32")
    np.testing.assert_allclose(compiled.run({"x": X})[0], _expected(X), rtol=1e-4, atol=1e-5)
    compiled.set_param("w", W * 2)
    np.testing.assert_allclose(compiled.run({"x": X})[0], _expected(X, W * 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharing", [WeightSharing.PRIVATE, WeightSharing.RAW])
def test_writing_to_the_callers_array_changes_nothing(device: Device, sharing: WeightSharing) -> None:
    """The session borrows the store's buffer, not the caller's."""
    mine = W.copy()
    compiled = Session(device, CompileOptions(sharing=sharing)).compile(_mlp())
    compiled.set_param("w", mine)
    compiled.run({"x": X})
    mine[:] = 0
    np.testing.assert_allclose(compiled.run({"x": X})[0], _expected(X), rtol=1e-4, atol=1e-5)


def test_no_run_sees_a_mixture_of_weights() -> None:
    """Both weights are changed together while threads run: each result belongs to one of the versions."""
    compiled = Session("cpu").compile(_mlp())
    versions = [_expected(X, W * (step + 1), V * (step + 1)) for step in range(20)]
    stop = threading.Event()
    wrong: list[Any] = []

    def run_on() -> None:
        try:
            while not stop.is_set():
                result = compiled.run({"x": X})[0]
                if not any(np.allclose(result, version, rtol=1e-4, atol=1e-5) for version in versions):
                    wrong.append(result)
        except RunError as err:
            wrong.append(err)

    threads = [threading.Thread(target=run_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(20):
        with compiled.update_params():
            compiled.set_param("w", W * (step + 1))
            compiled.set_param("v", V * (step + 1))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    np.testing.assert_allclose(compiled.run({"x": X})[0], versions[-1], rtol=1e-4, atol=1e-5)


def test_threads_share_a_compiled_graph(device: Device) -> None:
    """Concurrent runs with different batch sizes each get their own result."""
    compiled = Session(device).compile(_mlp())
    wrong: list[Any] = []

    def run_on(rows: int) -> None:
        x = np.full((rows, 4), rows, np.float32)
        for _ in range(5):
            result = compiled.run({"x": x})[0]
            if not np.allclose(result, _expected(x), rtol=1e-4, atol=1e-5):
                wrong.append((rows, result))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run_on, (1, 2, 3)))
    assert wrong == []


def test_a_run_that_fails_spoils_none_beside_or_after_it(device: Device) -> None:
    """OpenVINO (1.24.1) read inputs of the past in the next run, and in those of other threads."""
    graph = Graph("pool")
    x = graph.input("x", [1, 1, 1, "width"])
    kind = _f32(1, 1, 1, "w")
    graph.outputs = list(graph.onnx_node("MaxPool", [x], {"kernel_shape": [1, 3], "strides": [1, 2]}, types=[kind]))
    compiled, wrong, failed = Session(device).compile(graph), [], []

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            width = int(rng.integers(3, 8))
            given = rng.standard_normal((1, 1, 1, width)).astype(np.float32)
            wanted = sliding_window_view(given[0, 0, 0], 3)[::2].max(axis=1)
            if not np.array_equal(compiled.run({"x": given})[0][0, 0, 0], wanted):
                wrong.append(width)
            if seed == 0:
                try:
                    compiled.run({"x": given[..., :1]})
                except EngineError:
                    failed.append(width)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert (wrong, len(failed)) == ([], 60)


def test_named_dims_that_disagree_are_refused() -> None:
    """ONNX Runtime would broadcast one row against three without a word."""
    graph = Graph("add")
    a, b = graph.input("a", ["N", 4]), graph.input("b", ["N", 4])
    graph.outputs = list(graph.onnx_node("Add", [a, b], types=[_f32("N", 4)]))
    compiled = Session("cpu").compile(graph)
    with pytest.raises(InputError, match="'N'"):
        compiled.run({"a": X[:1], "b": X})
    np.testing.assert_array_equal(compiled.run({"a": X, "b": X})[0], X + X)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.I8, DType.U64, DType.BOOL, DType.I4, DType.F8E4M3])
def test_every_dtype_goes_in_and_comes_out(dtype: DType) -> None:
    """Values of types numpy has no name for survive a run to f32 and back."""
    graph = Graph("there and back")
    x = graph.input("x", ["n"], dtype)
    (wide,) = graph.onnx_node("Cast", [x], {"to": elem_type(DType.F32)}, types=[_f32("n")])
    back = TensorType(dtype, Shape(["n"]))
    graph.outputs = [wide, *graph.onnx_node("Cast", [wide], {"to": elem_type(dtype)}, types=[back])]
    compiled = Session("cpu").compile(graph)
    values = np.array([0, 1, 1, 0]).astype(dtype.numpy)
    wide_result, result = compiled.run({"x": values})
    np.testing.assert_array_equal(wide_result, [0, 1, 1, 0])
    assert result.dtype == dtype.numpy
    np.testing.assert_array_equal(result.astype(np.float64), [0, 1, 1, 0])


def test_typed_runs_widen_bf16() -> None:
    """bf16 bytes feed an f32 input; the output is f32 bytes."""
    compiled = Session("cpu").compile(_mlp())
    halves = X.astype(ml_dtypes.bfloat16)
    ((data, dtype),) = compiled.run_typed({"x": (halves.tobytes(), "bf16")})
    assert dtype is DType.F32
    result = np.frombuffer(data, np.float32).reshape(3, 8)
    np.testing.assert_allclose(result, _expected(halves.astype(np.float32)), rtol=1e-4, atol=1e-5)


def test_one_set_of_weights_serves_two_compiled_graphs() -> None:
    """A store that is passed on is shared: a value set through one is seen by the other."""
    graph = _mlp()
    first = Session("cpu").compile(graph)
    second = Session("cpu").compile(graph, first.weights)
    first.set_param("w", W * 3)
    np.testing.assert_allclose(second.run({"x": X})[0], _expected(X, W * 3), rtol=1e-4, atol=1e-5)


@pytest.mark.webgpu
def test_a_named_device_that_lacks_a_kernel_refuses_and_names_the_node() -> None:
    """Strict: the user's node, its op and the remedy are in the error, and nothing ran on the CPU instead."""
    with pytest.raises(PlacementError) as caught:
        Session("webgpu").compile(_with_determinant())
    for part in ("'my_det'", "Det", "WebGPU", "CPUExecutionProvider", "ASSISTED"):
        assert part in str(caught.value)
    assert "'double'" not in str(caught.value)
    assert caught.value.placement.requested_share == 0.5


@pytest.mark.webgpu
def test_help_that_was_allowed_is_accounted_for() -> None:
    """Assisted: the graph runs, and the placement lists the nodes on the CPU and the boundary copies."""
    compiled = Session("webgpu", CompileOptions(placement=PlacementRule.ASSISTED)).compile(_with_determinant())
    np.testing.assert_allclose(compiled.run({"x": [[1.0, 2.0], [3.0, 4.0]]})[0], 4 * (1 * 4 - 2 * 3), rtol=1e-5)
    assert [node.origin for node in compiled.placement.strays] == ["my_det"]
    assert compiled.placement.boundary_copies == 1


@pytest.mark.webgpu
def test_a_graph_that_is_wholly_elsewhere_is_refused_even_with_help() -> None:
    """When the device takes nothing, calling it that device's result would be a lie."""
    graph = Graph("det only")
    x = graph.input("x", [2, 2])
    graph.outputs = list(graph.onnx_node("Det", [x], types=[_f32()], name="my_det"))
    with pytest.raises(PlacementError, match="nothing of the graph runs on WebGPU"):
        Session("webgpu", CompileOptions(placement=PlacementRule.ASSISTED)).compile(graph)


@pytest.mark.skipif("is_available('cuda')", reason="this machine has a CUDA device that works")
def test_cuda_never_gives_a_cpu_result() -> None:
    """Where CUDA does not work, asking for it raises with the reason, whichever way it is asked for."""
    runner = GraphDevices(_mlp())
    for ask in (
        lambda: Session("cuda"),
        lambda: runner.run("cuda", {"x": X}),
        lambda: runner.run_resolved({"x": X}, "cuda"),
        lambda: runner.compile("cuda"),
    ):
        with pytest.raises(DeviceUnavailableError, match=r"CUDA is not available: .+"):
            ask()


@pytest.mark.webgpu
def test_a_chain_answers_from_the_first_device_that_works() -> None:
    """`cuda,webgpu,cpu` answers from WebGPU where there is no CUDA, and lists why CUDA was passed over."""
    runner = GraphDevices(_mlp())
    with environment.override({"RLX_DEVICE_CHAIN": "cuda,webgpu,cpu"}):
        device, outputs = runner.run_chain({"x": X})
    np.testing.assert_allclose(outputs[0], _expected(X), rtol=1e-4, atol=1e-5)
    refused = [tried for tried, _ in runner.last_attempts]
    assert [*refused, device] == ([Device.CUDA] if is_available("cuda") else [Device.CUDA, Device.WEBGPU])
    assert all(reason for _, reason in runner.last_attempts)


@pytest.mark.webgpu
def test_a_chain_goes_past_a_device_that_lacks_a_kernel() -> None:
    """A device that takes only part of the graph is an attempt, and the CPU answers."""
    runner = GraphDevices(_with_determinant(), DevicePolicy.only(["webgpu", "cpu"]))
    device, outputs = runner.run_try(["webgpu", "cpu"], {"x": [[1.0, 2.0], [3.0, 4.0]]})
    assert device == Device.CPU
    np.testing.assert_allclose(outputs[0], -8.0, rtol=1e-5)
    assert "Det" in runner.last_attempts[0][1]


@pytest.mark.webgpu
def test_devices_share_one_set_of_weights() -> None:
    """A value that is set once counts on every device, with one session on each."""
    runner = GraphDevices(_mlp(), DevicePolicy.only(["webgpu", "cpu"]))
    assert set(runner.warm_all()) == {Device.WEBGPU, Device.CPU}
    runner.set_param("w", W * 2)
    for device in ("cpu", "webgpu"):
        np.testing.assert_allclose(runner.run(device, {"x": X})[0], _expected(X, W * 2), rtol=1e-4, atol=1e-5)
