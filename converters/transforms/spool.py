"""Weights on their way to another dtype: converted piece by piece, kept in a temporary file and mapped from there.

So neither the old nor the new weights of a large model are ever in memory as a whole.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.files import pieces
from rlx_ort.errors import ConversionError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.narrow import narrowed
from rlx_ort.ir.tensor import TensorData

__all__ = ["WeightSpool", "values_of"]

_IN_MEMORY_BYTES = 1 << 20  # smaller tensors are not worth a place in the file
_ALIGNMENT = 64


class WeightSpool:
    """Takes tensors one after another and gives them back in another dtype once all are there.

    The file is in the system's folder for temporary files (`TMPDIR`, on Windows `TEMP`), as large as the large tensors
    are afterwards, and vanishes with the last tensor that is mapped from it.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="rlx_ort-")  # noqa: SIM115  # lives as long as the spool
        self._small: dict[str, TensorData] = {}
        self._large: dict[str, tuple[int, DType, tuple[int, ...]]] = {}
        self._end = 0

    def __enter__(self) -> WeightSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def narrow(self, name: str, data: TensorData, dtype: DType) -> None:
        """Take in a tensor, rounded to a narrower float type; finite numbers stay finite, see `narrowed`.

        Raises:
            ConversionError: the temporary file cannot be written, or the weight's own file has changed.
        """
        if data.dtype is dtype or dtype.nbytes(data.num_elements) < _IN_MEMORY_BYTES:
            self._small[name] = narrowed(data, dtype)
            return
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        try:
            self._file.seek(start)
            for values in values_of(data):
                self._file.write(narrowed(TensorData.from_array(values, data.dtype), dtype).buffer.data)
        except OSError as err:
            folder = Path(tempfile.gettempdir())
            raise ConversionError(
                f"weight {name!r} cannot be kept in {folder} while it is converted: {err}; "
                "set TMPDIR (on Windows TEMP) to a folder with room"
            ) from err
        self._large[name] = (start, dtype, data.shape)
        self._end = start + dtype.nbytes(data.num_elements)

    def tensors(self) -> dict[str, TensorData]:
        """Return all tensors that were taken in; the large ones are mapped from the file."""
        if not self._large:
            return dict(self._small)
        self._file.flush()
        whole = np.memmap(self._file, np.uint8, "r", shape=(self._end,))
        found = dict(self._small)
        for name, (start, dtype, shape) in self._large.items():
            found[name] = TensorData(dtype, shape, whole[start : start + dtype.nbytes(math.prod(shape))])
        return found


def values_of(data: TensorData) -> Iterator[npt.NDArray[Any]]:
    """Yield the elements of a tensor that is not packed, in flat pieces of at most 8 MiB; use each at once."""
    size = data.dtype.numpy.itemsize
    rest = b""
    for piece in pieces(data):
        whole = rest + piece if rest else piece  # a file may give fewer bytes than asked for
        count = len(whole) // size
        rest = bytes(whole[count * size :])
        yield TensorData(data.dtype, (count,), np.frombuffer(whole[: count * size], np.uint8)).numpy()
