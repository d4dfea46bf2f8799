"""Tensors that are rounded to a narrower float type, piece by piece."""

from __future__ import annotations

import copy
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rlx_ort import ConversionError, DType
from rlx_ort.ir.tensor import PIECE_BYTES, FileRange, TensorData, narrowed_later, read_tensors, values_of, write_tensors

MANY = np.random.default_rng(3).normal(size=(5, 700_001)).astype(np.float32)  # 14 MB, no whole number of pieces


def stored(folder: Path) -> TensorData:
    """Return `MANY`, mapped from a file at an odd place."""
    odd, many = TensorData.from_array(np.ones(3, np.uint8)), TensorData.from_array(MANY)
    write_tensors(folder / "w.safetensors", {"odd": odd, "many": many}, {})
    data = read_tensors(folder / "w.safetensors")[0]["many"]
    assert isinstance(data.source, FileRange)
    return data


@pytest.mark.parametrize(("dtype", "numpy"), [(DType.F16, np.float16), (DType.BF16, ml_dtypes.bfloat16)])
def test_large_and_small_tensors_are_rounded(tmp_path: Path, dtype: DType, numpy: type) -> None:
    """As numpy and ml_dtypes round, also elements that lie across two pieces; read whole and in pieces."""
    many, few = narrowed_later(stored(tmp_path), dtype), narrowed_later(TensorData.from_array(MANY[:, :10]), dtype)
    np.testing.assert_array_equal(many.numpy(), MANY.astype(numpy))
    np.testing.assert_array_equal(few.numpy(), MANY[:, :10].astype(numpy))
    assert (many.dtype, many.shape, many.nbytes) == (dtype, MANY.shape, 2 * MANY.size)
    assert b"".join(many.pieces()) == MANY.astype(numpy).tobytes()


def test_a_large_tensor_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """Each piece holds what one piece of the original becomes."""
    sizes = [len(piece) for piece in narrowed_later(stored(tmp_path), DType.F16).pieces()]
    assert sizes == [PIECE_BYTES // 2, 2 * MANY.size - PIECE_BYTES // 2]


def test_numbers_beyond_the_range_become_the_largest() -> None:
    """Infinities and NaN stay, in a large tensor as in a small one."""
    for count in (8, 700_000):
        values = np.zeros(count, np.float32)
        values[:5] = (1e9, -1e9, np.inf, np.nan, 65504)
        got = narrowed_later(TensorData.from_array(values), DType.F16).numpy()
        np.testing.assert_array_equal(got[:6], np.array([65504, -65504, np.inf, np.nan, 65504, 0], np.float16))


def test_a_tensor_of_the_type_is_returned_as_it_is() -> None:
    """Without a copy."""
    data = TensorData.from_array(np.arange(4))
    assert narrowed_later(data, DType.I64) is data


def test_a_copy_is_a_plain_tensor() -> None:
    """It holds the rounded bytes."""
    later = narrowed_later(TensorData.from_array(MANY), DType.F16)
    copied = copy.deepcopy(later)
    assert type(copied) is TensorData
    assert copied == later


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    """When the bytes are asked for, not with half of the new ones."""
    later = narrowed_later(stored(tmp_path), DType.F16)
    with (tmp_path / "w.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ConversionError, match="was written to since it was opened"):
        list(later.pieces())


def test_pieces_are_all_elements_in_order(tmp_path: Path) -> None:
    """From memory and from a file."""
    for data in (TensorData.from_array(MANY), stored(tmp_path)):
        np.testing.assert_array_equal(np.concatenate([piece.copy() for piece in values_of(data)]), MANY.reshape(-1))
