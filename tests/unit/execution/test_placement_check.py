"""Placements have the user's node names, the two rules judge them, and added nodes are no strays."""

from __future__ import annotations

from typing import Any

import onnx.parser
import pytest

from rlx_ort import Device, DType, PlacementError, PlacementRule
from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.execution.added_nodes import added_nodes
from rlx_ort.execution.placement import build_placement, enforce
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.providers.base import NodeAssignment

GPU, CPU = "WebGpuExecutionProvider", "CPUExecutionProvider"
KIND = TensorType(DType.F32, Shape([8]))


def _node(name: str, reads: str, writes: str, **more: Any) -> ExportedNode:
    origin = int("".join(filter(str.isdigit, name)) or 0)
    return ExportedNode.of(name, "", "Relu", 21, origin, (KIND,), (KIND,), (reads,), (writes,), **more)


def _model(*nodes: ExportedNode) -> ExportedModel:
    names = {node.origin: f"user_{node.origin}" for node in nodes}
    return ExportedModel(model=None, params=(), nodes=nodes, origin_names=names, input_types={})  # type: ignore[arg-type]


def _chain(count: int) -> ExportedModel:
    return _model(*(_node(f"n{i}", f"v{i}", f"v{i + 1}") for i in range(count)))


def _at(*pairs: tuple[str, str]) -> list[NodeAssignment]:
    return [NodeAssignment(ep, name, "", "Relu") for name, ep in pairs]


def test_strict_names_the_strays_and_the_remedy() -> None:
    """The error has the user's node, its op, where it is, and how to allow it; the placement is attached."""
    placement = build_placement(GPU, _at(("n0", GPU), ("n1", CPU)), _chain(2))
    with pytest.raises(PlacementError) as caught:
        enforce(placement, PlacementRule.STRICT, Device.WEBGPU)
    for part in ("WebGPU", "'user_1' (Relu) is on CPUExecutionProvider", "PlacementRule.ASSISTED", "50%"):
        assert part in str(caught.value)
    assert "user_0" not in str(caught.value)
    assert caught.value.placement is placement


def test_strict_counts_the_strays_after_ten() -> None:
    """A long list is cut after ten names."""
    placement = build_placement(GPU, _at(("n0", GPU), *((f"n{i}", CPU) for i in range(1, 15))), _chain(15))
    with pytest.raises(PlacementError, match="and 4 more") as caught:
        enforce(placement, PlacementRule.STRICT, Device.WEBGPU)
    assert str(caught.value).count("is on CPUExecutionProvider") == 10


@pytest.mark.parametrize("rule", list(PlacementRule))
def test_help_with_everything_is_a_fallback(rule: PlacementRule) -> None:
    """When nothing at all is on the device, even the assisted rule refuses."""
    placement = build_placement(GPU, _at(("n0", CPU), ("n1", CPU)), _chain(2))
    with pytest.raises(PlacementError, match="nothing of the graph runs on WebGPU"):
        enforce(placement, rule, Device.WEBGPU)


def test_shape_computation_on_the_cpu_is_no_stray() -> None:
    """Nodes that only compute shapes are pinned; on the device they are ordinary."""
    model = _model(_node("n0", "v0", "v1"), _node("n1", "v1", "v2", shape_only=True))
    placement = build_placement(GPU, _at(("n0", GPU), ("n1", CPU)), model)
    enforce(placement, PlacementRule.STRICT, Device.WEBGPU)
    assert placement.nodes_by_ep[CPU][0].pinned
    assert placement.requested_share == 1.0


def test_copies_are_counted_once_per_value() -> None:
    """A value that two nodes of the other side read is copied once; there and back are two copies."""
    model = _model(_node("n0", "v0", "v1"), _node("n1", "v1", "v2"), _node("n2", "v1", "v3"), _node("n3", "v3", "v4"))
    placement = build_placement(GPU, _at(("n0", GPU), ("n1", CPU), ("n2", CPU), ("n3", GPU)), model)
    assert placement.boundary_copies == 2
    assert placement.crossings == (("v1", CPU), ("v3", GPU))
    assert placement.sites == {"n0": GPU, "n1": CPU, "n2": CPU, "n3": GPU}


def test_a_node_that_was_fused_away_stands_where_its_producer_is() -> None:
    """No copy is counted through a node that the engine merged into its neighbour."""
    placement = build_placement(GPU, _at(("n0/Fusion", GPU), ("n2", GPU)), _chain(3))
    assert placement.boundary_copies == 0


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


def test_sizes_that_a_rewrite_leaves_untyped_are_integers() -> None:
    """A `Shape` that the layout rewrite moves has an output that no value_info names."""
    text = "<int64[2] places = {1, 0}> { read = Shape (x) to = Gather (read, places) y = Reshape (x, to) }"
    assert added_nodes(_rewritten(text), _exported())["Gather_token_to"].sizes


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
