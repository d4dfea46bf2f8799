"""Recurrent layers check their shapes."""

from __future__ import annotations

import pytest

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.sequence import GatedDeltaNet, SelectiveScan
from rlx_ort.ir.types import Shape, TensorType


def f32(*dims: int | str) -> TensorType:
    return TensorType(DType.F32, Shape(dims))


SCAN = [f32("b", "s", 3), f32("b", "s", 3), f32(3, 4), f32("b", "s", 4), f32("b", "s", 4)]
NET = [f32(2, "s", 3, 4)] * 3 + [f32(2, "s", 3)] * 2


def test_results_have_the_type_of_what_goes_through() -> None:
    """The selective scan gives x's type, the delta rule v's and its state's."""
    assert SelectiveScan(4).infer(SCAN) == (SCAN[0],)
    assert GatedDeltaNet(4).infer(NET) == (NET[2],)
    assert GatedDeltaNet(4, True).infer([*NET, f32(2, 3, 4, 4)]) == (NET[2], f32(2, 3, 4, 4))


@pytest.mark.parametrize("place", range(5))
def test_each_input_must_fit_the_others(place: int) -> None:
    """A last dimension that differs is named with its input."""
    for op, good in ((SelectiveScan(4), SCAN), (GatedDeltaNet(4), NET)):
        bad = list(good)
        shape = bad[place].shape or Shape()
        bad[place] = f32(*[dim for dim in shape[:-1] if dim is not None], 7)
        with pytest.raises(GraphVerifyError, match=op.kind):
            op.infer(bad)


def test_a_state_is_wanted_only_when_it_is_carried() -> None:
    """The number of inputs goes with `carry_state`."""
    with pytest.raises(GraphVerifyError, match="takes q, k, v, g and beta; got 6 inputs"):
        GatedDeltaNet(4).infer([*NET, f32(2, 3, 4, 4)])
    with pytest.raises(GraphVerifyError, match="and a state; got 5 inputs"):
        GatedDeltaNet(4, True).infer(NET)


def test_the_number_of_states_is_read_from_a_and_must_be_known() -> None:
    """A named last dimension needs n given."""
    g = Graph()
    x, delta, a, b, c = (g.input(name, kind.shape or ()) for name, kind in zip("xdabc", SCAN, strict=True))
    assert g.selective_scan(x, delta, a, b, c).node.op == SelectiveScan(4)
    with pytest.raises(GraphVerifyError, match="give n"):
        g.selective_scan(x, delta, g.input("named", [3, "n"]), b, c)
