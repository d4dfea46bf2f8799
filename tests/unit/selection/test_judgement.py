"""A graph is judged before there is a model of it, and the judgement is that of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, DType, Graph, InputError, PlacementRule
from rlx_ort.converters.to_onnx.exported import Outline
from rlx_ort.converters.to_onnx.exporter import draft
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.selection.predict import predicted_ns
from rlx_ort.selection.support import draft_for, support_of
from rlx_ort.selection.windows import fitting_sizes

LAYERS = 4


def dense() -> Graph:
    """Equal layers of products, biases, activations and normalisations."""
    graph = Graph("dense")
    value = graph.input("x", ["batch", 8])
    for layer in range(LAYERS):
        hidden = value @ graph.param(f"w{layer}", [8, 32]) + graph.param(f"b{layer}", [32])
        hidden = graph.gelu(hidden) @ graph.param(f"v{layer}", [32, 8])
        value = graph.softmax(hidden * 0.5 + value, -1)
    graph.outputs = [value, graph.tanh(value)]
    return graph


def convolutions() -> Graph:
    """Convolutions with a residual, whose activations are fused."""
    graph = Graph("convolutions")
    value = graph.input("x", [1, 4, 9, 9])
    for layer in range(LAYERS):
        kernel = graph.param(f"k{layer}", [4, 4, 3, 3])
        value = graph.relu(graph.conv2d(value, kernel, padding=1) + value)
    graph.outputs = [value]
    return graph


def shapes() -> Graph:
    """A row laid out to a size that only a run knows, which is computed from the shape of another value."""
    graph = Graph("shapes")
    value = graph.input("x", ["batch", "tokens", 6])
    for layer in range(LAYERS):
        row = graph.param(f"row{layer}", [1, 1, 6])
        value = graph.sigmoid(value) * graph.expand(row, ["batch", "tokens", 6])
    graph.outputs = [value]
    return graph


def untyped() -> Graph:
    """Ops of several nodes, between which only ONNX knows the types."""
    graph = Graph("untyped")
    value = graph.input("x", ["batch", 4])
    for _ in range(LAYERS):
        value = graph.silu(value) + graph.activation("mish", value)
    graph.outputs = [value]
    return graph


def folded() -> Graph:
    """Nodes of constants alone, which are computed when a session is opened."""
    graph = Graph("folded")
    x = graph.input("x", [4, 4])
    for layer in range(LAYERS):
        weight = graph.transpose(graph.constant(np.full((4, 4), layer, np.float32)), [1, 0])
        x = x @ graph.exp(weight)
    graph.outputs = [x]
    return graph


def branching() -> Graph:
    """A body, whose nodes are judged as well."""
    graph = Graph("branching")
    x, flag = graph.input("x", [4]), graph.input("flag", [1], "bool")
    for _ in range(2):
        x = graph.if_(flag, lambda body, y: body.relu(y), lambda body, y: body.tanh(y), [x])
    graph.outputs = [x]
    return graph


GRAPHS = [dense, convolutions, shapes, untyped, folded, branching]


def description(outline: Outline) -> tuple[Any, ...]:
    """Return all that an outline says."""
    nodes = [
        (node[3:], node.domain, node.op_type, node.version, node.origin, node.inputs, node.outputs, node.shape_only)
        for node in outline.nodes
    ]
    return nodes, outline.input_types, outline.output_types


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_the_outline_says_what_the_model_says(build: Callable[[], Graph]) -> None:
    """Nodes with types, names and origin, and the interface are the same before the model is made and after."""
    before = draft(build())
    outline = before.outline
    assert description(outline) == description(Outline.of_model(before.finished()))


@pytest.mark.parametrize("rule", list(PlacementRule))
@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_support_and_prediction_are_those_of_the_model(
    build: Callable[[], Graph], rule: PlacementRule, machine: Any
) -> None:
    """A device that lacks a kernel gives the same blocker, CPU nodes and time whether the model was made before."""
    names = sorted({node.op_type for node in draft(build()).outline.nodes})
    everything = frozenset(DType)
    lacking = draft(build()).outline.nodes[-1].op_type  # the last node depends on an input, so it is not folded away
    others = [name for name in names if name != lacking]
    machine.add("cpu", kernels=machine.kernels(*names, dtypes=everything), profile=machine.profile(gemm_gflops=2.0))
    provider = machine.add("gpu", kernels=machine.kernels(*others, dtypes=everything), profile=machine.profile())
    options = CompileOptions(placement=rule)
    early, late = build(), build()
    made = draft_for(provider, late, options)
    assert made is not None
    made.finished()
    for device in (Device("cpu"), Device("gpu")):
        assert support_of(device, early, options) == support_of(device, late, options)
        assert predicted_ns(early, device, options) == predicted_ns(late, device, options)
    assert support_of(Device("cpu"), early, options).supported
    assert support_of(Device("gpu"), early, options).cpu_nodes or rule is PlacementRule.STRICT


def test_made_up_lengths_are_enlarged_until_every_window_fits() -> None:
    """A convolution of 40 over one of 10 that moves by 5 needs 205 elements; what was given stays."""
    g = Graph("windows")
    y = g.input("x", ["batch", 1, "samples"])
    for width, stride in ((10, 5), (40, 1)):
        y = g.onnx_node(
            "Conv",
            [y, g.constant(np.ones((1, 1, width), np.float32))],
            {"strides": (stride,)},
            types=[TensorType(DType.F32, Shape([None, 1, None]))],
        )[0]
    g.outputs = [y]
    assert fitting_sizes(g, {})[:2] == (2, 256)
    with pytest.raises(InputError, match="samples=100; give larger sizes with --dim"):
        fitting_sizes(g, {"samples": 100})
