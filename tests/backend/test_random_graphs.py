"""Generated graphs are sound, and keep their meaning in JSON; `tests/generated` runs them, and brings them to ONNX."""

from __future__ import annotations

import pytest
from generated.graphs import made_of, quiet

from rlx_ort import Graph, verify
from rlx_ort.ir.core import format_graph
from rlx_ort.ir.serde import from_json, to_json


@pytest.fixture(params=range(0, 60, 2), ids=lambda seed: f"seed {seed}")
def graph(request: pytest.FixtureRequest) -> Graph:
    """A graph of a seed."""
    with quiet():
        return made_of(request.param).graph


def test_builders_make_sound_graphs(graph: Graph) -> None:
    """Verify has nothing to say about what builders made."""
    assert verify(graph) == []


def test_json_round_trip_is_identical(graph: Graph) -> None:
    """The text, the outputs and the weights come back equal."""
    text, tensors = to_json(graph)
    back = from_json(text, tensors)
    assert to_json(back) == (text, tensors)
    assert format_graph(back) == format_graph(graph)
    assert back.weights == graph.weights
