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


@pytest.mark.parametrize(
    ("tokens", "mask", "past", "wanted"),
    [
        ("sequence_length", "past_sequence_length + sequence_length", "past_sequence_length", (8, 16, 8)),
        ("sequence_length", "past_sequence_length + 1", "past_sequence_length", (1, 9, 8)),
        ("sequence_length", "total_sequence_length", "past_sequence_length", (8, 16, 8)),
        ("sequence_length", "attention_mask_sequence_length", "past_key_values_length", (8, 16, 8)),
        ("s1", "s2", "s3", (8, 16, 8)),
        (None, None, None, (8, 16, 8)),
        (1, "mask", "past", (1, 9, 8)),
        (1, "mask", 64, (1, 65, 64)),
        (1, 64, 64, (1, 64, 64)),
        (1, "past", "past", (1, 8, 8)),
    ],
)
def test_the_mask_of_a_decoder_covers_its_cache_and_its_tokens(
    tokens: int | str | None, mask: int | str | None, past: int | str | None, wanted: tuple[int, int, int]
) -> None:
    """Whatever an exporter calls the dims; a mask whose size is settled keeps it."""
    g = Graph()
    g.input("input_ids", ["batch", tokens], "i64")
    g.input("attention_mask", ["batch", mask], "i64")
    g.input("past_key_values.0.key", ["batch", 2, past, 4])
    g.input("encoder_attention_mask", ["batch", "encoder_length"], "i64")
    arrays, _ = random_inputs(g.input_types)
    assert arrays["encoder_attention_mask"].shape == (2, 8)
    assert arrays["attention_mask"].all()
    assert tuple(arrays[name].shape[-1] for name in ("input_ids", "attention_mask")) == wanted[:2]
    assert arrays["past_key_values.0.key"].shape == (2, 2, wanted[2], 4)


def test_given_sizes_of_a_decoder_come_first() -> None:
    """The mask is the sum of the sizes that were given, or has its own."""
    g = Graph()
    g.input("input_ids", ["batch", "new"], "i64")
    g.input("attention_mask", ["batch", "length"], "i64")
    g.input("past_key_values.0.key", ["batch", 2, "past", 4])
    for sizes, length in (({"new": 1, "past": 5}, 6), ({"new": 1, "past": 5, "length": 7}, 7)):
        assert random_inputs(g.input_types, sizes).arrays["attention_mask"].shape == (2, length)
