"""Whatever is refused says which node, on which device, why, and what to do."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort import Device, Graph, GraphDevices, GraphVerifyError, LegalizeError, RlxError
from rlx_ort.ir.ops.onnx import REFUSED_KINDS, refused_op
from rlx_ort.selection.support import first_unsupported_op, legalize_graph_for_device


def graph_with(kind: str) -> Graph:
    g = Graph("g")
    x = g.input("x", [2])
    g.outputs = list(g.add_node(refused_op(kind), [g.relu(x)], types=[x.type], name="my_node"))
    return g


@pytest.mark.parametrize("kind", sorted(REFUSED_KINDS))
def test_a_kind_that_runs_nowhere_is_refused_by_name(kind: str, device: Device) -> None:
    """The node, the device, the reason and the remedy are in the message; the report has the node."""
    reason, remedy = REFUSED_KINDS[kind]
    with pytest.raises(LegalizeError) as caught:
        legalize_graph_for_device(graph_with(kind), device)
    for part in ("'my_node'", kind, device.display, reason, remedy):
        assert part in str(caught.value)
    (node,) = caught.value.report.still_unsupported
    assert (node.index, node.name, node.kind) == (2, "my_node", kind)
    assert first_unsupported_op(device, graph_with(kind)) == node


def test_running_it_is_refused_with_the_same_node(device: Device) -> None:
    """Running without asking first gives the same reason."""
    with pytest.raises(RlxError, match="my_node") as caught:
        GraphDevices(graph_with("Svd")).run(device, {"x": np.zeros(2, np.float32)})
    assert isinstance(caught.value, (GraphVerifyError, LegalizeError))
    assert REFUSED_KINDS["Svd"][1] in str(caught.value)


@pytest.mark.webgpu
def test_an_op_that_one_device_lacks_is_refused_there_with_a_way_out() -> None:
    """The user's own name of the node, the kernel that is missing, and both ways out; elsewhere it runs."""
    g = Graph("rounding")
    x = g.input("x", [3])
    g.outputs = [g.activation("round", x + 1.0, name="my_rounding")]
    with pytest.raises(LegalizeError) as caught:
        legalize_graph_for_device(g, "webgpu")
    for part in ("'my_rounding'", "WebGPU", "ai.onnx::Round", "Choose another device", "PlacementRule.ASSISTED"):
        assert part in str(caught.value)
    assert legalize_graph_for_device(g, "cpu")[0] is g
    with pytest.raises(RlxError, match="my_rounding"):
        GraphDevices(g).run("webgpu", {"x": np.zeros(3, np.float32)})
