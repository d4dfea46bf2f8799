"""The facts about the installed ONNX Runtime are those of `providers/cores/`."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
from developer_scripts import load_script

from rlx_ort import GraphDevices, LegalizeError, from_onnx, supports_graph
from rlx_ort.converters.to_onnx.opset import MAX_OPSET
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.cores import core_of, known_cores


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Load the script that writes the files."""
    return load_script("core_facts")


def test_the_installed_version_takes_what_its_file_says(script: ModuleType) -> None:
    """Its libraries hold no other config key, and it loads exactly the opsets and IR versions of the file."""
    assert list(script.check()) == []


def test_models_are_written_up_to_the_newest_opset_that_a_known_version_loads() -> None:
    """The exporter, which asks no engine, has the limit as a constant."""
    assert max(core.opset for core in known_cores()) == MAX_OPSET


def test_pieces_of_constants_are_no_keys(script: ModuleType) -> None:
    """Compilers cut long constants into pieces of 16 bytes; a Windows library has the constants whole."""
    piece, key, long_key = b"session.a_piece_", b"session.mode", b"session.sixteen_"
    linux = (False, [b"\0".join((b"", piece, key, long_key, b""))])
    windows = (True, [b"\0" + long_key + b"\0"])
    assert script.whole([linux, windows]) == {"session.mode", "session.sixteen_"}


X = np.array([-5.5, 5.5, 7.0, -7.0], np.float32)
Y = np.array([3.0, -3.0, 4.0, 4.0], np.float32)
BITS = np.array([2**40 + 5, 2**63, 7, 9], np.uint64)
PLACES = np.array([3, 63, 64, 200], np.uint64)
BYTES, FEW = np.array([-128, 127, -1, 64], np.int8), np.array([1, 2, 9, 1], np.int8)


@pytest.mark.parametrize(
    ("dtype", "node", "inputs", "wanted"),
    [
        ("float", "Mod(x, y)", (X, Y), X - np.floor(X / Y) * Y),
        ("uint64", 'BitShift<direction="RIGHT">(x, y)', (BITS, PLACES), np.array([2**37, 1, 0, 0], np.uint64)),
        ("int8", 'BitShift<direction="RIGHT">(x, y)', (BYTES, FEW), np.array([-64, 31, -1, 32], np.int8)),
    ],
    ids=["floored remainder", "wide shift", "arithmetic shift"],
)
def test_what_only_opset_28_means_runs_where_the_core_loads_it_and_is_refused_elsewhere(
    dtype: str, node: str, inputs: tuple[npt.NDArray[np.generic], ...], wanted: npt.NDArray[np.generic]
) -> None:
    """No older form is written in its place, and the refusal names the version that loads it."""
    text = f'<ir_version: 14, opset_import: ["": 28]> g ({dtype}[4] x, {dtype}[4] y) => ({dtype}[4] z) {{ z = {node} }}'
    graph = from_onnx(onnx.parser.parse_model(text).SerializeToString())
    feeds = dict(zip("xy", inputs, strict=True))
    if core_of(runtime.runtime_version()).opset >= 28:
        assert supports_graph("cpu", graph)
        (got,) = GraphDevices(graph).run("cpu", feeds)
        np.testing.assert_array_equal(got, wanted)
    else:
        assert not supports_graph("cpu", graph)
        with pytest.raises(LegalizeError, match=r"opset of ai\.onnx 28.*ONNX Runtime 1\.32 and newer load it"):
            GraphDevices(graph).run("cpu", feeds)


def test_a_model_of_ir_version_14_runs_on_every_core() -> None:
    """What it holds is older, so an older form is written for the engine."""
    text = '<ir_version: 14, opset_import: ["": 28]> g (float[4] x) => (float[4] z) { z = Relu(x) }'
    graph = from_onnx(onnx.parser.parse_model(text).SerializeToString())
    (got,) = GraphDevices(graph).run("cpu", {"x": X})
    np.testing.assert_array_equal(got, np.maximum(X, 0))
