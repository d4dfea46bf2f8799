"""Padded runs give what plain ones give, and ranges share their weights."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.device import Device
from rlx_ort.errors import InputError, ParamError
from rlx_ort.execution.buckets import BucketedCompileCache, power_of_two_ladder
from rlx_ort.ir.graph import Graph

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


def test_an_open_graph_runs_the_true_shape() -> None:
    """Where the provider does not compile for each shape, nothing is padded, nothing is cut."""
    cache = _cache("cpu")
    cache.ensure_graph_with_params(3, _open, {"w": W})
    found = cache.run_padded(3, 3, _open, [("x", np.ones((3, 4), np.float32), 4)])
    assert found is not None
    assert found[1][0].shape == (3, 3)


def test_padding_can_be_asked_for() -> None:
    """With `pad`, an output without a row size comes back with the padding."""
    cache = _cache("cpu", pad=True)
    cache.ensure_graph_with_params(3, _open, {"w": W})
    found = cache.run_padded(3, 3, _open, [("x", np.ones((3, 4), np.float32), 4)], [0])
    assert found is not None
    assert found[1][0].shape == (4, 3)


def test_flat_rows_take_the_declared_shape() -> None:
    """Data without axes is padded and shaped as the input wants it."""
    cache = _cache("cpu")
    cache.ensure_graph_with_params(3, _fixed, {"w": W})
    found = cache.run_padded(3, 3, _fixed, [("x", np.ones(12, np.float32), 4)], [3])
    assert found is not None
    assert found[1][0].shape == (3, 3)


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
