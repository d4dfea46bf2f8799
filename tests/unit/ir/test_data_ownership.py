"""What a graph keeps of its caller's arrays: copies of those that may change, and the memory of those that cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort import DType, Graph, GraphVerifyError
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.tensor import TensorData

Array = npt.NDArray[Any]


def _param(array: Array) -> TensorData:
    graph = Graph("g")
    graph.param("w", array.shape, data=array)
    return graph.weights["w"]


def _constant(array: Array) -> TensorData:
    op = Graph("g").constant(array).node.op
    assert isinstance(op, Constant)
    return op.data


def _operand(array: Array) -> TensorData:
    graph = Graph("g")
    op = graph.add(graph.input("x", array.shape), array).graph.nodes[1].op
    assert isinstance(op, Constant)
    return op.data


KEEPERS = pytest.mark.parametrize("keep", [_param, _constant, _operand])


@KEEPERS
@pytest.mark.parametrize("view", [False, True])
def test_a_later_change_of_an_array_changes_no_graph(keep: Callable[[Array], TensorData], view: bool) -> None:
    """A writeable array is copied, and so is a read-only view of one."""
    array = np.ones((2, 3), np.float32)
    given = array[:]
    given.flags.writeable = not view
    kept = keep(given)
    array[:] = 9
    np.testing.assert_array_equal(kept.numpy(), np.ones((2, 3)))


@KEEPERS
@pytest.mark.parametrize("mapped", [False, True])
def test_memory_that_cannot_change_is_shared(keep: Callable[[Array], TensorData], mapped: bool, tmp_path: Path) -> None:
    """Memory maps for reading and read-only arrays take no memory a second time."""
    array: Array = np.ones((2, 3), np.float32)
    if mapped:
        array.tofile(tmp_path / "w")
        array = np.memmap(tmp_path / "w", np.float32, "r", shape=(2, 3))
    array.flags.writeable = False
    assert np.shares_memory(keep(array).buffer, array)


def test_a_param_takes_tensor_data_of_its_dtype() -> None:
    """It is shared as it is, and another dtype is refused, since its bytes would be read as something else."""
    data = TensorData.from_array(np.ones(3, np.float32))
    graph = Graph("g")
    graph.param("w", [3], data=data)
    assert graph.weights["w"] is data
    with pytest.raises(GraphVerifyError, match="f16"):
        graph.param("half", [3], DType.F16, data=data)
