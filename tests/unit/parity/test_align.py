"""Values of two models find their counterparts under other names, with casts between, and around a changed operator."""

from __future__ import annotations

import onnx
from onnx import parser

from rlx_ort.parity.bisect import nearest, pair_values

PLAIN = """
<ir_version: 8, opset_import: ["": 18]>
chain (float[2] x) => (float[2] y) <float[2] w = {1, 2}> {
  a = Mul (x, w)
  b = Relu (a)
  c = Add (b, x)
  y = Sigmoid (c)
}
"""


def _graph(body: str, opening: str = "chain (float[2] x) => (float[2] y) <float[2] w = {1, 2}>") -> onnx.GraphProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]>\n{opening} {{\n{body}\n}}').graph


def test_equal_names_are_counterparts() -> None:
    """A model pairs with itself by name, in order."""
    graph = parser.parse_model(PLAIN).graph
    assert list(pair_values(graph, graph).items()) == [(name, name) for name in "abcy"]


def test_renamed_values_are_paired_by_structure() -> None:
    """With every name changed, each value finds the one that is made in the same way."""
    other = _graph("q1 = Mul (x, w)\n q2 = Relu (q1)\n q3 = Add (q2, x)\n y = Sigmoid (q3)")
    assert pair_values(parser.parse_model(PLAIN).graph, other) == {"a": "q1", "b": "q2", "c": "q3", "y": "y"}


def test_casts_do_not_hide_structure() -> None:
    """A model with inserted casts is paired with the one without, at the values between the casts."""
    other = _graph("q0 = Cast <to = 10> (x)\n q1 = Mul (q0, w)\n q2 = Relu (q1)\n q3 = Add (q2, q0)\n"
                   "q4 = Sigmoid (q3)\n y = Cast <to = 1> (q4)")  # fmt: skip
    found = pair_values(parser.parse_model(PLAIN).graph, other)
    assert {name: found[name] for name in "abc"} == {"a": "q1", "b": "q2", "c": "q3"}


def test_a_changed_operator_does_not_lose_the_rest() -> None:
    """Behind an operator that another one replaced, values are paired by the order of operators."""
    other = _graph("q1 = Mul (x, w)\n q2 = Elu (q1)\n q3 = Add (q2, x)\n q4 = Sigmoid (q3)", "chain (float[2] x) => "
                   "(float[2] q4) <float[2] w = {1, 2}>")  # fmt: skip
    assert pair_values(parser.parse_model(PLAIN).graph, other) == {"a": "q1", "c": "q3", "y": "q4"}


def test_names_that_mean_something_else_are_not_believed() -> None:
    """Two exports number their values; one has an operator more, so equal numbers name different values."""
    a = _graph("v1 = Mul (x, w)\n v2 = Relu (v1)\n v3 = Add (v2, x)\n v4 = Sigmoid (v3)", "chain (float[2] x) => "
               "(float[2] v4) <float[2] w = {1, 2}>")  # fmt: skip
    b = _graph("v1 = Neg (x)\n v2 = Mul (x, w)\n v3 = Relu (v2)\n v4 = Add (v3, x)\n v5 = Sigmoid (v4)\n"
               "v6 = Add (v5, v1)", "chain (float[2] x) => (float[2] v6) <float[2] w = {1, 2}>")  # fmt: skip
    assert pair_values(a, b) == {"v1": "v2", "v2": "v3", "v3": "v4", "v4": "v5"}


def test_what_a_value_comes_from_skips_values_without_counterpart() -> None:
    """Sources are the nearest paired values; nodes passed over on the way are named; captures of bodies count."""
    graph = parser.parse_model(PLAIN).graph
    found = nearest(graph, {"a": "a", "y": "y"})
    assert found["a"] == ((), ())
    assert found["y"][0] == ("a",)
    assert set(found["y"][1]) == {"b", "c"}
    branch = _graph(
        """k = Less (x, w)
        s = ReduceMin <keepdims = 0> (f)
        a = Mul (x, w)
        y = If (s) <then_branch = t () => (float[2] u) { u = Identity (a) },
                    else_branch = e () => (float[2] v) { v = Neg (x) }>""",
        "chain (float[2] x, bool[1] f) => (float[2] y) <float[2] w = {1, 2}>",
    )
    assert "a" in nearest(branch, {"a": "a", "y": "y"})["y"][0]
