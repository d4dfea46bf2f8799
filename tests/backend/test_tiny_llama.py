"""The example decoder: its steps over a cache on the device give what a float64 reference without a cache gives."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_llama
from reference_check import relative_error, rotation

from rlx_ort import CompileOptions, DecodeLoop, Device, LayerKvCache, PlacementRule, Session

SIZES = tiny_llama.Sizes(vocabulary=24, width=32, heads=4, kv_heads=2, inner=24)
PROMPT = np.random.default_rng(2).integers(0, SIZES.vocabulary, (2, 4))


@pytest.fixture(scope="module")
def weights() -> dict[str, tiny_llama.Array]:
    """Return the weights of the decoder."""
    return tiny_llama.make_weights(SIZES)


def test_each_step_agrees_with_the_reference(device: Device, weights: dict[str, tiny_llama.Array]) -> None:
    """The logits of the prompt and of five steps are within 1e-4, for a batch of two."""
    decoder = tiny_llama.Decoder(SIZES, weights, device.label)
    ids = PROMPT
    logits = decoder.start(PROMPT)
    for _ in range(5):
        assert relative_error(logits, tiny_llama.reference_logits(SIZES, weights, ids)) < 1e-4
        ids = np.concatenate([ids, decoder.token()], axis=1)
        [logits] = decoder.step()
    assert relative_error(logits, tiny_llama.reference_logits(SIZES, weights, ids)) < 1e-4


def test_the_decode_loop_draws_the_tokens_of_the_reference(
    device: Device, weights: dict[str, tiny_llama.Array]
) -> None:
    """One graph for prompt and steps, over a cache of the longest length, for a batch of two."""
    options = CompileOptions(placement=PlacementRule.ASSISTED)
    loop = DecodeLoop(Session(device, options).compile(tiny_llama.build_in_place(SIZES, weights)), 16, batch=2)
    tokens = np.stack(list(loop.generate(PROMPT, 8)), axis=1)
    np.testing.assert_array_equal(tokens, tiny_llama.reference_tokens(SIZES, weights, PROMPT, 8))


def test_the_likeliest_tokens_are_those_of_the_reference(weights: dict[str, tiny_llama.Array]) -> None:
    """Tokens drawn in the graph and fed back on the device are the reference's, and not all the same."""
    tokens = tiny_llama.Decoder(SIZES, weights, "cpu").generate(PROMPT, 10)
    expected = tiny_llama.reference_tokens(SIZES, weights, PROMPT, 10)
    assert len(np.unique(expected)) > 3
    np.testing.assert_array_equal(tokens, expected)


def test_a_cache_on_the_host_gives_the_same_logits(weights: dict[str, tiny_llama.Array]) -> None:
    """`LayerKvCache` carries the keys and values of both sequences from step to step."""
    decoder = tiny_llama.Decoder(SIZES, weights, "cpu")
    cos, sin = (table.astype(np.float32) for table in rotation(SIZES.longest, SIZES.head))
    count = PROMPT.shape[1]
    feeds = {"ids": PROMPT.astype(np.int32), "cos": cos[:count], "sin": sin[:count]}
    _, token, *flat = decoder.prefill.run(feeds)
    cache = LayerKvCache.from_layer_outputs(SIZES.layers, 2, count, SIZES.kv_width, flat)
    ids = np.concatenate([PROMPT, token], axis=1)
    for _ in range(3):
        past = cache.past_seq
        held = {f"{name}{layer}": group[layer] for name, group in (("k", cache.keys), ("v", cache.values))
                for layer in range(SIZES.layers)}  # fmt: skip
        feeds = {"ids": token, "cos": cos[past : past + 1], "sin": sin[past : past + 1], **held}
        logits, token, *grown = decoder.decode.run(feeds)
        logits, cache = cache.advance_from_decode_outputs([logits, *grown])
        assert relative_error(logits, tiny_llama.reference_logits(SIZES, weights, ids)) < 1e-4
        ids = np.concatenate([ids, token], axis=1)
    assert cache.past_seq == count + 3
