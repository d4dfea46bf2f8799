"""QNN: Qualcomm's Hexagon NPU; the `onnxruntime-qnn` plugin brings it. Static shapes, mostly quantised models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.providers.base import Availability, CostProfile
from rlx_ort.providers.engine.recipe import Keeps, names
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.plugins import hardware_type


class QnnProvider(OrtProvider):
    """Qualcomm NPUs, and their simulator that runs on the CPU of Linux x64; GPUs come after NPUs."""

    name: ClassVar[str] = "qnn"
    kinds: ClassVar[tuple[str, ...]] = ("qnn",)
    ep_name: ClassVar[str] = "QNNExecutionProvider"
    genai_name: ClassVar[str] = "QNN"
    title: ClassVar[str] = "QNN"
    remedy: ClassVar[str] = "pip install onnxruntime-qnn  # on Windows on ARM; on Linux x64 it simulates the NPU"
    plugin: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    compiles_per_shape: ClassVar[bool] = True
    # https://onnxruntime.ai/docs/execution-providers/QNN-ExecutionProvider.html#configuration-options
    option_keys: ClassVar[frozenset[str] | None] = names(
        """
        backend_path backend_type profiling_level profiling_file_path rpc_control_latency vtcm_mb
        htp_performance_mode qnn_saver_path qnn_context_priority htp_graph_finalization_optimization_mode soc_model
        htp_arch device_id enable_htp_fp16_precision enable_htp_weight_sharing offload_graph_io_quantization
        """
    )
    keeps: ClassVar[Keeps] = Keeps.CONTEXT

    def order(self, ep_device: Any) -> int:
        """Return the place of a device: NPUs, GPUs, then the CPU that simulates one."""
        return ("NPU", "GPU", "CPU").index(hardware_type(ep_device))

    def facts(self, device: Device) -> Availability:
        """Return the hardware, and that it is no NPU where the provider simulates one on the CPU."""
        facts = super().facts(device)
        return replace(facts, hardware=f"simulator on {facts.hardware}") if self._simulated(device) else facts

    def chosen(self, device: Device, options: CompileOptions) -> dict[str, str]:
        """Return options for the NPU; f32 models run in f16 there, so only where that was asked for."""
        half = options.precision in (Precision.F16, Precision.BF16)
        chosen = {"htp_performance_mode": "burst", "enable_htp_fp16_precision": str(int(half))}
        if "backend_path" not in options.provider_options:  # the provider takes one of the two
            # By itself the provider finds no backend for the CPU, where the Linux x64 wheel simulates the HTP.
            gpu = any(hardware_type(each) == "GPU" for each in self.ep_devices(device))
            chosen["backend_type"] = "gpu" if gpu else "htp"
        return chosen

    def default_profile(self, device: Device) -> CostProfile:
        """Return the profile of a laptop NPU, or of the simulator; assumed, not measured."""
        if self._simulated(device):
            return CostProfile.shipped(
                "simulator of an NPU, assumed", gflops=(0.1, 0.1), bytes_per_ns=(0.1, 1), ns=(100_000, 1_000_000)
            )
        return CostProfile.shipped(
            "laptop NPU, assumed", gflops=(1_000, 2_000), bytes_per_ns=(40, 5), ns=(10_000, 500_000)
        )

    def _simulated(self, device: Device) -> bool:
        try:
            return self.missing(device) is None and hardware_type(self.ep_devices(device)[0]) == "CPU"
        except (DeviceUnavailableError, IndexError):
            return False
