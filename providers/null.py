"""Providers without an engine: `NullProvider`, whose outputs are zeros, and `UnsupportedProvider`, which refuses.

The first lets everything but arithmetic be tested without hardware. No registry has it unless it is registered, and
automatic choice never picks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, EngineError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import SequenceType, TensorType, ValueType
from rlx_ort.providers.base import (
    Availability,
    CostProfile,
    EngineSession,
    KernelClaim,
    NodeAssignment,
    Provider,
    SessionRequest,
)

_INSTEAD = {
    "tpu": "export the model and run it with a TPU runtime",
    "opengl": "use 'gpu', which runs on Vulkan, Direct3D 12 or Metal",
}
_PROFILE = CostProfile(1.0, 1.0, 1.0, 1_000.0, 1_000.0, 1.0, 1.0, source="default: null")


@dataclass(kw_only=True, eq=False, repr=False)
class NullProvider(Provider):
    """Answers every request with zeros, or with the failures that were set.

    The three failures are messages, which may be set and cleared at any time, to simulate a device that breaks and
    recovers. Nodes that it does not take go to the CPU provider. `sessions` counts those that are open.
    """

    name: ClassVar[str] = "null"
    kinds: ClassVar[tuple[str, ...]] = ("null",)
    ep_name: ClassVar[str] = "NullExecutionProvider"
    selectable: ClassVar[bool] = False

    probe_failure: str = ""
    open_failure: str = ""
    run_failure: str = ""
    takes: Callable[[ExportedNode], bool] = lambda node: True
    profile: CostProfile | None = _PROFILE
    kernels: Sequence[KernelClaim] | None = None
    sessions: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def probe(self, device: Device) -> Availability:
        """Return an answer without looking at anything."""
        if self.probe_failure:
            return Availability(False, self.probe_failure, "clear probe_failure")
        return Availability(True, hardware="none", driver="null")

    def open(self, request: SessionRequest) -> EngineSession:
        """Return a session that computes nothing; see `Provider.open`."""
        if self.probe_failure:
            raise DeviceUnavailableError(request.device, self.probe_failure, "clear probe_failure")
        if self.open_failure:
            raise EngineError(self.open_failure)
        self.count(1)
        return NullSession(self, request)

    def default_profile(self, device: Device) -> CostProfile | None:
        """Return the profile it was given."""
        return self.profile

    def claims(self) -> Sequence[KernelClaim] | None:
        """Return the kernels it was given."""
        return self.kernels

    def count(self, change: int) -> None:
        """Add to the number of open sessions."""
        with self._lock:
            self.sessions += change


@dataclass(eq=False)
class NullSession:
    """A session whose outputs are zeros of the declared shapes, with named dims read from the feeds."""

    provider: NullProvider
    """The provider that opened it, asked on each run whether to fail."""
    request: SessionRequest
    runs: int = 0
    """How many runs succeeded."""
    _open: bool = True

    def __post_init__(self) -> None:
        model, own, cpu = self.request.model, self.provider.ep_name, "CPUExecutionProvider"
        self.input_types, self.output_types = model.input_types, model.output_types
        self.assignments = tuple(
            NodeAssignment(own if self.provider.takes(node) else cpu, node.name, node.domain, node.op_type)
            for node in model.nodes
        )

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Return zeros for the named outputs, unless `run_failure` is set."""
        if not self._open:
            raise EngineError(f"the session on {self.request.device.display} is closed; compile the graph again")
        if self.provider.run_failure:
            raise EngineError(self.provider.run_failure)
        sizes = self._sizes(feeds)
        results = [_zeros(self.request.model.output_types[name], sizes) for name in output_names]
        self.runs += 1
        return results

    def close(self) -> None:
        """Close the session; closing twice is harmless."""
        if self._open:
            self._open = False
            self.provider.count(-1)

    def _sizes(self, feeds: Mapping[str, Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, kind in self.request.model.input_types.items():
            if isinstance(kind, TensorType) and kind.shape is not None and name in feeds:
                pairs = zip(kind.shape, np.shape(feeds[name]), strict=False)
                sizes.update({dim: size for dim, size in pairs if isinstance(dim, str)})
        return sizes


def _zeros(kind: ValueType, sizes: Mapping[str, int]) -> Any:
    if isinstance(kind, SequenceType):
        return []
    if not isinstance(kind, TensorType):
        return None
    shape = tuple(dim if isinstance(dim, int) else sizes.get(str(dim), 1) for dim in kind.shape or ())
    if kind.dtype is DType.STRING:
        return np.full(shape, "", object)
    return np.zeros(shape, kind.dtype.numpy)


class UnsupportedProvider(Provider):
    """Refuses the known devices that no execution provider serves, and names an alternative."""

    name: ClassVar[str] = "unsupported"
    kinds: ClassVar[tuple[str, ...]] = ("tpu", "opengl")
    selectable: ClassVar[bool] = False

    def probe(self, device: Device) -> Availability:
        """Return that there is no execution provider for the device."""
        reason = f"no ONNX Runtime execution provider serves {device.family.display}"
        return Availability(False, reason, _INSTEAD[device.kind])

    def open(self, request: SessionRequest) -> EngineSession:
        """Refuse; see `Provider.open`."""
        availability = self.probe(request.device)
        raise DeviceUnavailableError(request.device, availability.reason, availability.remedy)

    def default_profile(self, device: Device) -> CostProfile | None:
        """Return None: a device that cannot run has no cost."""
        return None
