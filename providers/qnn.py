"""QNN: Qualcomm's Hexagon NPU; the `onnxruntime-qnn` plugin brings it. Static shapes, mostly quantised models."""

from __future__ import annotations

from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.execution.options import CompileOptions, Precision
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.recipe import Keeps, SessionRecipe, names

__all__ = ["QnnProvider"]


class QnnProvider(OrtProvider):
    """Qualcomm NPUs."""

    # --- identity
    name: ClassVar[str] = "qnn"
    kinds: ClassVar[tuple[str, ...]] = ("qnn",)
    ep_name: ClassVar[str] = "QNNExecutionProvider"
    title: ClassVar[str] = "QNN"
    remedy: ClassVar[str] = "pip install onnxruntime-qnn on Windows on ARM; elsewhere it can only compile"
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

    # --- session options
    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe on the NPU; f32 models run in f16 there, so only where that was asked for."""
        half = options.precision in (Precision.F16, Precision.BF16)
        chosen = {"htp_performance_mode": "burst", "enable_htp_fp16_precision": str(int(half))}
        devices = self.ep_devices(device)
        if not devices:
            chosen["backend_type"] = "htp"
        return SessionRecipe(
            self.ep_name,
            options=chosen,
            option_keys=self.option_keys,
            ep_devices=devices,
            keeps=Keeps.CONTEXT,
        )

    # --- claims and quirks
    # Of several QNN devices in a list the last one wins (https://github.com/microsoft/onnxruntime/pull/26085), so a
    # recipe holds exactly one.

    # --- default profile
    def default_profile(self, device: Device) -> CostProfile:
        """Return the profile of a laptop NPU; assumed, not measured."""
        return CostProfile(
            gemm_gflops=1_000.0,
            conv_gflops=2_000.0,
            memory_bytes_per_ns=40.0,
            dispatch_ns=10_000.0,
            roundtrip_ns=500_000.0,
            upload_bytes_per_ns=5.0,
            readback_bytes_per_ns=5.0,
            source="default: laptop NPU, assumed",
        )
