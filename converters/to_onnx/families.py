"""Imports every family of lowerings, so that each op finds its own. A new family file is added here."""

from __future__ import annotations

from rlx_ort.converters.to_onnx import (
    attention,
    blocks,
    control,
    conv,
    custom,
    dequant,
    elementwise,
    indexing,
    linalg,
    moe,
    native,
    norm,
    quant,
    reduce,
    sample,
    sequence,
    shape,
    signal,
    solve,
    volume,
)

__all__ = ["FAMILIES"]

FAMILIES = (
    attention,
    blocks,
    control,
    conv,
    custom,
    dequant,
    elementwise,
    indexing,
    linalg,
    moe,
    native,
    norm,
    quant,
    reduce,
    sample,
    sequence,
    shape,
    signal,
    solve,
    volume,
)
"""The modules that hold the lowerings."""
