"""How an imported CastLike is written."""

from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import Shape, TensorType


def test_a_cast_like_a_known_type_is_a_cast() -> None:
    """It no longer reads the value whose type it takes, so that ONNX Runtime can fold it."""
    graph = Graph("like")
    x, like = graph.input("x", [2]), graph.input("like", [3], "i64")
    graph.outputs = graph.onnx_node("CastLike", [x, like], types=[TensorType(DType.I64, Shape((2,)))])
    (node,) = export_model(graph).model.graph.node
    assert (node.op_type, list(node.input)) == ("Cast", ["x"])
    assert {attribute.name: attribute.i for attribute in node.attribute} == {"to": 7}
