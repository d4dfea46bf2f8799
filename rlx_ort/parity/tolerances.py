"""What counts as equal by default, from the precision of the two sides and from where they run."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rlx_ort.parity.metrics import Tolerance
from rlx_ort.parity.opening import OrtFormatFile

__all__ = ["dtypes_of", "tolerance_for"]

_F32 = 1e-5
"""One rounding is 6e-8; other kernels and orders of summation add up to some tens of them over a deep model."""
_DEVICES = 1e-3
"""Kernels of another device sum in other ways and take shortcuts in `exp` and `tanh`."""
_F16 = 5e-3
"""One rounding is 5e-4."""
_BF16 = 4e-2
"""Three bits less than f16, so eight times as much."""
_COSINE = {8: 0.99, 4: 0.98}
"""Bits of quantised values -> floor of the cosine: single elements are far off, the direction of the result is not."""


def tolerance_for(dtypes: Collection[str], *, other_device: bool = False, bits: int | None = None) -> Tolerance:
    """Return what counts as equal where the caller does not say.

    Quantised: a cosine of 0.99 for 8 bits and 0.98 for 4. Else a relative L2 error of 1e-5 in f32, 5e-3 where one side
    has f16 and 4e-2 where one has bf16, and at least 1e-3 between two devices.

    Args:
        dtypes: names of the float types on both sides, such as `f32` and `f16`.
        other_device: whether the two run on different devices.
        bits: bits of quantised values, None where nothing was quantised between the two.
    """
    if bits is not None:
        return Tolerance(relative_l2=None, cosine=_COSINE[bits])
    allowed = _BF16 if "bf16" in dtypes else _F16 if "f16" in dtypes else _F32
    return Tolerance(max(allowed, _DEVICES) if other_device else allowed)


def dtypes_of(*models: object) -> set[str]:
    """Return the names of the element types of the weights and interfaces of models; none of ORT files."""
    return {name for model in models if not isinstance(model, OrtFormatFile) for name in _dtypes(model)}


def _dtypes(model: object) -> Iterator[str]:
    from rlx_ort.converters.bundle import ModelBundle
    from rlx_ort.ir.types import TensorType

    if not isinstance(model, ModelBundle):
        return
    for data in model.weights.values():
        yield data.dtype.value
    for kind in (*model.input_types().values(), *model.output_types().values()):
        if isinstance(kind, TensorType):
            yield kind.dtype.value
