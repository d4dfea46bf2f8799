"""AMD's GPUs through the plugin `onnxruntime-ep-amdgpu`, which hands a model to MIGraphX or DirectML as it sees fit."""

from __future__ import annotations

from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.engine.recipe import SessionRecipe, names
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.rocm import RocmProvider

__all__ = ["AmdGpuProvider"]


class AmdGpuProvider(OrtProvider):
    """AMD GPUs; the index counts them as ONNX Runtime does."""

    # --- identity
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
    # The repository's src/amdgpu/gpu_options.h; without device_id, which the index stands for, and its telemetry.
    option_keys: ClassVar[frozenset[str] | None] = names(
        "disable_caching force_recompile exhaustive_tune profile cache_dir mlss_use_specific_ops"
    )

    # --- session options
    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe on one GPU, with the plugin's telemetry off.

        Raises:
            DeviceUnavailableError: the index is beyond the devices of the plugin.
        """
        return SessionRecipe(
            self.ep_name,
            options={"telemetry_enable": "0"},
            option_keys=self.option_keys,
            ep_devices=self.ep_devices(device),
            cache_options=lambda folder: {"cache_dir": folder},
        )

    # --- default profile
    def default_profile(self, device: Device) -> CostProfile:
        """Return the profile of MIGraphX; assumed, not measured."""
        return RocmProvider().default_profile(device)
