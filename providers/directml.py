"""DirectML: any Direct3D 12 GPU or NPU on Windows; the `onnxruntime-directml` package brings it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.errors import install_command
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.engine.recipe import SessionRecipe
from rlx_ort.providers.engine.runtime import Problem
from rlx_ort.providers.engine.stopping import Turns
from rlx_ort.providers.hardware import loads
from rlx_ort.providers.ort_provider import OrtProvider


class DirectMlProvider(OrtProvider):
    """GPUs through Direct3D 12; the index is the adapter's place in DXGI's list, not in that of performance."""

    name: ClassVar[str] = "directml"
    kinds: ClassVar[tuple[str, ...]] = ("directx",)
    ep_name: ClassVar[str] = "DmlExecutionProvider"
    genai_name: ClassVar[str] = "DML"
    title: ClassVar[str] = "DirectML"
    extra: ClassVar[str] = "directml"
    plugin: ClassVar[bool] = True
    # https://onnxruntime.ai/docs/execution-providers/DirectML-ExecutionProvider.html
    option_keys: ClassVar[frozenset[str] | None] = frozenset(
        ("device_id", "performance_preference", "device_filter", "disable_metacommands")
    )

    def missing_libraries(self, device: Device) -> Problem | None:
        """Return whether Direct3D 12 or DirectML itself is not there."""
        missing = [name for name in ("d3d12.dll", "dxgi.dll", "DirectML.dll") if sys.platform == "win32"]
        missing = [name for name in missing if not loads(name)]
        if "DirectML.dll" in missing and len(missing) == 1:
            return None  # the package carries its own copy, which is not on the loader's path
        if missing:
            return Problem(f"{', '.join(missing)} not found", "update Windows to version 1903 or newer")
        return None

    def install_remedy(self) -> str:
        """Return the command on Windows; elsewhere nothing brings DirectML."""
        return install_command(self.extra) if sys.platform == "win32" else "DirectML exists on Windows only"

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe without memory patterns, which the provider refuses, and with one run at a time."""
        # https://onnxruntime.ai/docs/execution-providers/DirectML-ExecutionProvider.html#configuration-options:
        # memory patterns and parallel execution are not supported, and a session must not run in two threads.
        # AMD's plugin (https://github.com/onnxruntime/onnxruntime-ep-amdgpu) takes the device itself and no options.
        lock = Turns()
        recipe = replace(super().recipe(device, options), mem_pattern=False, run_lock=lambda: lock)
        if recipe.ep_devices:
            return replace(recipe, option_keys=frozenset())
        return replace(recipe, options={"device_id": str(device.index)})

    # Free dims compile slowly and fall out of graph fusion; bind them with `CompileOptions.dims`.

    profile: ClassVar[CostProfile | None] = CostProfile.shipped(
        "middling desktop GPU, assumed", gflops=(2_500, 1_500), bytes_per_ns=(120, 5), ns=(10_000, 150_000)
    )
