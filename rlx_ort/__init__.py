"""Build or import a model once; run it on the best ONNX Runtime device of a machine you do not control.

    import rlx_ort

    runner = rlx_ort.load("model.onnx")
    outputs = runner.run_fastest({"x": x})

The public names are loaded when they are first used: importing the package imports neither ONNX Runtime nor ONNX.
"""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx_ort.calibration.profile import CalibrationProfile
    from rlx_ort.compat import BackendsManifest, DeviceRouter, FlexibleSession
    from rlx_ort.converters.files import save_onnx
    from rlx_ort.converters.from_onnx import from_onnx
    from rlx_ort.converters.from_torch import from_torch
    from rlx_ort.converters.to_onnx import to_onnx
    from rlx_ort.deploy.open import load, open_package, warm_package
    from rlx_ort.deploy.start import start_package
    from rlx_ort.device import DEVICE_PRIORITY, Device, device_label, parse_device, parse_device_list
    from rlx_ort.errors import (
        CalibrationError,
        CancelledRunError,
        ConversionError,
        DeviceError,
        DeviceFallbackError,
        DeviceParseError,
        DeviceUnavailableError,
        EngineError,
        GraphError,
        GraphVerifyError,
        InputError,
        IntegrityError,
        LegalizeError,
        MemoryBudgetError,
        NoViableDeviceError,
        PackageError,
        ParamError,
        ParityError,
        PlacementError,
        RlxError,
        RunError,
        ServingError,
        StateLossError,
        TimeLimitError,
        WriteError,
    )
    from rlx_ort.execution.benchmark import DeviceBenchResult
    from rlx_ort.execution.buckets import (
        Bucket,
        BucketedCompileCache,
        LayerKvCache,
        bucket_decode_mask,
        pad_rows,
        power_of_two_ladder,
        slice_rows,
    )
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.decode import DecodeLoop
    from rlx_ort.execution.expert_pool import (
        ExpertPool,
        RefreshPolicy,
        budget_from_memory,
        merged_mask,
        per_layer_masks,
        refresh_pools,
    )
    from rlx_ort.execution.interface import Outputs, ValueInfo
    from rlx_ort.execution.moe import MoeResidencyStats
    from rlx_ort.execution.placement import DispatchSummary, KernelDispatchReport, Placement, format_dispatch_report
    from rlx_ort.execution.session import CompileCache, Session
    from rlx_ort.graph_devices import GraphDevices, graph_param_names
    from rlx_ort.ir.core import Node
    from rlx_ort.ir.dtype import DType, promote
    from rlx_ort.ir.graph import (
        DimBinding,
        Graph,
        Value,
        dynamic_symbols,
        has_dynamic_dims,
        infer_bindings_from_inputs,
        op_kinds,
    )
    from rlx_ort.ir.op import Op
    from rlx_ort.ir.types import Dim, Shape
    from rlx_ort.ir.verify import verify
    from rlx_ort.options.compile_options import (
        CompileOptions,
        OptimizationLevel,
        PlacementRule,
        Precision,
        WeightSharing,
    )
    from rlx_ort.options.dispatch import KernelDispatch, KernelDispatchPolicy
    from rlx_ort.options.precision import PrecisionPolicy
    from rlx_ort.providers.registry import (
        available_apple_devices,
        available_devices,
        drain_device,
        fastest_among,
        fastest_device,
        full_name,
        is_available,
        register_provider,
        supports_run_slots,
    )
    from rlx_ort.resilience.failover import Attempt, RunRecord
    from rlx_ort.resilience.limits import CancelToken, limited, limited_async
    from rlx_ort.resilience.memory import DeviceMemory, ModelMemory, memory_use
    from rlx_ort.resilience.options import Resilience
    from rlx_ort.resilience.quarantine import DeviceHealth, HealthState
    from rlx_ort.selection.candidates import DeviceCandidate, device_report, devices_for, fastest_device_for, rank
    from rlx_ort.selection.cost import BackendCostModel, ProfileCostModel, estimate_graph_cost, pick_best_device
    from rlx_ort.selection.policy import DevicePickStrategy, DevicePolicy, device_chain_from_env, device_from_env
    from rlx_ort.selection.predict import calibrate, cost_model, explain
    from rlx_ort.selection.resolve import resolve_device, resolve_device_chain, run_with_fallback
    from rlx_ort.selection.support import (
        UnsupportedOp,
        dispatch_report_for_device,
        first_unsupported_op,
        legalize_graph_for_device,
        supports,
        supports_graph,
    )

    __version__: str

