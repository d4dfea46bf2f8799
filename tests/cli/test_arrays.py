"""Arrays in files, types that npz cannot hold, and made-up inputs."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import DType, Graph
from rlx_ort.cli.arrays import flattened, read_npz, storable, to_declared_types, write_npz
from rlx_ort.ir.types import TensorType

NUMERIC = [dtype for dtype in DType if dtype is not DType.STRING]


def test_an_output_may_have_any_name(tmp_path: Path) -> None:
    """Names that numpy.savez would refuse, such as `file`, and names with slashes come back."""
    arrays = {"file": np.arange(3), "layer/out:0": np.ones((2, 2), np.float16), "ä": np.array(True)}
    write_npz(tmp_path / "a.npz", arrays)
    found = read_npz(tmp_path / "a.npz")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda dtype: dtype.value)
def test_every_dtype_survives_a_file(tmp_path: Path, dtype: DType) -> None:
    """What was written in any dtype reads back, in the model's dtype, with the same values."""
    array = np.array([0, 1], np.float32).astype(dtype.numpy)
    g = Graph()
    g.add_node(_input("x", TensorType(dtype)), (), name="x")
    write_npz(tmp_path / "a.npz", {"x": array})
    found = to_declared_types(read_npz(tmp_path / "a.npz"), g.input_types)["x"]
    assert found.dtype == dtype.numpy
    np.testing.assert_array_equal(found.astype(np.complex128), array.astype(np.complex128))


def test_text_survives_a_file(tmp_path: Path) -> None:
    """Strings are stored as unicode, without pickle, and fed as objects again."""
    g = Graph()
    g.add_node(_input("x", TensorType(DType.STRING)), (), name="x")
    array = np.array(["a", "größer"], dtype=object)
    write_npz(tmp_path / "a.npz", {"x": array})
    found = to_declared_types(read_npz(tmp_path / "a.npz"), g.input_types)["x"]
    assert (found.dtype, found.tolist()) == (np.dtype(object), array.tolist())


def test_bfloat16_is_stored_as_float32() -> None:
    """A type that npz would turn into raw bytes is stored in one that holds all its values."""
    array = np.array([1.5, -3.0], ml_dtypes.bfloat16)
    assert storable(array).dtype == np.float32


def _input(name: str, kind: object) -> object:
    from rlx_ort.ir.ops.leaf import Input

    return Input(name, kind)  # type: ignore[arg-type]  # tests name any type


def test_maps_with_other_keys_and_optionals_are_flattened_one_by_one() -> None:
    """Maps of one sequence may differ in their keys; an optional may have no value."""
    found = flattened({"s": [{"a": 1.0}, {"b": 2.0, "c": 3.0}], "o": None, "m": {7: 0.5}, "n": [[], [np.arange(2)]]})
    expected = {
        "s[0].keys": ["a"],
        "s[0].values": [1.0],
        "s[1].keys": ["b", "c"],
        "s[1].values": [2.0, 3.0],
        "o.none": [],
        "m.keys": [7],
        "m.values": [0.5],
        "n[0][]": [],
        "n[1][0]": [0, 1],
    }
    assert {name: array.tolist() for name, array in found.items()} == expected
