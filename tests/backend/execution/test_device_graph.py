"""Recorded launches are replayed with new inputs."""

from __future__ import annotations

import numpy as np
import pytest
from sample_models.step_graphs import step_graph, step_inputs

from rlx_ort.errors import EngineError
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions

RNG = np.random.default_rng(11)


@pytest.mark.webgpu
def test_a_device_graph_replays_with_new_inputs() -> None:
    """Recorded launches give new results for new inputs, on every path."""
    graph = Graph("static")
    x = graph.input("x", [2, 4])
    state = graph.input("state", [2, 4])
    graph.outputs = [graph.tanh(x + state)]
    compiled = Session("webgpu", CompileOptions(device_graph=True)).compile(graph)
    plain = Session("webgpu").compile(graph)
    for _ in range(4):
        inputs = {name: RNG.standard_normal((2, 4)).astype(np.float32) for name in ("x", "state")}
        expected = plain.run(inputs)[0]
        np.testing.assert_allclose(compiled.run(inputs)[0], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(compiled.run_slots(list(inputs.values()))[0], expected, rtol=1e-6, atol=1e-6)
    compiled.bind_gpu_handle("state", inputs["state"])
    compiled.set_gpu_handle_feed("state", 0)
    plain.bind_gpu_handle("state", inputs["state"])
    plain.set_gpu_handle_feed("state", 0)
    for _ in range(3):
        np.testing.assert_allclose(
            compiled.run({"x": inputs["x"]})[0], plain.run({"x": inputs["x"]})[0], rtol=1e-6, atol=1e-6
        )


@pytest.mark.webgpu
def test_a_device_graph_needs_static_shapes() -> None:
    """Dims without a size are refused, with the option that binds them."""
    compiled = Session("webgpu", CompileOptions(device_graph=True)).compile(step_graph())
    with pytest.raises(EngineError, match="dims="):
        compiled.run(step_inputs()[0])
