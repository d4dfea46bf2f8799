"""Made-up inputs fit the model: sizes of dims, and integers that index something stay inside it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from rlx_ort.converters.bundle import bundle_of
from rlx_ort.errors import InputError
from rlx_ort.parity.compare import random_inputs

EMBEDDING = """
<ir_version: 8, opset_import: ["": 18]>
embed (int64[batch, tokens] ids, int32[batch, tokens] segments, int64[batch, tokens] attention_mask,
       int64[batch, tokens] position_ids, bool[batch] flags, int64[batch] plain) => (float[batch, tokens, 2] y)
<float[5, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 0}, float[3, 2] kinds = {1, 2, 3, 4, 5, 6},
 float[2, 4] places = {1, 2, 3, 4, 5, 6, 7, 8}, int64[1] axis = {0}> {
  wide = Cast <to = 7> (segments)
  more = Unsqueeze (wide, axis)
  a = Gather (table, ids)
  b = Gather (kinds, more)
  c = Gather <axis = 1> (places, position_ids)
  y = Add (a, b)
}
"""


def test_indices_stay_inside_the_table_they_index() -> None:
    """Directly, through a cast and a reshape, and along the axis of the Gather; all rows are reached."""
    found = random_inputs(bundle_of(parser.parse_model(EMBEDDING)), {"batch": 50, "tokens": 6}).arrays
    assert set(np.unique(found["ids"])) == set(range(5))
    assert set(np.unique(found["segments"])) == set(range(3))
    assert found["segments"].dtype == np.int32
    assert found["position_ids"].max() == 3


def test_masks_are_ones_positions_count_and_other_integers_are_bits() -> None:
    """Masks and positions, recognized by their names, get values that make sense."""
    found = random_inputs(bundle_of(parser.parse_model(EMBEDDING)), {"batch": 50, "tokens": 3}).arrays
    assert found["attention_mask"].all()
    assert found["flags"].all()
    np.testing.assert_array_equal(found["position_ids"][0], [0, 1, 2])
    assert set(np.unique(found["plain"])) == {0, 1}


def test_the_same_seed_gives_the_same_inputs() -> None:
    """And another seed others."""
    model = bundle_of(parser.parse_model(EMBEDDING))
    first, again, other = (random_inputs(model, seed=seed).arrays["ids"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_dims_without_a_size_are_assumed_and_told() -> None:
    """What was assumed is in the answer, so that it can be shown; what was given is not."""
    made = random_inputs(bundle_of(parser.parse_model(EMBEDDING)), {"tokens": 3})
    assert made.assumed == {"batch": 2}
    assert made.arrays["ids"].shape == (2, 3)


def test_a_sum_of_dims_is_their_sum() -> None:
    """A mask over past and new tokens has the length of both, written as a sum or by its usual name."""
    text = """
<ir_version: 8, opset_import: ["": 18]>
cached (float[1, past_sequence_length] past, float[1, sequence_length] x) => (float[n] y) { y = Identity (x) }
"""
    proto = parser.parse_model(text)
    for name, total in (("sum_mask", "past_sequence_length + sequence_length + 1"), ("mask", "total_sequence_length")):
        value = proto.graph.input.add()
        value.CopyFrom(proto.graph.input[0])
        value.name = name
        value.type.tensor_type.shape.dim[1].dim_param = total
    found = random_inputs(bundle_of(proto), {"past_sequence_length": 4, "sequence_length": 3}).arrays
    assert found["sum_mask"].shape == (1, 8)
    assert found["mask"].shape == (1, 7)


def test_an_input_that_is_no_tensor_needs_data() -> None:
    """No sequence is generated, and the message has the remedy."""
    text = """
<ir_version: 8, opset_import: ["": 18]>
items (seq(float[2]) x) => (int64 y) { y = SequenceLength (x) }
"""
    with pytest.raises(InputError, match="npz"):
        random_inputs(bundle_of(parser.parse_model(text)))
