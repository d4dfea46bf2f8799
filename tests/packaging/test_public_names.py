"""The public names of the package, pinned: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import importlib.metadata

import rlx_ort
from rlx_ort import errors

ERRORS = """
CalibrationError CancelledRunError ConversionError DeviceError DeviceFallbackError DeviceParseError
DeviceUnavailableError EngineError GraphError GraphVerifyError InputError IntegrityError LegalizeError
MemoryBudgetError MissingExtraError
NoViableDeviceError PackageError ParamError ParityError PlacementError RlxError RunError ServingError StateLossError
TimeLimitError WriteError
"""

NAMES = """
Attempt BackendCostModel BackendsManifest Bucket BucketedCompileCache CalibrationProfile CancelToken CompileCache
DeviceMemory ModelMemory memory_use
CompileOptions CompiledGraph DEVICE_PRIORITY DType DecodeLoop Device DeviceBenchResult DeviceCandidate DeviceHealth
DevicePickStrategy DevicePolicy DeviceRouter Dim DimBinding DispatchSummary ExpertPool FlexibleSession Graph
GraphDevices HealthState KernelDispatch KernelDispatchPolicy KernelDispatchReport LayerKvCache MoeResidencyStats Node
Op OptimizationLevel Outputs Placement PlacementRule Precision PrecisionPolicy ProfileCostModel RefreshPolicy
Resilience RunRecord Session Shape UnsupportedOp Value ValueInfo WeightSharing __version__
available_apple_devices available_devices
bucket_decode_mask budget_from_memory calibrate cost_model device_chain_from_env device_from_env device_label
device_report devices_for dispatch_report_for_device drain_device dynamic_symbols estimate_graph_cost explain
fastest_among fastest_device fastest_device_for first_unsupported_op format_dispatch_report from_onnx from_torch
full_name graph_param_names has_dynamic_dims infer_bindings_from_inputs is_available legalize_graph_for_device limited
limited_async load merged_mask op_kinds open_package pad_rows parse_device parse_device_list per_layer_masks
pick_best_device power_of_two_ladder promote rank refresh_pools register_provider resolve_device resolve_device_chain
run_with_fallback save_onnx slice_rows start_package supports supports_graph supports_run_slots to_onnx verify
warm_package
"""


def test_the_public_names_are_these() -> None:
    """`__all__` and `dir()` hold exactly the pinned names."""
    assert set(rlx_ort.__all__) == {*NAMES.split(), *ERRORS.split()}
    assert dir(rlx_ort) == sorted(rlx_ort.__all__)


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
