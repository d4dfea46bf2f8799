"""What each provider module asks ONNX Runtime for, on any machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlx_ort import DEVICE_PRIORITY, CompileOptions, Device, DeviceUnavailableError, EngineError, Graph, Precision
from rlx_ort.converters.to_onnx.exporter import exported
from rlx_ort.providers import cuda, ort_provider, rocm
from rlx_ort.providers.base import SessionRequest
from rlx_ort.providers.coreml import CoreMlProvider
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.cuda import CudaProvider, cuda_options
from rlx_ort.providers.directml import DirectMlProvider
from rlx_ort.providers.engine import cuda_driver
from rlx_ort.providers.engine.recipe import SessionRecipe
from rlx_ort.providers.engine.replays import NotRecordedError
from rlx_ort.providers.mlx import MlxProvider
from rlx_ort.providers.openvino import OpenVinoProvider
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.plugins import Plugin
from rlx_ort.providers.qnn import QnnProvider
from rlx_ort.providers.registry import default_registry
from rlx_ort.providers.rocm import RocmProvider
from rlx_ort.providers.tensorrt import TensorRtProvider


@pytest.mark.parametrize(("precision", "tf32"), [(Precision.F32, "0"), (Precision.TF32, "1"), (Precision.F16, "0")])
def test_cuda_uses_tf32_only_when_asked(precision, tf32):
    """ONNX Runtime's own default would cost 6e-4 of accuracy."""
    assert cuda_options(2, precision) == {"device_id": "2", "use_tf32": tf32}
    assert cuda_options(0, precision) == {"use_tf32": tf32}  # the first GPU by default, without a warning


@pytest.mark.parametrize(
    ("dtype", "rows", "search"),
    [("f32", 4, None), ("f32", "rows", "HEURISTIC"), ("f16", 4, "HEURISTIC"), ("f16", "rows", "HEURISTIC")],
)
def test_cuda_plans_convolutions_by_heuristics_for_open_sizes_and_in_f16(monkeypatch, dtype, rows, search):
    """An option of the caller comes on top."""
    opened: list[SessionRecipe] = []
    monkeypatch.setattr(cuda, "open_session", lambda recipe, request: opened.append(recipe))
    graph = Graph("convolution")
    x = graph.input("x", [rows, 3, 8, 8], dtype)
    graph.outputs = [graph.conv2d(x, graph.param("w", [4, 3, 3, 3], dtype))]
    device, options = Device("cuda"), CompileOptions()
    CudaProvider()._open(SessionRequest(device, exported(graph), {}, options))
    assert opened[0].provider_options(options).get("cudnn_conv_algo_search") == search
    assert opened[0].replans is (rows == "rows")
    asked = options.with_(provider_options={"cudnn_conv_algo_search": "DEFAULT"})
    assert opened[0].provider_options(asked)["cudnn_conv_algo_search"] == "DEFAULT"


def test_directml_plans_no_memory_patterns_and_runs_one_at_a_time():
    """The provider refuses sessions with memory patterns, and concurrent runs of one session, not of the process."""
    recipe, other = (DirectMlProvider().recipe(Device("directx:1"), CompileOptions()) for _ in range(2))
    assert recipe.mem_pattern is False
    assert recipe.options["device_id"] == "1"
    assert recipe.run_lock() is recipe.run_lock()
    assert recipe.run_lock() is not other.run_lock()


@pytest.mark.parametrize(("kind", "units"), [("metal", "CPUAndGPU"), ("ane", "CPUAndNeuralEngine")])
def test_core_ml_kinds_differ_in_their_compute_units(kind, units):
    """`metal` and `ane` are one provider with two settings."""
    recipe = CoreMlProvider().recipe(Device(kind), CompileOptions())
    assert recipe.options["MLComputeUnits"] == units
    assert "ModelCacheDirectory" not in recipe.options


def test_rocm_is_migraphx_with_half_precision_only_on_request():
    """The old ROCm provider is gone."""
    plain = RocmProvider().recipe(Device("rocm:3"), CompileOptions())
    half = RocmProvider().recipe(Device("rocm:3"), CompileOptions(precision=Precision.F16))
    assert RocmProvider.ep_name == "MIGraphXExecutionProvider"
    assert dict(plain.options) == {"device_id": "3"}
    assert half.options["migraphx_fp16_enable"] == "1"


def ep_device(kind: str) -> Any:
    """Play one of ONNX Runtime's device objects."""
    return SimpleNamespace(device=SimpleNamespace(type=f"OrtHardwareDeviceType.{kind}"))


