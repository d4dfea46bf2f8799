"""`cached_attention`: its types, and what it refuses."""

from __future__ import annotations

import pytest

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.graph import Graph


def test_the_new_cache_has_the_type_of_the_past_one() -> None:
    """The result is like q; keys and values keep the longest length."""
    g = Graph("step")
    q = g.input("q", ["batch", 1, 64])
    k, v = (g.input(name, ["batch", 1, 32]) for name in "kv")
    past = tuple(g.input(name, ["batch", 2, 100, 16]) for name in ("keys", "values"))
    found = g.cached_attention(q, k, v, past, g.input("past_length", ["batch"], "i32"), 4)
    assert [str(value.type) for value in found] == ["f32(batch, 1, 64)", *["f32(batch, 2, 100, 16)"] * 2]


def test_a_cache_of_another_rank_is_refused() -> None:
    """The message says what a cache looks like."""
    g = Graph("step")
    q = g.input("q", ["batch", 1, 64])
    past = (g.input("keys", ["batch", 100, 64]), g.input("values", ["batch", 100, 64]))
    with pytest.raises(GraphVerifyError, match=r"past keys are \(batch, heads, longest, head size\)"):
        g.cached_attention(q, q, q, past, g.input("past_length", ["batch"], "i32"), 4)


@pytest.mark.parametrize(("head", "rotated"), [(12, False), (8, True)])
def test_a_size_of_heads_that_no_kernel_takes_is_refused(head: int, rotated: bool) -> None:
    """The graph is refused when it is built, not in its first run."""
    g = Graph("step")
    q = g.input("q", ["batch", 1, head])
    past = (g.input("keys", ["batch", 1, 100, head]), g.input("values", ["batch", 1, 100, head]))
    tables = (g.input("cos", [100, head // 2]), g.input("sin", [100, head // 2])) if rotated else None
    with pytest.raises(GraphVerifyError, match="a head has a multiple of"):
        g.cached_attention(q, q, q, past, g.input("past_length", ["batch"], "i32"), 1, rotation=tables)
