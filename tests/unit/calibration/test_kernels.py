"""The table of kernels: what its rows are called, and that its graphs compute what they say."""

from __future__ import annotations

import math

import pytest

from rlx_ort import DType, verify
from rlx_ort.calibration.kernels import KERNELS, Kernel, KernelGraph, Point, RandomData


def _named(name: str) -> Kernel:
    return next(kernel for kernel in KERNELS if kernel.name == name)


@pytest.mark.parametrize(
    ("name", "point", "size"),
    [
        ("MatMul", (32, 512), (32, 512 * 512)),
        ("BatchedMatMul", (8, 16, 64), (2 * 8 * 16 * 64 * 16,)),
        ("Conv3x3", (4, 56, 64), (4 * 56 * 56, 64)),
        ("DepthwiseConv", (1, 28, 64), (28 * 28 * 64,)),
        ("Attention", (8, 128), (4 * 8 * 12 * 128 * 128 * 64,)),
        ("Add", (1 << 14, 256), (1 << 14,)),
        ("Softmax", (1 << 14, 64), (1 << 14, 64)),
        ("upload", (1 << 10,), (1 << 10,)),
    ],
)
def test_the_size_of_a_row_counts_what_the_table_says(name: str, point: Point, size: Point) -> None:
    """Rows times weights, flops, pixels and channels, elements, bytes."""
    assert _named(name).size(point) == size


def test_no_size_of_a_kernel_is_measured_twice() -> None:
    """A row is found by kernel, size and dtype."""
    for kernel in KERNELS:
        points = [kernel.size(point) for _, points in kernel.groups for point in points]
        assert len(points) == len(set(points)), kernel.name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.name}-{kernel.dtype}")
def test_each_copy_adds_the_same_nodes_to_a_correct_graph(kernel: Kernel) -> None:
    """Three copies have three times as many nodes more than the base as one copy has, at every size."""
    dtype = DType(kernel.dtype)

    def nodes(point: Point, copies: int) -> int:
        graph = KernelGraph(_DATA, dtype, chained=kernel.chained)
        kernel.build(graph, point, copies)
        assert list(verify(graph.graph)) == []
        return sum(getattr(node.op, "op_type", "") != "" for node in graph.graph.nodes)

    for point in {point for _, points in kernel.groups for point in points if math.prod(point) < 1 << 22}:
        if kernel.copies != 1:
            assert nodes(point, 3) - nodes(point, 0) == 3 * (nodes(point, 1) - nodes(point, 0)) > 0


_DATA = RandomData()
