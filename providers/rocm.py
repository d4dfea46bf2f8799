"""AMD GPUs: ROCm through MIGraphX, which compiles a program for each input shape, and AMD's own choice of a back end.

AMD's build of ONNX Runtime (`onnxruntime-migraphx`) has MIGraphX, and so has a plugin for any build. The plugin
`onnxruntime-ep-amdgpu` passes a model to MIGraphX or DirectML.

The older ROCMExecutionProvider left ONNX Runtime in 1.23, before the oldest release that is supported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.errors import EngineError
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.engine.recipe import SessionRecipe, names
from rlx_ort.providers.engine.runtime import Problem
from rlx_ort.providers.hardware import engine_library, missing_libraries
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.plugins import plugin_for

_HALVES = {Precision.F16: "migraphx_fp16_enable", Precision.BF16: "migraphx_bf16_enable"}


class RocmProvider(OrtProvider):
    """AMD GPUs; the index is HIP's device ordinal."""

    name: ClassVar[str] = "rocm"
    kinds: ClassVar[tuple[str, ...]] = ("rocm",)
    ep_name: ClassVar[str] = "MIGraphXExecutionProvider"
    title: ClassVar[str] = "ROCm (MIGraphX)"
    remedy: ClassVar[str] = "pip install onnxruntime-migraphx  # on Linux with ROCm, in place of onnxruntime"
    plugin: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    compiles_per_shape: ClassVar[bool] = True
    # https://onnxruntime.ai/docs/execution-providers/MIGraphX-ExecutionProvider.html; the save and load options that
    # the page still names are refused since https://github.com/microsoft/onnxruntime/issues/25379.
    option_keys: ClassVar[frozenset[str] | None] = names(
        """
        device_id migraphx_fp16_enable migraphx_bf16_enable migraphx_fp8_enable migraphx_int8_enable
        migraphx_int8_calibration_table_name migraphx_int8_use_native_calibration_table migraphx_exhaustive_tune
        migraphx_mem_limit migraphx_arena_extend_strategy migraphx_external_alloc migraphx_external_free
        migraphx_external_empty_cache migraphx_model_cache_dir
        """
    )
    cache_option: ClassVar[str] = "migraphx_model_cache_dir"

    def missing_libraries(self, device: Device) -> Problem | None:
        """Return the ROCm libraries that are not found, all of them."""
        plugin = plugin_for(self.ep_name)
        library = engine_library("onnxruntime_providers_migraphx") if plugin is None else plugin.library
        missing = () if library is None else missing_libraries(library)
        if library is None or not missing:
            return None
        return Problem(f"{library.name} needs {', '.join(missing)}", "install ROCm and MIGraphX from AMD's repository")

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe in the spelling of the build or of the plugin; see `OrtProvider.recipe`."""
        recipe = super().recipe(device, options)
        return replace(recipe, spelled=_as_plugin_options) if recipe.ep_devices else recipe

    def chosen(self, device: Device, options: CompileOptions) -> dict[str, str]:
        """Return options for one GPU; half precision only where it was asked for."""
        chosen = {} if self.ep_devices(device) else {"device_id": str(device.index)}
        if options.precision in _HALVES:
            chosen[_HALVES[options.precision]] = "1"
        return chosen

    # A new input shape is compiled inside `run`, seconds to minutes; bucket or pad varying sizes.

    profile: ClassVar[CostProfile | None] = CostProfile.shipped(
        "middling GPU, assumed", gflops=(10_000, 6_000), bytes_per_ns=(800, 10), ns=(4_000, 40_000)
    )


def _as_plugin_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options without the prefix, as `onnxruntime-ep-migraphx` names them."""
    # https://github.com/onnxruntime/onnxruntime-ep-amdgpu/blob/main/src/migraphx/mgx_options.h
    plain = {key.removeprefix("migraphx_"): value for key, value in options.items()}
    if "model_cache_dir" in plain:
        plain["cache_dir"] = plain.pop("model_cache_dir")
    lost = sorted(f"migraphx_{key}" for key in plain if key.startswith(("mem_limit", "arena_", "external_")))
    if lost:
        raise EngineError(f"the MIGraphX plugin has no option {', '.join(lost)}")
    return plain


class AmdGpuProvider(OrtProvider):
    """AMD GPUs; the index counts them as ONNX Runtime does."""

    name: ClassVar[str] = "amdgpu"
    kinds: ClassVar[tuple[str, ...]] = ("amdgpu",)
    ep_name: ClassVar[str] = "AMDGPUExecutionProvider"
    title: ClassVar[str] = "AMD GPU"
    remedy: ClassVar[str] = (
        "build the wheel of https://github.com/onnxruntime/onnxruntime-ep-amdgpu and install it; "
        "the package of that name that pip finds (0.0.0) is empty"
    )
    plugin: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    compiles_per_shape: ClassVar[bool] = True
    # The repository's src/amdgpu/gpu_options.h; without device_id, which the index sets, and its telemetry.
    option_keys: ClassVar[frozenset[str] | None] = names(
        "disable_caching force_recompile exhaustive_tune profile cache_dir mlss_use_specific_ops"
    )

    cache_option: ClassVar[str] = "cache_dir"

    def chosen(self, device: Device, options: CompileOptions) -> dict[str, str]:
        """Return that the plugin's telemetry is off."""
        return {"telemetry_enable": "0"}

    profile: ClassVar[CostProfile | None] = RocmProvider.profile
