"""A graph from `legalize_graph_for_device` runs on the device, with the results of the graph it was made from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort import CompileOptions, Device, Graph, Session, Value, legalize_graph_for_device
from rlx_ort.options.dispatch import KernelDispatch, KernelDispatchPolicy

Array = npt.NDArray[np.float32]

Q = np.random.default_rng(7).standard_normal((2, 5, 8)).astype(np.float32)
W = np.random.default_rng(8).standard_normal((8, 3)).astype(np.float32)


def _product(g: Graph, x: Value) -> Value:
    """No provider has a native form for it: the fused kernel takes matrices, and `x` has three axes."""
    return g.fused_matmul_bias_act(x, g.param("w", W.shape, data=W), g.constant(W[0]), activation="relu", name="op")


def _product_expected() -> Array:
    return np.maximum(Q.astype(np.float64) @ W + W[0], 0).astype(np.float32)


def _attention(g: Graph, x: Value) -> Value:
    """The fused kernels have no sliding mask: each query sees itself and the key before it."""
    return g.attention_kind(x, x, x, 2, 4, "sliding:1", name="op")


def _attention_expected() -> Array:
    heads = Q.astype(np.float64).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)
    scores = heads @ heads.transpose(0, 1, 3, 2) / 2.0
    near = np.arange(5)[:, None] - np.arange(5)[None, :]
    weights = np.exp(np.where((near >= 0) & (near <= 1), scores, -np.inf))
    mixed = weights / weights.sum(-1, keepdims=True) @ heads
    return mixed.transpose(0, 2, 1, 3).reshape(Q.shape).astype(np.float32)


CASES = pytest.mark.parametrize(
    ("build", "expected"),
    [(_product, _product_expected), (_attention, _attention_expected)],
    ids=["product", "attention"],
)


def _graph(build: Callable[[Graph, Value], Value]) -> Graph:
    g = Graph("one")
    g.set_outputs([build(g, g.input("x", ["batch", 5, 8]))], ["y"])
    return g


@CASES
def test_the_legal_graph_runs_on_the_device_with_default_options(
    device: Device, build: Callable[[Graph, Value], Value], expected: Callable[[], Array]
) -> None:
    """The op became basic ones, every node is on the device, and the numbers are right."""
    graph = _graph(build)
    legal, report = legalize_graph_for_device(graph, device)
    assert report.common_lowered_kinds == (graph.outputs[0].node.op.kind,)
    assert graph.outputs[0].node.op.kind not in {node.op.kind for node in legal.nodes}
    with Session(device).compile(legal) as compiled:
        [found] = compiled.run({"x": Q})
        assert compiled.placement.requested_share == 1.0
    np.testing.assert_allclose(found, expected(), rtol=1e-4, atol=1e-5)


@CASES
def test_a_legal_graph_needs_no_choice_of_forms(
    device: Device, build: Callable[[Graph, Value], Value], expected: Callable[[], Array]
) -> None:
    """It compiles even where the native form is forced, which the graph given cannot have."""
    forced = CompileOptions(kernel_dispatch=KernelDispatch(KernelDispatchPolicy.FORCE_NATIVE))
    legal, _ = legalize_graph_for_device(_graph(build), device)
    with Session(device, forced).compile(legal) as compiled:
        np.testing.assert_allclose(compiled.run({"x": Q})[0], expected(), rtol=1e-4, atol=1e-5)


def test_an_op_that_the_cpu_has_no_fused_kernel_for_is_rewritten() -> None:
    """QuickGelu has no f64 kernel on the CPU, so silu becomes a Sigmoid and a product."""
    g = Graph("one")
    g.outputs = [g.silu(g.input("x", [4], "f64"))]
    legal, _ = legalize_graph_for_device(g, "cpu")
    x = np.array([-2.0, -0.5, 0.0, 3.0])
    assert [getattr(node.op, "op_type", node.op.kind) for node in legal.nodes] == ["Input", "Sigmoid", "Mul"]
    np.testing.assert_allclose(Session("cpu").compile(legal).run({"x": x})[0], x / (1 + np.exp(-x)), rtol=1e-12)


def test_a_graph_without_such_ops_comes_back_itself(device: Device) -> None:
    """Nothing is copied where nothing is rewritten."""
    g = Graph("plain")
    g.outputs = [g.relu(g.input("x", [2, 3]))]
    assert legalize_graph_for_device(g, device)[0] is g
