"""Sessions take and give every ONNX type, and turn every failure into one of our errors."""

from __future__ import annotations

import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import (
    Device,
    DeviceUnavailableError,
    DType,
    EngineError,
    InputError,
    LegalizeError,
    RlxError,
    is_available,
)
from rlx_ort.ir.types import OptionalType, SequenceType, Shape, TensorType
from rlx_ort.providers.engine.runtime import ENGINE_EXCEPTIONS, bindings, opening_error, running_error
from rlx_ort.providers.engine.stopping import Stop
from rlx_ort.providers.webgpu import WebGpuProvider

ADD = "(float[N,2] a, float[N,2] b) => (float[N,2] y) { y = Add(a, b) }"
DTYPES = [
    (DType.BF16, "bfloat16"), (DType.F8E4M3, "float8e4m3fn"), (DType.F8E5M2, "float8e5m2"),
    (DType.F8E4M3FNUZ, "float8e4m3fnuz"), (DType.F8E5M2FNUZ, "float8e5m2fnuz"), (DType.F16, "float16"),
    (DType.F64, "double"), (DType.I8, "int8"), (DType.U16, "uint16"), (DType.I64, "int64"), (DType.U64, "uint64"),
    (DType.BOOL, "bool"),
]  # fmt: skip


def test_inputs_and_outputs_have_our_types_with_named_dims(open_model):
    """A session has the names, element types and shapes of the IR."""
    session = open_model(ADD)
    kind = TensorType(DType.F32, Shape(("N", 2)))
    assert list(session.input_types.items()) == [("a", kind), ("b", kind)]
    assert list(session.output_types.items()) == [("y", kind)]


def test_every_node_is_assigned_and_named(open_model):
    """The assignment names the provider, the node and the operator."""
    (node,) = open_model(ADD).assignments
    assert (node.provider, node.name, node.domain, node.op_type) == ("CPUExecutionProvider", "n0_Add", "", "Add")


@pytest.mark.parametrize(("dtype", "name"), DTYPES, ids=[name for _, name in DTYPES])
def test_every_element_type_goes_in_and_comes_out(open_model, dtype, name):
    """Identity returns the fed array bit for bit, also for types numpy alone does not know."""
    session = open_model(f"({name}[N,3] x) => ({name}[N,3] y) {{ y = Identity(x) }}")
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype.numpy)
    (y,) = session.run(["y"], {"x": x})
    assert (y.dtype, y.shape) == (dtype.numpy, (2, 3))
    np.testing.assert_array_equal(y.view(np.uint8), x.view(np.uint8))


@pytest.mark.parametrize(("dtype", "name"), [(ml_dtypes.int4, "int4"), (ml_dtypes.uint4, "uint4")])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_four_bit_integers_go_in_packed(open_model, dtype, name, count):
    """Cast reads each of an odd or even number of 4-bit values right."""
    session = open_model(f"({name}[N] x) => (float[N] y) {{ y = Cast<to=1>(x) }}")
    x = np.array([1, 2, 3, 7, 5][:count], np.int8).astype(dtype)
    (y,) = session.run(["y"], {"x": x})
    np.testing.assert_array_equal(y, x.astype(np.float32))


@pytest.mark.parametrize(("dtype", "number"), [(ml_dtypes.int4, 22), (ml_dtypes.uint4, 21)])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_four_bit_integers_come_out_unpacked(open_model, dtype, number, count):
    """Cast writes 4-bit values that are read as one element each."""
    kind = "int4" if number == 22 else "uint4"
    session = open_model(f"(float[N] x) => ({kind}[N] y) {{ y = Cast<to={number}>(x) }}")
    x = np.array([1, 2, 3, 7, 5][:count], np.float32)
    (y,) = session.run(["y"], {"x": x})
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.astype(np.float32), x)


def test_strings_go_in_and_come_out_as_text(open_model):
    """Letters outside ASCII survive."""
    session = open_model("(string[N] x) => (string[N] y) { y = Identity(x) }")
    (y,) = session.run(["y"], {"x": np.array(["a", "ü", ""], object)})
    assert y.tolist() == ["a", "ü", ""]


