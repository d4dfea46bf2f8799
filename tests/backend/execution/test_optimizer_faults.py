"""Models that ONNX Runtime's optimisers do not survive run, each in a child process."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
import numpy as np
import rlx_ort
from rlx_ort import CompileOptions, Graph, Session

perm = [int(axis) for axis in sys.argv[1]]
shape = [0, 0, 0]
for place, size in zip(perm, (4, 2, 3)):
    shape[place] = size
x = np.arange(24, dtype=np.float32).reshape(shape)
w = np.ones((3, 5), np.float32)
g = Graph()
value = g.input("x", shape)
if sys.argv[2] == "cast":
    value = g.transpose(value.cast("f16"), perm) @ g.constant(w.astype(np.float16))
    g.outputs = [value.cast("f32")]
    options = CompileOptions()
else:
    g.outputs = [g.transpose(value, perm) @ g.constant(w)]
    options = CompileOptions(precision=rlx_ort.Precision.F16)
(result,) = Session("cpu", options).compile(g).run({"x": x})
np.testing.assert_allclose(result, x.transpose(perm) @ w, rtol=1e-2)
"""


@pytest.mark.parametrize("how", ["cast", "precision"])
@pytest.mark.parametrize("perm", ["102", "021"])
def test_an_f16_product_of_transposed_data_runs(perm: str, how: str) -> None:
    """Cast, Transpose and MatMul in f16 are right at full optimisation, and the process lives."""
    child = [sys.executable, "-P", "-c", _PROGRAM, perm, how]
    done = subprocess.run(child, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
