"""Weights reach a session from memory, right under every optimisation, and live as long as it needs them."""

from __future__ import annotations

import gc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, DType, EngineError, Graph, OptimizationLevel, ParamError, WeightSharing
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.tensor import TensorData
from rlx_ort.providers.base import SessionRequest
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.engine import injection
from rlx_ort.providers.engine.injection import BORROWING_VERSION, write_weights_file
from rlx_ort.providers.engine.runtime import runtime_version

RNG = np.random.default_rng(7)
MATMUL = "(float[N,64] x) => (float[N,32] y) { t = Transpose<perm=[1,0]>(W) h = MatMul(x, t) y = Add(h, b) }"
CONV = """(float[1,8,16,16] x) => (float[1,16,14,14] y) {
    c = Conv<kernel_shape=[3,3]>(x, K, bias) y = Relu(c) }"""
BOTH = """(float[4,16] x) => (float[4,16] y) {
    t = Transpose<perm=[1,0]>(W) a = MatMul(x, W) b = MatMul(x, t) y = Add(a, b) }"""
borrows = pytest.mark.skipif(
    (runtime_version() or ()) < BORROWING_VERSION, reason="this ONNX Runtime does not borrow weights"
)


def random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("sharing", [WeightSharing.PRIVATE, WeightSharing.RAW])
@pytest.mark.parametrize("level", list(OptimizationLevel))
def test_a_foldable_weight_gives_the_float64_result_at_every_level(open_model, level, sharing):
    """A matrix product with a transposed weight, which ONNX Runtime folds, equals numpy's."""
    x, weight, bias = random(3, 64), random(32, 64), random(32)
    session = open_model(MATMUL, {"W": weight, "b": bias}, optimization=level, sharing=sharing)
    (y,) = session.run(["y"], {"x": x})
    np.testing.assert_allclose(y, x.astype(np.float64) @ weight.astype(np.float64).T + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("level", list(OptimizationLevel))
def test_a_weight_whose_layout_is_changed_gives_the_float64_result(open_model, level):
    """A convolution, whose weight ONNX Runtime reorders, equals the sum written out in float64."""
    x, kernel, bias = random(1, 8, 16, 16), random(16, 8, 3, 3), random(16)
    (y,) = open_model(CONV, {"K": kernel, "bias": bias}, optimization=level).run(["y"], {"x": x})
    patches = np.lib.stride_tricks.sliding_window_view(x[0].astype(np.float64), (3, 3), axis=(1, 2))
    wanted = np.einsum("chwij,ocij->ohw", patches, kernel.astype(np.float64)) + bias[:, None, None]
    np.testing.assert_allclose(y[0], np.maximum(wanted, 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", list(OptimizationLevel))
def test_a_weight_used_folded_and_direct_is_the_same_in_both_places(open_model, level):
    """The sum x W + x W^T equals numpy's, so no use saw a placeholder."""
    x, weight = random(4, 16), random(16, 16)
    (y,) = open_model(BOTH, {"W": weight}, optimization=level).run(["y"], {"x": x})
    np.testing.assert_allclose(y, x.astype(np.float64) @ (weight + weight.T), rtol=1e-4, atol=1e-4)


@pytest.mark.webgpu
@pytest.mark.parametrize("level", [OptimizationLevel.OFF, OptimizationLevel.ALL])
def test_webgpu_computes_with_injected_weights(open_model, level):
    """The injected values, not placeholders, reach the GPU."""
    x, weight, bias = random(2, 64), random(32, 64), random(32)
    (y,) = open_model(MATMUL, {"W": weight, "b": bias}, "webgpu", optimization=level).run(["y"], {"x": x})
    np.testing.assert_allclose(y, x @ weight.T + bias, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F64, DType.I64, DType.U8, DType.BOOL, DType.F8E4M3])
def test_weights_of_every_kind_come_back_unchanged(open_model, dtype):
    """A weight of 256 elements passes through Identity bit for bit."""
    values = RNG.integers(0, 2, 256).astype(dtype.numpy)
    kind = {"f16": "float16", "bf16": "bfloat16", "f64": "double", "f8e4m3": "float8e4m3fn"}
    kind |= {"i64": "int64", "u8": "uint8", "bool": "bool"}
    session = open_model(f"() => ({kind[dtype.value]}[256] y) {{ y = Identity(W) }}", {"W": values})
    (y,) = session.run(["y"], {})
    assert y.dtype == dtype.numpy
    np.testing.assert_array_equal(y.view(np.uint8), values.view(np.uint8))


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33])
def test_weights_around_the_inline_limit_are_right(open_model, size):
    """Weights just below, at and above 128 bytes, and empty ones, are read whole."""
    weight = random(size)
    session = open_model(f"(float[1] x) => (float[{size + 1}] y) {{ y = Concat<axis=0>(x, W) }}", {"W": weight})
    (y,) = session.run(["y"], {"x": np.ones(1, np.float32)})
    np.testing.assert_array_equal(y, [1, *weight])