def test_sequences_are_lists_of_arrays(open_model):
    """A sequence goes in as a list and comes out as one."""
    session = open_model(
        "(seq(float[N]) s, float[N] x) => (seq(float[N]) t) { t = SequenceInsert(s, x) }".replace("float[N])", "float)")
    )
    assert isinstance(session.input_types["s"], SequenceType)
    (t,) = session.run(["t"], {"s": [np.ones(2, np.float32)], "x": np.zeros(3, np.float32)})
    assert [item.tolist() for item in t] == [[1, 1], [0, 0, 0]]


@pytest.mark.parametrize(("value", "wanted"), [(np.ones(2, np.float32), True), (None, False)])
def test_an_optional_may_be_fed_none(open_model, value, wanted):
    """None stands for an absent optional."""
    session = open_model("(optional(float[2]) x) => (bool y) { y = OptionalHasElement(x) }")
    assert isinstance(session.input_types["x"], OptionalType)
    (y,) = session.run(["y"], {"x": value})
    assert bool(y) is wanted


def test_a_map_comes_out_as_a_dict(open_model):
    """ZipMap's result is a list of dicts."""
    text = "(float[1,2] x) => (seq(map(int64, float)) y) { y = ai.onnx.ml.ZipMap<classlabels_int64s=[7, 9]>(x) }"
    (y,) = open_model(text).run(["y"], {"x": np.array([[0.25, 0.75]], np.float32)})
    assert y == [{7: 0.25, 9: 0.75}]


def test_bf16_and_f32_outputs_come_out_of_one_run(open_model):
    """A run with one foreign output still returns the plain ones as arrays."""
    session = open_model("(bfloat16[2] x, float[2] z) => (bfloat16[2] y, float[2] w) { y = Identity(x) w = Neg(z) }")
    y, w = session.run(["y", "w"], {"x": np.ones(2, ml_dtypes.bfloat16), "z": np.ones(2, np.float32)})
    assert (y.dtype, w.tolist()) == (ml_dtypes.bfloat16, [-1, -1])


def test_strings_with_bf16_outputs_are_refused_in_words(open_model):
    """What no call of ONNX Runtime can do is an error that says so."""
    text = "(string[1] s, bfloat16[2] x) => (string[1] t, bfloat16[2] y) { t = Identity(s) y = Identity(x) }"
    with pytest.raises(EngineError, match="cast those to f32"):
        open_model(text).run(["t", "y"], {"s": np.array(["a"], object), "x": np.ones(2, ml_dtypes.bfloat16)})


@pytest.mark.parametrize(
    "feeds",
    [
        {"a": np.ones((2, 2), np.float32), "b": np.ones((2, 3), np.float32)},
        {"a": np.ones((2, 2), np.float32), "b": np.ones(2, np.float32)},
        {"a": np.ones((2, 2), np.float32), "b": np.ones((2, 2), np.float64)},
        {"a": np.ones((2, 2), np.float32), "b": 1.0},
        {"a": np.ones((2, 2), np.float32)},
        {name: np.ones((2, 2), np.float32) for name in "abc"},
    ],
    ids=["dim", "rank", "dtype", "scalar", "missing", "unknown"],
)
def test_wrong_feeds_are_input_errors(open_model, feeds):
    """ONNX Runtime's refusal of a feed is an InputError with its exception as the cause."""
    with pytest.raises(InputError) as caught:
        open_model(ADD).run(["y"], feeds)
    assert caught.value.__cause__ is not None


def test_a_failing_kernel_is_an_engine_error_with_the_cause(open_model):
    """An index beyond the table fails in the kernel, which no check of the inputs can foresee."""
    session = open_model("(int64[1] i) => (float[1,40] y) { y = Gather(W, i) }", {"W": np.ones((2, 40), np.float32)})
    with pytest.raises(EngineError) as caught:
        session.run(["y"], {"i": np.array([9])})
    assert type(caught.value.__cause__).__module__.startswith("onnxruntime")


def test_a_node_without_a_kernel_is_a_legalize_error(open_model):
    """The CPU provider has no kernel for this element type."""
    with pytest.raises(LegalizeError, match="Max"):
        open_model("(int16[2] x) => (int16[2] y) { y = Max(x, x) }")


def test_an_unknown_operator_is_an_engine_error(open_model):
    """A model ONNX Runtime does not understand is refused, not run elsewhere."""
    with pytest.raises(EngineError, match="Nonsense"):
        open_model("(float[2] x) => (float[2] y) { y = com.microsoft.Nonsense(x) }")


def engine_exception_types() -> dict[str, type[Exception]]:
    found = {name: value for name, value in vars(bindings()).items() if isinstance(value, type)}
    return {name: value for name, value in found.items() if issubclass(value, Exception)}


