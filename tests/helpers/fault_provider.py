"""A provider with injected faults: runs on another one, and fails, hangs or returns wrong results. Only for tests."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlx_ort import Device, DeviceUnavailableError, DType, EngineError, Graph
from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.ir.types import ValueType
from rlx_ort.providers.base import (
    Availability,
    CostProfile,
    EngineSession,
    MemoryReading,
    NodeAssignment,
    Provider,
    SessionRequest,
)
from rlx_ort.providers.engine.stopping import check_stopped
from rlx_ort.providers.null import NullProvider, NullSession

OUT_OF_MEMORY = "Failed to allocate memory for requested buffer of size {}"
NODE_OUT_OF_MEMORY, NODE_OVERFLOW = ([1 << bits] + [1] * 7 for bits in (48, 62))
"""Shapes for `node_shapes`: more memory than a process can address, and more than 64 bits can count."""
LOST = "CUDA failure 719: unspecified launch failure ; GPU=0"


class Doubling(NullProvider):
    """A provider that needs no engine and computes `x + x` for every output."""

    selectable = True

    def __init__(self, kind: str = "cpu", dispatch_ns: float = 100_000.0) -> None:
        super().__init__(profile=CostProfile(100.0, 100.0, 100.0, dispatch_ns, dispatch_ns, 100.0, 100.0))
        self.name, self.kinds, self.ep_name = kind, (kind,), "CPUExecutionProvider"

    def open(self, request: SessionRequest) -> EngineSession:
        """Open a session that doubles."""
        super().open(request)
        return _DoublingSession(self, request)


class _DoublingSession(NullSession):
    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Double the only input; a product of matrices where there are two, as in the probe."""
        super().run(output_names, feeds)
        first, *others = feeds.values()
        return [first @ others[0] if others else first + first] * len(output_names)


class FaultProvider(Provider):
    """Serves a device of its own through another provider, and has the faults that are set on it.

    Attributes:
        by_node: whether sessions that are opened can fail at a node; needs a provider of ONNX Runtime.
        dead: the text that every probe, opening and run fails with; empty while the device lives.
        fail_at: number of a run, from 1 -> the error that it raises.
        node_shapes: number of a node, from 1 in the order of the model -> the shape that its output is expanded to. The
            engine's own `Expand` fails, with an error that has the node's name. For sessions opened `by_node`.
        script: asked for the number of each run; may return an error to raise, or do what it likes.
        memory_bytes: runs that are fed more bytes run out of memory; None for no limit.
        open_delay_s: seconds that opening a session takes.
        open_now: set to end the opening of sessions at once.
        factor: what float results are multiplied by; 1 for right ones.
        hang: set while runs do not end by themselves. They end with an error when they are stopped.
        stubborn: whether a run that hangs cannot be stopped.
        sizes: graph -> bytes that its session takes once it is open, and that its first run adds to its arena.
        spikes: graph -> bytes that its session takes beside those while it is opened.
        run_spikes: graph -> bytes that its session takes beside those in its first run.
        capacity: bytes that all sessions may take before one of them runs out of memory; None for no limit.
        whole: whether readings of the memory are of sessions alone.
        peak: the most bytes that all sessions took together.
        requests: what was opened.
        runs: runs that were begun.
        opened: sessions that were opened.
        closed: sessions that were closed.
        probes: probes that were made.
        fed: the inputs of the last run.
    """

    name = "fault"
    kinds = ("fault",)
    ep_name = "CPUExecutionProvider"

    def __init__(self, inner: Provider, *, by_node: bool = False) -> None:
        self.inner = inner
        self.by_node = by_node
        self.node_shapes: dict[int, Sequence[int]] = {}
        self.dead = ""
        self.fail_at: dict[int, Exception] = {}
        self.script: Callable[[int], Exception | None] | None = None
        self.memory_bytes: int | None = None
        self.open_delay_s = 0.0
        self.open_now = threading.Event()
        self.factor = 1.0
        self.hang = threading.Event()
        self.stubborn = False
        self.sizes: dict[str, tuple[int, int]] = {}
        self.spikes: dict[str, int] = {}
        self.run_spikes: dict[str, int] = {}
        self.capacity: int | None = None
        self.whole = False
        self.peak = 0
        self.requests: list[SessionRequest] = []
        self.taken: dict[_FaultSession, int] = {}
        self.runs = self.opened = self.closed = self.probes = 0
        self.fed: Mapping[str, Any] = {}
        self.inside = 0
        self.lock = threading.Lock()
        self.looked = threading.Event()  # at the memory

    def recover(self) -> None:
        """Have no faults any more; runs that hang end."""
        self.dead, self.fail_at, self.script, self.node_shapes = "", {}, None, {}
        self.memory_bytes, self.open_delay_s, self.factor = None, 0.0, 1.0
        self.hang.clear()
        self.stubborn = False

    def probe(self, device: Device) -> Availability:
        """Answer without a session."""
        self.probes += 1
        return Availability(not self.dead, self.dead, hardware="none", driver="fault")

    def open(self, request: SessionRequest) -> EngineSession:
        """Open a session on the other provider."""
        self.open_now.wait(self.open_delay_s)
        if self.dead:
            raise DeviceUnavailableError(request.device, self.dead)
        model = _expanded(request.model) if self.by_node else request.model
        session = _FaultSession(self, self.inner.open(dataclasses.replace(request, device=Device.CPU, model=model)))
        name = request.model.model.graph.name
        at_opening, session.arena = self.sizes.get(name, (0, 0))
        session.spike = self.run_spikes.get(name, 0)
        self.take(session, at_opening)
        self.take_for_a_moment(session, self.spikes.get(name, 0))
        self.opened += 1
        self.requests.append(request)
        return session

    def memory(self, device: Device) -> MemoryReading | None:
        """Return what the open sessions take, beside 1000 bytes of other data unless `whole`."""
        if not self.sizes:
            return None
        with self.lock:
            self.looked.set()
            return MemoryReading(sum(self.taken.values()) + 1000 * (not self.whole), self.whole, "fault")

    def take(self, session: _FaultSession, nbytes: int) -> None:
        """Give memory to a session."""
        with self.lock:
            used = sum(self.taken.values())
            if self.capacity is not None and used + nbytes > self.capacity:
                raise EngineError(OUT_OF_MEMORY.format(nbytes))
            self.taken[session] = self.taken.get(session, 0) + nbytes
            self.peak = max(self.peak, used + nbytes)

    def take_for_a_moment(self, session: _FaultSession, nbytes: int) -> None:
        """Give memory to a session and take it back once that was seen, or after a second in which nobody looked."""
        if nbytes:
            self.take(session, nbytes)
            self.looked.clear()
            self.looked.wait(1.0)
            self.take(session, -nbytes)

    def default_profile(self, device: Device) -> CostProfile | None:
        """Return a profile that makes it the automatic choice."""
        return CostProfile(1e6, 1e6, 1e6, 1.0, 1.0, 1e6, 1e6)