def test_a_read_only_memory_map_at_an_odd_offset_serves_as_a_weight(open_model, tmp_path: Path):
    """A weight in the middle of a file needs no copy and no alignment."""
    weight = random(50)
    path = tmp_path / "blob"
    path.write_bytes(b"abc" + weight.tobytes())
    mapped = np.memmap(path, np.uint8, "r", offset=3)
    data = TensorData(DType.F32, (50,), mapped)
    (y,) = open_model("(float[50] x) => (float[50] y) { y = Mul(x, W) }", {"W": data}).run(
        ["y"], {"x": np.full(50, 2, np.float32)}
    )
    np.testing.assert_array_equal(y, weight * 2)


def test_a_missing_weight_is_an_error_that_names_it(open_model):
    """Opening a session without a parameter's data raises ParamError."""
    from rlx_ort.device import Device
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.providers.base import SessionRequest
    from rlx_ort.providers.registry import default_registry

    from .conftest import exported  # noqa: TID252 - the folder's own helpers

    model = exported("(float[50] x) => (float[50] y) { y = Mul(x, W) }", {"W": TensorData.from_array(random(50))})
    provider = default_registry().for_device(Device.CPU)
    with pytest.raises(ParamError, match="'W'"):
        provider.open(SessionRequest(Device.CPU, model, {}, CompileOptions()))


@borrows
def test_the_session_borrows_and_does_not_copy(open_model):
    """With prepacking off, a change of the caller's buffer is seen, which proves that there is one copy."""
    weight = random(200)
    session = open_model("(float[200] x) => (float[200] y) { y = Add(x, W) }", {"W": weight}, sharing=WeightSharing.RAW)
    x = np.zeros(200, np.float32)
    before = session.run(["y"], {"x": x})[0].copy()
    weight += 1
    np.testing.assert_array_equal(session.run(["y"], {"x": x})[0], before + 1)


LIFETIME = """
import gc, numpy as np
from conftest import open_text
session = open_text("(float[1000,300] x) => (float[1000,300] y) { y = Add(x, W) }",
                    {"W": np.full((1000, 300), 3, np.float32)})
gc.collect()
junk = [np.random.default_rng(i).standard_normal((1000, 300)).astype(np.float32) for i in range(50)]
y = session.run(["y"], {"x": np.zeros((1000, 300), np.float32)})[0]
assert (y == 3).all()
"""


def test_weights_nobody_else_holds_outlive_the_call_that_opened_the_session(python):
    """The session alone keeps its buffers; without that the process reads freed memory and dies."""
    done = python(LIFETIME)
    assert done.returncode == 0, done.stderr


CLOSING = """
import threading, numpy as np
from conftest import open_text
from rlx_ort.errors import EngineError
x = np.ones((512, 2048), np.float32)
for _ in range(15):
    session = open_text("(float[512,2048] x) => (float[512,2048] y) { h = Add(x, W) g = Add(h, W) y = Add(g, W) }",
                        {"W": np.ones((512, 2048), np.float32)})
    results = []
    def work():
        try:
            for _ in range(1000000):
                results.append(session.run(["y"], {"x": x})[0])
                del results[:-2]
        except EngineError:
            pass
    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    while not results:
        pass
    session.close()
    junk = [np.full((512, 2048), 7, np.float32) for _ in range(8)]
    [thread.join() for thread in threads]
    assert all((y == 4).all() for y in results)
"""