@pytest.fixture
def plugged(monkeypatch):
    """Return a function that makes a plugin bring devices of these kinds of hardware, in ONNX Runtime's order."""

    def bring(*kinds: str) -> list[Any]:
        found = [ep_device(kind) for kind in kinds]
        for module in (ort_provider, rocm):
            monkeypatch.setattr(module, "plugin_for", lambda name: Plugin("x", "1", (name,), Path("x")))
        monkeypatch.setattr(ort_provider, "plugin_devices", lambda engine, name: found)
        monkeypatch.setattr(ort_provider.runtime, "onnxruntime", lambda: None)
        return found

    return bring


def load_config(recipe: SessionRecipe, **options: Any) -> dict[str, Any]:
    spelled = recipe.provider_options(CompileOptions(provider_options=options))
    assert spelled.keys() <= {"load_config", "device_type"}  # all else is ignored by the plugin
    found: dict[str, Any] = json.loads(spelled["load_config"])
    return found


@pytest.mark.parametrize(
    ("precision", "hint"),
    [(Precision.F32, "f32"), (Precision.TF32, "f32"), (Precision.F16, "f16"), (Precision.BF16, "bf16")],
)
def test_openvino_computes_in_f32_unless_less_is_asked_for(plugged, precision, hint):
    """Left to itself it takes bf16 where the processor has it."""
    plugged("CPU")
    recipe = OpenVinoProvider().recipe(Device("openvino"), CompileOptions(precision=precision))
    assert load_config(recipe)["CPU"]["INFERENCE_PRECISION_HINT"] == hint


def test_openvino_uses_the_threads_of_the_process_or_those_asked_for(plugged, monkeypatch):
    """`RLX_WORKERS` and `intra_op_threads` count as on the CPU."""
    plugged("CPU")
    monkeypatch.setenv("RLX_WORKERS", "3")
    for options, threads in ((CompileOptions(), "3"), (CompileOptions(intra_op_threads=2), "2")):
        recipe = OpenVinoProvider().recipe(Device("openvino"), options)
        assert load_config(recipe)["CPU"]["INFERENCE_NUM_THREADS"] == threads


def test_openvinos_options_reach_both_of_its_builds(plugged):
    """Under the names of OpenVINO, with the caller's own load_config on top, and its cache in the given folder."""
    plugged("CPU")
    recipe = OpenVinoProvider().recipe(Device("openvino"), CompileOptions())
    recipe = replace(recipe, options={**recipe.options, **recipe.cache_options("/kept")})
    own = json.dumps({"CPU": {"NUM_STREAMS": "2"}, "GPU": {"PLUGIN_THROTTLE": "1"}})
    found = load_config(recipe, precision="FP16", num_streams=4, load_config=own)
    assert found["GPU"] == {"PLUGIN_THROTTLE": "1"}
    assert found["CPU"].items() >= {"INFERENCE_PRECISION_HINT": "f16", "NUM_STREAMS": "2", "CACHE_DIR": "/kept"}.items()


def test_openvino_gets_inputs_that_nothing_reads_behind_the_others(plugged):
    """It takes inputs by their places after it dropped those; a node that asks for a shape alone is folded away."""
    import onnx.parser

    plugged("CPU")
    rewritten = OpenVinoProvider().recipe(Device("openvino"), CompileOptions()).rewritten
    assert rewritten is not None
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[2] u, float[2] a, float[2] s, float[2] b, bool c)'
    text += " => (float[2] y, int64[1] n) { y = If (c) <then_branch = t () => (float[2] v) { v = Sub(a, b) },"
    text += " else_branch = e () => (float[2] w) { w = Neg(a) }> n = Shape(s) }"
    model = onnx.ModelProto.FromString(rewritten(onnx.parser.parse_model(text).SerializeToString()))
    assert [value.name for value in model.graph.input] == ["a", "b", "c", "u", "s"]


@pytest.mark.parametrize("text", ["settings.json", "[]", '{"CPU": 1}'])
def test_a_load_config_that_openvino_would_not_read_is_refused(plugged, text):
    """It takes the JSON itself; the name of a file made it answer from the CPU."""
    plugged("CPU")
    with pytest.raises(EngineError, match="load_config"):
        load_config(OpenVinoProvider().recipe(Device("openvino"), CompileOptions()), load_config=text)


