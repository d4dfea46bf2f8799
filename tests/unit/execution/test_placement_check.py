"""Placements have the user's node names, and the two rules judge them."""

from __future__ import annotations

from typing import Any

import pytest

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.device import Device
from rlx_ort.errors import PlacementError
from rlx_ort.execution.placement import build_placement, enforce
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.options.compile_options import PlacementRule
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
