"""The public names of the package, pinned: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import rlx_ort
from rlx_ort import compat, errors

ERRORS = """
CalibrationError CancelledRunError ConversionError DeviceError DeviceFallbackError DeviceParseError
DeviceUnavailableError EngineError GraphError GraphVerifyError InputError IntegrityError LegalizeError
MemoryBudgetError MissingExtraError
NoViableDeviceError PackageError ParamError ParityError PlacementError RlxError RunError ServingError StageError
StateLossError TimeLimitError WriteError
"""

NAMES = """
Attempt CalibrationProfile CancelToken CompileOptions CompiledGraph DType DecodeLoop Device DeviceBenchResult
DeviceCandidate DeviceHealth DeviceMemory DevicePickStrategy DevicePolicy Dim Graph GraphDevices HealthState
KernelDispatch KernelDispatchPolicy ModelMemory Node Op OptimizationLevel Outputs Placement PlacementRule Precision
PrecisionPolicy Resilience RunRecord Session Shape UnsupportedOp Value ValueInfo WeightSharing __version__
available_devices calibrate convert cost_model create_package explain first_unsupported_op from_onnx from_torch
is_available limited limited_async load memory_use open_package rank register_provider save_onnx start_package
supports supports_graph to_onnx verify warm_package
"""

OF_RLX = """
BackendCostModel BackendsManifest Bucket BucketedCompileCache CompileCache DEVICE_PRIORITY DeviceRouter DimBinding
DispatchSummary ExpertPool FlexibleSession KernelDispatchReport LayerKvCache MoeResidencyStats ProfileCostModel
RefreshPolicy available_apple_devices bucket_decode_mask budget_from_memory device_chain_from_env device_from_env
device_label device_report devices_for dispatch_report_for_device drain_device dynamic_symbols estimate_graph_cost
fastest_among fastest_device fastest_device_for format_dispatch_report full_name graph_param_names has_dynamic_dims
infer_bindings_from_inputs legalize_graph_for_device merged_mask op_kinds pad_rows parse_device parse_device_list
per_layer_masks pick_best_device power_of_two_ladder promote refresh_pools resolve_device resolve_device_chain
run_with_fallback slice_rows supports_run_slots
"""


def test_the_public_names_are_these() -> None:
    """`__all__` and `dir()` hold exactly the pinned names."""
    assert set(rlx_ort.__all__) == {*NAMES.split(), *ERRORS.split()}
    assert dir(rlx_ort) == sorted(rlx_ort.__all__)


def test_the_names_of_rlx_are_found_and_not_listed() -> None:
    """They are those of `rlx_ort.compat`, and the same objects; the surface that completion shows stays small."""
    assert set(compat.__all__) == set(OF_RLX.split())
    assert set(compat.__all__).isdisjoint(dir(rlx_ort))
    assert [name for name in compat.__all__ if getattr(rlx_ort, name) is not getattr(compat, name)] == []
    assert len(dir(rlx_ort)) < 90


def test_every_public_name_can_be_had() -> None:
    """Each name in `__all__` is there when it is asked for."""
    assert [name for name in rlx_ort.__all__ if getattr(rlx_ort, name, None) is None] == []


def test_every_error_is_public() -> None:
    """The errors of the package are exactly those of its error module."""
    defined = {
        name
        for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, Exception) and item.__module__ == errors.__name__
    }
    assert defined == set(ERRORS.split())


def test_the_version_is_that_of_the_installed_package() -> None:
    """`__version__` is not typed in a second time."""
    assert rlx_ort.__version__ == importlib.metadata.version("rlx_ort")


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as in any module."""
    with pytest.raises(AttributeError, match="rlx_ort"):
        _ = rlx_ort.Grpah


@pytest.mark.parametrize("names", ["Graph, Device, CompileOptions", "GraphDevices, Session, load"])
def test_importing_names_loads_no_engine(names: str, tmp_path: Path) -> None:
    """Data types and runners load neither ONNX Runtime nor ONNX nor rich before they are put to work."""
    heavy = ["onnxruntime", "onnx", "onnx_ir", "rich"]
    program = f"from rlx_ort import {names}\nimport sys\nprint(*(name for name in {heavy!r} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=True
    )
    assert result.stdout.strip() == ""
