"""Nodes that ONNX Runtime adds before it assigns nodes to devices."""

import onnx.parser
import pytest

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.device import Device
from rlx_ort.errors import PlacementError
from rlx_ort.execution.added_nodes import added_nodes
from rlx_ort.execution.placement import build_placement, enforce
from rlx_ort.options.compile_options import PlacementRule
from rlx_ort.providers.base import NodeAssignment

_DEVICE, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def _rewritten(text: str) -> onnx.ModelProto:
    header = '<ir_version: 10, opset_import: ["" : 21]> g (float[n, 4, m] x) => (float[n, 4, m] y)'
    model = onnx.parser.parse_model(f"{header} {text}")
    for node in model.graph.node:
        node.name = f"{node.op_type}_token_{node.output[0]}"
    return model


def _exported(*nodes: tuple[str, str]) -> ExportedModel:
    records = tuple(ExportedNode.of(name, "", op, 21, index, (), ()) for index, (name, op) in enumerate(nodes))
    return ExportedModel(onnx.ModelProto(), (), records, {i: name for i, (name, _) in enumerate(nodes)}, {})


_SIZES = """
    <int64[3] order = {0, 2, 1}, int64[3] all, int64[3] read>
    { read = Shape (x) all = Gather (read, order) y = Reshape (x, all) }
"""
_VALUES = """
    <int64[3] order = {0, 2, 1}, int64[n, 4, m] whole, int64[3, 4, m] picked>
    { whole = Cast <to = 7> (x) picked = Gather (whole, order) y = Cast <to = 1> (picked) }
"""


@pytest.mark.parametrize(("text", "sizes"), [(_SIZES, True), (_VALUES, False)])
def test_a_node_computes_sizes_if_it_reads_shapes_and_constants_alone(text: str, sizes: bool) -> None:
    """The dataflow decides, and neither the operator nor the name."""
    nodes = added_nodes(_rewritten(text), _exported())
    gathers = [node for name, node in nodes.items() if name.startswith("Gather")]
    assert [node.sizes for node in gathers] == [sizes]


def test_a_float_made_from_sizes_is_no_size() -> None:
    """A fill of a computed shape is work of the device."""
    text = "<int64[3] read, float[n, 4, m] z> { read = Shape (x) z = ConstantOfShape (read) y = Add (x, z) }"
    assert not added_nodes(_rewritten(text), _exported())["ConstantOfShape_token_z"].sizes


def test_an_added_node_that_computes_sizes_is_pinned() -> None:
    """The strict rule accepts it on the CPU."""
    exported = _exported()
    assigned = [
        NodeAssignment(_DEVICE, "Reshape_token_y", "", "Reshape"),
        NodeAssignment(_CPU, "Gather_token_all", "", "Gather"),
    ]
    placement = build_placement(_DEVICE, assigned, exported, added=lambda: added_nodes(_rewritten(_SIZES), exported))
    enforce(placement, PlacementRule.STRICT, Device.CUDA)
    assert [node.pinned for node in placement.nodes_by_ep[_CPU]] == [True]


def test_an_added_node_that_reads_values_is_refused_by_the_name_of_the_users_node_it_follows() -> None:
    """The message leads to a node that the user can find."""
    model = _rewritten(_VALUES)
    model.graph.node[0].name = "tokens"
    exported = _exported(("tokens", "Cast"))
    assigned = [
        NodeAssignment(_DEVICE, "tokens", "", "Cast"),
        NodeAssignment(_CPU, "Gather_token_picked", "", "Gather"),
    ]
    placement = build_placement(_DEVICE, assigned, exported, added=lambda: added_nodes(model, exported))
    with pytest.raises(PlacementError, match="added behind 'tokens'"):
        enforce(placement, PlacementRule.STRICT, Device.CUDA)


def test_the_rewritten_model_is_not_read_back_without_a_stray_node_that_was_added() -> None:
    """Reading it back opens another session."""
    assigned = [NodeAssignment(_DEVICE, "Transpose_token_1", "", "Transpose")]
    build_placement(_DEVICE, assigned, _exported(), added=lambda: pytest.fail("was read back"))


def test_integers_that_are_moved_constants_are_no_stray_work() -> None:
    """The layout rewrite permutes the amounts of a Pad by a Gather that nothing folds afterwards."""
    text = "<int64[2] amounts = {0, 1}, int64[2] places = {1, 0}> { to = Gather (amounts, places) y = Reshape (x, to) }"
    assert added_nodes(_rewritten(text), _exported())["Gather_token_to"].sizes