__all__ = [
    "Attempt", "BackendCostModel", "BackendsManifest", "Bucket", "BucketedCompileCache", "CalibrationError",
    "CalibrationProfile", "CancelToken", "CancelledRunError", "CompileCache", "CompileOptions", "CompiledGraph",
    "ConversionError", "DEVICE_PRIORITY", "DType", "DecodeLoop", "Device", "DeviceBenchResult", "DeviceCandidate",
    "DeviceError", "DeviceFallbackError", "DeviceHealth", "DeviceMemory", "DeviceParseError",
    "DevicePickStrategy", "DevicePolicy", "DeviceRouter", "DeviceUnavailableError", "Dim", "DimBinding",
    "DispatchSummary", "EngineError", "ExpertPool", "FlexibleSession", "Graph", "GraphDevices", "GraphError",
    "GraphVerifyError", "HealthState", "InputError", "IntegrityError", "KernelDispatch", "KernelDispatchPolicy",
    "KernelDispatchReport", "LayerKvCache", "LegalizeError", "MemoryBudgetError", "ModelMemory",
    "MoeResidencyStats", "NoViableDeviceError", "Node", "Op", "OptimizationLevel", "Outputs", "PackageError",
    "ParamError", "ParityError", "Placement", "PlacementError", "PlacementRule", "Precision", "PrecisionPolicy",
    "ProfileCostModel", "RefreshPolicy", "Resilience", "RlxError", "RunError", "RunRecord", "ServingError",
    "Session", "Shape", "StateLossError", "TimeLimitError", "UnsupportedOp", "Value", "ValueInfo",
    "WeightSharing", "WriteError", "__version__", "available_apple_devices", "available_devices",
    "bucket_decode_mask", "budget_from_memory", "calibrate", "cost_model", "device_chain_from_env",
    "device_from_env", "device_label", "device_report", "devices_for", "dispatch_report_for_device",
    "drain_device", "dynamic_symbols", "estimate_graph_cost", "explain", "fastest_among", "fastest_device",
    "fastest_device_for", "first_unsupported_op", "format_dispatch_report", "from_onnx", "from_torch",
    "full_name", "graph_param_names", "has_dynamic_dims", "infer_bindings_from_inputs", "is_available",
    "legalize_graph_for_device", "limited", "limited_async", "load", "memory_use", "merged_mask", "op_kinds",
    "open_package", "pad_rows", "parse_device", "parse_device_list", "per_layer_masks", "pick_best_device",
    "power_of_two_ladder", "promote", "rank", "refresh_pools", "register_provider", "resolve_device",
    "resolve_device_chain", "run_with_fallback", "save_onnx", "slice_rows", "start_package", "supports",
    "supports_graph", "supports_run_slots", "to_onnx", "verify", "warm_package",
]  # fmt: skip

# In a checkout that is not installed, `converters`, `providers` and `calibration` are beside this folder.
_checkout = Path(__file__).resolve().parents[1]
if not (_checkout / "rlx_ort" / "providers").exists() and (_checkout / "providers" / "ort_provider.py").is_file():
    __path__.append(str(_checkout))

_NAMES_OF = {
    "calibration.profile": "CalibrationProfile",
    "compat": "BackendsManifest DeviceRouter FlexibleSession",
    "converters.files": "save_onnx",
    "converters.from_onnx": "from_onnx",
    "converters.from_torch": "from_torch",
    "converters.to_onnx": "to_onnx",
    "deploy.open": "load open_package warm_package",
    "deploy.start": "start_package",
    "device": "DEVICE_PRIORITY Device device_label parse_device parse_device_list",
    "execution.benchmark": "DeviceBenchResult",
    "execution.buckets": "Bucket BucketedCompileCache LayerKvCache bucket_decode_mask pad_rows power_of_two_ladder "
    "slice_rows",
    "execution.compiled": "CompiledGraph",
    "execution.decode": "DecodeLoop",
    "execution.interface": "Outputs ValueInfo",
    "execution.placement": "DispatchSummary KernelDispatchReport Placement format_dispatch_report",
    "execution.expert_pool": "ExpertPool RefreshPolicy budget_from_memory merged_mask per_layer_masks refresh_pools",
    "execution.moe": "MoeResidencyStats",
    "execution.session": "CompileCache Session",
    "graph_devices": "GraphDevices graph_param_names",
    "ir.core": "Node",
    "ir.dtype": "DType promote",
    "ir.graph": "DimBinding Graph Value dynamic_symbols has_dynamic_dims infer_bindings_from_inputs op_kinds",
    "ir.op": "Op",
    "ir.types": "Dim Shape",
    "ir.verify": "verify",
    "options.compile_options": "CompileOptions OptimizationLevel PlacementRule Precision WeightSharing",
    "options.dispatch": "KernelDispatch KernelDispatchPolicy",
    "options.precision": "PrecisionPolicy",
    "providers.registry": "available_apple_devices available_devices drain_device fastest_among fastest_device "
    "full_name is_available register_provider supports_run_slots",
    "resilience.failover": "Attempt RunRecord",
    "resilience.limits": "CancelToken limited limited_async",
    "resilience.memory": "DeviceMemory ModelMemory memory_use",
    "resilience.options": "Resilience",
    "resilience.quarantine": "DeviceHealth HealthState",
    "selection.candidates": "DeviceCandidate device_report devices_for fastest_device_for rank",
    "selection.cost": "BackendCostModel ProfileCostModel estimate_graph_cost pick_best_device",
    "selection.policy": "DevicePickStrategy DevicePolicy device_chain_from_env device_from_env",
    "selection.predict": "calibrate cost_model explain",
    "selection.resolve": "resolve_device resolve_device_chain run_with_fallback",
    "selection.support": "UnsupportedOp dispatch_report_for_device first_unsupported_op legalize_graph_for_device"
    " supports supports_graph",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Return a public name from the module it lives in, and keep it here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: Any = _version()
    else:
        module = _MODULE_OF.get(name, "errors")
        collecting = gc.isenabled()
        gc.disable()  # imports create no garbage, and collecting takes a fifth of the time
        try:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        finally:
            if collecting:
                gc.enable()
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:  # a checkout that is not installed
        import tomllib

        project = tomllib.loads((_checkout / "pyproject.toml").read_text(encoding="utf-8"))
        return str(project["project"]["version"])


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
