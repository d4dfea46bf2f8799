"""Padded runs give what plain ones give, and ranges share their weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx_text import parsed

from rlx_ort import BucketedCompileCache, Device, Graph, InputError, ParamError, Session, from_onnx, power_of_two_ladder

SOURCE = np.random.default_rng(3)
W = SOURCE.normal(size=(4, 3)).astype(np.float32)


def _fixed(rows: int) -> Graph:
    graph = Graph("fixed")
    graph.outputs = [graph.gelu(graph.input("x", [rows, 4]) @ graph.param("w", [4, 3]))]
    return graph


def _open(rows: int) -> Graph:
    graph = Graph("open")
    graph.outputs = [graph.gelu(graph.input("x", ["rows", 4]) @ graph.param("w", [4, 3]))]
    return graph


def _cache(device: Device | str, pad: bool | None = None) -> BucketedCompileCache:
    return BucketedCompileCache(power_of_two_ladder(2, 8), device, pad=pad)


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_padded_rows_equal_plain_ones(device: Device, rows: int) -> None:
    """The result of a padded run is that of the graph for exactly these rows, within 1e-6."""
    x = SOURCE.normal(size=(rows, 4)).astype(np.float32)
    cache = _cache(device)
    cache.ensure_graph_with_params(rows, _fixed, {"w": W})
    found = cache.run_padded(rows, rows, _fixed, [("x", x, 4)], [3])
    assert found is not None
    upper, (padded,) = found
    exact = BucketedCompileCache([(rows, rows + 1)], device)
    exact.ensure_graph_with_params(rows, _fixed, {"w": W})
    plain = exact.run_padded(rows, rows, _fixed, [("x", x, 4)], [3])
    assert plain is not None
    assert upper == max(2, 1 << (rows - 1).bit_length())
    assert padded.shape == (rows, 3)
    np.testing.assert_allclose(padded, plain[1][0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "pad", "shape", "sizes", "rows"),
    [(_open, None, (3, 4), [], 3), (_open, True, (3, 4), [0], 4), (_fixed, None, (12,), [3], 3)],
    ids=["an open graph", "padding that is asked for", "data without axes"],
)
def test_what_is_padded(
    build: Callable[[int], Graph], pad: bool | None, shape: tuple[int, ...], sizes: list[int], rows: int
) -> None:
    """Nothing where the size is open; with `pad`, an output of no row size keeps the padding; flat data gets axes."""
    cache = _cache("cpu", pad=pad)
    cache.ensure_graph_with_params(3, build, {"w": W})
    found = cache.run_padded(3, 3, build, [("x", np.ones(shape, np.float32), 4)], sizes)
    assert found is not None
    assert found[1][0].shape == (rows, 3)


def test_mixed_inputs_are_padded_one_by_one() -> None:
    """An input without a row size is passed on as it is."""

    def build(rows: int) -> Graph:
        graph = Graph("mixed")
        graph.outputs = [graph.input("x", [rows, 2]) * graph.input("scale", [2])]
        return graph

    x, scale = np.ones((3, 2), np.float32), np.array([2, 3], np.float32)
    found = _cache("cpu").run_padded_mixed(3, 3, build, [("x", x, 2), ("scale", scale, None)], [2])
    assert found is not None
    np.testing.assert_array_equal(found[1][0], x * scale)


def test_ranges_share_one_store_of_weights() -> None:
    """A parameter set for one range is there for the next, and only a new range takes `params`."""
    cache = _cache("cpu")
    cache.ensure_graph_with_params(2, _fixed, {"w": W})
    cache.ensure_graph_with_params(2, _fixed, {"w": W + 1})
    second = cache.get_or_compile(4, _fixed)
    assert second is not None
    np.testing.assert_allclose(second[1].run({"x": np.eye(4, dtype=np.float32)})[0].shape, (4, 3))
    assert cache.weights is second[1].weights
    held = cache.weights.get("w")
    assert held is not None
    np.testing.assert_array_equal(held.numpy(), W)
    assert (cache.compiled_count, cache.total_buckets) == (2, 3)


def test_ranges_whose_weights_differ_are_refused() -> None:
    """A parameter of another shape in another range raises."""

    def build(rows: int) -> Graph:
        graph = Graph("differs")
        graph.outputs = [graph.input("x", [1, rows]) @ graph.param("w", [rows, 1])]
        return graph

    cache = _cache("cpu")
    cache.get_or_compile(2, build)
    with pytest.raises(ParamError, match="share their parameters"):
        cache.get_or_compile(4, build)


def test_a_wrong_number_of_rows_is_refused() -> None:
    """Data with other rows than announced raises and names the input."""
    with pytest.raises(InputError, match="'x' has 2 rows"):
        _cache("cpu").run_padded(3, 3, _fixed, [("x", np.ones((2, 4), np.float32), 4)])


# Bodies of graphs from x to y whose rows influence each other: 3 of 4 rows and one of zeros give other values.
MIXING = {
    "maximum of integers": ("int32", "m = ReduceMax<axes=[0]>(x) y = Sub(x, m)"),
    "sum counted backwards": (
        "float",
        "o = Constant<value_float=1.0>() p = Add(x, o) i = Constant<value_int=0>() y = CumSum<reverse=1>(p, i)",
    ),
    "any of booleans": (
        "bool",
        "n = Not(x) c = Cast<to=6>(n) m = ReduceMax<axes=[0]>(c) f = Cast<to=9>(m) y = And(x, f)",
    ),
    "softmax along the rows": ("float", "y = Softmax<axis=0>(x)"),
    "one scale for all rows": (
        "float",
        "a = Abs(x) b = Constant<value_float=10.0>() p = Sub(b, a) q, s, z = DynamicQuantizeLinear(p)"
        "y = DequantizeLinear(q, s, z)",
    ),
    "product of rows with rows": ("float", "e = Exp(x) t = Transpose(e) p = MatMul(e, t) y = MatMul(p, e)"),
    "divided by their number": (
        "float",
        "s = Shape(x) i = Constant<value_int=0>() n = Gather(s, i) c = Cast<to=1>(n) y = Div(x, c)",
    ),
    "as many columns as rows": (
        "float",
        "s = Shape(x) n = Shape<end=1>(x) c = Constant<value_ints=[4]>() t = Concat<axis=0>(c, n) f = Reshape(x, t)"
        "m = Softmax(f) y = Reshape(m, s)",
    ),
}
VALUES = {
    "int32": np.array([[-9, -8, -7, -6], [-5, -4, -3, -2], [-9, -9, -9, -9]], np.int32),
    "bool": np.ones((3, 4), bool),
    "float": np.array([[-2, -1, 3, 1], [5, 4, 3, 2], [-1, -1, -2, -2]], np.float32),
}


def _imported(mixing: tuple[str, str], rows: int | str) -> Graph:
    kind, body = mixing
    return from_onnx(parsed(f"({kind}[{rows},4] x) => ({kind}[{rows},4] y) {{ {body} }}", 17, 8))


@pytest.mark.parametrize("mixing", MIXING.values(), ids=MIXING.keys())
def test_rows_that_influence_each_other_are_not_padded(mixing: tuple[str, str]) -> None:
    """A graph of one number of rows is refused with the reason, and padding changes its values indeed."""
    x = VALUES[mixing[0]]
    exact = Session().compile(_imported(mixing, 3)).run({"x": x})[0]
    with pytest.raises(InputError, match=r"not proved independent.*unproven=True"):
        _cache("cpu").run_padded(3, 3, lambda rows: _imported(mixing, rows), [("x", x, 4)], [4])
    insisting = BucketedCompileCache(power_of_two_ladder(2, 8), "cpu", unproven=True)
    found = insisting.run_padded(3, 3, lambda rows: _imported(mixing, rows), [("x", x, 4)], [4])
    assert found is not None
    assert not np.allclose(found[1][0], exact)


@pytest.mark.parametrize("mixing", MIXING.values(), ids=MIXING.keys())
def test_open_rows_that_influence_each_other_run_unpadded(
    mixing: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that compiles for each shape gets the true one; padding that was asked for is refused."""
    x = VALUES[mixing[0]]
    exact = Session().compile(_imported(mixing, "n")).run({"x": x})[0]
    with pytest.raises(InputError, match="not proved independent"):
        _cache("cpu", pad=True).run_padded(3, 3, lambda rows: _imported(mixing, "n"), [("x", x, 4)], [4])
    cache = _cache("cpu")
    monkeypatch.setattr(cache, "_pad", True)  # as for a provider that compiles for each shape
    found = cache.run_padded(3, 3, lambda rows: _imported(mixing, "n"), [("x", x, 4)], [4])
    assert found is not None
    np.testing.assert_array_equal(found[1][0], exact)


