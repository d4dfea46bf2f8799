"""Who is at fault for an error: the caller, the device, or nobody known yet. One table decides for every caller.

Chains, benchmarks, the server and resilience ask it whether another device may succeed (`is_device_failure`), and
resilience whether the device is quarantined (`fault_of`).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from rlx_ort.errors import (
    CalibrationError,
    CancelledRunError,
    DeviceError,
    DeviceParseError,
    DeviceUnavailableError,
    EngineError,
    GraphError,
    GraphVerifyError,
    InputError,
    MemoryBudgetError,
    PackageError,
    ParamError,
    ParityError,
    PlacementError,
    RlxError,
    ServingError,
    StageError,
    StateLossError,
    TimeLimitError,
)

C = TypeVar("C")
T = TypeVar("T")

OUT_OF_MEMORY, OVER_BUDGET = NO_ROOM = "out of memory", "memory budget"
"""Kinds of failure that end when others free their memory."""
NOT_TAKEN = "ONNX Runtime did not take the model"
"""The message of an error that stopped a session from being opened begins so."""
CANNOT_RUN = "cannot run node"
"""The message of an error of sizes that a device's kernel does not take has these words."""
OUT_OF_RANGE = "is out of range for node"
"""The message of an error of an index that was fed has these words."""
DEVICE_GONE = (
    r"WebGPU device lost|Failed to get a WebGPU adapter|no CUDA-capable device|invalid device ordinal"
    r"|CUDA driver version is insufficient|devices are busy or unavailable|887A0005|887A0006|887A0007|887A0020"
)
"""Texts of ONNX Runtime that say that the device is not there any more."""


class Fault(enum.Enum):
    """Who is at fault, and so the next step."""

    CALLER = "caller"
    """The inputs, the model or the program: the error is raised, since every device would fail."""

    REFUSAL = "refusal"
    """The device does not take this work: the next one is tried, and the device is not quarantined."""

    DEVICE = "device"
    """The device: it is quarantined, and the next one is tried."""

    UNKNOWN = "unknown"
    """The next device is tried. If it answers the same inputs, the device that failed is quarantined."""


class Rule(NamedTuple):
    """A row of the table: errors of these types whose text, or whose cause's type, matches."""

    types: tuple[type[BaseException], ...]
    text: re.Pattern[str] | None
    fault: Fault
    what: str


_NO_MEMORY = re.compile(
    # core/framework/bfc_arena.cc, AllocateRawInternal; microsoft/onnxruntime#16307, #20038
    r"Failed to allocate memory for requested buffer"
    # cudaErrorMemoryAllocation as core/providers/cuda/cuda_call.cc prints it; cuBLAS and cuDNN have their own
    r"|CUDA failure 2:|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    # E_OUTOFMEMORY and DXGI's name of it (DirectML); VkResult (Dawn); std::bad_alloc (CPU)
    r"|8007000E|VK_ERROR_OUT_OF_\w+_MEMORY|bad_alloc|out of memory",
    re.IGNORECASE,
)
_DRIVER = re.compile(
    # core/providers/cuda/cuda_call.cc: "CUDA failure 700: an illegal memory access ..."; microsoft/onnxruntime#26312
    r"(CUDA|CUDNN|CUBLAS|CUFFT|CURAND|HIP|ROCBLAS|MIOPEN) failure \d+|CUDA error"
    # DXGI_ERROR_DEVICE_REMOVED and its relatives, microsoft/onnxruntime#22700, #26606; VkResult
    r"|887A00[0-9A-F]{2}|VK_ERROR_\w+",
    re.IGNORECASE,
)
_ENDED = re.compile(r"the process is exiting|terminate flag|is closed; compile the graph again|was changed in place")
# The lines above a message are the name of ONNX Runtime's exception, `onnxruntime_pybind_exceptions.cc`. A session that
# does not open says nothing about other providers. In a run, NotImplemented is a kernel without a case for its inputs.
_REFUSED = re.compile(
    r"^(InvalidArgument|InvalidGraph|InvalidProtobuf|NoSuchFile|NoModel)\n"
    + NOT_TAKEN
    + rf"|^NotImplemented\n|{CANNOT_RUN}"
)
# A kernel that refuses the data, such as an index out of range, which other providers may read as anything. It reaches
# us as EngineError; see `running_error`.
_DATA = re.compile(r"^(InvalidArgument|InvalidGraph|InvalidProtobuf|NoSuchFile|NoModel)\n")
# Sizes that do not fit each other, whatever the provider: providers/cpu/math/element_wise_ops.cc (CUDA's takes the same
# text), tensor/reshape_helper.h, tensor/concatbase.h and math/matmul_helper.h of core/. Indices out of range: ours, and
# tensor/gather_elements.cc, whose error is no InvalidArgument.
_SIZES = re.compile(
    r"Attempting to broadcast an axis by a dimension other than 1|cannot be reshaped to the requested shape"
    rf"|Non concat axis dimensions must match|MatMul dimension mismatch|{OUT_OF_RANGE}"
    r"|GatherElements op: Out of range value in index tensor"
)

