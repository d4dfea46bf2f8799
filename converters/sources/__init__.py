"""Where models and weights come from: one file per format, each to a `ModelBundle` or a `WeightFile`.

`open_source` takes any model file, `read_weights` any weight file; `apply_weights` brings the two together.
"""

from __future__ import annotations

from rlx_ort.converters.sources.apply import WeightReport, apply_weights
from rlx_ort.converters.sources.detect import Format, format_of
from rlx_ort.converters.sources.open import open_source, read_weights
from rlx_ort.converters.sources.renames import Rename, Renames, load_renames
from rlx_ort.converters.sources.torch_module import from_torch
from rlx_ort.converters.sources.weights import WeightFile

__all__ = [
    "Format",
    "Rename",
    "Renames",
    "WeightFile",
    "WeightReport",
    "apply_weights",
    "format_of",
    "from_torch",
    "load_renames",
    "open_source",
    "read_weights",
]
