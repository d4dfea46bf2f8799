"""Made-up inputs have the declared shapes and dtypes, and rows that differ."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import DType, Graph, InputError
from rlx_ort.ir.types import SequenceType, TensorType
from rlx_ort.made_up import even_inputs, random_inputs, shaped_inputs


def test_random_inputs_have_the_declared_shapes_and_dtypes() -> None:
    """Sizes come from the names given, else by place; integers are 0 and 1; the same seed gives the same data."""
    g = Graph()
    g.input("x", ["batch", "tokens", 3])
    g.input("ids", [50], "i64")
    g.input("half", [2], "bf16")
    (first, assumed), (second, _) = (random_inputs(g.input_types, {"batch": 4}, seed=7) for _ in range(2))
    assert assumed == {"tokens": 8}
    assert {name: (array.shape, array.dtype) for name, array in first.items()} == {
        "x": ((4, 8, 3), np.dtype(np.float32)),
        "ids": ((50,), np.dtype(np.int64)),
        "half": ((2,), np.dtype(ml_dtypes.bfloat16)),
    }
    assert set(first["ids"].tolist()) == {0, 1}
    np.testing.assert_array_equal(first["x"], second["x"])


def test_nothing_is_made_up_for_an_input_that_is_no_tensor() -> None:
    """A sequence has to be given."""
    with pytest.raises(InputError, match="xs"):
        random_inputs({"xs": SequenceType(TensorType(DType.F32))})


def test_even_inputs_have_rows_that_differ() -> None:
    """Floats lie from 0 to 1; integers are zeros, which index every table; open dims other than the rows are 8."""
    g = Graph()
    g.input("x", ["batch", "tokens"])
    g.input("ids", ["batch", 2], "i64")
    g.input("half", ["batch"], "f16")
    found = even_inputs(g.input_types, 5)
    assert {name: array.shape for name, array in found.items()} == {"x": (5, 8), "ids": (5, 2), "half": (5,)}
    assert len(np.unique(found["x"], axis=0)) == 5
    assert 0 <= found["x"].min() <= found["x"].max() <= 1
    assert not found["ids"].any()
    assert found["half"].dtype == np.float16


def test_shapes_alone_take_no_memory() -> None:
    """A prediction needs sizes, not data; inputs without a shape are left out."""
    g = Graph()
    g.input("x", ["batch", 1 << 40])
    arrays, assumed = shaped_inputs(g.input_types, {})
    assert arrays["x"].shape == (2, 1 << 40)
    assert assumed == {"batch": 2}
