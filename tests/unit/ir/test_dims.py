"""Named dims: what inputs say about them."""

from __future__ import annotations

import pytest

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.graph import DimBinding, Graph, dynamic_symbols, has_dynamic_dims, infer_bindings_from_inputs


def _graph() -> Graph:
    graph = Graph("dims")
    x = graph.input("x", ["batch", 4])
    graph.input("y", ["batch", 2])
    graph.input("fixed", [3])
    graph.input("open", ["rows", "seq"])
    graph.outputs = [x + 1.0]
    return graph


def test_lengths_tell_named_dims() -> None:
    """12 elements of `(batch, 4)` are a batch of 3."""
    assert infer_bindings_from_inputs(_graph(), {"x": 12, "fixed": 3}) == {"batch": 3}


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({"x": 10}, "no multiple of 4"),
        ({"x": 12, "y": 8}, "'y' makes 'batch' 4, but input 'x' makes it 3"),
        ({"open": 6}, "2 dims"),
        ({"fixed": 4}, "of 3 elements, got 4"),
        ({"z": 4}, "no tensor input 'z'"),
    ],
)
def test_lengths_that_do_not_come_out_even_are_refused(lengths: dict[str, int], said: str) -> None:
    """What one dim cannot explain raises and names the input."""
    with pytest.raises(GraphVerifyError, match=said):
        infer_bindings_from_inputs(_graph(), lengths)


def test_batch_and_sequence_bind_rows_for_several_sequences_only() -> None:
    """`rows` is all tokens together, and is left open for one sequence."""
    assert DimBinding.batch_seq(2, 5) == {"batch": 2, "seq": 5, "rows": 10}
    assert DimBinding.batch_seq(1, 5) == {"batch": 1, "seq": 5}
    assert DimBinding.batch_past_seq(2, 7) == {"batch": 2, "past_seq": 7}


def test_equal_bindings_have_one_hash_whatever_their_order() -> None:
    """So a binding may be a key of a cache."""
    first, second = DimBinding({"a": 1, "b": 2}), DimBinding({"b": 2}, a=1)
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(ValueError, match="size -1"):
        DimBinding(a=-1)


def test_symbols_are_listed_and_go_when_bound() -> None:
    """`Graph.bind` takes a binding."""
    graph = _graph()
    assert dynamic_symbols(graph) == ["batch", "rows", "seq"]
    assert has_dynamic_dims(graph)
    assert not has_dynamic_dims(graph.bind(DimBinding(batch=2, rows=3, seq=4)))
