"""Optimisers of ONNX Runtime that end the process or lose precision on some models, and how to recognise those models.

A fault is data: the optimiser to leave out, and what a model must hold for it to matter. Each is reproduced by
`tests/backend/execution/test_optimizer_faults.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from rlx_ort.converters.protos import bodies_of, graphs_of

if TYPE_CHECKING:
    import onnx

KEY = "optimization.disable_specified_optimizers"
_F32, _F16, _F64, _BF16 = 1, 10, 11, 16  # of TensorProto


@dataclass(frozen=True, slots=True)
class OptimizerFault:
    """An optimiser that the CPU provider cannot survive, or that makes results wrong, on some models.

    Attributes:
        optimizer: its name in ONNX Runtime.
        operators: a model without one of these is safe.
        element_types: a model without values of one of these ONNX element types is safe.
        reason: the wrong result, and where it was measured.
        epsilon: whether a model is safe too if the epsilons of its norms are f32.
        everywhere: whether it is wrong on every provider.
        right_from: the first version of ONNX Runtime that was found to be right; all are wrong if it is empty.
    """

    optimizer: str
    operators: tuple[str, ...]
    element_types: tuple[int, ...]
    reason: str
    epsilon: bool = False
    everywhere: bool = False
    right_from: tuple[int, ...] = ()


FAULTS = (
    OptimizerFault(
        "MatmulTransposeFusion",
        ("Transpose", "MatMul"),
        (_F16,),
        "Transpose of the batch axis (perm 1, 0, 2) between a Cast to f16 and MatMul: the graph it leaves ends the "
        "process in the NCHWc transformer, which runs next (1.31.1)",
    ),
    *(
        OptimizerFault(
            "MatMulScaleFusion",
            ("MatMul", scaled),
            (_F64,),
            "the factor of an f64 product becomes an attribute, which is an f32 (1.31.1)",
        )
        for scaled in ("Mul", "Div")
    ),
    *(
        OptimizerFault(
            "NoopElimination", (scaled,), (_F64,), "an f64 factor within 1e-8 of 1 is taken for 1 and removed (1.31.1)"
        )
        for scaled in ("Mul", "Div")
    ),
    OptimizerFault(
        "SimplifiedLayerNormFusion",
        ("ReduceMean", "Sqrt", "Div"),
        (_F16, _F64, _BF16),
        "the epsilon of an RMS norm becomes 1e-5 unless it is an f32 (1.31.1 and 1.32.0)",
        epsilon=True,
        everywhere=True,
    ),
    *(
        OptimizerFault(
            f"LayerNormFusion{level}",
            ("ReduceMean", "Sqrt", "Div"),
            (_F64,),
            "the epsilon of an f64 layer norm becomes an attribute, which is an f32 (1.31.1)",
            epsilon=True,
            everywhere=True,
        )
        for level in ("L1", "L2")
    ),
    *(
        OptimizerFault(
            f"LayerNormFusion{level}",
            ("ReduceMean", "Sqrt", "Div"),
            (_F16, _BF16),
            "the epsilon of a layer norm becomes 1e-5 unless it is an f32 (1.24.4)",
            epsilon=True,
            everywhere=True,
            right_from=(1, 31),
        )
        for level in ("L1", "L2")
    ),
)


def disabled_optimizers(model: bytes, version: tuple[int, ...], *, on_cpu: bool) -> list[str]:
    """Return the optimisers of a version to leave out for a serialised ONNX model, on the CPU provider or another."""
    if model[4:8] == b"ORTM":
        return []  # ORT format: it was optimised when it was made
    faults = [fault for fault in FAULTS if on_cpu or fault.everywhere]
    faults = [fault for fault in faults if not fault.right_from or version < fault.right_from]
    near = [fault for fault in faults if all(operator.encode() in model for operator in fault.operators)]
    if not near:
        return []
    import onnx

    proto = onnx.ModelProto.FromString(model)
    types = set(_element_types(proto))
    other = any(_has_other_epsilon(graph, {}) for graph in (proto.graph, *proto.functions))
    wrong = [fault for fault in near if (other or not fault.epsilon) and not types.isdisjoint(fault.element_types)]
    return list(dict.fromkeys(fault.optimizer for fault in wrong))


def _element_types(model: onnx.ModelProto) -> Iterator[int]:
    """Yield the element types of inputs, weights, constants and casts, those of subgraphs included."""
    graphs = [graph for graph in graphs_of(model) if graph.node]
    for graph in graphs:
        yield from (tensor.data_type for tensor in graph.initializer)
        yield from (value.type.tensor_type.elem_type for value in graph.input)
    nodes = [node for owner in (*graphs, *model.functions) for node in owner.node]
    for attribute in chain.from_iterable(node.attribute for node in nodes):
        if attribute.name in {"to", "dtype"}:
            yield attribute.i
        if attribute.HasField("t"):
            yield attribute.t.data_type


def _has_other_epsilon(graph: onnx.GraphProto | onnx.FunctionProto, outer: Mapping[str, int]) -> bool:
    """Return whether a number added before a square root may be of another type than f32; `outer` are known types."""
    known = {**outer, **{tensor.name: tensor.data_type for tensor in getattr(graph, "initializer", ())}}
    added: dict[str, list[int | None]] = {}
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to":
                known[node.output[0]] = attribute.i
            elif node.op_type == "Constant" and attribute.HasField("t"):
                known[node.output[0]] = attribute.t.data_type
        if any(_has_other_epsilon(inner, known) for inner in bodies_of(node)):
            return True
        if node.op_type == "Add":
            added[node.output[0]] = [known.get(name) for name in node.input]
        elif node.op_type == "Sqrt" and _F32 not in added.get(node.input[0], [_F32]):
            return True
    return False
