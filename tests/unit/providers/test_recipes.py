"""What each provider module asks ONNX Runtime for, on any machine."""

from __future__ import annotations

import ctypes

import pytest

from rlx_ort.device import DEVICE_PRIORITY, Device
from rlx_ort.execution.options import CompileOptions, Precision
from rlx_ort.providers import cuda_recorder
from rlx_ort.providers.coreml import CoreMlProvider
from rlx_ort.providers.cuda import CudaProvider, cuda_options
from rlx_ort.providers.directml import DirectMlProvider
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.recordable import NotRecordedError
from rlx_ort.providers.registry import default_registry
from rlx_ort.providers.rocm import RocmProvider
from rlx_ort.providers.tensorrt import TensorRtProvider


@pytest.mark.parametrize(("precision", "tf32"), [(Precision.F32, "0"), (Precision.TF32, "1"), (Precision.F16, "0")])
def test_cuda_uses_tf32_only_when_asked(precision, tf32):
    """ONNX Runtime's own default would cost 6e-4 of accuracy."""
    assert cuda_options(2, precision) == {"device_id": "2", "use_tf32": tf32}


def test_directml_plans_no_memory_patterns_and_runs_one_at_a_time():
    """The provider refuses sessions with memory patterns, and concurrent runs."""
    recipe = DirectMlProvider().recipe(Device("directx:1"), CompileOptions())
    assert recipe.mem_pattern is False
    assert recipe.options["device_id"] == "1"
    assert recipe.run_lock() is recipe.run_lock()


def test_two_directml_sessions_do_not_wait_for_each_other():
    """The rule is one run a session, not one run a process."""
    first, second = (DirectMlProvider().recipe(Device.DIRECTX, CompileOptions()) for _ in range(2))
    assert first.run_lock() is not second.run_lock()


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
    monkeypatch.setattr(cuda_recorder, "LIBRARY", "no-such-driver.so")
    monkeypatch.setattr(cuda_recorder, "_driver", cuda_recorder._driver.__wrapped__)
    monkeypatch.setattr(cuda_recorder, "_context", cuda_recorder._context.__wrapped__)
    with pytest.raises(NotRecordedError, match=r"no-such-driver\.so"):
        cuda_recorder.open_recorder(0)


def test_a_memcpy_node_has_the_size_of_the_driver_s_structure():
    """CUDA_MEMCPY3D has 200 bytes on 64-bit systems; a wrong layout would misread captured copies."""
    assert ctypes.sizeof(cuda_recorder._Memcpy3D) == 200
