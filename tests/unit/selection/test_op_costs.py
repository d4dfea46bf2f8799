"""Every op of the IR has a price: that of the nodes it is exported to."""

from __future__ import annotations

import math
from typing import Any

import pytest
from op_tests.cases import CASES, built

from rlx_ort.calibration.features import workload_of
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.device import Device
from rlx_ort.errors import RlxError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.selection.cost import ProfileCostModel, estimate_graph_cost, total_ns

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
def test_an_op_costs_the_launches_of_what_it_is_exported_to(name: str, machine: Any) -> None:
    """What is folded and what only names memory anew is free; the price is finite, and that of the exported model."""
    machine.add("cpu", kernels=None)
    model = ProfileCostModel(Device.CPU, machine.profile(roundtrip_ns=ROUNDTRIP_NS, dispatch_ns=DISPATCH_NS))
    graph = case_graph(name)
    predicted = estimate_graph_cost(graph, model)
    workload = workload_of(export_model(graph))
    launched = sum(count for kernel, count in workload.counts.items() if kernel.name != "View")
    assert ROUNDTRIP_NS + launched * DISPATCH_NS <= predicted < math.inf
    assert predicted == pytest.approx(total_ns(workload, model))
