"""OpenVINO: Intel CPUs, GPUs and NPUs; a plugin package, or Intel's own build of ONNX Runtime, brings it."""

from __future__ import annotations

from typing import ClassVar

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError
from rlx_ort.execution.options import CompileOptions, Precision
from rlx_ort.providers import runtime
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.recipe import SessionRecipe, names

__all__ = ["OpenVinoProvider"]

_ORDER = ("GPU", "NPU", "CPU")


class OpenVinoProvider(OrtProvider):
    """Intel hardware through OpenVINO; the index counts what OpenVINO sees, GPUs first, then NPUs, then the CPU."""

    # --- identity
    name: ClassVar[str] = "openvino"
    kinds: ClassVar[tuple[str, ...]] = ("openvino",)
    ep_name: ClassVar[str] = "OpenVINOExecutionProvider"
    title: ClassVar[str] = "OpenVINO"
    remedy: ClassVar[str] = "pip install onnxruntime-ep-openvino"
    plugin: ClassVar[bool] = True
    compiles: ClassVar[bool] = True
    # https://onnxruntime.ai/docs/execution-providers/OpenVINO-ExecutionProvider.html#configuration-options
    option_keys: ClassVar[frozenset[str] | None] = names(
        """
        device_type device_id precision num_of_threads num_streams cache_dir load_config enable_qdq_optimizer
        disable_dynamic_shapes enable_opencl_throttling model_priority layout reshape_input enable_causallm
        """
    )

    # --- session options
    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe on one concrete device: OpenVINO's AUTO would choose against the policy of the caller.

        Raises:
            DeviceUnavailableError: the index is beyond the devices OpenVINO sees.
        """
        devices = self.ep_devices(device)
        chosen = {} if devices else {"device_type": self._device_type(device)}
        # Its GPU computes in f16 unless it is told to keep the precision of the model.
        chosen["precision"] = "FP16" if options.precision is Precision.F16 else "ACCURACY"
        return SessionRecipe(
            self.ep_name,
            options=chosen,
            option_keys=self.option_keys,
            ep_devices=devices,
            cache_options=lambda folder: {"cache_dir": folder},
        )

    def _device_type(self, device: Device) -> str:
        listed = getattr(runtime.bindings(), "get_available_openvino_device_ids", None)
        found = list(listed()) if listed is not None else ["CPU"]
        found.sort(key=lambda name: (_ORDER.index(name.split(".")[0]) if name.split(".")[0] in _ORDER else 9, name))
        if device.index >= len(found):
            raise DeviceUnavailableError(device, f"OpenVINO sees {', '.join(found) or 'nothing'}, counted from 0")
        return str(found[device.index])

    # --- default profile
    def default_profile(self, device: Device) -> CostProfile:
        """Return the profile of an integrated GPU; assumed, not measured."""
        return CostProfile(
            gemm_gflops=800.0,
            conv_gflops=600.0,
            memory_bytes_per_ns=40.0,
            dispatch_ns=5_000.0,
            roundtrip_ns=100_000.0,
            upload_bytes_per_ns=10.0,
            readback_bytes_per_ns=10.0,
            source="default: integrated GPU, assumed",
        )
