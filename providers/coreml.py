"""Core ML: Apple's GPU (`metal`) and Neural Engine (`ane`); the macOS build of `onnxruntime` has it inside."""

from __future__ import annotations

import platform
import sys
from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.errors import install_command
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.engine.recipe import names
from rlx_ort.providers.engine.runtime import Problem, parse_version
from rlx_ort.providers.ort_provider import OrtProvider

# Bare tokens, compared with case; the header's spelling `MLComputeUnitsAll` is refused.
_COMPUTE_UNITS = {"metal": "CPUAndGPU", "ane": "CPUAndNeuralEngine"}
_ML_PROGRAM_SINCE = (12,)


class CoreMlProvider(OrtProvider):
    """Apple's accelerators through Core ML, one of each."""

    name: ClassVar[str] = "coreml"
    kinds: ClassVar[tuple[str, ...]] = ("metal", "ane")
    ep_name: ClassVar[str] = "CoreMLExecutionProvider"
    title: ClassVar[str] = "Core ML"
    extra: ClassVar[str] = "cpu"
    compiles: ClassVar[bool] = True
    compiles_per_shape: ClassVar[bool] = True
    # https://onnxruntime.ai/docs/execution-providers/CoreML-ExecutionProvider.html#configuration-options-new-api
    option_keys: ClassVar[frozenset[str] | None] = names(
        """
        ModelFormat MLComputeUnits RequireStaticInputShapes EnableOnSubgraphs SpecializationStrategy
        ProfileComputePlan AllowLowPrecisionAccumulationOnGPU ModelCacheDirectory
        """
    )
    # Set to the compile cache's folder of one model only: Core ML's own key holds neither the weights nor the build of
    # ONNX Runtime, so a changed model of the same name would be answered by the old one.
    cache_option: ClassVar[str] = "ModelCacheDirectory"

    def missing_libraries(self, device: Device) -> Problem | None:
        """Refuse an index above 0, and the Neural Engine on Intel Macs, which have none."""
        if device.index:
            return Problem(f"there is one {device.family.display}", f"use {device.kind!r}")
        if device.kind == "ane" and sys.platform == "darwin" and platform.machine() != "arm64":
            return Problem("this Mac has no Neural Engine", "use 'cpu'")
        return None

    def install_remedy(self) -> str:
        """Return the command on macOS; elsewhere nothing brings Core ML."""
        return install_command(self.extra) if sys.platform == "darwin" else "Core ML exists on macOS only"

    def chosen(self, device: Device, options: CompileOptions) -> dict[str, str]:
        """Return options for the ML Program format, which computes in f32 and exists from macOS 12 on."""
        version = parse_version(platform.mac_ver()[0])
        return {
            "ModelFormat": "MLProgram" if not version or version >= _ML_PROGRAM_SINCE else "NeuralNetwork",
            "MLComputeUnits": _COMPUTE_UNITS[device.kind],
            "RequireStaticInputShapes": "0",
        }

    def default_profile(self, device: Device) -> CostProfile:
        """Return the profile of an Apple silicon laptop; assumed, not measured."""
        return CostProfile.shipped(
            "Apple silicon laptop, assumed",
            gflops=(2_500, 1_500) if device.kind == "metal" else (1_500, 3_000),
            bytes_per_ns=(100, 20),
            ns=(5_000, 200_000),
        )
