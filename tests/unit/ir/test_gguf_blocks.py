"""GGUF blocks give the numbers that the format defines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.gguf_blocks import GGUF_FORMATS, block_format, dequantize_blocks

# Random blocks with the weights that the `gguf` package (0.19.0, gguf.quants.dequantize) reads from them.
RECORDED = np.load(Path(__file__).parents[2] / "data" / "gguf_blocks.npz")


@pytest.mark.parametrize("name", sorted(set(GGUF_FORMATS) - {"q8_k"}))
def test_blocks_give_the_recorded_weights(name: str) -> None:
    """Every bit of random blocks counts, two blocks a row."""
    np.testing.assert_array_equal(dequantize_blocks(name, RECORDED[f"{name}_raw"]), RECORDED[f"{name}_values"])


def test_q8_k_blocks_are_an_f32_scale_and_signed_bytes() -> None:
    """A block is the scale, 256 codes, and sums that only products of two packed operands read."""
    codes = np.arange(-128, 128, dtype=np.int8)
    raw = np.concatenate([np.array([0.375], "<f4").view(np.uint8), codes.view(np.uint8), np.full(32, 99, np.uint8)])
    np.testing.assert_array_equal(dequantize_blocks("q8_k", raw), codes * np.float32(0.375))


@pytest.mark.parametrize("spelling", ["Q4_K", "q4k", " Q4-K ", "q4_k"])
def test_formats_are_found_by_several_spellings(spelling: str) -> None:
    """The name in a file, and the short one."""
    assert block_format(spelling).name == "q4_k"


def test_an_unknown_format_suggests_the_closest() -> None:
    """A typo and an unknown format are different errors."""
    with pytest.raises(GraphVerifyError, match="did you mean 'q4_0'"):
        block_format("q4_00")


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    """K = 300 has no Q4_K row, and 100 bytes are none either."""
    with pytest.raises(GraphVerifyError, match="k must be a multiple; got 300"):
        block_format("q4_k").row_bytes(300)
    with pytest.raises(GraphVerifyError, match="multiples of 144 bytes"):
        dequantize_blocks("q4_k", np.zeros((2, 100), np.uint8))


def test_no_rows_give_no_weights() -> None:
    """An empty tensor keeps its shape."""
    assert dequantize_blocks("q6_k", np.zeros((0, 420), np.uint8)).shape == (0, 512)
