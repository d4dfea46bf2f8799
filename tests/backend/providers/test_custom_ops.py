"""Custom-op libraries: loaded by absolute path, refused with the loader's words."""

from pathlib import Path

import numpy as np
import pytest

from rlx_ort import CompileOptions, DType, EngineError, Graph, Session
from rlx_ort.ir.types import Shape, TensorType


def graph() -> Graph:
    """Return a graph of one plain node."""
    g = Graph()
    g.outputs = [g.relu(g.input("x", [2]))]
    return g


def test_a_library_is_named_by_its_absolute_path() -> None:
    """A bare name would be searched for in folders that others may write to."""
    with pytest.raises(EngineError, match="absolute path"):
        Session("cpu", CompileOptions(custom_op_libraries=("libops.so",))).compile(graph())


def test_a_file_that_is_no_library_is_refused_with_the_reason(tmp_path: Path) -> None:
    """The process goes on; the loader's own words are in the message."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    with pytest.raises(EngineError, match=r"broken\.so cannot be loaded"):
        Session("cpu", CompileOptions(custom_op_libraries=(str(broken),))).compile(graph())


def test_a_custom_op_of_a_library_runs() -> None:
    """The extensions package brings a real library; NegPos splits a tensor by sign."""
    extensions = pytest.importorskip("onnxruntime_extensions")
    g = Graph()
    x = g.input("x", [4])
    kind = TensorType(DType.F32, Shape([4]))
    g.outputs = list(g.onnx_node("NegPos", [x], types=[kind, kind], domain="ai.onnx.contrib", version=1))
    options = CompileOptions(custom_op_libraries=(extensions.get_library_path(),))
    negative, positive = Session("cpu", options).compile(g).run({"x": np.array([1, -2, 3, -4], np.float32)})
    np.testing.assert_array_equal(negative, [0, -2, 0, -4])
    np.testing.assert_array_equal(positive, [1, 0, 3, 0])