def test_as_many_rows_as_the_longest_length_need_no_proof() -> None:
    """Nothing is added, so that nothing is mixed in."""
    x, mixing = np.arange(16, dtype=np.float32).reshape(4, 4), MIXING["softmax along the rows"]
    exact = Session().compile(_imported(mixing, 4)).run({"x": x})[0]
    found = _cache("cpu").run_padded(4, 4, lambda rows: _imported(mixing, rows), [("x", x, 4)], [4])
    assert found is not None
    np.testing.assert_array_equal(found[1][0], exact)


def test_an_output_over_all_rows_is_refused_though_it_is_not_cut() -> None:
    """A mean over the rows has no padding to show, and would be that of the padded rows."""

    def build(rows: int) -> Graph:
        graph = Graph("pooled")
        x = graph.input("x", [rows, 4])
        graph.outputs = [x * 2, graph.mean(x, [0])]
        return graph

    with pytest.raises(InputError, match="reduces over the rows"):
        _cache("cpu").run_padded(3, 3, build, [("x", np.ones((3, 4), np.float32), 4)], [4])


def test_rows_behind_another_axis_of_an_output_are_not_cut_off_as_if_first() -> None:
    """Of a transposed output the first elements are not the first rows; with 0 it comes back with the padding."""

    def build(rows: int) -> Graph:
        graph = Graph("transposed")
        graph.outputs = [graph.transpose(graph.input("x", [rows, 4]), [1, 0])]
        return graph

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with pytest.raises(InputError, match="rows on axis 1"):
        _cache("cpu").run_padded(3, 3, build, [("x", x, 4)], [4])
    found = _cache("cpu").run_padded(3, 3, build, [("x", x, 4)], [0])
    assert found is not None
    np.testing.assert_array_equal(found[1][0][:, :3], x.T)