def test_openvinos_index_counts_gpus_then_npus_then_the_cpu(plugged):
    """ONNX Runtime lists them as the operating system does."""
    cpu, npu, gpu, other = plugged("CPU", "NPU", "GPU", "GPU")
    found = [OpenVinoProvider().ep_devices(Device("openvino", index)) for index in range(4)]
    assert found == [(gpu,), (other,), (npu,), (cpu,)]


def test_openvinos_npu_is_for_those_who_ask_for_f16(plugged):
    """It computes in nothing else, so f32 would be less than was asked for."""
    plugged("NPU")
    with pytest.raises(EngineError, match="f16"):
        OpenVinoProvider().recipe(Device("openvino"), CompileOptions())
    assert OpenVinoProvider().recipe(Device("openvino"), CompileOptions(precision=Precision.F16)).ep_devices


def test_openvino_on_the_cpu_is_not_taken_for_a_gpu(plugged, monkeypatch):
    """Its default profile follows the hardware."""
    monkeypatch.setattr(OpenVinoProvider, "missing", lambda self, device: None)
    plugged("CPU", "GPU")
    gpu, cpu = (OpenVinoProvider().default_profile(Device("openvino", index)) for index in (0, 1))
    assert cpu.gemm_gflops == CpuProvider().default_profile(Device.CPU).gemm_gflops
    assert "integrated GPU" in gpu.source


@pytest.mark.parametrize(("hardware", "backend"), [("NPU", "htp"), ("CPU", "htp"), ("GPU", "gpu")])
def test_qnn_is_told_its_backend(plugged, hardware, backend):
    """It finds none for the CPU, where the wheel for Linux x64 simulates the HTP."""
    plugged(hardware)
    assert QnnProvider().recipe(Device("qnn"), CompileOptions()).options["backend_type"] == backend


def test_a_backend_path_of_the_caller_takes_the_place_of_the_type(plugged):
    """QNN refuses both at once."""
    plugged("CPU")
    options = CompileOptions(provider_options={"backend_path": "/lib/libQnnHtp.so"})
    sent = QnnProvider().recipe(Device("qnn"), options).provider_options(options)
    assert sent["backend_path"] == "/lib/libQnnHtp.so"
    assert "backend_type" not in sent


def test_a_simulated_npu_is_not_expected_to_be_fast(plugged, monkeypatch):
    """Else an automatic choice would prefer it to the CPU that simulates it."""
    monkeypatch.setattr(QnnProvider, "missing", lambda self, device: None)
    plugged("CPU")
    assert QnnProvider().default_profile(Device("qnn")).gemm_gflops < 1
    assert QnnProvider().facts(Device("qnn")).hardware.startswith("simulator on")


def test_migraphx_as_a_plugin_has_its_own_names_of_options(plugged):
    """Without the prefix, on the device object, and with its own name of the cache's folder."""
    (gpu,) = plugged("GPU")
    recipe = RocmProvider().recipe(Device("rocm"), CompileOptions(precision=Precision.F16))
    recipe = replace(recipe, options={**recipe.options, **recipe.cache_options("/kept")})
    assert recipe.ep_devices == (gpu,)
    assert recipe.provider_options(CompileOptions()) == {"fp16_enable": "1", "cache_dir": "/kept"}
    with pytest.raises(EngineError, match="migraphx_mem_limit"):
        recipe.provider_options(CompileOptions(provider_options={"migraphx_mem_limit": 1}))


def test_directml_as_a_plugin_gets_the_device_itself(plugged):
    """It has no options; runs still take turns."""
    (gpu,) = plugged("GPU")
    recipe = DirectMlProvider().recipe(Device.DIRECTX, CompileOptions())
    assert recipe.ep_devices == (gpu,)
    assert (dict(recipe.options), recipe.option_keys, recipe.mem_pattern) == ({}, frozenset(), False)


@pytest.mark.parametrize("kind", ["mlx", "amdgpu"])
def test_a_provider_that_is_a_plugin_only_runs_on_its_device_object(plugged, kind):
    """The index counts what ONNX Runtime lists; one beyond is refused."""
    (gpu,) = plugged("GPU")
    provider = default_registry().for_device(Device(kind))
    assert isinstance(provider, OrtProvider)
    recipe = provider.recipe(Device(kind), CompileOptions())
    assert recipe.ep_devices == (gpu,)
    assert recipe.ep_name == {"mlx": "MLXExecutionProvider", "amdgpu": "AMDGPUExecutionProvider"}[kind]
    with pytest.raises(DeviceUnavailableError):
        provider.recipe(Device(kind, 1), CompileOptions())


