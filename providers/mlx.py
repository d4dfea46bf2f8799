"""MLX: Apple's array library on the GPUs of Macs with Apple silicon; the `onnxruntime-ep-mlx` plugin brings it."""

from __future__ import annotations

import platform
import sys
from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.engine.runtime import Problem
from rlx_ort.providers.ort_provider import OrtProvider


class MlxProvider(OrtProvider):
    """The GPU of a Mac with Apple silicon, through MLX; index 0 only."""

    name: ClassVar[str] = "mlx"
    kinds: ClassVar[tuple[str, ...]] = ("mlx",)
    # https://github.com/onnxruntime/onnxruntime-ep-mlx
    ep_name: ClassVar[str] = "MLXExecutionProvider"
    title: ClassVar[str] = "MLX"
    plugin: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    option_keys: ClassVar[frozenset[str] | None] = frozenset()  # it reads environment variables

    def missing_libraries(self, device: Device) -> Problem | None:
        """Refuse an index above 0: the provider takes one device."""
        return Problem("there is one MLX device", "use 'mlx'") if device.index else None

    def install_remedy(self) -> str:
        """Return the command on a Mac with Apple silicon; elsewhere nothing brings MLX."""
        if sys.platform == "darwin" and platform.machine() == "arm64":
            return "pip install 'onnxruntime>=1.31' onnxruntime-ep-mlx  # on macOS 14 or newer"
        return "MLX runs on Macs with Apple silicon only"

    def no_hardware_remedy(self) -> str:
        """Return its requirements."""
        return "it needs macOS 14 or newer and Metal, which virtual machines may lack; 'metal' uses Core ML"

    profile: ClassVar[CostProfile | None] = CostProfile.shipped(
        "laptop GPU with Apple silicon, assumed", gflops=(3_000, 1_500), bytes_per_ns=(100, 20), ns=(5_000, 200_000)
    )
