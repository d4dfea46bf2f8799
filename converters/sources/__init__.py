"""Where models and weights come from: one file per format, each to a `ModelBundle` or a `WeightFile`.

`open_source` takes any model file, `read_weights` any weight file; `apply_weights` brings the two together.
"""

from __future__ import annotations

from rlx_ort.converters.from_torch import bundle_from_torch as from_torch
from rlx_ort.converters.sources.apply import WeightReport, apply_weights, bake
from rlx_ort.converters.sources.open import Format, format_of, open_source, read_weights
from rlx_ort.converters.sources.weights import Rename, Renames, WeightFile, load_renames

__all__ = [
    "Format", "Rename", "Renames", "WeightFile", "WeightReport", "apply_weights", "bake", "format_of", "from_torch",
    "load_renames", "open_source", "read_weights",
]  # fmt: skip
