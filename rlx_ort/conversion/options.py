"""The options of a conversion (`ConvertOptions`), and its result (`ConversionReport`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.from_onnx.tensor_files import Folders
from rlx_ort.converters.sources import Renames
from rlx_ort.converters.transforms.half_precision import PrecisionKind
from rlx_ort.converters.transforms.quantize import QuantizeKind
from rlx_ort.device import Device
from rlx_ort.parity.compare import Comparison
from rlx_ort.parity.metrics import Tolerance


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Changes of a conversion besides the format. Everything is off by default but the verification.

    Attributes:
        params: a weight file whose tensors replace the weights of the same name, or become weights in place of inputs.
        cast: whether floats of that file may be converted to the model's float type.
        renames: the names of the file's tensors in the model; None takes their own names.
        inputs: values that become the inputs of the part to keep; empty keeps the model's.
        outputs: values that become its outputs; empty keeps the model's.
        dims: named dim -> size it is fixed at.
        free: name -> places `input[axis]` of fixed dims that become a dim of that name; without places, the first axis
            of every input. The result is run on twice the size as well.
        opset: ai.onnx opset to move to.
        ir_version: IR version to declare.
        simplify: whether to fold constants, remove nodes without effect and infer shapes.
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
        tolerance: the largest difference; None chooses it by the precision, see `default_tolerance`.
        trusted_links: folders that links of the source's external data may lead into; see `from_onnx`.
    """

    params: Path | None = None
    cast: bool = False
    renames: Renames | None = None
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    dims: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    free: Mapping[str, Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
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
    trusted_links: Folders = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A summary of a model: its nodes with those of bodies, bytes of weights by element type, and bytes altogether."""

    nodes: int
    opset: int
    ir_version: int
    weight_bytes: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParamsTaken:
    """The result of reading a weight file: how many weights it gave data, and the inputs that became weights.

    `missing` weights are not in the file and stay unchanged. The model has no place for `unused` tensors.
    """

    loaded: int
    became_weights: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class ConversionReport:
    """The result of `convert`.

    Attributes:
        files: the files of the target, the model first.
        file_bytes: the bytes of all files together.
        before: facts of the source, its weights already exchanged.
        after: facts of the result.
        steps: the report of each step that ran, by its name: `precision`, `opset`, `params`...
        comparison: source against result; None if it was not verified.
        unverified: why it was not; empty if it was.
        emulated: how a side was emulated, such as bf16 on the CPU; empty if both ran as they are.
        seconds: step -> time it took.
    """

    source: str
    files: tuple[Path, ...]
    file_bytes: int
    before: ModelFacts
    after: ModelFacts
    steps: Mapping[str, Any]
    comparison: Comparison | None
    unverified: str
    emulated: str
    seconds: Mapping[str, float]

    def __repr__(self) -> str:
        target = self.files[0].name if self.files else "nothing"
        verdict = "not verified" if self.comparison is None else "verified" if self.comparison.ok else "differs"
        return f"<ConversionReport {Path(self.source).name} to {target}, {self.file_bytes} bytes, {verdict}>"


def facts_of(bundle: ModelBundle) -> ModelFacts:
    """Return the facts of a model; reads no weights."""
    sizes: Counter[str] = Counter()
    for data in bundle.weights.values():
        sizes[data.dtype.value] += data.nbytes
    weights = dict(sizes.most_common())
    return ModelFacts(bundle.node_count, bundle.opset, int(bundle.proto.ir_version), weights, bundle.nbytes)
