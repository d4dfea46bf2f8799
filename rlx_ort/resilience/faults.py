"""Who is at fault for a failed run: the caller, the device, or nobody known yet. One table decides."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from rlx_ort.errors import (
    CancelledRunError,
    DeviceParseError,
    DeviceUnavailableError,
    EngineError,
    GraphError,
    InputError,
    LegalizeError,
    MemoryBudgetError,
    PackageError,
    ParamError,
    PlacementError,
    RlxError,
    StateLossError,
    TimeLimitError,
)
from rlx_ort.providers.engine.runtime import DEVICE_GONE

OUT_OF_MEMORY = "out of memory"


class Fault(enum.Enum):
    """Who is at fault, and so what happens next."""

    CALLER = "caller"
    """The inputs, the model or the program: the error is raised, since every device would fail."""

    REFUSAL = "refusal"
    """The device does not take this graph: the next one is tried, and the device is not quarantined."""

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
_ENDED = re.compile(r"the process ends|terminate flag|is closed; compile the graph again|was changed in place")
# Names of ONNX Runtime's exceptions, `onnxruntime_pybind_exceptions.cc`: a kernel that refuses the data (an index out
# of range), or a model without a kernel. InvalidArgument of a kernel reaches us as EngineError; see `runtime.py`.
_MODEL = re.compile(r"^(InvalidArgument|InvalidGraph|InvalidProtobuf|NotImplemented|NoSuchFile|NoModel)\n")

RULES: tuple[Rule, ...] = (
    Rule((LegalizeError, PlacementError), None, Fault.REFUSAL, "refused"),
    Rule((MemoryBudgetError,), None, Fault.REFUSAL, "memory budget"),
    Rule((InputError, ParamError, DeviceParseError), None, Fault.CALLER, "inputs"),
    Rule((GraphError, PackageError), None, Fault.CALLER, "model"),
    Rule((CancelledRunError, StateLossError), None, Fault.CALLER, "cancelled"),
    Rule((TimeLimitError,), None, Fault.UNKNOWN, "time limit"),
    Rule((MemoryError,), None, Fault.DEVICE, OUT_OF_MEMORY),
    Rule((DeviceUnavailableError,), None, Fault.DEVICE, "device lost"),
    Rule((EngineError,), _ENDED, Fault.CALLER, "session closed"),
    Rule((Exception,), _NO_MEMORY, Fault.DEVICE, OUT_OF_MEMORY),
    Rule((Exception,), re.compile(DEVICE_GONE), Fault.DEVICE, "device lost"),
    Rule((Exception,), _DRIVER, Fault.DEVICE, "driver error"),
    Rule((EngineError,), _MODEL, Fault.CALLER, "model"),
    Rule((EngineError,), None, Fault.UNKNOWN, "engine error"),
)
"""The first row that matches decides. Rows for any exception apply to errors of this package and of ONNX Runtime."""


def fault_of(error: BaseException) -> tuple[Fault, str]:
    """Return who is at fault for an error of a run, and the kind of failure in a word or two.

    A bug, which is any exception that neither this package nor ONNX Runtime raises on purpose, is the caller's.
    """
    foreign = type(error).__module__.partition(".")[0] == "onnxruntime"
    if not (foreign or isinstance(error, (RlxError, MemoryError))):
        return Fault.CALLER, "program"
    text = f"{type(error.__cause__ or error).__name__}\n{error}"
    for rule in RULES:
        if isinstance(error, rule.types) and (rule.text is None or rule.text.search(text)):
            return rule.fault, rule.what
    return (Fault.UNKNOWN, "engine error") if foreign else (Fault.CALLER, "program")
