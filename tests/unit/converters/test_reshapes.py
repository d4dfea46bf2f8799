"""How an imported Reshape is written."""

import pytest
from onnx import parser

from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.to_onnx.exporter import export_model


@pytest.mark.parametrize(("shape", "kept"), [("-1, 2", False), ("3, 2", False), ("0, 2", True)])
def test_zeros_are_allowed_where_there_are_some(shape: str, kept: bool) -> None:
    """Elsewhere `allowzero` says nothing, and is left out: DirectML takes -1 for a size beside it."""
    text = f"""(float[n,m] x) => (float[a,b] y) <int64[2] s = {{{shape}}}> {{ y = Reshape <allowzero = 1> (x, s) }}"""
    graph = from_onnx(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {text}'))
    (node,) = export_model(graph).model.graph.node
    assert bool(node.attribute) == kept


def test_a_shape_that_is_computed_may_have_zeros() -> None:
    """So the node stays as it is."""
    text = "(float[n,m] x, int64[2] s) => (float[a,b] y) { y = Reshape <allowzero = 1> (x, s) }"
    graph = from_onnx(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {text}'))
    (node,) = export_model(graph).model.graph.node
    assert node.attribute[0].i == 1
