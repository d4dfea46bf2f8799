"""OpenVINO: Intel CPUs, GPUs and NPUs; a plugin package, or Intel's own build of ONNX Runtime, brings it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rlx_ort.converters.protos import nodes_of, set_items
from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, EngineError
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.options.variant import Variant, variants_of
from rlx_ort.providers.base import Availability, CostProfile
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.process import budget
from rlx_ort.providers.engine.recipe import SessionRecipe, names
from rlx_ort.providers.engine.stopping import Turns
from rlx_ort.providers.hardware import cpu_name
from rlx_ort.providers.kernel_limits import KernelLimit, is_empty_first, limits_of
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.plugins import hardware_type
from rlx_ort.storage import parse_json

_ORDER = ("GPU", "NPU", "CPU")
# The plugin ignores these options of Intel's own build (and logs that they belong into load_config), so they are
# handed to both as what OpenVINO calls them: https://docs.openvino.ai/2026/api/c_cpp_api/group__ov__runtime__cpp__prop__api.html
_PROPERTIES = {
    "precision": "INFERENCE_PRECISION_HINT",
    "num_of_threads": "INFERENCE_NUM_THREADS",
    "num_streams": "NUM_STREAMS",
    "cache_dir": "CACHE_DIR",
    "model_priority": "MODEL_PRIORITY",
}
_SHAPE_ONLY = frozenset({"Shape", "Size"})  # ONNX Runtime folds them where the shape is known
_PRECISIONS = {Precision.F16: "f16", Precision.BF16: "bf16"}
_SPELLINGS = {"FP32": "f32", "FP16": "f16", "BF16": "bf16", "ACCURACY": "f32"}


class OpenVinoProvider(OrtProvider):
    """Intel hardware through OpenVINO; the index counts OpenVINO's devices, GPUs first, then NPUs, then the CPU."""

    name: ClassVar[str] = "openvino"
    kinds: ClassVar[tuple[str, ...]] = ("openvino",)
    ep_name: ClassVar[str] = "OpenVINOExecutionProvider"
    genai_name: ClassVar[str] = "OpenVINO"
    title: ClassVar[str] = "OpenVINO"
    remedy: ClassVar[str] = "pip install onnxruntime-ep-openvino"
    plugin: ClassVar[bool] = True
    precisions: ClassVar[Sequence[Precision]] = (Precision.F16, Precision.BF16)
    compiles: ClassVar[bool] = True
    # On tensors without elements (`emptied.py` of the tests has the cases; onnxruntime-openvino 1.24.1).
    limits: ClassVar[Sequence[KernelLimit]] = (
        *limits_of("GRU LSTM RNN", is_empty_first, "a dim of 0 ends the process"),
        *limits_of("AveragePool GlobalAveragePool", is_empty_first, "the mean of no elements is not NaN"),
        KernelLimit("ReduceMax", is_empty_first, "the largest of no elements is not -inf"),
    )
    # https://onnxruntime.ai/docs/execution-providers/OpenVINO-ExecutionProvider.html#configuration-options
    # Without device_type and device_id: the device's index chooses. Without layout and disable_dynamic_shapes: the
    # plugin does not know them.
    option_keys: ClassVar[frozenset[str] | None] = names("load_config reshape_input enable_causallm") | set(_PROPERTIES)

    def variants(self, device: Device, options: CompileOptions) -> Sequence[Variant]:
        """Return other numbers of threads, on OpenVINO's CPU."""
        if self._target(device) != "CPU":
            return ()
        total = budget().total
        return variants_of(
            "provider_options.num_of_threads", [str(count) for count in sorted({1, total // 2 or 1, 2 * total})]
        )

    def facts(self, device: Device) -> Availability:
        """Return the processor's name for OpenVINO's CPU, else the device's name in ONNX Runtime or OpenVINO."""
        facts = super().facts(device)
        if facts.hardware:
            return facts
        target = self._target(device)
        return Availability(False, hardware=cpu_name() if target == "CPU" else target, remedy=facts.remedy)

    def probe_precision(self, device: Device) -> Precision:
        """Return f16 for an NPU, which has no other arithmetic on floats."""
        return Precision.F16 if self._target(device).startswith("NPU") else Precision.F32

    def no_hardware_remedy(self) -> str:
        """Return the remedy when the plugin is there and sees nothing that it runs on."""
        return (
            "the plugin runs on Intel's CPUs, GPUs and NPUs only, and GPUs and NPUs need Intel's driver; other CPUs "
            "take Intel's own build of ONNX Runtime: pip uninstall -y onnxruntime && pip install onnxruntime-openvino"
        )

    def order(self, ep_device: Any) -> int:
        """Return the place of a device of the plugin, which lists them as the operating system does."""
        return _place(hardware_type(ep_device))

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe on one concrete device: OpenVINO's AUTO would choose against the policy of the caller.

        It computes in f32 unless less is asked for; by default OpenVINO takes bf16 or f16 where that is fast. After a
        run that failed, the next one of earlier sizes may read inputs of the past (1.24.1), and so may those beside it.
        So runs of a session take turns, also with `num_streams`, and none follows one that failed.
        """
        devices = self.ep_devices(device)
        target = self._target(device)
        if target.startswith("NPU") and options.precision is not Precision.F16:
            raise EngineError("OpenVINO computes in f16 on NPUs; allow it with CompileOptions(precision=Precision.F16)")
        lock = Turns()
        chosen = {} if devices else {"device_type": target}
        chosen["precision"] = _PRECISIONS.get(options.precision, "f32")
        if target == "CPU":
            chosen["num_of_threads"] = str(options.intra_op_threads or budget().total)
        return replace(
            super().recipe(device, options),
            options=chosen,
            cache_options=lambda folder: {"cache_dir": folder},
            spelled=lambda merged: _as_properties(merged, target.partition(".")[0]),
            run_lock=lambda: lock,
            spoiled_by_errors=True,
            rewritten=_unread_inputs_last,
        )

    def _target(self, device: Device) -> str:
        """Return OpenVINO's name of the device, such as `GPU.1` or `CPU`."""
        devices = self.ep_devices(device)
        if devices:
            return hardware_type(devices[0])
        listed = getattr(runtime.bindings(), "get_available_openvino_device_ids", None)
        names = sorted(listed() if listed is not None else ["CPU"], key=lambda name: (_place(name), name))
        if device.index >= len(names):
            raise DeviceUnavailableError(device, f"OpenVINO sees {', '.join(names) or 'nothing'}, counted from 0")
        return str(names[device.index])

    def default_profile(self, device: Device) -> CostProfile:
        """Return the profile of an integrated GPU, or of the CPU where OpenVINO runs on that; assumed, not measured."""
        try:
            on_cpu = self.missing(device) is None and self._target(device) == "CPU"
        except DeviceUnavailableError:
            on_cpu = False
        if on_cpu:
            cpu = CpuProvider().default_profile(device)
            return replace(cpu, roundtrip_ns=30_000.0, source="default: as the CPU, with a longer round trip, assumed")
        return CostProfile.shipped(
            "integrated GPU, assumed", gflops=(800, 600), bytes_per_ns=(40, 10), ns=(5_000, 100_000)
        )


def _place(name: str) -> int:
    kind = name.partition(".")[0]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _unread_inputs_last(payload: bytes) -> bytes:
    """Return the model with the inputs behind the others whose values no node reads.

    OpenVINO takes inputs by their place after it dropped those that it does not need: with one of them before the
    others it silently computes with the wrong tensors (ONNX Runtime 1.24.1).
    """
    import onnx

    model = onnx.ModelProto.FromString(payload)
    readers = [node for node in nodes_of(model, functions=False) if node.op_type not in _SHAPE_ONLY]
    read = {name for node in readers for name in node.input}
    inputs = list(model.graph.input)
    ordered = sorted(inputs, key=lambda value: value.name not in read)
    if ordered == inputs:
        return payload
    set_items(model.graph.input, ordered)
    ordered_bytes: bytes = model.SerializeToString(deterministic=True)
    return ordered_bytes


def _as_properties(options: Mapping[str, str], target: str) -> dict[str, str]:
    """Move the provider options that the plugin ignores into load_config, where both builds read them."""
    left = {key: value for key, value in options.items() if key not in _PROPERTIES and key != "load_config"}
    wanted = {_PROPERTIES[key]: value for key, value in options.items() if key in _PROPERTIES}
    hint = wanted["INFERENCE_PRECISION_HINT"]
    wanted["INFERENCE_PRECISION_HINT"] = _SPELLINGS.get(hint.upper(), hint)
    text = options.get("load_config", "{}")
    try:
        given = parse_json(text)
    except ValueError as err:
        raise EngineError(f"OpenVINO's load_config is not JSON: {err}; give the text, not the name of a file") from err
    if not isinstance(given, dict) or not all(isinstance(value, dict) for value in given.values()):
        raise EngineError(
            f'OpenVINO\'s load_config needs an object for each device, such as {{"CPU": {{...}}}}; found {text}'
        )
    given[target] = {**wanted, **given.get(target, {})}
    return {**left, "load_config": json.dumps(given, sort_keys=True)}
