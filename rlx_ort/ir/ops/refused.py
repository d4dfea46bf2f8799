"""Kinds that are read but not run: graphics, gradients, factorisations, and compiler-internal ops.

A graph may hold them, so that a model with them can be read, shown and cut; `verify` reports each with its node, the
reason and a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.types import ValueType

__all__ = ["REFUSED_KINDS", "Refused", "refused_op"]

_GRAPHICS = "it is a graphics kernel, for which ONNX Runtime has no operator"
_GRADIENT = "it computes a gradient, and rlx_ort runs inference only"
_FACTORS = "ONNX has no operator for it"
_COMPILED = "only a compiler writes it"
_NO_OP = "there is no IR op of it yet"

_RENDER = "render outside the graph and feed the image in"
_CUT = "cut the graph before it: set the outputs to the values of the forward pass"
_SOLVE = "use dense_solve where a solution is wanted, or compute it with numpy and feed it in"
_UNFUSE = "export the model before fusion, in its single ops"

_GRADIENT_KINDS = """
    ReluBackward ActivationBackward FakeQuantizeBackward FakeQuantizeLSQBackwardX
    FakeQuantizeLSQBackwardScale ComplexNormSqBackward MaxPool2dBackward Conv2dBackwardInput
    Conv2dBackwardWeight SoftmaxCrossEntropyBackward AttentionBackwardQuery AttentionBackwardKey
    AttentionBackwardValue LayerNormBackwardInput LayerNormBackwardGamma RmsNormBackwardInput
    RmsNormBackwardGamma RmsNormBackwardBeta RopeBackward GroupNormBackwardInput GroupNormBackwardGamma
    GroupNormBackwardBeta CumsumBackward GatherBackward ScanBackward ScanBackwardXs
"""

REFUSED_KINDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("GaussianSplatRender", "GaussianSplatPrepare", "GaussianSplatRasterize", "GaussianSplatRenderBackward"),
        (_GRAPHICS, _RENDER),
    ),
    **dict.fromkeys(_GRADIENT_KINDS.split(), (_GRADIENT, _CUT)),
    **dict.fromkeys(("Cholesky", "TriangularSolve", "LogDet", "Svd", "Qr", "Eigh"), (_FACTORS, _SOLVE)),
    "ElementwiseRegion": (_COMPILED, _UNFUSE),
    **{
        kind: (_NO_OP, f"add ONNX's operator {operator} with onnx_node")
        for kind, operator in {
            "Det": "Det",
            "Lstm": "LSTM",
            "Gru": "GRU",
            "Rnn": "RNN",
            "ConvTranspose3d": "ConvTranspose",
        }.items()
    },
    **dict.fromkeys(
        ("RngNormal", "RngUniform"),
        ("ONNX Runtime's generators differ from one provider to the next", "draw with numpy and feed the numbers in"),
    ),
    "Mamba2": (_NO_OP, "write it with selective_scan or scan"),
    "LogMel": (_NO_OP, "write it with stft, psd, a matmul with the filter bank, and log"),
    "WelchPeaks": (_NO_OP, "write it with stft, psd and mean, and find the peaks with numpy"),
}
"""Kind -> (why it does not run, what to do instead)."""


class Refused(Op):
    """Base of the kinds that do not run.

    Attributes:
        attributes: the op's attributes as text, kept for reports.
    """

    attributes: Mapping[str, str] = field(default_factory=dict)

    reason: ClassVar[str] = ""
    remedy: ClassVar[str] = ""

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Refuse.

        Raises:
            GraphVerifyError: always; the message has the reason and a remedy.
        """
        raise GraphVerifyError(f"{self.kind} does not run: {self.reason}; {self.remedy}")

    def describe(self) -> str:
        """Return the kind."""
        return self.kind


def _class_of(kind: str, reason: str, remedy: str) -> type[Refused]:
    names = {
        "kind": kind,
        "reason": reason,
        "remedy": remedy,
        "arity": (0, None),
        "__doc__": f"A kind that does not run: {reason}.",
        "__module__": __name__,
        "__slots__": (),
    }
    return type(kind, (Refused,), names)


_CLASSES = {kind: _class_of(kind, *texts) for kind, texts in REFUSED_KINDS.items()}


def refused_op(kind: str, attributes: Mapping[str, str] | None = None) -> Refused:
    """Return the op of a refused kind, for an importer that keeps what it cannot run.

    Raises:
        KeyError: the kind is not one of `REFUSED_KINDS`.
    """
    return _CLASSES[kind](dict(attributes or {}))
