"""Ops a user brings check what they are given."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.control import Custom
from rlx_ort.ir.serde import from_json, to_json
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.ir.verify import verify

KIND = TensorType(DType.F32, Shape(["n", 3]))


def test_a_custom_op_has_the_declared_results() -> None:
    """Its results are what the caller says, one value each."""
    g = Graph()
    x = g.input("x", ["n", 3])
    results = g.custom_op("Twin", [x], [KIND, TensorType(DType.I64, Shape(["n"]))], domain="my.ops")
    assert [value.type for value in results] == [KIND, TensorType(DType.I64, Shape(["n"]))]


@pytest.mark.parametrize(("name", "domain", "types"), [("", "my", [KIND]), ("X", "", [KIND]), ("X", "my", [])])
def test_a_custom_op_needs_name_domain_and_types(name: str, domain: str, types: list[TensorType]) -> None:
    """Nothing of it can be guessed."""
    g = Graph()
    with pytest.raises(GraphVerifyError, match="Custom"):
        g.custom_op(name, [g.input("x", [3])], types, domain=domain)


def test_a_function_must_take_the_inputs() -> None:
    """The message says how many inputs were given and wanted."""
    body = Graph("one")
    body.outputs = [body.exp(body.input("x", [3]))]
    g = Graph()
    x = g.input("x", [3])
    with pytest.raises(GraphVerifyError, match="gives its function 2 inputs, 'one' has 1"):
        g.custom_fn([x, x], body)
    with pytest.raises(GraphVerifyError, match=r"input 'x' of its function to be f32\(4,\)"):
        g.custom_fn([g.input("y", [4])], body)


def test_a_function_with_several_results_needs_the_other_builder() -> None:
    """`custom_fn` returns one value."""
    g = Graph()
    with pytest.raises(GraphVerifyError, match="use custom_fn_multi"):
        g.custom_fn([g.input("x", [3])], lambda b, v: (v, v))


def test_custom_ops_and_functions_survive_json() -> None:
    """Attributes of every kind and bodies come back as they were."""
    g = Graph()
    x = g.input("x", ["n", 3])
    attributes = {"a": 1, "b": 2.5, "c": "text", "d": (1, 2), "e": TensorData.from_array(np.arange(3))}
    (made,) = g.custom_op("Mine", [x], [KIND], domain="my.ops", attributes=attributes, version=3)
    g.outputs = [g.custom_fn([made], lambda b, v: b.exp(v))]
    text, tensors = to_json(g)
    again = from_json(text, tensors)
    assert verify(again) == []
    op = again.nodes[1].op
    assert isinstance(op, Custom)
    assert (dict(op.attributes), op.types, op.version) == (attributes, (KIND,), 3)
