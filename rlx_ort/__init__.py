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
    from rlx_ort.calibration.calibrate import calibrate
    from rlx_ort.calibration.profile import CalibrationProfile
    from rlx_ort.converters.files import save_onnx
    from rlx_ort.converters.from_onnx import from_onnx
    from rlx_ort.converters.from_torch import from_torch
    from rlx_ort.converters.to_onnx import to_onnx
    from rlx_ort.deploy.open import open_package
    from rlx_ort.deploy.start import start_package
    from rlx_ort.deploy.warm import warm_package
    from rlx_ort.device import Device
    from rlx_ort.errors import (
        CalibrationError,
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
        NoViableDeviceError,
        PackageError,
        ParamError,
        ParityError,
        PlacementError,
        RlxError,
        RunError,
    )
    from rlx_ort.execution.benchmark import DeviceBenchResult
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.options import CompileOptions, OptimizationLevel, PlacementRule, Precision, WeightSharing
    from rlx_ort.execution.placement import Placement
    from rlx_ort.execution.session import Session
    from rlx_ort.flexible_session import FlexibleSession
    from rlx_ort.graph_devices import GraphDevices, load
    from rlx_ort.ir.dtype import DType
    from rlx_ort.ir.graph import Graph, Value
    from rlx_ort.ir.shape import Shape
    from rlx_ort.manifest import BackendsManifest
    from rlx_ort.providers.registry import register_provider
    from rlx_ort.router import DeviceRouter
    from rlx_ort.selection.availability import available_devices, fastest_device
    from rlx_ort.selection.candidates import device_report, rank
    from rlx_ort.selection.policy import DevicePickStrategy, DevicePolicy
    from rlx_ort.selection.predict import explain

    __version__: str

__all__ = [
    "BackendsManifest",
    "CalibrationError",
    "CalibrationProfile",
    "CompileOptions",
    "CompiledGraph",
    "ConversionError",
    "DType",
    "Device",
    "DeviceBenchResult",
    "DeviceError",
    "DeviceFallbackError",
    "DeviceParseError",
    "DevicePickStrategy",
    "DevicePolicy",
    "DeviceRouter",
    "DeviceUnavailableError",
    "EngineError",
    "FlexibleSession",
    "Graph",
    "GraphDevices",
    "GraphError",
    "GraphVerifyError",
    "InputError",
    "IntegrityError",
    "LegalizeError",
    "NoViableDeviceError",
    "OptimizationLevel",
    "PackageError",
    "ParamError",
    "ParityError",
    "Placement",
    "PlacementError",
    "PlacementRule",
    "Precision",
    "RlxError",
    "RunError",
    "Session",
    "Shape",
    "Value",
    "WeightSharing",
    "__version__",
    "available_devices",
    "calibrate",
    "device_report",
    "explain",
    "fastest_device",
    "from_onnx",
    "from_torch",
    "load",
    "open_package",
    "rank",
    "register_provider",
    "save_onnx",
    "start_package",
    "to_onnx",
    "warm_package",
]

# In a checkout that is not installed, `converters`, `providers` and `calibration` stand beside this folder.
_checkout = Path(__file__).resolve().parents[1]
if not (_checkout / "rlx_ort" / "providers").exists() and (_checkout / "providers" / "ort_provider.py").is_file():
    __path__.append(str(_checkout))

_MODULE_OF = {
    "BackendsManifest": "manifest",
    "CalibrationProfile": "calibration.profile",
    "CompileOptions": "execution.options",
    "CompiledGraph": "execution.compiled",
    "DType": "ir.dtype",
    "Device": "device",
    "DeviceBenchResult": "execution.benchmark",
    "DevicePickStrategy": "selection.policy",
    "DevicePolicy": "selection.policy",
    "DeviceRouter": "router",
    "FlexibleSession": "flexible_session",
    "Graph": "ir.graph",
    "GraphDevices": "graph_devices",
    "OptimizationLevel": "execution.options",
    "Placement": "execution.placement",
    "PlacementRule": "execution.options",
    "Precision": "execution.options",
    "Session": "execution.session",
    "Shape": "ir.shape",
    "Value": "ir.graph",
    "WeightSharing": "execution.options",
    "available_devices": "selection.availability",
    "calibrate": "calibration.calibrate",
    "device_report": "selection.candidates",
    "explain": "selection.predict",
    "fastest_device": "selection.availability",
    "from_onnx": "converters.from_onnx",
    "from_torch": "converters.from_torch",
    "load": "graph_devices",
    "open_package": "deploy.open",
    "rank": "selection.candidates",
    "register_provider": "providers.registry",
    "save_onnx": "converters.files",
    "start_package": "deploy.start",
    "to_onnx": "converters.to_onnx",
    "warm_package": "deploy.warm",
}


def __getattr__(name: str) -> Any:
    """Return a public name from the module it lives in, and keep it here."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: Any = _version()
    else:
        module = _MODULE_OF.get(name, "errors")
        collecting = gc.isenabled()
        gc.disable()  # nothing that is imported is garbage, and looking for some takes a fifth of the time
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