RULES: tuple[Rule, ...] = (
    Rule((InputError, ParamError, DeviceParseError), None, Fault.CALLER, "inputs"),
    Rule((GraphVerifyError, PackageError), None, Fault.CALLER, "model"),
    Rule((CancelledRunError, StateLossError), None, Fault.CALLER, "cancelled"),
    Rule((ServingError,), None, Fault.CALLER, "request"),
    Rule((GraphError, PlacementError), None, Fault.REFUSAL, "refused"),  # forms differ from device to device, too
    Rule((MemoryBudgetError,), None, Fault.REFUSAL, OVER_BUDGET),
    Rule((CalibrationError,), None, Fault.REFUSAL, "not measured"),
    Rule((DeviceUnavailableError,), None, Fault.DEVICE, "device lost"),
    Rule((DeviceError,), None, Fault.REFUSAL, "no device"),  # no other was found within the work either
    Rule((ParityError,), None, Fault.UNKNOWN, "results differ"),
    Rule((TimeLimitError,), None, Fault.UNKNOWN, "time limit"),
    Rule((MemoryError,), None, Fault.DEVICE, OUT_OF_MEMORY),
    Rule((EngineError,), _ENDED, Fault.CALLER, "session closed"),
    Rule((Exception,), _NO_MEMORY, Fault.DEVICE, OUT_OF_MEMORY),
    Rule((Exception,), re.compile(DEVICE_GONE), Fault.DEVICE, "device lost"),
    Rule((Exception,), _DRIVER, Fault.DEVICE, "driver error"),
    Rule((Exception,), _REFUSED, Fault.REFUSAL, "refused"),
    Rule((Exception,), _DATA, Fault.CALLER, "model"),
    Rule((EngineError,), _SIZES, Fault.CALLER, "inputs"),
    Rule((EngineError,), None, Fault.UNKNOWN, "engine error"),
    Rule((RlxError,), None, Fault.UNKNOWN, "failed"),  # raised as RunError by callers whose next device may succeed
    Rule((Exception,), None, Fault.UNKNOWN, "engine error"),
)
"""The first row that matches decides. Rows for any exception apply to errors of this package and of ONNX Runtime."""


def fault_of(error: BaseException) -> tuple[Fault, str]:
    """Return who is at fault for an error, and the kind of failure in a word or two.

    A bug, which is any exception that neither this package nor ONNX Runtime raises on purpose, is the caller's.
    """
    if isinstance(error, StageError) and error.__cause__ is not None:
        return fault_of(error.__cause__)
    foreign = type(error).__module__.partition(".")[0] == "onnxruntime"
    if not (foreign or isinstance(error, (RlxError, MemoryError))):
        return Fault.CALLER, "program"
    text = f"{type(error.__cause__ or error).__name__}\n{error}"
    rule = next(
        rule for rule in RULES if isinstance(error, rule.types) and (rule.text is None or rule.text.search(text))
    )
    return rule.fault, rule.what


def is_device_failure(error: BaseException) -> bool:
    """Return whether another device may succeed where this error was raised.

    False for faults on every device (inputs, parameters, device names, the graph, the package, data that a
    kernel refuses, a cancelled run, state that cannot move), and for every exception that neither this package nor ONNX
    Runtime raises on purpose, which is a bug or the caller's own business.
    """
    return fault_of(error)[0] is not Fault.CALLER


def those_that_work(
    candidates: Iterable[C], work: Callable[[C], T], failed: Callable[[C, Exception], object]
) -> Iterator[tuple[C, T]]:
    """Yield each candidate with which the work succeeds, and its result.

    An error that another device may avoid goes to `failed`, which may raise it; others are raised as they are.
    """
    for candidate in candidates:
        try:
            result = work(candidate)
        except Exception as err:  # raised again unless the device is at fault
            if not is_device_failure(err):
                raise
            failed(candidate, err)
        else:
            yield candidate, result
            del result


def first_that_works(
    candidates: Iterable[C], work: Callable[[C], T], failed: Callable[[C, Exception], object]
) -> tuple[C, T] | None:
    """Return the first candidate with which the work succeeds, and its result; None if there is none."""
    return next(those_that_work(candidates, work, failed), None)
