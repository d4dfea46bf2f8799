"""What a conversion did: facts of the model before and after, and the verdict on the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx_ort.converters.bundle import ModelBundle
    from rlx_ort.parity.compare import Comparison

__all__ = ["ConversionReport", "ModelFacts", "ParamsTaken", "facts_of", "random_ops", "verdict"]

_RANDOM_OPS = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a summary says of a model.

    Attributes:
        nodes: nodes, those of bodies included.
        opset: ai.onnx opset.
        ir_version: IR version.
        weight_bytes: element type -> bytes of the weights of that type.
        nbytes: bytes of weights and model together.
    """

    nodes: int
    opset: int
    ir_version: int
    weight_bytes: Mapping[str, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ParamsTaken:
    """What a weight file had for the model.

    Attributes:
        loaded: how many weights have the data of the file now.
        became_weights: inputs that are weights now.
        missing: weights that the file has nothing for; they are as they were.
        unused: tensors of the file that the model has no place for.
    """

    loaded: int
    became_weights: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What `convert` did.

    Attributes:
        source: what was converted.
        files: the files of the target, the model first.
        file_bytes: the bytes of all files together.
        before: facts of the source, its weights already exchanged.
        after: facts of the result.
        steps: what each step that ran reports, by its name: `precision`, `opset`, `params`...
        comparison: source against result; None if it was not verified.
        unverified: why it was not; empty if it was.
        emulated: how a side was run in place of what it says, as bf16 on the CPU; empty where both ran as they are.
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


def facts_of(bundle: ModelBundle) -> ModelFacts:
    """Return the facts of a model; reads no weights."""
    by_dtype: dict[str, int] = {}
    for data in bundle.weights.values():
        by_dtype[data.dtype.value] = by_dtype.get(data.dtype.value, 0) + data.nbytes
    weights = dict(sorted(by_dtype.items(), key=lambda row: -row[1]))
    return ModelFacts(bundle.node_count, bundle.opset, int(bundle.proto.ir_version), weights, bundle.nbytes)


def random_ops(bundle: ModelBundle) -> list[str]:
    """Return the operators of a model that draw random numbers: no two runs of it agree."""
    from rlx_ort.converters.bundle import graphs_of

    return sorted({n.op_type for graph in graphs_of(bundle.proto) for n in graph.node if n.op_type in _RANDOM_OPS})


def verdict(comparison: Comparison, drawn: Sequence[str]) -> str:
    """Return why a conversion is refused; `drawn` are the operators that draw random numbers."""
    lines = [f"the result differs from the source by more than {comparison.tolerance}; nothing was written:"]
    for output in comparison.outputs:
        found, mark = output.found, "" if output.ok else " <-"
        if found.shapes is not None:
            lines.append(f"  {output.name}: shape {list(found.shapes[0])} became {list(found.shapes[1])}{mark}")
            continue
        extra = f", {found.nonfinite} not finite on one side only" if found.nonfinite else ""
        extra += f", {found.differing} of {found.elements} differ" if found.differing else ""
        figures = f"max abs {found.max_abs:.3g}, relative L2 {found.relative_l2:.3g}, cosine {found.cosine:.6g}"
        lines.append(f"  {output.name}: {figures}{extra}{mark}")
    if drawn:
        operators = ", ".join(drawn)
        lines.append(f"  the model draws random numbers ({operators}), so no two runs agree; do not verify it")
    else:
        lines.append("  allow more with a tolerance, keep nodes as they are, or write it unverified and bisect the two")
    return "\n".join(lines)
