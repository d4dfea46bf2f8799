"""`CompileCache`: what is kept, what makes room, and what is compiled once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from rlx_ort import CompileCache, CompileOptions, Graph, OptimizationLevel

ONES = np.ones((4, 3), np.float32)


def test_a_hit_returns_the_same_object_with_its_parameters(
    providers: object, matmul_graph: Callable[..., Graph]
) -> None:
    """The second call builds nothing, and a parameter that was set stays set."""
    cache = CompileCache("cpu", 2)
    first = cache.get_or_compile("a", matmul_graph)
    first.set_param("w", ONES)

    def build() -> Graph:
        raise AssertionError("built twice")

    assert cache.get_or_compile("a", build) is first
    assert first.weights.is_set("w")
    assert "a" in cache
    assert len(cache) == 1


def test_the_graph_used_longest_ago_makes_room(providers: object, matmul_graph: Callable[..., Graph]) -> None:
    """A hit counts as use: the other one leaves, though it was inserted later."""
    cache = CompileCache("cpu", 2)
    for key in ("a", "b", "a", "c"):
        cache.get_or_compile(key, matmul_graph)
    assert ("a" in cache, "b" in cache, "c" in cache) == (True, False, True)


def test_a_graph_that_made_room_still_runs_for_its_holder(
    providers: object, matmul_graph: Callable[..., Graph]
) -> None:
    """Eviction does not close a graph that is still referred to."""
    cache = CompileCache("cpu", 1)
    held = cache.get_or_compile("a", lambda: matmul_graph(ONES))
    cache.get_or_compile("b", matmul_graph)
    np.testing.assert_array_equal(held.run({"x": np.ones((1, 4), np.float32)})[0], [[4, 4, 4]])


def test_options_are_part_of_the_key(providers: object, matmul_graph: Callable[..., Graph]) -> None:
    """The same key with other options is another graph; equal options are not."""
    cache = CompileCache("cpu", 4)
    plain = cache.get_or_compile("a", matmul_graph)
    off = CompileOptions(optimization=OptimizationLevel.OFF)
    assert cache.get_or_compile("a", matmul_graph, options=off) is not plain
    assert cache.get_or_compile("a", matmul_graph, options=CompileOptions()) is plain
    assert len(cache) == 2


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_cache_keeps_at_least_one(capacity: int, providers: object, matmul_graph: Callable[..., Graph]) -> None:
    """A capacity below 1 is taken as 1."""
    cache = CompileCache("cpu", capacity)
    cache.get_or_compile("a", matmul_graph)
    assert len(cache) == 1


def test_threads_that_want_one_key_share_one_compilation(providers: object, matmul_graph: Callable[..., Graph]) -> None:
    """Eight threads get the same object, and the graph was built once."""
    cache = CompileCache("cpu", 2)
    built = []

    def build() -> Graph:
        built.append(threading.get_ident())
        return matmul_graph()

    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get_or_compile("a", build))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len({id(item) for item in found}) == 1


def test_a_build_that_fails_leaves_the_key_free(providers: object, matmul_graph: Callable[..., Graph]) -> None:
    """The error reaches the caller, and the next call builds again."""
    cache = CompileCache("cpu", 2)

    def fail() -> Graph:
        raise KeyError("no such file")

    with pytest.raises(KeyError):
        cache.get_or_compile("a", fail)
    assert cache.get_or_compile("a", matmul_graph) is not None
