"""Sizes of made-up inputs for which convolutions have room."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort.errors import InputError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.selection.windows import fitting_sizes


def test_made_up_lengths_are_enlarged_until_every_window_fits() -> None:
    """A convolution of 40 over one of 10 that moves by 5 needs 205 elements; what was given stays."""
    g = Graph("windows")
    y = g.input("x", ["batch", 1, "samples"])
    for width, stride in ((10, 5), (40, 1)):
        y = g.onnx_node(
            "Conv",
            [y, g.constant(np.ones((1, 1, width), np.float32))],
            {"strides": (stride,)},
            types=[TensorType(DType.F32, Shape([None, 1, None]))],
        )[0]
    g.outputs = [y]
    assert fitting_sizes(g, {})[:2] == (2, 256)
    with pytest.raises(InputError, match="samples=100; give larger sizes with --dim"):
        fitting_sizes(g, {"samples": 100})
