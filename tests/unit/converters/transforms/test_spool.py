"""Weights that are converted piece by piece."""

from __future__ import annotations

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rlx_ort.converters.transforms.spool import WeightSpool, values_of
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import FileRange, TensorData
from rlx_ort.ir.tensor_file import read_tensors, write_tensors

MANY = np.random.default_rng(3).normal(size=(5, 700_001)).astype(np.float32)  # 14 MB, no whole number of pieces


def stored(tmp_path: Path) -> TensorData:
    """Return `MANY`, mapped from a file at an odd place."""
    write_tensors(tmp_path / "w.safetensors", {"odd": TensorData.from_array(np.ones(3, np.uint8)),
                                               "many": TensorData.from_array(MANY)}, {})  # fmt: skip
    data = read_tensors(tmp_path / "w.safetensors")[0]["many"]
    assert isinstance(data.source, FileRange)
    return data


@pytest.mark.parametrize(("dtype", "numpy"), [(DType.F16, np.float16), (DType.BF16, ml_dtypes.bfloat16)])
def test_large_and_small_tensors_come_back_rounded(tmp_path: Path, dtype: DType, numpy: type) -> None:
    """What numpy and ml_dtypes round to, also for elements that lie across two pieces."""
    with WeightSpool() as spool:
        spool.narrow("many", stored(tmp_path), dtype)
        spool.narrow("few", TensorData.from_array(MANY[:, :10]), dtype)
        spool.narrow("same", TensorData.from_array(np.arange(4)), DType.I64)
        found = spool.tensors()
    np.testing.assert_array_equal(found["many"].numpy(), MANY.astype(numpy))
    np.testing.assert_array_equal(found["few"].numpy(), MANY[:, :10].astype(numpy))
    np.testing.assert_array_equal(found["same"].numpy(), np.arange(4))
    assert {data.dtype for name, data in found.items() if name != "same"} == {dtype}


def test_pieces_are_all_elements_in_order(tmp_path: Path) -> None:
    """From memory and from a file."""
    for data in (TensorData.from_array(MANY), stored(tmp_path)):
        np.testing.assert_array_equal(np.concatenate([piece.copy() for piece in values_of(data)]), MANY.reshape(-1))


def test_a_full_disk_is_a_conversion_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the weight, the folder and the variable that moves it."""

    class Full:
        def seek(self, place: int) -> None: ...

        def close(self) -> None: ...

        def write(self, data: object) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **given: Full())
    with WeightSpool() as spool, pytest.raises(ConversionError, match=r"weight 'many' cannot be kept in .*TMPDIR"):
        spool.narrow("many", TensorData.from_array(MANY), DType.F16)
