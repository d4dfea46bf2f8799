"""`Provider`, the base class of every provider, and the values that it takes and returns.

A provider's members stand in this order: identity, probe, session options, claims and quirks, default profile. Nothing
outside this folder names a single provider; `rlx_ort.providers.registry` finds them.
"""

from __future__ import annotations

import abc
import contextlib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import ValueType
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.options.variant import Variant
from rlx_ort.providers.kernel_limits import KernelLimit

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a device works here, proven by a one-node session, and the remedy when it does not.

    Texts are empty, and the memory is 0, where they are unknown. `reason` quotes the loader or the driver, `remedy` is
    the command or step that repairs it. `identity` differs between equal devices: PCI address, UUID or LUID.
    """

    available: bool
    reason: str = ""
    remedy: str = ""
    hardware: str = ""
    driver: str = ""
    memory_bytes: int = 0
    identity: str = ""


@dataclass(frozen=True, slots=True)
class NodeAssignment:
    """One node and the execution provider that ONNX Runtime gave it to."""

    provider: str
    name: str
    domain: str
    op_type: str


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """An input signature whose launches are recorded.

    `inputs` holds dtypes and shapes such as `float32[1, 768]`, `nbytes` the bytes of its buffers in the device's
    memory; as many are pinned in host memory.
    """

    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SizedRun:
    """The state of a session with fixed sizes for inputs that came back.

    `state` is `opening`, `used` or `refused`, with the `reason`. `plain_ns` and `sized_ns` are the least times of a run
    without and with it, in ns; `nbytes` is the memory of the device that it takes, at least that of its weights.
    """

    sizes: str
    state: str
    reason: str = ""
    plain_ns: int = 0
    sized_ns: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceGraphReport:
    """Which runs of a session replay recorded launches: signatures, the one used longest ago first.

    `refused` holds the reason for each signature that is not recorded; `reason` is why the session records nothing.
    `sized` has the sessions with fixed sizes, whose recordings are among `recorded`; None where sizes get none.
    """

    recorded: tuple[RecordedRun, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    sized: tuple[SizedRun, ...] | None = None


@dataclass(frozen=True, slots=True)
class KernelClaim:
    """One kernel of a provider: the operator, its version range, and the dtypes of its type parameters."""

    domain: str
    op_type: str
    first_version: int
    last_version: int | None
    """Last opset version, or None for an open end."""
    dtypes: Mapping[str, frozenset[DType]] = field(default_factory=dict)
    """Type parameter (`T`, or an input name) -> element types it takes."""


def figure(whose: str, name: str, value: object, *, is_rate: bool = False) -> float:
    """Return a rate, which is finite and above 0, or a time or a transfer, which are not below 0.

    A time may be infinite or no number: predictions with it lose to every other.

    Raises:
        CalibrationError: it is none.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        if (0 < number < math.inf) if is_rate else not number < 0:
            return number
    wanted = "a finite number above 0" if is_rate else "a number of at least 0"
    raise CalibrationError(f"{whose} gives {value!r} as {name}; it must be {wanted}")


_RATES = ("gemm_gflops", "conv_gflops", "memory_bytes_per_ns")


@dataclass(frozen=True, slots=True)
class CostProfile:
    """The rates and latencies of a device for the cost model, from `source`, in GFLOP/s, bytes per ns and ns.

    Rates are above 0, since a rate of 0 would make its part of a run free; only transfers may be free.

    Raises:
        CalibrationError: a figure is no number, or out of its range.
    """

    gemm_gflops: float
    conv_gflops: float
    memory_bytes_per_ns: float
    dispatch_ns: float
    roundtrip_ns: float
    upload_bytes_per_ns: float
    readback_bytes_per_ns: float
    upload_latency_ns: float = 0.0
    readback_latency_ns: float = 0.0
    source: str = "default"

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name != "source"):
            figure(f"the profile {self.source!r}", name, getattr(self, name), is_rate=name in _RATES)

    @classmethod
    def shipped(
        cls, source: str, gflops: tuple[float, float], bytes_per_ns: tuple[float, float], ns: tuple[float, float]
    ) -> CostProfile:
        """Return a default profile: (gemm, conv), (memory, transfers in both directions) and (dispatch, round trip)."""
        gemm, conv, memory, moved, dispatch, roundtrip = map(float, (*gflops, *bytes_per_ns, *ns))
        return cls(gemm, conv, memory, dispatch, roundtrip, moved, moved, source=f"default: {source}")


