"""Rounds tensors to a narrower float type."""

from __future__ import annotations

import numpy as np

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData

__all__ = ["narrowed"]

_LARGEST = {DType.F16: 65504.0, DType.BF16: 3.3895313892515355e38}


def narrowed(data: TensorData, dtype: DType) -> TensorData:
    """Return the tensor in another float type; a copy, unless it already is of that type.

    Finite numbers that the type cannot hold become the largest it can: -1e9 in a mask is -65504 in f16, as minus
    infinity would turn a row in which all is masked into NaN. Infinities stay.
    """
    if data.dtype is dtype:
        return data
    wide = data.numpy()
    with np.errstate(over="ignore"):
        values = wide.astype(dtype.numpy)
    overflown = np.isinf(values.astype(np.float32)) & np.isfinite(wide)
    if overflown.any():
        limit = _LARGEST[dtype]
        values = np.where(overflown, np.copysign(limit, wide), wide).astype(dtype.numpy)
    return TensorData.from_array(values, dtype)