def test_closing_during_runs_neither_crashes_nor_changes_results(python):
    """Runs that are under way keep session and weights; later ones are refused."""
    done = python(CLOSING)
    assert done.returncode == 0, done.stderr


def test_a_closed_session_refuses_to_run_and_closing_twice_is_harmless(open_model):
    """`run` after `close` is an EngineError, and outputs from before stay valid."""
    session = open_model("(float[40] x) => (float[40] y) { y = Add(x, W) }", {"W": np.ones(40, np.float32)})
    (y,) = session.run(["y"], {"x": np.ones(40, np.float32)})
    session.close()
    session.close()
    gc.collect()
    np.testing.assert_array_equal(y, np.full(40, 2, np.float32))
    with pytest.raises(EngineError, match="closed"):
        session.run(["y"], {"x": np.ones(40, np.float32)})


def test_a_weight_that_is_an_output_is_copied_out(open_model):
    """An output that is a weight stays valid after the session and its weights are gone."""
    weight = random(300)
    data = {"W": TensorData.from_array(weight.copy())}
    session = open_model("(float[300] x) => (float[300] y) { y = Identity(W) }", data)
    (y,) = session.run(["y"], {"x": weight})
    assert not np.shares_memory(y, data["W"].buffer)


def test_a_core_that_cannot_borrow_maps_one_file_for_all_sessions(open_model, monkeypatch, tmp_path: Path):
    """The second path, taken by older cores, writes the weights once and is right at every level."""
    from rlx_ort.providers.engine import injection

    monkeypatch.setattr(injection, "BORROWING_VERSION", (999,))
    x, weight, bias = random(3, 64), random(32, 64), random(32)
    for level in OptimizationLevel:
        (y,) = open_model(MATMUL, {"W": weight, "b": bias}, optimization=level).run(["y"], {"x": x})
        np.testing.assert_allclose(y, x @ weight.T + bias, rtol=1e-4, atol=1e-4)
    assert len(list((tmp_path / "cache" / "weights").glob("*.bin"))) == 1


def test_a_weights_file_holds_each_buffer_where_its_entry_says(tmp_path: Path):
    """Large buffers start at multiples of 64 KiB, which Windows needs to map them."""
    buffers = {"a": np.arange(7, dtype=np.uint8), "big": RNG.integers(0, 255, 1 << 20).astype(np.uint8)}
    path, entries = write_weights_file(buffers, tmp_path)
    content = path.read_bytes()
    for name, (offset, length) in entries.items():
        assert content[offset : offset + length] == buffers[name].tobytes()
    assert entries["big"][0] % 65536 == 0


def test_a_weights_file_that_was_cut_short_is_written_again(tmp_path: Path):
    """A file of the wrong size, as a full disk leaves it, is replaced."""
    buffers = {"a": np.arange(200, dtype=np.uint8)}
    path, _ = write_weights_file(buffers, tmp_path)
    path.write_bytes(b"short")
    write_weights_file(buffers, tmp_path)
    assert path.read_bytes() == buffers["a"].tobytes()


def test_a_weights_file_that_was_changed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One of the right name and size is read before it is used, by each process that did not write it itself."""
    buffers = {"a": np.arange(200, dtype=np.uint8), "b": np.arange(2 << 20, dtype=np.uint32).view(np.uint8)}
    path, entries = write_weights_file(buffers, tmp_path)
    content = bytearray(path.read_bytes())
    content[entries["b"][0] + 3_000_000] ^= 1
    monkeypatch.setattr(injection, "_compared", {})
    path.write_bytes(content)
    write_weights_file(buffers, tmp_path)
    offset, length = entries["b"]
    assert path.read_bytes()[offset : offset + length] == buffers["b"].tobytes()
    assert [found.name for found in tmp_path.iterdir() if found.suffix == ".partial"] == []


def test_a_weights_file_is_read_once_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sessions that share weights do not read them again to compare them."""
    buffers = {"a": np.arange(200, dtype=np.uint8)}
    monkeypatch.setattr(injection, "_compared", {})
    path, _ = write_weights_file(buffers, tmp_path)
    before = path.stat().st_ino
    opened = []
    plain = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *rest: opened.append(self) or plain(self, *rest))
    write_weights_file(buffers, tmp_path)
    assert (opened, path.stat().st_ino) == ([], before)


