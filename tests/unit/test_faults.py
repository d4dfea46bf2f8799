"""The table of whose fault a failure is, and the comparison that re-admission relies on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import EngineError, InputError, NoViableDeviceError, RunError, errors
from rlx_ort.faults import Fault, fault_of, is_device_failure
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
    (
        "Non-zero status code returned while running Add node. Name:'add' Status Message: axis == 1 || axis == largest "
        "was false. Attempting to broadcast an axis by a dimension other than 1. 2 by 4",
        Fault.CALLER,
        "inputs",
    ),
    (
        "Status Message: The input tensor cannot be reshaped to the requested shape. Input shape:{2,3}, requested: {4}",
        Fault.CALLER,
        "inputs",
    ),
    ("WebGPU cannot run node 'matmul' (MatMul) on f32(0, 2): an inner dim of 0", Fault.REFUSAL, "refused"),
]


@pytest.mark.parametrize(("text", "fault", "what"), TEXTS, ids=[text[:30] for text, _, _ in TEXTS])
def test_texts_of_the_engine(text: str, fault: Fault, what: str) -> None:
    """Memory, loss and driver errors are the device's; others are of unknown fault."""
    assert fault_of(EngineError(f"the run on CUDA failed: {text}")) == (fault, what)


# Class -> who is at fault, from docs/resilience.md ("Which runs move to another device") and the contract: what every
# device would raise is the caller's, what names no device or takes no graph is refused, and a device that fails is out.
VERDICTS = {
    "RlxError": Fault.UNKNOWN,  # says nothing more; `run_with_fallback` asks callers to raise a RunError
    "RunError": Fault.UNKNOWN,
    "EngineError": Fault.UNKNOWN,
    "StageError": Fault.UNKNOWN,
    "TimeLimitError": Fault.UNKNOWN,
    "ParityError": Fault.UNKNOWN,
    "DeviceError": Fault.REFUSAL,
    "NoViableDeviceError": Fault.REFUSAL,  # "not viable under the policy" is an attempt of a chain
    "DeviceFallbackError": Fault.REFUSAL,
    "GraphError": Fault.REFUSAL,
    "LegalizeError": Fault.REFUSAL,
    "ConversionError": Fault.REFUSAL,  # a native form that is forced exists on some devices only
    "PlacementError": Fault.REFUSAL,
    "MemoryBudgetError": Fault.REFUSAL,
    "CalibrationError": Fault.REFUSAL,
    "DeviceUnavailableError": Fault.DEVICE,
    "DeviceParseError": Fault.CALLER,
    "GraphVerifyError": Fault.CALLER,
    "InputError": Fault.CALLER,
    "ParamError": Fault.CALLER,
    "CancelledRunError": Fault.CALLER,
    "StateLossError": Fault.CALLER,
    "MissingExtraError": Fault.CALLER,
    "ServingError": Fault.CALLER,
    "PackageError": Fault.CALLER,
    "IntegrityError": Fault.CALLER,
    "WriteError": Fault.CALLER,
}
CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.RlxError)
}


def test_every_error_of_the_package_has_one_verdict() -> None:
    """The table has a row for each class, by itself or by a base, and both questions get the same answer."""
    assert CLASSES.keys() == VERDICTS.keys()
    found = {name: kind.__new__(kind) for name, kind in CLASSES.items()}
    assert {name: fault_of(error)[0] for name, error in found.items()} == VERDICTS
    moves = {name: is_device_failure(error) for name, error in found.items()}
    assert moves == {name: fault is not Fault.CALLER for name, fault in VERDICTS.items()}


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (KeyError("a bug"), Fault.CALLER),
        (KeyError("a bug that mentions out of memory"), Fault.CALLER),
        (MemoryError(), Fault.DEVICE),
        (RunError("out of memory"), Fault.DEVICE),
        (NoViableDeviceError("none: CUDA failure 2: out of memory"), Fault.REFUSAL),
        (InputError("'x' is out of memory"), Fault.CALLER),
    ],
    ids=repr,
)
def test_texts_decide_only_where_the_class_does_not(error: Exception, fault: Fault) -> None:
    """A bug is the caller's, and a message that quotes another device's failure changes nothing."""
    assert fault_of(error)[0] is fault
    assert is_device_failure(error) is (fault is not Fault.CALLER)


def _caused(name: str, text: str) -> EngineError:
    error = EngineError(text)
    error.__cause__ = type(name, (Exception,), {"__module__": "onnxruntime.capi"})(text)
    return error


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        # An index out of range: an error on one device is a row of zeros on another, so no other one answers.
        (_caused("InvalidArgument", "the run on CPU failed: indices element out of bounds"), (Fault.CALLER, "model")),
        (_caused("NotImplemented", "the run on WebGPU failed: no case for rank 9"), (Fault.REFUSAL, "refused")),
        (_caused("InvalidGraph", "ONNX Runtime did not take the model for QNN: no op"), (Fault.REFUSAL, "refused")),
        (_caused("InvalidArgument", "ONNX Runtime did not take the model for QNN: x"), (Fault.REFUSAL, "refused")),
        (_caused("InvalidArgument", "the run on CUDA failed: CUDA failure 700"), (Fault.DEVICE, "driver error")),
    ],
    ids=lambda value: str(value)[:40],
)
def test_onnx_runtime_s_exception_decides_with_the_phase(error: EngineError, verdict: tuple[Fault, str]) -> None:
    """Data that a kernel refuses in a run is the caller's; a model that a provider does not open is its refusal."""
    assert fault_of(error) == verdict


def test_an_exception_of_onnx_runtime_itself_is_judged_by_its_text() -> None:
    """Some calls of ONNX Runtime are not wrapped."""
    kind = type("Fail", (Exception,), {"__module__": "onnxruntime.capi.onnxruntime_pybind11_state"})
    assert fault_of(kind("CUDA failure 700: ..."))[0] is Fault.DEVICE
    assert fault_of(kind("strange"))[0] is Fault.UNKNOWN


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
