"""The static answer of `support_of` against where ONNX Runtime really puts the nodes."""

import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, DType, EngineError, Graph, LegalizeError, OptimizationLevel
from rlx_ort.converters.to_onnx.exporter import exported
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.providers.base import SessionRequest
from rlx_ort.providers.registry import provider_of
from rlx_ort.selection.support import support_of

# Operators of one input and one output of the same type: kernels, functions of ONNX, and ops of the CPU only.
OPERATORS = ["Erf", "Relu", "Sin", "Acosh", "Sign", "Mish", "Softplus", "Identity", "Ceil", "Round", "HardSwish"]
PLAIN = CompileOptions(optimization=OptimizationLevel.OFF)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.F64, DType.BF16], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("op_type", OPERATORS)
def test_the_static_answer_is_what_onnx_runtime_does(op_type: str, dtype: DType, device: Device) -> None:
    """A node is taken if and only if a session opens, every node of it is on the device, and it runs."""
    graph = Graph("one")
    kind = TensorType(dtype, Shape([4]))
    graph.outputs = graph.onnx_node(op_type, [graph.input("x", [4], dtype)], types=[kind])
    provider = provider_of(device)
    assert provider is not None
    placed = False
    try:
        session = provider.open(SessionRequest(device, exported(graph, PLAIN), {}, PLAIN))
        placed = all(node.provider == provider.ep_name for node in session.assignments)
        session.run(list(session.output_types), {"x": np.ones(4, dtype.numpy)})
        session.close()
    except (EngineError, LegalizeError):
        placed = False
    assert support_of(device, graph, PLAIN).supported == placed
