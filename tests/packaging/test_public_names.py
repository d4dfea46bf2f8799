"""The public names of the package, pinned: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import importlib.metadata

import rlx_ort
from rlx_ort import errors

ERRORS = """
CalibrationError ConversionError DeviceError DeviceFallbackError DeviceParseError DeviceUnavailableError EngineError
GraphError GraphVerifyError InputError IntegrityError LegalizeError NoViableDeviceError PackageError ParamError
ParityError PlacementError RlxError RunError
"""

NAMES = """
BackendsManifest CalibrationProfile CompileOptions CompiledGraph DType Device DeviceBenchResult DevicePickStrategy
DevicePolicy DeviceRouter FlexibleSession Graph GraphDevices OptimizationLevel Placement PlacementRule Precision
Session Shape Value WeightSharing __version__ available_devices calibrate device_report explain fastest_device
from_onnx from_torch load open_package rank register_provider save_onnx start_package to_onnx warm_package
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
    assert set(errors.__all__) == set(ERRORS.split())


def test_the_version_is_that_of_the_installed_package() -> None:
    """`__version__` is not typed in a second time."""
    assert rlx_ort.__version__ == importlib.metadata.version("rlx_ort")