class _FaultSession:
    def __init__(self, provider: FaultProvider, inner: EngineSession) -> None:
        self._provider = provider
        self._inner = inner
        self._closed = False
        self.arena = self.spike = 0  # bytes that the first run adds, and takes for a moment
        self._grown = 0
        self._arena_lock = threading.Lock()

    @property
    def input_types(self) -> Mapping[str, ValueType]:
        return {name: kind for name, kind in self._inner.input_types.items() if not name.startswith(_SHAPE)}

    @property
    def output_types(self) -> Mapping[str, ValueType]:
        return self._inner.output_types

    @property
    def assignments(self) -> Sequence[NodeAssignment]:
        return self._inner.assignments

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run on the other provider, with the faults that are set."""
        provider = self._provider
        with provider.lock:
            provider.runs += 1
            provider.inside += 1
            provider.fed = feeds
            number = provider.runs
        try:
            if provider.dead:
                raise EngineError(provider.dead)
            error = provider.fail_at.get(number) or (provider.script and provider.script(number))
            if error:
                raise error
            fed = sum(np.asarray(value).nbytes for value in feeds.values())
            if provider.memory_bytes is not None and fed > provider.memory_bytes:
                raise EngineError(OUT_OF_MEMORY.format(fed))
            with self._arena_lock:
                spike, self.spike = self.spike, 0
                provider.take_for_a_moment(self, spike)
                if self.arena and not self._grown:
                    provider.take(self, self.arena)
                    self._grown = self.arena
            hang = provider.hang
            while hang.is_set():
                time.sleep(0.001)
                if not provider.stubborn:
                    check_stopped()
            if provider.by_node:
                feeds = {**feeds, **self._shapes()}
            return [self._bent(result) for result in self._inner.run(output_names, feeds)]
        finally:
            with provider.lock:
                provider.inside -= 1

    def close(self) -> None:
        """Close the session below; once is enough."""
        if not self._closed:
            self._closed = True
            self._provider.closed += 1
        self._provider.taken.pop(self, None)
        self._inner.close()

    def shrink_arena(self) -> bool:
        """Free what the first run has added."""
        with self._arena_lock:
            if self._grown:
                self._provider.take(self, -self._grown)
                self._grown = 0
        return True

    def _shapes(self) -> dict[str, Any]:
        """Return the shape that each node's output is expanded to."""
        names = [name for name in self._inner.input_types if name.startswith(_SHAPE)]
        shapes = self._provider.node_shapes
        return {name: np.array(shapes.get(int(name.removeprefix(_SHAPE)), ()), np.int64) for name in names}

    def _bent(self, result: Any) -> Any:
        factor = self._provider.factor
        return result if factor == 1.0 else (result * factor).astype(result.dtype)


_SHAPE = "fault/shape/"


def _expanded(model: ExportedModel) -> ExportedModel:
    """Return a model in which the first output of each node is expanded to a shape that is fed; no dims keep it."""
    import onnx

    from rlx_ort.ir.types import TensorType

    proto = onnx.ModelProto.FromString(model.skeleton)
    nodes, types = list(proto.graph.node), dict(model.input_types)
    del proto.graph.node[:]
    for number, node in enumerate(nodes, 1):
        name, output = f"{_SHAPE}{number}", node.output[0]
        node.output[0] = f"{output}/unchanged"
        expand = onnx.helper.make_node("Expand", [node.output[0], name], [output], f"{node.name}/expanded")
        proto.graph.node.extend((node, expand))
        proto.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [None]))
        types[name] = TensorType(DType.I64, (None,))
    return dataclasses.replace(model, model=proto, input_types=types)


def doubled(shape: Sequence[int | str] = (4,)) -> Graph:
    """Return the graph `x + x`."""
    graph = Graph("doubled")
    x = graph.input("x", shape, DType.F32)
    graph.outputs = [x + x]
    return graph


def until(done: Callable[[], object], seconds: float = 10.0, step_s: float = 0.002) -> None:
    """Wait for something that happens in the background."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(step_s)
