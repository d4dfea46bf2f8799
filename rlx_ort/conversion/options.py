"""`ConvertOptions`: what a conversion does besides changing the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    from rlx_ort.converters.sources.renames import Renames
    from rlx_ort.converters.transforms.half_precision import PrecisionKind
    from rlx_ort.converters.transforms.quantize import QuantizeKind
    from rlx_ort.device import Device
    from rlx_ort.parity.metrics import Tolerance

__all__ = ["ConvertOptions"]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What a conversion does besides changing the format. Everything is off by default but the verification.

    Attributes:
        params: a weight file whose tensors replace the weights of the same name, or become weights in place of inputs.
        renames: what tensors of the file are called in the model; None takes their own names.
        inputs: values that become the inputs of the part to keep; empty keeps the model's.
        outputs: values that become its outputs; empty keeps the model's.
        dims: named dim -> size it is fixed at.
        opset: ai.onnx opset to move to.
        ir_version: IR version to declare.
        simplify: whether to fold constants, remove what does nothing and infer shapes.
        precision: `f16`, `bf16` or `mixed`.
        keep: operators and names of nodes that stay in f32; of a quantisation, names of nodes that stay as they are.
        quantize: `int8-dynamic`, `int8-static` or `int4-weights`.
        calibration: input -> samples, along a new first axis or the batch axis, for `int8-static`.
        external_data: whether weights go to a file of their own; None decides by size.
        detach: name of a safetensors file beside an ONNX target that gets the weights.
        device: the device an optimised target is made for.
        overwrite: whether files that are there may be replaced.
        verify: whether source and result are run on the same inputs and compared before the target appears.
        verify_inputs: name -> array to verify on; random ones by default.
        tolerance: what counts as equal; None goes by the precision, see `default_tolerance`.
    """

    params: Path | None = None
    renames: Renames | None = None
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    dims: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    opset: int | None = None
    ir_version: int | None = None
    simplify: bool = False
    precision: PrecisionKind | None = None
    keep: Sequence[str] = ()
    quantize: QuantizeKind | None = None
    calibration: Mapping[str, npt.NDArray[Any]] | None = None
    external_data: bool | None = None
    detach: str | None = None
    device: Device | str | None = None
    overwrite: bool = False
    verify: bool = True
    verify_inputs: Mapping[str, npt.NDArray[Any]] | None = None
    tolerance: Tolerance | None = None
