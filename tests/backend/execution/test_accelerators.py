"""What an accelerator must show beyond its operators: precision on request, flash attention, a limit of memory."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, EngineError, Graph, GraphDevices, Precision, Session


@pytest.mark.parametrize(("precision", "bound"), [(Precision.F32, 1e-5), (Precision.TF32, 5e-3)])
def test_products_are_exact_to_f32_unless_tf32_is_asked_for(device: Device, precision: Precision, bound: float) -> None:
    """The bound is a relative error in norm against float64."""
    if precision is Precision.TF32 and device.kind != "cuda":
        pytest.skip("only CUDA has TF32")
    square = np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)
    graph = Graph("square")
    x = graph.input("x", [512, 512])
    graph.outputs = [x @ x]
    got = GraphDevices(graph, options=CompileOptions(precision=precision)).run(device, {"x": square})[0]
    want = square.astype(np.float64) @ square
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_attention_is_right_where_kernels_take_their_flash_form(device: Device, mask: str) -> None:
    """64 queries are beyond the lengths at which kernels change."""
    draw = np.random.default_rng(0)
    inputs = {name: draw.standard_normal((2, 64, 64)).astype(np.float32) for name in "qkv"}
    graph = Graph("attention")
    graph.outputs = [
        graph.attention_kind(
            *(graph.input(name, [2, 64, 64]) for name in "qkv"), num_heads=4, head_dim=16, mask_kind=mask
        )
    ]
    heads = {name: each.reshape(2, 64, 4, 16).transpose(0, 2, 1, 3).astype(np.float64) for name, each in inputs.items()}
    scores = heads["q"] @ heads["k"].swapaxes(2, 3) / 4
    if mask == "causal":
        scores = np.where(np.tril(np.ones((64, 64), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = (weights / weights.sum(-1, keepdims=True) @ heads["v"]).transpose(0, 2, 1, 3).reshape(2, 64, 64)
    np.testing.assert_allclose(GraphDevices(graph).run(device, inputs)[0], want, rtol=1e-4, atol=1e-4)


def test_a_run_beyond_the_memory_limit_fails_and_the_graph_stays_usable(device: Device) -> None:
    """A gigabyte does not fit into 64 MiB."""
    if device.kind != "cuda":
        pytest.skip("only CUDA has a limit")
    graph = Graph("large")
    x = graph.input("x", ["n", 1024])
    graph.outputs = [(x @ graph.transpose(x, [1, 0])).sum([1])]
    compiled = Session(device, CompileOptions(device_memory_limit_bytes=64 << 20)).compile(graph)
    small = np.ones((16, 1024), np.float32)
    want = compiled.run({"x": small})[0]
    with pytest.raises(EngineError):
        compiled.run({"x": np.zeros((16384, 1024), np.float32)})
    np.testing.assert_array_equal(compiled.run({"x": small})[0], want)
