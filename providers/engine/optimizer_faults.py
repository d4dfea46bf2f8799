"""Optimisers of ONNX Runtime that end the process or lose precision on some models, and how to recognise those models.

A fault is data: the optimiser to leave out, and what a model must hold for it to matter. Each is reproduced by
`tests/backend/execution/test_optimizer_faults.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

KEY = "optimization.disable_specified_optimizers"
_F16 = 10  # TensorProto.FLOAT16
_F64 = 11  # TensorProto.DOUBLE


@dataclass(frozen=True, slots=True)
class OptimizerFault:
    """An optimiser that the CPU provider cannot survive, or that makes results wrong, on some models.

    Attributes:
        optimizer: its name in ONNX Runtime.
        operators: a model without one of these is safe.
        element_type: a model without values of this ONNX element type is safe.
        reason: the wrong result, and where it was measured.
    """

    optimizer: str
    operators: tuple[str, ...]
    element_type: int
    reason: str


FAULTS = (
    OptimizerFault(
        "MatmulTransposeFusion",
        ("Transpose", "MatMul"),
        _F16,
        "Transpose of the batch axis (perm 1, 0, 2) between a Cast to f16 and MatMul: the graph it leaves ends the "
        "process in the NCHWc transformer, which runs next (1.31.1)",
    ),
    *(
        OptimizerFault(
            "MatMulScaleFusion",
            ("MatMul", scaled),
            _F64,
            "the factor of an f64 product becomes an attribute, which is an f32 (1.31.1)",
        )
        for scaled in ("Mul", "Div")
    ),
    *(
        OptimizerFault(
            "NoopElimination", (scaled,), _F64, "an f64 factor within 1e-8 of 1 is taken for 1 and removed (1.31.1)"
        )
        for scaled in ("Mul", "Div")
    ),
)


def disabled_optimizers(model: bytes) -> list[str]:
    """Return the optimisers to leave out for a serialised ONNX model on the CPU provider."""
    if model[4:8] == b"ORTM":
        return []  # ORT format: it was optimised when it was made
    near = [fault for fault in FAULTS if all(operator.encode() in model for operator in fault.operators)]
    if not near:
        return []
    import onnx

    proto = onnx.ModelProto.FromString(model)
    graphs = [proto.graph, *proto.functions]
    types = {kind for graph in graphs for kind in _element_types(graph)}
    return list(dict.fromkeys(fault.optimizer for fault in near if fault.element_type in types))


def _element_types(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[int]:
    """Yield the element types of inputs, weights, constants and casts, those of subgraphs included."""
    if hasattr(graph, "initializer"):
        yield from (tensor.data_type for tensor in graph.initializer)
        yield from (value.type.tensor_type.elem_type for value in graph.input)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in {"to", "dtype"}:
                yield attribute.i
            if attribute.HasField("t"):
                yield attribute.t.data_type
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    yield from _element_types(inner)
