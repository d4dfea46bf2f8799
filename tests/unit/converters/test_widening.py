"""Steps between opsets that only add to an operator, and what needs no schema at all."""

import pytest

from rlx_ort.converters.onnx_types import schema_of
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.converters.to_onnx.opset import NodeForm, obsolete_attributes, obstacle
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import Shape, TensorType

X = TensorType(DType.F32, Shape([2, 3]))


@pytest.mark.parametrize(
    ("op_type", "written", "target", "attributes", "expected"),
    [
        ("Relu", 14, 21, {}, ""),
        ("Cast", 13, 21, {"to": 1}, ""),  # 19 added saturate, which only float8 looks at
        ("Relu", 14, 21, {"__note": 1}, ""),  # of whoever wrote the model
        ("Add", 6, 7, {"broadcast": 1, "axis": 0}, "no attribute"),  # before 7 a node broadcast by an attribute
        ("Softmax", 11, 13, {}, "flattened"),
        ("Squeeze", 11, 13, {"axes": (0,)}, "no attribute axes"),  # the axes became an input
        ("Swish", 21, 24, {}, "no Swish in opset 21"),
        ("NoSuchOp", 13, 21, {}, "no NoSuchOp in opset 13"),
        ("GroupNormalization", 18, 20, {"num_groups": 1}, ""),  # as little in force there as here
    ],
)
def test_a_node_moves_where_the_step_only_adds(
    op_type: str, written: int, target: int, attributes: dict[str, object], expected: str
) -> None:
    """All else is an obstacle, with the reason."""
    inputs = [X, TensorType(DType.F32, Shape([2]))] if op_type == "Add" else [X]
    found = obstacle(NodeForm(op_type, attributes, inputs, [X]), written, target)
    assert bool(found) == bool(expected)
    assert expected in found


def test_notes_at_a_node_stay() -> None:
    """Attributes that an opset lacks go, and those that no opset has are not the operator's."""
    assert obsolete_attributes("Relu", ["__note", "consumed_inputs"], 1, 21) == ["consumed_inputs"]


def test_a_graph_is_exported_without_schemas() -> None:
    """Their registry takes 7 MB of the process."""
    graph = Graph()
    graph.outputs = [graph.gelu(graph.input("x", [2, 3]) @ graph.param("w", [3, 4]))]
    schema_of.cache_clear()
    export_model(graph)
    assert schema_of.cache_info().misses == 0