@pytest.mark.parametrize("shape", [(3, 8), (1, 3, 8), (24,)])
def test_graphs_built_for_their_number_of_rows_are_padded(shape: tuple[int, ...]) -> None:
    """Numbers of rows in shapes, and values made for each row, do not end the proof."""

    def build(rows: int) -> Graph:
        graph = Graph("blocks")
        x = graph.input(
            "x", [shape_of if shape_of != 3 else rows for shape_of in shape] if len(shape) > 1 else [8 * rows]
        )
        heads = graph.transpose(graph.reshape(x, [rows, 2, 4]), [1, 0, 2])
        places = graph.constant(np.arange(rows, dtype=np.float32).reshape(1, rows, 1))
        joined = graph.concat([heads + places, graph.constant(np.ones((2, rows, 1), np.float32))], 2)
        graph.outputs = [graph.softmax(graph.reshape(graph.transpose(joined, [1, 0, 2]), [rows, 10]), -1)]
        return graph

    x = SOURCE.normal(size=shape).astype(np.float32)
    heads = x.reshape(3, 2, 4) + np.arange(3).reshape(3, 1, 1)
    joined = np.concatenate([heads, np.ones((3, 2, 1))], 2).reshape(3, 10)
    wanted = np.exp(joined - joined.max(1, keepdims=True))
    found = _cache("cpu").run_padded(3, 3, build, [("x", x, 8)], [10])
    assert found is not None
    np.testing.assert_allclose(found[1][0], wanted / wanted.sum(1, keepdims=True), rtol=1e-5)