def test_amds_plugin_sends_no_telemetry(plugged):
    """As ONNX Runtime itself."""
    plugged("GPU")
    recipe = default_registry().for_device(Device("amdgpu")).recipe(Device("amdgpu"), CompileOptions())
    assert recipe.options["telemetry_enable"] == "0"


@pytest.mark.parametrize(
    ("system", "machine", "words"), [("darwin", "arm64", "onnxruntime-ep-mlx"), ("win32", "AMD64", "Apple silicon")]
)
def test_mlx_is_offered_where_it_runs(monkeypatch, system, machine, words):
    """Elsewhere there is nothing to install."""
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert words in MlxProvider().install_remedy()


def test_tensorrt_has_cuda_behind_it_and_no_engine_cache(monkeypatch, tmp_path):
    """What TensorRT leaves goes to CUDA; engines, which hold weights, are not kept."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    recipe = TensorRtProvider().recipe(Device("tensorrt:1"), CompileOptions())
    assert recipe.helpers == ((CudaProvider.ep_name, {"device_id": "1", "use_tf32": "0"}),)
    assert "trt_engine_cache_enable" not in recipe.options


def test_the_callers_options_come_last():
    """Options of `CompileOptions` win over the module's, as text."""
    recipe = DirectMlProvider().recipe(Device.DIRECTX, CompileOptions())
    chosen = recipe.provider_options(CompileOptions(provider_options={"device_id": 7}))
    assert chosen == {"device_id": "7"}


@pytest.mark.parametrize("provider", default_registry().providers(), ids=lambda provider: provider.name)
def test_every_default_profile_is_positive_and_says_where_it_comes_from(provider):
    """Rates, bandwidths and times are above zero and marked as defaults."""
    for kind in provider.kinds:
        profile = provider.default_profile(Device(kind))
        if profile is None:
            assert not isinstance(provider, OrtProvider)
            continue
        assert profile.source.startswith("default")
        assert min(profile.gemm_gflops, profile.conv_gflops, profile.memory_bytes_per_ns) > 0
        assert min(profile.dispatch_ns, profile.roundtrip_ns, profile.upload_bytes_per_ns) > 0


def test_every_known_device_has_a_provider():
    """No built-in name is left without an answer."""
    assert [kind for kind in DEVICE_PRIORITY if default_registry().for_device(Device(kind)) is None] == []


def test_cuda_records_by_default_and_requires_it_when_asked(monkeypatch):
    """False records nothing, "auto" may, True must."""
    monkeypatch.setattr(CudaProvider, "ep_devices", lambda self, device: ())
    recipes = {
        how: CudaProvider().recipe(Device.CUDA, CompileOptions(device_graph=how)) for how in (False, "auto", True)
    }
    assert recipes[False].recording is None
    assert [recipes[how].recording.required for how in ("auto", True)] == [False, True]
    assert all(recipe.run_config == {"disable_synchronize_execution_providers": "1"} for recipe in recipes.values())


def test_cuda_keeps_off_streams_that_the_caller_decides_about(monkeypatch):
    """With the caller's own stream or graph capture nothing is recorded, and runs wait for the device."""
    monkeypatch.setattr(CudaProvider, "ep_devices", lambda self, device: ())
    options = CompileOptions(provider_options={"enable_cuda_graph": "1"})
    recipe = CudaProvider().recipe(Device.CUDA, options)
    assert not recipe.run_config
    with pytest.raises(NotRecordedError, match="'enable_cuda_graph' is set"):
        recipe.recording.open()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"profile_prefix": "p"}, "profile"),
        ({"session_config": {"session.use_env_allocators": "1"}}, "share its arena"),
    ],
)
def test_cuda_does_not_record_what_would_be_hidden_or_overwritten(monkeypatch, options, reason):
    """A replay writes no profile, and writes to an arena in which other sessions may keep tensors."""
    monkeypatch.setattr(CudaProvider, "ep_devices", lambda self, device: ())
    recipe = CudaProvider().recipe(Device.CUDA, CompileOptions(**options))
    with pytest.raises(NotRecordedError, match=reason):
        recipe.recording.open()


def test_a_machine_without_the_driver_records_nothing(monkeypatch):
    """The reason names the library."""
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "no-such-driver.so")
    monkeypatch.setattr(cuda_driver, "_driver", cuda_driver._driver.__wrapped__)
    monkeypatch.setattr(cuda_driver, "_context", cuda_driver._context.__wrapped__)
    with pytest.raises(NotRecordedError, match=r"no-such-driver\.so"):
        cuda_driver.open_recorder(0)
