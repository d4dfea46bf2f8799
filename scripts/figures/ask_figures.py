"""What it costs to ask a provider which nodes of a model it takes: the first time, and when the answers are known."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator

from figures.record import Figure
from rlx_ort import environment
from rlx_ort.converters.protos import paused_collector
from rlx_ort.converters.to_onnx.exporter import drafted
from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers import registry
from rlx_ort.providers.base import Provider
from rlx_ort.providers.registry import available_devices
from rlx_ort.selection.questions import answers_for, groups_of

__all__ = ["measure"]

REPEATS = 12
OPTIONS = CompileOptions()


def measure() -> Iterator[Figure]:
    """Yield the cost on every device that works here but the other names of one; the target is for kernels in lists."""
    for device in available_devices():
        provider = registry.default_registry().for_device(device)
        if provider is None or provider.question_scope(device) is None or device.kind in ("gpu", "vulkan"):
            continue
        first, known, count = [], [], 0
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as folder:
                environment.set_override("CACHE_DIR", folder)
                for times in (first, known):
                    seconds, count = _asked(provider, device)
                    times.append(seconds)
                environment.clear_overrides()
        target = None if provider.compiles or device.kind == "webgpu" else 1.0
        yield Figure(f"asking {device.label} about 3,000 nodes of {count} kinds", min(first), "s", target)
        yield Figure(f"the same, {device.label}, answers known", min(known) * 1e3, "ms", 5.0)


def _asked(provider: Provider, device: Device) -> tuple[float, int]:
    """Return the seconds that asking took and the number of kinds; what was made is freed outside of the time."""
    draft = drafted(model(), OPTIONS, None)
    _ = draft.outline
    start = time.perf_counter()
    with paused_collector():  # as a choice does
        groups = groups_of(draft, OPTIONS, whole=provider.compiles, shapes=device.kind == "cpu")
        answers = answers_for(provider, device, groups, draft, OPTIONS)
    seconds = time.perf_counter() - start
    assert len(answers) == len(groups)
    return seconds, len(groups)


def model() -> Graph:
    """Return a model of 3,000 nodes of 150 kinds, each kind with attributes of its own."""
    graph = Graph("kinds")
    value = graph.input("x", ["batch", 8, 16, 16])
    for at in range(3_000):
        value = _node(graph, value, at % 150)
    graph.outputs = [value]
    return graph


def _node(graph: Graph, value: Value, kind: int) -> Value:
    types = [value.type]
    operator, attributes = (
        ("LeakyRelu", {"alpha": 0.01 * (kind + 1)}),
        ("Elu", {"alpha": 0.01 * (kind + 1)}),
        ("HardSigmoid", {"alpha": 0.01 * (kind + 1)}),
        ("LRN", {"size": 2 * (kind // 6) + 1}),
        ("Softmax", {"axis": kind // 6 % 4}) if kind < 24 else ("ThresholdedRelu", {"alpha": 0.01 * kind}),
        ("Selu", {"alpha": 0.01 * (kind + 1)}),
    )[kind % 6]
    [result] = graph.onnx_node(operator, [value], types=types, attributes=attributes)
    return result