PRIVATE_MEMORY = "private memory of the process"


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """This process's use of a device's memory at one moment, and the source of the number.

    If `whole` is false, the bytes include data other than that of sessions, as in host memory, so that only the
    difference of two readings is meaningful.
    """

    nbytes: int
    whole: bool
    source: str


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """What is known of the memory of a provider's sessions, so that it can be counted before one is opened.

    Attributes:
        on_host: whether sessions compute in host memory: weights are borrowed, inputs are not copied, and memory that
            was allocated and never used takes none.
        arena: whether activations lie in ONNX Runtime's arena, which grows by doubling.
        in_place: operators that may write their result over their first input, or are fused so that none is written.
        reorders: whether convolutions are computed in a layout of their own, whose values ONNX Runtime does not reuse.
        session_bytes: bytes that a session takes without nodes.
        node_bytes: bytes that a node of the model takes in the graph and the session.
        process_bytes: bytes that the device's libraries take once in a process.
        page_bytes: what the device hands out memory in; what is smaller than half of it shares a page.
    """

    on_host: bool = False
    arena: bool = True
    in_place: frozenset[str] = frozenset()
    reorders: bool = False
    session_bytes: int = 0
    node_bytes: int = 0
    process_bytes: int = 0
    page_bytes: int = 1


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A model to open; the session keeps `weights`, the data of every external initializer by name, alive.

    `budgeted` asks for an arena that grows by the needed bytes and no more.
    """

    device: Device
    model: ExportedModel
    weights: Mapping[str, TensorData]
    options: CompileOptions
    budgeted: bool = False


class EngineSession(Protocol):
    """An open session of some engine. `run` may be called from several threads at once."""

    @property
    def input_types(self) -> Mapping[str, ValueType]:
        """Name -> type of the model's inputs, in order."""

    @property
    def output_types(self) -> Mapping[str, ValueType]:
        """Name -> type of its outputs, in order."""

    @property
    def assignments(self) -> Sequence[NodeAssignment]:
        """Where each node is, as reported by the engine."""

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run once and return the named outputs; feeds were checked and coerced before."""

    def close(self) -> None:
        """Drop the session, then its weights; closing twice is harmless."""


class Provider(abc.ABC):
    """One execution provider: a file of this folder has one subclass, and an instance of it in the registry.

    Attributes:
        name: the module's name, used in messages and for looking the provider up.
        kinds: the device kinds it serves, best first.
        ep_name: ONNX Runtime's name of the execution provider, empty for engines that are not ONNX Runtime.
        genai_name: onnxruntime-genai's name of it, empty where that has none.
        selectable: whether automatic choice may pick it; false for test providers.
        exclusive: whether only one session of the provider may run at a time in this process.
        option_keys: its provider options, None when they are not listed.
        compiles_per_shape: whether a run with new input shapes compiles the graph anew, which takes seconds.
        compiles: whether it compiles whole subgraphs, so that it has no kernels to list. It is asked about single nodes
            in a child process, since some nodes end the process.
        doubtful_dtypes: element types whose nodes are assigned even where the device cannot compute them, so that
            asking about one takes a run.
        limits: forms that kernels accept and do not compute.
        checks_indices: whether kernels raise an error for indices out of range, in every run.
        distrusted_kernels: (domain, operator) of fused kernels with wrong results; an op that has a basic form is never
            written as one of these.
        slow_kernels: (domain, operator) of fused kernels that take longer than the nodes they stand for, and the
            operators of these; an op is written as one only where the caller forces it or those have no kernels.
        work_space_bytes: bytes libraries may allocate in a run of a session that has not run in the thread or has not
            recorded launches before; kept free under a memory budget.
        session_memory: the known facts about the memory of sessions.
        precisions: the arithmetics other than f32 that `tune` tries.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    ep_name: ClassVar[str] = ""
    genai_name: ClassVar[str] = ""
    selectable: ClassVar[bool] = True
    exclusive: ClassVar[bool] = False
    option_keys: ClassVar[frozenset[str] | None] = None
    compiles_per_shape: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    doubtful_dtypes: ClassVar[frozenset[DType]] = frozenset()
    limits: ClassVar[Sequence[KernelLimit]] = ()
    checks_indices: ClassVar[bool] = True
    distrusted_kernels: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    slow_kernels: ClassVar[Mapping[tuple[str, str], Sequence[str]]] = {}
    work_space_bytes: ClassVar[int] = 0
    session_memory: ClassVar[SessionMemory] = SessionMemory()
    precisions: ClassVar[Sequence[Precision]] = ()

    @abc.abstractmethod
    def probe(self, device: Device) -> Availability:
        """Return whether the device works here. May open a one-node session; callers remember the answer."""

    @abc.abstractmethod
    def open(self, request: SessionRequest) -> EngineSession:
        """Open a session on the device, with every way of falling back to another one turned off.

        Raises:
            DeviceUnavailableError: the device does not work here.
            LegalizeError: the engine has no kernel for a node.
            EngineError: the engine refused the model; its own exception is the cause.
        """

    @abc.abstractmethod
    def default_profile(self, device: Device) -> CostProfile | None:
        """Return the shipped cost profile, or None when there is none."""

    def claims(self) -> Sequence[KernelClaim] | None:
        """Return the provider's kernels, or None when they cannot be listed (compiling providers)."""
        return None

    def optimized(self, request: SessionRequest, *, whole: bool = False) -> onnx.ModelProto | None:
        """Return a model as the engine assigns it to devices, after its first rewrites, None for other engines.

        With `whole` it has all rewrites, as a session runs it. Weights are left out. Opens a session on the device and
        writes the weights to a temporary folder.

        Raises:
            RlxError: as `open`.
        """
        return None

    def variants(self, device: Device, options: CompileOptions) -> Sequence[Variant]:
        """Return the ways to run a graph that `tune` tries beyond the options, those first that change the most."""
        return ()

    def judged_by(self) -> str:
        """Return where `claims` come from when it is not the provider itself, else an empty text."""
        return ""

    def question_scope(self, device: Device) -> str | None:
        """Return provider, versions and hardware as the key of answers about nodes; None if it cannot be asked."""
        return None

    def devices(self) -> Sequence[Device]:
        """Return the devices that hardware discovery sees, without proving that they work."""
        return tuple(Device(kind) for kind in self.kinds)

    def memory(self, device: Device) -> MemoryReading | None:
        """Return this process's use of the device's memory now, None where that cannot be read."""
        return None

    def memory_limit(self, device: Device, options: CompileOptions, installed: int) -> int | None:
        """Return the most bytes that a session can have on a device with so much memory, 0 where that is unknown.

        None means that no session is refused: the limit is unknown, or above it sessions are only slower.
        """
        return None

    def host_memory(self, device: Device, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory `(nbytes,)` of the host from which the device reads at full speed, as far as there is such."""
        return np.empty(nbytes, np.uint8)

    def packed_bytes(self, op_type: str, place: int, shape: Sequence[int], itemsize: int) -> int:
        """Return the bytes of the copy that a kernel keeps of a constant input in a layout of its own; 0 for none."""
        return 0

    def node_work_bytes(self, op_type: str, shapes: Sequence[Sequence[int]]) -> int:
        """Return the bytes that a kernel takes from the arena during a run, besides its results."""
        return 0

    def run_lock(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock that a run must hold: a process-wide lock for exclusive providers, nothing for others."""
        return contextlib.nullcontext()
