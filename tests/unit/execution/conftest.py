"""Devices without hardware: providers that compute `x @ w` in numpy, and fail on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rlx_ort import Device, DType, Graph
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.providers import registry
from rlx_ort.providers.base import CostProfile, EngineSession, SessionRequest
from rlx_ort.providers.null import NullProvider, NullSession


class MatMulSession(NullSession):
    """Computes `y = x @ w`, slowly enough that a change of `w` in between would show."""

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Multiply by the weights the session was opened with."""
        super().run(output_names, feeds)
        weights = self.request.weights["w"].numpy()
        columns = []
        for column in range(weights.shape[1]):
            columns.append(feeds["x"] @ weights[:, column])
            time.sleep(0)
        assert self._open, "the session was closed while a run was in it"
        return [np.stack(columns, axis=-1)] * len(output_names)


class FakeProvider(NullProvider):
    """A provider of one device kind.

    `opened` counts the sessions it opened, `cards` is how many devices it sees, and `refuses` the error with which a
    device, by label, refuses to open a session.
    """

    selectable = True

    def __init__(self, kind: str, dispatch_ns: float, **settings: Any) -> None:
        profile = CostProfile(100.0, 100.0, 100.0, dispatch_ns, dispatch_ns, 100.0, 100.0)
        super().__init__(**({"profile": profile} | settings))
        self.name = self.kind = kind
        self.kinds = (kind,)
        self.ep_name = "CPUExecutionProvider" if kind == "cpu" else f"{kind.upper()}ExecutionProvider"
        self.opened = 0
        self.cards = 1
        self.refuses: dict[str, Exception] = {}

    def devices(self) -> Sequence[Device]:
        """Return one device for each card."""
        return tuple(Device(self.kind, index) for index in range(self.cards))

    def open(self, request: SessionRequest) -> EngineSession:
        """Open a session that multiplies."""
        refusal = self.refuses.get(request.device.label)
        if refusal is not None:
            raise refusal
        super().open(request)
        self.opened += 1
        return MatMulSession(self, request)


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeProvider]:
    """Replace the process's registry by one with a slow CPU, a fast CUDA and a WebGPU in between."""
    fakes = {
        "cpu": FakeProvider("cpu", 100_000.0),
        "cuda": FakeProvider("cuda", 1_000.0),
        "webgpu": FakeProvider("webgpu", 10_000.0),
    }
    known = registry.ProviderRegistry(tuple(fakes.values()))
    monkeypatch.setattr(registry, "default_registry", lambda: known)
    return fakes


@pytest.fixture
def matmul_graph() -> Callable[..., Graph]:
    """Return a function that builds `y = x[n, 4] @ w[4, 3]`, with data for `w` if it is given some."""

    def build(weights: Any = None) -> Graph:
        graph = Graph("matmul")
        x = graph.input("x", ["n", 4])
        w = graph.param("w", [4, 3], data=weights)
        kind = TensorType(DType.F32, Shape(["n", 3]))
        graph.outputs = list(graph.onnx_node("MatMul", [x, w], types=[kind], name="mm"))
        return graph

    return build
