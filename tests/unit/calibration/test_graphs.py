"""The graphs that are measured: what is in a chain, and what is put before it."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.calibration import graphs
from rlx_ort.calibration.operator_graphs import elementwise
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.onnx import OnnxNode


def operators(graph: Graph) -> list[str]:
    """Return the operators that are computed, in order."""
    return [node.op.op_type for node in graph.nodes if isinstance(node.op, OnnxNode)]


def reading(graph: Graph, op_type: str) -> list[str]:
    """Return what computes the first input of each node of an operator."""
    nodes = [node for node in graph.nodes if isinstance(node.op, OnnxNode) and node.op.op_type == op_type]
    makers = [graph.nodes[node.inputs[0].node].op for node in nodes if node.inputs[0] is not None]
    return [op.op_type if isinstance(op, OnnxNode) else op.kind for op in makers]


@pytest.mark.parametrize(
    "chain",
    [
        graphs.frame(2),
        elementwise("Add", 3, 256),
        elementwise("Relu", 3, 256),
        graphs.fused_gemm(64, 2, ("bias", "act")),
        graphs.conv(16, 3, 2, extra=("add", "act")),
        graphs.bmm(4, turned=True),
    ],
    ids=lambda chain: str(chain.name),
)
def test_a_tensor_is_handed_out_once_before_its_chain(chain: Graph) -> None:
    """There is one node more, right after the tensor, and names stay apart."""
    handed_out = graphs.spread(chain)
    assert operators(handed_out) == [operators(chain)[0], "Relu", *operators(chain)[1:]]
    names = [name for node in handed_out.nodes for name in node.output_names]
    assert len(set(names)) == len(names)


def test_the_chain_reads_what_all_cores_have_written() -> None:
    """The first product reads the new node, and so does a link that adds the first tensor each time."""
    assert reading(graphs.spread(graphs.gemm(64, 64, 2)), "MatMul") == ["Relu", "MatMul"]
    assert reading(graphs.spread(elementwise("ReduceMean", 1, 256)), "ReduceMean") == ["Relu"]
    assert reading(graphs.spread(graphs.frame(3)), "Slice") == ["Relu"]


def test_a_chain_keeps_its_weights_and_its_output() -> None:
    """The arrays are the same ones, not copies."""
    chain = graphs.fused_gemm(64, 2, ("bias",))
    handed_out = graphs.spread(chain)
    assert list(handed_out.weights) == list(chain.weights) == ["w0", "w1", "w2", "w3"]
    assert [value.type for value in handed_out.outputs] == [value.type for value in chain.outputs]
    assert np.shares_memory(handed_out.weights["w0"].numpy(), chain.weights["w0"].numpy())