def test_every_exception_of_onnx_runtime_is_mapped():
    """A new ONNX Runtime with a new exception type fails here until somebody decides what it means."""
    assert engine_exception_types().keys() <= ENGINE_EXCEPTIONS.keys()


@pytest.mark.parametrize("name", sorted(ENGINE_EXCEPTIONS))
def test_mapped_exceptions_become_ours(name):
    """Each type becomes an RlxError, both while opening and while running."""
    kind = engine_exception_types().get(name)
    if kind is None:
        pytest.skip(f"this ONNX Runtime has no {name}")
    err = kind("[ONNXRuntimeError] : 1 : FAIL : what happened")
    for ours in (opening_error(err, Device.CPU), running_error(err, Device.CPU)):
        assert isinstance(ours, RlxError)
        assert "what happened" in str(ours)
        assert "ONNXRuntimeError" not in str(ours)


def test_a_model_that_a_provider_refuses_does_not_make_the_device_unavailable():
    """The provider worked a moment ago; a device that is gone says so in words of its own."""
    fail = bindings().EPFail
    refused = opening_error(fail("[ONNXRuntimeError] : 11 : EP_FAIL : does not support Round"), Device.WEBGPU)
    gone = opening_error(fail("[ONNXRuntimeError] : 11 : EP_FAIL : no CUDA-capable device is detected"), Device.CUDA)
    assert isinstance(refused, EngineError)
    assert "WebGPU: does not support Round" in str(refused)
    assert isinstance(gone, DeviceUnavailableError)


def test_unknown_keys_and_options_are_refused(open_model):
    """ONNX Runtime would ignore a key; the closest one is named. The CPU provider has no options at all."""
    with pytest.raises(InputError, match=r"session\.disable_prepacking"):
        open_model(ADD, session_config={"session.disable_prepackin": "1"})
    with pytest.raises(EngineError, match="use_tf32"):
        open_model(ADD, provider_options={"use_tf32": "1"})


def test_one_session_runs_in_many_threads(open_model):
    """Concurrent runs of one CPU session give each caller its own result."""
    from concurrent.futures import ThreadPoolExecutor

    session = open_model(ADD)

    def work(number: int) -> bool:
        x = np.full((8, 2), number, np.float32)
        return bool((session.run(["y"], {"a": x, "b": x})[0] == 2 * number).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


def test_profiling_writes_a_file(open_model, tmp_path):
    """`profile_prefix` leads to a profile where it says."""
    session = open_model(ADD, profile_prefix=str(tmp_path / "run"))
    x = np.ones((1, 2), np.float32)
    session.run(["y"], {"a": x, "b": x})
    assert session.raw.end_profiling().startswith(str(tmp_path / "run"))


def test_a_library_that_cannot_be_loaded_never_means_cpu(open_model, monkeypatch):
    """A provider that is listed and then dropped by ONNX Runtime is an error, not a CPU session."""
    from rlx_ort.providers.cuda import CudaProvider
    from rlx_ort.providers.engine import runtime

    if CudaProvider.ep_name in runtime.available_eps():
        pytest.skip("this ONNX Runtime has CUDA, so it does not drop it")
    monkeypatch.setattr(runtime, "available_eps", lambda: (CudaProvider.ep_name, "CPUExecutionProvider"))
    monkeypatch.setattr("rlx_ort.providers.cuda.nvidia_gpus", lambda: ())
    with pytest.warns(UserWarning, match="not in available"), pytest.raises(DeviceUnavailableError, match="instead of"):
        open_model(ADD, device="cuda")


@pytest.mark.skipif(not is_available("webgpu"), reason="this machine has no WebGPU, whose runs take turns")
def test_a_session_that_stopped_work_collects_is_closed_once_other_runs_have_ended(open_model):
    """Garbage may be collected by a thread whose work is to end; the end of the session waits for the device."""
    session = open_model(ADD, device="webgpu")
    gone, stop, closed = threading.Event(), Stop(), threading.Event()
    weakref.finalize(session._core.session, gone.set)
    stop.stop()

    def collect() -> None:
        with stop.held():
            session.close()
        closed.set()

    with WebGpuProvider().run_lock():
        threading.Thread(target=collect).start()
        assert closed.wait(30)
        assert not gone.is_set()
    assert gone.wait(30)
