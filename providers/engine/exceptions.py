"""What each exception of ONNX Runtime becomes here.

ONNX Runtime's own types share no base class but `Exception`, and some failures come as plain RuntimeError, ValueError
or UnicodeDecodeError, so each is named.
"""

from __future__ import annotations

import re

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, EngineError, InputError, LegalizeError, RlxError

__all__ = ["DEVICE_GONE", "ENGINE_EXCEPTIONS", "PLAIN_EXCEPTIONS", "opening_error", "running_error"]

# https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/python/onnxruntime_pybind_exceptions.cc
# name -> (while a session is opened, while it runs)
ENGINE_EXCEPTIONS: dict[str, tuple[type[RlxError], type[RlxError]]] = {
    "DeviceReset": (DeviceUnavailableError, EngineError),
    "EPFail": (EngineError, EngineError),  # what a provider says of models that it cannot compile
    "EngineError": (EngineError, EngineError),
    "Fail": (EngineError, EngineError),
    "InvalidArgument": (EngineError, InputError),
    "InvalidGraph": (EngineError, EngineError),
    "InvalidProtobuf": (EngineError, EngineError),
    "ModelLoadCanceled": (EngineError, EngineError),
    "ModelLoaded": (EngineError, EngineError),
    "ModelRequiresCompilation": (EngineError, EngineError),
    "NoModel": (EngineError, EngineError),
    "NoSuchFile": (EngineError, EngineError),
    "NotFound": (EngineError, EngineError),
    "NotImplemented": (LegalizeError, EngineError),
    "RuntimeException": (EngineError, EngineError),
}

PLAIN_EXCEPTIONS: dict[type[Exception], tuple[type[RlxError], type[RlxError]]] = {
    UnicodeDecodeError: (EngineError, EngineError),  # the message itself is not UTF-8
    RuntimeError: (EngineError, EngineError),
    ValueError: (EngineError, InputError),
    TypeError: (EngineError, InputError),
}

# InvalidArgument also comes out of kernels, for data that no check of the inputs could have caught.
_ABOUT_INPUTS = re.compile(
    r"Invalid input name|Invalid output name|Got invalid dimensions|Unexpected input data type|Invalid rank for input"
    r"|Missing Input|Invalid Feed|Required inputs|Input name cannot|do not match expected type|Unable to handle object"
)
DEVICE_GONE = re.compile(
    r"WebGPU device lost|Failed to get a WebGPU adapter|no CUDA-capable device|invalid device ordinal"
    r"|CUDA driver version is insufficient|devices are busy or unavailable|887A0005|887A0006|887A0007|887A0020"
)
_NOISE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
# Source position and C++ signature in front of what happened.
_POSITION = re.compile(r"/\S+?\.(?:cc|h|cpp):\d+ .*?\)(?:::<lambda\(\)>)? (?=\S)")


def opening_error(err: Exception, device: Device, remedy: str = "") -> RlxError:
    """Return the error for an exception that stopped a session from being opened; raise it `from` the exception."""
    kind = _mapped(err)[0]
    text = readable(err)
    if "ort_version_supported" in text:  # a plugin that was built for a newer core registers, and fails here
        return DeviceUnavailableError(device, text, "pip install --upgrade onnxruntime")
    if kind is DeviceUnavailableError or DEVICE_GONE.search(str(err)):
        return DeviceUnavailableError(device, text, remedy)
    return kind(f"ONNX Runtime did not take the model for {device.display}: {text}")


def running_error(err: Exception, device: Device) -> RlxError:
    """Return the error for an exception out of a run; raise it `from` the exception."""
    kind = _mapped(err)[1]
    text = readable(err)
    if _ABOUT_INPUTS.search(text):
        return InputError(text)
    if kind is InputError and type(err).__name__ == "InvalidArgument":
        kind = EngineError
    return kind(text) if kind is InputError else EngineError(f"the run on {device.display} failed: {text}")


def readable(err: Exception) -> str:
    """Return what the exception says without ONNX Runtime's prefix and source positions."""
    text = _POSITION.sub("", _NOISE.sub("", str(err))).strip()
    return text or type(err).__name__


def _mapped(err: Exception) -> tuple[type[RlxError], type[RlxError]]:
    for plain, kinds in PLAIN_EXCEPTIONS.items():
        if isinstance(err, plain):
            return kinds
    return ENGINE_EXCEPTIONS.get(type(err).__name__, (EngineError, EngineError))
