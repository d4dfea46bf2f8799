"""Random graphs keep their meaning: in JSON, in ONNX and back, and when they run."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from interpreter import evaluate
from sample_models.random_graphs import RandomGraph, random_graphs

from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.execution.session import Session
from rlx_ort.ir.ops.leaf import Input, Param
from rlx_ort.ir.serde import from_json, to_json
from rlx_ort.ir.verify import verify

# Rounding of f32 adds up over as many as 50 ops, each of which may multiply it by the size of its other operand.
BOUND = 2e-3


def run(graph: Any, feeds: dict[str, Any]) -> list[Any]:
    return Session("cpu").compile(graph).run(feeds)


@given(random_graphs())
def test_builders_make_sound_graphs_of_many_ops(made: RandomGraph) -> None:
    """Verify has nothing to say about what builders made, and the graphs are as long as promised."""
    assert verify(made.graph) == []
    ops = [node for node in made.graph.nodes if not isinstance(node.op, (Input, Param))]
    assert len(ops) >= 5


@given(random_graphs())
def test_json_round_trip_is_identical(made: RandomGraph) -> None:
    """The text, the nodes, the outputs and the weights come back equal."""
    text, tensors = to_json(made.graph)
    back = from_json(text, tensors)
    assert (back.nodes, back._outputs, back.weights) == (made.graph.nodes, made.graph._outputs, made.graph.weights)
    assert to_json(back) == (text, tensors)


@settings(max_examples=25)
@given(random_graphs())
def test_cpu_agrees_with_the_interpreter(made: RandomGraph) -> None:
    """Every output is that of the definition in float64, but for rounding."""
    for result, expected in zip(run(made.graph, made.feeds), evaluate(made.graph, made.feeds), strict=True):
        assert result.shape == expected.shape
        size = max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(result, expected, rtol=BOUND, atol=BOUND * size)


@settings(max_examples=25)
@given(random_graphs())
def test_onnx_round_trip_gives_the_same_outputs(made: RandomGraph) -> None:
    """Exported, imported and exported again, the graph computes the very same numbers."""
    back = from_onnx(to_onnx(made.graph))
    assert verify(back) == []
    assert back.output_names == made.graph.output_names
    for before, after in zip(run(made.graph, made.feeds), run(back, made.feeds), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)
