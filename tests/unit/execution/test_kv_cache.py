"""`LayerKvCache`: batches are independent, and arrays of the wrong size are refused."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort import InputError, LayerKvCache, bucket_decode_mask

BATCH, PAST, WIDTH, LAYERS = 2, 3, 4, 2


def _outputs(tokens: int = PAST) -> list[np.ndarray]:
    size = BATCH * tokens * WIDTH
    return [np.arange(size, dtype=np.float32).reshape(BATCH, tokens, WIDTH) + 1000 * i for i in range(2 * LAYERS)]


def _cache() -> LayerKvCache:
    return LayerKvCache.from_layer_outputs(LAYERS, BATCH, PAST, WIDTH, _outputs())


def test_outputs_become_keys_and_values_in_turns() -> None:
    """Flat or shaped, output 2i is the keys of layer i and output 2i + 1 its values."""
    flat = LayerKvCache.from_layer_outputs(LAYERS, BATCH, PAST, WIDTH, [out.reshape(-1) for out in _outputs()])
    np.testing.assert_array_equal(flat.keys[1], _outputs()[2])
    np.testing.assert_array_equal(flat.values[0], _outputs()[1])
    assert (flat.num_layers, flat.batch, flat.past_seq, flat.kv_dim) == (LAYERS, BATCH, PAST, WIDTH)


def test_a_wrong_number_of_outputs_is_refused() -> None:
    """Three outputs cannot be two layers."""
    with pytest.raises(InputError, match="got 3 outputs"):
        LayerKvCache.from_layer_outputs(LAYERS, BATCH, PAST, WIDTH, _outputs()[:3])


def test_an_output_of_another_length_is_refused_by_name() -> None:
    """The message names the layer's value."""
    outputs = _outputs()
    outputs[3] = outputs[3][:, :2]
    with pytest.raises(InputError, match="v1 needs 24 elements"):
        LayerKvCache.from_layer_outputs(LAYERS, BATCH, PAST, WIDTH, outputs)


def test_padding_follows_the_tokens_of_each_sequence() -> None:
    """The second sequence begins at its own place, not right behind the first one's tokens."""
    padded = _cache().pad_layers_to_upper(5)
    assert len(padded) == 2 * LAYERS
    np.testing.assert_array_equal(padded[0][:, :PAST], _outputs()[0])
    assert not padded[0][:, PAST:].any()
    with pytest.raises(InputError, match="do not fit"):
        _cache().pad_layers_to_upper(2)


@pytest.mark.parametrize("places", [PAST + 1, 6])
def test_a_step_keeps_one_more_token_of_each_sequence(places: int) -> None:
    """Of padded outputs the first tokens of every sequence are kept, not the first elements of all."""
    logits = np.ones((BATCH, 7), np.float32)
    got, cache = _cache().advance_from_decode_outputs([logits, *_outputs(places)])
    np.testing.assert_array_equal(got, logits)
    assert cache.past_seq == PAST + 1
    np.testing.assert_array_equal(cache.keys[0][1], _outputs(places)[0][1, : PAST + 1])


def test_a_step_without_room_for_the_new_token_is_refused() -> None:
    """Outputs with the old number of tokens raise."""
    with pytest.raises(InputError, match="k0 needs places for 4 tokens"):
        _cache().advance_from_decode_outputs([np.ones(1), *_outputs(PAST)])
    with pytest.raises(InputError, match="got 4 outputs"):
        _cache().advance_from_decode_outputs(_outputs(PAST + 1))


def test_the_mask_hides_the_places_after_the_new_token() -> None:
    """Places up to and including `past_seq` count 0, the others -1e9."""
    np.testing.assert_array_equal(bucket_decode_mask(2, 5), np.array([0, 0, 0, -1e9, -1e9], np.float32))
    assert bucket_decode_mask(0, 2, batch=3).shape == (3, 2)
    with pytest.raises(InputError, match="no place"):
        bucket_decode_mask(5, 5)
