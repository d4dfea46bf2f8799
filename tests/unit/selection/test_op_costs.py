"""Every op of the IR has a price, as a node of the graph and as what it is exported to."""

from __future__ import annotations

import math
from typing import Any

import pytest
from op_cases import CASES, built

from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.device import Device
from rlx_ort.errors import RlxError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.selection.cost import ProfileCostModel, estimate_graph_cost
from rlx_ort.selection.estimate import total_ns
from rlx_ort.selection.workload import workload_of

ROUNDTRIP_NS, DISPATCH_NS = 1000.0, 10.0


def case_graph(name: str) -> Graph:
    """Return the graph of a case, in the first of three dtypes that its op takes."""
    for dtype in (DType.F32, DType.I32, DType.BOOL):
        try:
            return built(CASES[name], dtype)[0]
        except RlxError:
            continue
    raise AssertionError(f"{name} takes none of the dtypes")


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_op_costs_more_than_a_run_without_nodes(name: str, machine: Any) -> None:
    """Each node of the graph is launched; what is exported may be folded, but never costs less than the round trip."""
    model = ProfileCostModel(Device.CPU, machine.profile(roundtrip_ns=ROUNDTRIP_NS, dispatch_ns=DISPATCH_NS))
    graph = case_graph(name)
    nodes = sum(not node.op.is_leaf for node in graph.nodes)
    by_nodes = estimate_graph_cost(graph, model)
    by_export = total_ns(workload_of(export_model(graph)), model)
    assert ROUNDTRIP_NS + nodes * DISPATCH_NS <= by_nodes < math.inf
    assert ROUNDTRIP_NS <= by_export < math.inf
