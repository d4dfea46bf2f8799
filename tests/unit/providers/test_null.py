"""The provider without an engine."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.device import Device
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.base import SessionRequest
from rlx_ort.providers.null import NullProvider
from rlx_ort.providers.registry import ProviderRegistry

NODES = tuple(ExportedNode.of(name, "", op, 21, 0, (), (), (), ()) for name, op in (("a", "Add"), ("b", "Shape")))


@pytest.fixture
def request_null() -> SessionRequest:
    """Return a request for a model with one named dim."""
    ProviderRegistry((NullProvider(),))
    model = ExportedModel(
        model=None,  # the null provider never looks at it
        params=(),
        nodes=NODES,
        origin_names={},
        input_types={"x": TensorType(DType.F32, Shape(("n", 3)))},
        output_types={"y": TensorType(DType.BF16, Shape((2, "n"))), "s": TensorType(DType.STRING, Shape((1,)))},
    )
    return SessionRequest(Device("null"), model, {}, CompileOptions())


def test_outputs_are_zeros_of_the_declared_type_with_dims_from_the_feeds(request_null):
    """A named dim takes the size the input has."""
    session = NullProvider().open(request_null)
    y, s = session.run(["y", "s"], {"x": np.ones((5, 3), np.float32)})
    assert (y.dtype, y.shape, y.astype(np.float32).sum()) == (DType.BF16.numpy, (2, 5), 0)
    assert s.tolist() == [""]


def test_nodes_it_does_not_take_are_on_the_cpu(request_null):
    """`takes` plays a provider without some kernels."""
    session = NullProvider(takes=lambda node: node.op_type == "Add").open(request_null)
    assert [node.provider for node in session.assignments] == ["NullExecutionProvider", "CPUExecutionProvider"]
