"""A Range over the size of an input, in a model whose sizes are known: ONNX Runtime refuses one that is not i64."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from rlx_ort.converters.files import load_graph
from rlx_ort.graph_devices import GraphDevices

TAKEN = {"Squeeze": "Squeeze (sizes)", "Gather": "Gather (sizes, place)"}


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize(("dtype", "number"), [("int32", 6), ("float", 1), ("int64", 7)])
@pytest.mark.parametrize("size", ["n", "4"])
def test_an_imported_range_opens_once_its_size_is_known(taken: str, dtype: str, number: int, size: str) -> None:
    """The size is bound, or the model has it; a cast of the size stands before the scalar is taken of it."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[{size}] x) => ({dtype}[n] y) <int64 place = {{0}}, {dtype} zero = {{0}}, {dtype} one = {{1}}>
        {{ shape = Shape (x) sizes = Cast <to = {number}> (shape)
           end = {TAKEN[taken]} y = Range (zero, end, one) }}""")
    graph = load_graph(model).bind({"n": 4}) if size == "n" else load_graph(model)
    (result,) = GraphDevices(graph).run("cpu", {"x": np.zeros(4, np.float32)})
    np.testing.assert_array_equal(result, [0, 1, 2, 3])
