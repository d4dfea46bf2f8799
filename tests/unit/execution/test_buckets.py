"""Ranges of lengths: the ladder, padding and cutting, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlx_ort import BucketedCompileCache, Graph, InputError, ParamError, pad_rows, power_of_two_ladder, slice_rows
from rlx_ort.ir.tensor import TensorData


def test_a_ladder_doubles_from_the_first_extent_to_the_last() -> None:
    """The ladder of 8 to 256 is that of the contract."""
    ladder = power_of_two_ladder(8, 256)
    assert [tuple(bucket) for bucket in ladder] == [(1, 9), (9, 17), (17, 33), (33, 65), (65, 129), (129, 257)]
    assert [bucket.upper for bucket in ladder] == [8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    ("least", "most", "uppers"),
    [(1, 1, [1]), (5, 5, [8]), (3, 9, [4, 8, 16]), (16, 16, [16])],
)
def test_a_ladder_begins_and_ends_on_powers_of_two(least: int, most: int, uppers: list[int]) -> None:
    """Limits that are no powers of two are rounded up."""
    assert [bucket.upper for bucket in power_of_two_ladder(least, most)] == uppers


@pytest.mark.parametrize(("least", "most"), [(0, 4), (5, 4), (-1, 1)])
def test_a_ladder_without_lengths_is_refused(least: int, most: int) -> None:
    """Limits below 1, or in the wrong order, raise."""
    with pytest.raises(InputError, match="ladder"):
        power_of_two_ladder(least, most)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [([], "at least one"), ([(3, 3)], "holds no length"), ([(1, 5), (4, 9)], "overlap"), ([range(9, 2)], "holds no")],
)
def test_ranges_that_make_no_sense_are_refused(ranges: list[tuple[int, int]], message: str, providers: object) -> None:
    """No range, an empty one and overlapping ones raise; the message names them."""
    with pytest.raises(InputError, match=message):
        BucketedCompileCache(ranges)


def test_a_length_in_a_gap_has_no_range(providers: object) -> None:
    """Ranges may leave gaps; a length there is in no range, and nothing is built for it."""
    cache = BucketedCompileCache([(1, 5), range(8, 12)])
    assert cache.bucket_for(4) == (1, 5)
    assert cache.bucket_for(5) is None
    assert cache.bucket_for(0) is None
    assert cache.bucket_for(11) == (8, 12)
    assert cache.bucket_for(12) is None

    def build(upper: int) -> None:
        raise AssertionError(f"built for {upper}")

    assert cache.get_or_compile(6, build) is None  # type: ignore[arg-type]  # it must not be called
    assert (cache.total_buckets, cache.compiled_count) == (2, 0)


def test_padding_adds_rows_of_zeros_and_cutting_takes_them_off() -> None:
    """Data with rows first keeps its axes, and what is cut off again is what was there."""
    data = np.arange(6, dtype=np.float32).reshape(3, 2)
    padded = pad_rows(data, 2, 5)
    np.testing.assert_array_equal(padded, np.concatenate([data, np.zeros((2, 2), np.float32)]))
    np.testing.assert_array_equal(slice_rows(padded, 2, 3), data)


def test_flat_data_is_padded_flat() -> None:
    """Rows without an axis of their own are counted by their elements."""
    np.testing.assert_array_equal(pad_rows([1, 2, 3, 4], 2, 3), [1, 2, 3, 4, 0, 0])


def test_rows_behind_axes_of_one_are_cut_on_their_axis() -> None:
    """An output `(1, rows, inner)` stays of rank 3."""
    data = np.arange(8).reshape(1, 4, 2)
    np.testing.assert_array_equal(slice_rows(data, 2, 3), data[:, :3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pad_rows([1, 2, 3], 2, 4), "whole number"),
        (lambda: pad_rows([1, 2], 0, 4), "at least 1"),
        (lambda: pad_rows([1, 2, 3], 1, 2), "do not fit"),
        (lambda: slice_rows([1, 2, 3], 2, 1), "whole number"),
        (lambda: slice_rows([1, 2], 1, 3), "there are 2"),
    ],
    ids=["ragged", "no-inner", "too-many", "ragged-slice", "too-few"],
)
def test_data_that_is_not_whole_rows_is_refused(call: object, message: str) -> None:
    """Data that is not whole rows of that size raises instead of being cut silently."""
    with pytest.raises(InputError, match=message):
        call()  # type: ignore[operator]  # a table of calls


def test_other_data_of_a_shared_parameter_is_refused(providers: object) -> None:
    """One graph's data would be dropped; equal data is shared, and what was set since wins over what graphs bring."""
    cache = BucketedCompileCache([(1, 5), (5, 9), (9, 13)])

    def build(value: float) -> Callable[[int], Graph]:
        def made(upper: int) -> Graph:
            graph = Graph("bucket")
            weight = graph.param("w", [1], data=np.full(1, value, np.float32))
            graph.outputs = [graph.mul(graph.input("x", [upper]), weight)]
            return graph

        return made

    cache.get_or_compile(1, build(1))
    cache.get_or_compile(5, build(1))
    with pytest.raises(ParamError, match=r"'w'.*another range"):
        cache.get_or_compile(9, build(2))
    assert cache.weights is not None
    cache.weights.set("w", np.full(1, 3, np.float32))
    assert cache.get_or_compile(9, build(2)) is not None
    assert cache.weights.get("w") == TensorData.from_array(np.full(1, 3, np.float32))