def test_other_contents_get_another_file(tmp_path: Path):
    """The name is a hash of the content, so a changed weight never reads an old file."""
    first, _ = write_weights_file({"a": np.zeros(200, np.uint8)}, tmp_path)
    second, _ = write_weights_file({"a": np.ones(200, np.uint8)}, tmp_path)
    assert first != second


def test_bf16_weights_compute_after_a_cast(open_model):
    """A bf16 weight, which numpy does not know, is read bit for bit."""
    weight = random(100).astype(ml_dtypes.bfloat16)
    (y,) = open_model("() => (float[100] y) { y = Cast<to=1>(W) }", {"W": weight}).run(["y"], {})
    np.testing.assert_array_equal(y, weight.astype(np.float32))


@pytest.mark.parametrize("level", list(OptimizationLevel))
def test_prepacked_weights_are_written_once_and_give_the_float64_result(open_model, tmp_path: Path, level):
    """The second session opens what the first one packed."""
    x, weight, bias = random(3, 64), random(32, 64), random(32)
    options = {"sharing": WeightSharing.PREPACKED, "optimization": level}
    folder = tmp_path / "cache" / "compiled"
    for _ in range(2):
        (y,) = open_model(MATMUL, {"W": weight, "b": bias}, **options).run(["y"], {"x": x})
        np.testing.assert_allclose(y, x @ weight.T.astype(np.float64) + bias, rtol=1e-5, atol=1e-4)
        assert len(list(folder.glob("*/entry.json"))) == 1


def test_prepacked_weights_of_another_value_are_packed_anew(open_model):
    """A changed weight is never answered by an old file."""
    x = np.eye(64, dtype=np.float32)
    text = "(float[64,64] x) => (float[64,64] y) { y = MatMul(x, W) }"
    for value in (1, 2):
        session = open_model(text, {"W": np.full((64, 64), value, np.float32)}, sharing=WeightSharing.PREPACKED)
        assert (session.run(["y"], {"x": x})[0] == value).all()


@pytest.mark.webgpu
def test_prepacked_sharing_on_a_gpu_is_the_private_kind(open_model, tmp_path: Path):
    """A GPU copies weights to its own memory, so nothing is written."""
    x, weight, bias = random(3, 64), random(32, 64), random(32)
    session = open_model(MATMUL, {"W": weight, "b": bias}, "webgpu", sharing=WeightSharing.PREPACKED)
    np.testing.assert_allclose(session.run(["y"], {"x": x})[0], x @ weight.T + bias, rtol=1e-3, atol=1e-3)
    assert not (tmp_path / "cache" / "compiled").exists()


def test_a_model_is_read_back_without_a_second_copy_of_its_large_weights() -> None:
    """They are inputs of it, since the device that holds them may have no room for another copy."""
    graph = Graph("layer")
    x, w, b = graph.input("x", ("batch", 512)), graph.param("w", (512, 512)), graph.param("b", (512,))
    graph.outputs = [x @ w + b]
    weights = {name: TensorData.from_array(random(*shape)) for name, shape in (("w", (512, 512)), ("b", (512,)))}
    request = SessionRequest(Device.CPU, export_model(graph), weights, CompileOptions())
    rewritten, whole = (CpuProvider().optimized(request, whole=whole) for whole in (False, True))
    assert [value.name for value in rewritten.graph.input] == ["x", "w"]
    assert [value.name for value in whole.graph.input] == ["x"]
