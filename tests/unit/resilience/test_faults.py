"""The table of whose fault a failure is, and the comparison that re-admission relies on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import errors
from rlx_ort.device import Device
from rlx_ort.errors import (
    CancelledRunError,
    ConversionError,
    DeviceUnavailableError,
    EngineError,
    GraphVerifyError,
    InputError,
    IntegrityError,
    LegalizeError,
    NoViableDeviceError,
    ParamError,
    PlacementError,
    RunError,
    TimeLimitError,
)
from rlx_ort.resilience.faults import Fault, fault_of
from rlx_ort.resilience.trial import disagreement

# Texts of ONNX Runtime 1.31 and of its issue tracker, without the prefixes that `readable` removes.
TEXTS = [
    ("Failed to allocate memory for requested buffer of size 2830172160", Fault.DEVICE, "out of memory"),
    ("CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; expr=cudaMalloc(&p, size);", Fault.DEVICE, "out of memory"),
    ("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0", Fault.DEVICE, "out of memory"),
    ("Exception during initialization: std::bad_alloc", Fault.DEVICE, "out of memory"),
    ("(caller: 00007FFE114311D1) Exception(1) tid(ae54) 8007000E Not enough memory", Fault.DEVICE, "out of memory"),
    ("Exception(3) tid(5a68) 887A0005 The GPU device instance has been suspended.", Fault.DEVICE, "device lost"),
    ("WebGPU device lost (2): reason", Fault.DEVICE, "device lost"),
    ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", Fault.DEVICE, "driver error"),
    ("CUDNN failure 5003: CUDNN_STATUS_EXECUTION_FAILED_CUDART", Fault.DEVICE, "driver error"),
    ("VK_ERROR_DEVICE_LOST at QueueSubmit", Fault.DEVICE, "driver error"),
    ("Exiting due to terminate flag being set to true.", Fault.CALLER, "session closed"),
    ("the session on CUDA is closed; compile the graph again", Fault.CALLER, "session closed"),
    ("Non-zero status code returned while running Foo node", Fault.UNKNOWN, "engine error"),
]


@pytest.mark.parametrize(("text", "fault", "what"), TEXTS, ids=[text[:30] for text, _, _ in TEXTS])
def test_texts_of_the_engine(text: str, fault: Fault, what: str) -> None:
    """Memory, loss and driver errors are the device's; others are of unknown fault."""
    assert fault_of(EngineError(f"the run on CUDA failed: {text}")) == (fault, what)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (InputError("x"), Fault.CALLER),
        (ParamError("w"), Fault.CALLER),
        (GraphVerifyError("bad"), Fault.CALLER),
        (ConversionError("bad"), Fault.CALLER),
        (IntegrityError("changed"), Fault.CALLER),
        (CancelledRunError("cancelled"), Fault.CALLER),
        (RunError("the compiled graph is closed"), Fault.CALLER),
        (NoViableDeviceError("none"), Fault.CALLER),
        (KeyError("a bug"), Fault.CALLER),
        (KeyError("a bug that mentions out of memory"), Fault.CALLER),
        (LegalizeError("no kernel"), Fault.REFUSAL),
        (PlacementError("strays"), Fault.REFUSAL),
        (MemoryError(), Fault.DEVICE),
        (DeviceUnavailableError(Device.CUDA, "lost"), Fault.DEVICE),
        (TimeLimitError("too long"), Fault.UNKNOWN),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.value,
)
def test_types_of_errors(error: Exception, fault: Fault) -> None:
    """What every device would raise is the caller's."""
    assert fault_of(error)[0] is fault


def test_data_that_a_kernel_refuses_is_the_caller_s() -> None:
    """An index out of range reaches us as an EngineError that InvalidArgument caused."""
    cause = type("InvalidArgument", (Exception,), {"__module__": "onnxruntime.capi"})("indices element out of bounds")
    error = EngineError("the run on CPU failed: indices element out of data bounds, idx=9")
    error.__cause__ = cause
    assert fault_of(error) == (Fault.CALLER, "model")


def test_an_exception_of_onnx_runtime_itself_is_judged_by_its_text() -> None:
    """Some calls of ONNX Runtime are not wrapped."""
    kind = type("Fail", (Exception,), {"__module__": "onnxruntime.capi.onnxruntime_pybind11_state"})
    assert fault_of(kind("CUDA failure 700: ..."))[0] is Fault.DEVICE
    assert fault_of(kind("strange"))[0] is Fault.UNKNOWN


def test_every_error_of_the_package_is_decided() -> None:
    """A class that is added gets a verdict, by itself or by its base."""
    kinds = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, errors.RlxError)]
    assert len(kinds) > 20
    for kind in kinds:
        assert fault_of(kind.__new__(kind))[0] in Fault


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("wanted", "got", "differs"),
    [
        (ONES, ONES * np.float32(1.0005), ""),
        (ONES, ONES * np.float32(1.01), "differs by up to 0.01"),
        (ONES, ONES * np.float32("nan"), "NaN or infinities"),
        (ONES * np.float32("nan"), ONES * np.float32("nan"), ""),
        (ONES * np.float32("inf"), ONES * np.float32("inf"), ""),
        (ONES * np.float32("inf"), ONES * np.float32("-inf"), "NaN or infinities"),
        (ONES, ONES[:1], "float32[1, 3] in place of float32[2, 3]"),
        (ONES, ONES.astype(np.float64), "in place of"),
        (np.arange(3), np.array([0, 1, 3]), "the values differ"),
        (np.array(["a", "b"], object), np.array(["a", "b"], object), ""),
        (ONES.astype(np.float16), (ONES * 1.005).astype(np.float16), ""),
        (ONES.astype(ml_dtypes.bfloat16), (ONES * 1.05).astype(ml_dtypes.bfloat16), ""),
        (ONES.astype(ml_dtypes.bfloat16), (ONES * 1.2).astype(ml_dtypes.bfloat16), "differs"),
        (ONES.astype(np.complex64), ONES.astype(np.complex64) * (1 + 0.01j), "differs"),
        (np.array([1e6, 0], np.float32), np.array([1e6, 1], np.float32), ""),
        (np.zeros(3, np.float32), np.full(3, 1e-3, np.float32), "all is 0"),
        (np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32), ""),
        ([ONES], [ONES * 2], "differs"),
        (None, None, ""),
    ],
)
def test_results_agree_within_the_tolerance(wanted: Any, got: Any, differs: str) -> None:
    """Relative to the largest value, with NaN like NaN; other types exactly."""
    found = disagreement([wanted], [got], 1e-3)
    assert differs in found
    assert bool(found) == bool(differs)
