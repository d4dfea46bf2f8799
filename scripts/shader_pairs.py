#!/usr/bin/env python
"""Run each operator on WebGPU with one set of attributes after another, in one process, and compare with the CPU.

    python scripts/shader_pairs.py
    python scripts/shader_pairs.py Conv Softmax

All sessions stay open, and compiled shaders are shared among them: an attribute that the key of a shader lacks gives
the later node the shader of the earlier one. Exits with 1 if a result is wrong that neither a limit of the provider
refuses nor a lowering avoids. Takes minutes on an adapter in software.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rlx_ort.device import Device
from rlx_ort.providers.base import limited_nodes
from rlx_ort.providers.registry import provider_of, require_available

_WEBGPU = Device("webgpu")
_MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Case:
    """An operator, its inputs, and attribute sets; a set may bring constant inputs, which follow the others."""

    op: str
    inputs: Mapping[str, Any]
    attributes: Sequence[Mapping[str, Any]]
    constants: Sequence[Mapping[str, Any]] = ({},)
    outputs: int = 1
    domain: str = ""

    def variants(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Yield attributes and constants, all combinations."""
        yield from itertools.product(self.attributes, self.constants)


def _f(*shape: int) -> Any:
    return np.random.default_rng([7, *shape]).standard_normal(shape).astype(np.float32)


def _each(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def _i64(*values: int) -> Any:
    return np.array(values, np.int64)


def _combined(**values: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def _cases() -> Iterator[Case]:
    image, cube, square, row = _f(1, 4, 6, 6), _f(4, 4, 4), _f(4, 4), _f(4)
    indices = np.array([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
    epsilons = _each("epsilon", 1e-5, 0.5, 0.01)
    yield Case("InstanceNormalization", {"x": _f(2, 4, 8), "s": row, "b": row}, epsilons)
    yield Case("LayerNormalization", {"x": cube, "s": row, "b": row}, epsilons)
    yield Case("BatchNormalization", {"x": image, "s": row, "b": row, "m": row, "v": np.abs(row)}, epsilons)
    yield Case("SimplifiedLayerNormalization", {"x": cube, "g": row}, epsilons)
    for op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        affine = {"g": row, "b": row} if op == "SkipLayerNormalization" else {"g": row}
        yield Case(op, {"x": cube, "k": _f(4, 4, 4) + 1, **affine}, epsilons, domain=_MICROSOFT)
    yield Case("LpNormalization", {"x": square}, _combined(p=(1, 2), axis=(0, 1)))
    for op, name in (
        *(("Elu", "alpha"), ("LeakyRelu", "alpha"), ("ThresholdedRelu", "alpha")),
        *(("HardSigmoid", "alpha"), ("HardSigmoid", "beta")),
    ):
        yield Case(op, {"x": square}, _each(name, 0.3, 0.7, 1.5))
    yield Case("QuickGelu", {"x": square}, _each("alpha", 0.3, 1.5), domain=_MICROSOFT)
    yield Case("Gelu", {"x": square}, _each("approximate", "none", "tanh"))
    yield Case("Softmax", {"x": cube}, _each("axis", 0, 1, 2))
    kinds = (onnx.TensorProto.INT32, onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL)
    yield Case("Cast", {"x": square * 3}, _each("to", *kinds))
    axes = [{"a": _i64(*each)} for each in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2))]
    for name in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"):
        yield Case(f"Reduce{name}", {"x": np.abs(cube)}, _each("keepdims", 0, 1), axes)
    for op in ("ArgMax", "ArgMin"):
        every = _combined(axis=(0, 1, 2), keepdims=(0, 1), select_last_index=(0, 1))
        yield Case(op, {"x": np.round(cube)}, every)
    flags = _combined(exclusive=(0, 1), reverse=(0, 1))
    yield Case("CumSum", {"x": square}, flags, [{"a": np.array(axis)} for axis in (0, 1)])
    yield Case("Transpose", {"x": cube}, _each("perm", (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)))
    yield Case("Concat", {"x": square, "y": square + 1}, _each("axis", 0, 1))
    parts = [{"s": _i64(1, 3)}, {"s": _i64(3, 1)}]
    yield Case("Split", {"x": square}, _each("axis", 0, 1), parts, outputs=2)
    yield Case("Gather", {"x": square, "i": _i64(0, 2, 1, 3)}, _each("axis", 0, 1))
    yield Case("GatherElements", {"x": square, "i": indices}, _each("axis", 0, 1))
    yield Case("GatherND", {"x": cube, "i": indices[:, :1]}, _each("batch_dims", 0, 1))
    yield Case("ScatterElements", {"x": square, "i": indices, "u": square * 2}, _each("axis", 0, 1))
    reductions = _each("reduction", "add", "mul", "max", "min")
    yield Case("ScatterElements", {"x": square, "i": indices % 2, "u": square * 2}, reductions)
    yield Case("ScatterND", {"x": square, "i": _i64(0, 0, 2).reshape(3, 1), "u": _f(3, 4)}, reductions)
    blocks = [{"blocksize": 2, "mode": "DCR"}, {"blocksize": 2, "mode": "CRD"}, {"blocksize": 4, "mode": "DCR"}]
    yield Case("DepthToSpace", {"x": _f(1, 16, 4, 4)}, blocks)
    pads = [{"p": _i64(*p), "c": np.float32(c)} for p in ((1, 1, 1, 1), (2, 0, 0, 2), (0, 2, 2, 0)) for c in (0, 7)]
    yield Case("Pad", {"x": square}, _each("mode", "constant", "reflect", "edge", "wrap"), pads)
    slices = [
        {"s": _i64(start), "e": _i64(end), "a": _i64(axis), "t": _i64(step)}
        for start, end, step in ((0, 3, 1), (1, 4, 1), (0, 4, 2), (-1, -99, -1))
        for axis in (0, 1)
    ]
    yield Case("Slice", {"x": square}, [{}], slices)
    yield Case("Trilu", {"x": square}, _each("upper", 0, 1), [{"k": np.array(k)} for k in (-1, 0, 1)])
    tops = [{"k": _i64(k)} for k in (2, 3)]
    yield Case("TopK", {"x": square}, _combined(axis=(0, 1), largest=(0, 1)), tops, outputs=2)
    equations = ("ij,jk->ik", "ij,kj->ik", "ji,jk->ik", "ij,ij->i", "ij,ij->j", "ij,jk->ki")
    yield Case("Einsum", {"x": square, "y": square + 1}, _each("equation", *equations))
    gemm = _combined(transA=(0, 1), transB=(0, 1), alpha=(1.0, 0.5), beta=(1.0, 0.3))
    yield Case("Gemm", {"x": square, "y": square + 1, "z": square * 2}, gemm)
    yield Case("Clip", {"x": square}, [{}], [{"l": np.float32(a), "h": np.float32(b)} for a, b in ((-1, 1), (0, 0.5))])
    yield from _windows(image)


def _windows(image: Any) -> Iterator[Case]:
    plain = [
        *_each("pads", (1, 1, 1, 1), (0, 2, 0, 2), (2, 2, 0, 0)),
        *({"pads": (1, 1, 1, 1), "strides": strides} for strides in ((2, 2), (2, 1), (1, 2))),
        {"dilations": (2, 2), "pads": (2, 2, 2, 2)},
        *_each("auto_pad", "SAME_UPPER", "SAME_LOWER"),
    ]
    for groups in (1, 2, 4):
        variants = [{**each, "group": groups} for each in plain]
        yield Case("Conv", {"x": image, "w": _f(4, 4 // groups, 3, 3)}, variants)
    yield Case("Conv", {"x": image, "w": _f(4, 4, 1, 1)}, [{}, {"strides": (2, 2)}, {"pads": (1, 1, 1, 1)}])
    rows = [*_each("pads", (1, 1), (2, 0), (0, 2)), {"dilations": (2,), "pads": (2, 2)}, {"strides": (2,)}]
    yield Case("Conv", {"x": _f(1, 4, 8), "w": _f(4, 4, 3)}, rows)
    fused = [
        *_each("activation", "Relu", "Tanh"),
        *({"activation": "LeakyRelu", "activation_params": (alpha,)} for alpha in (0.1, 0.5)),
        *({"activation": "Clip", "activation_params": bounds} for bounds in ((0.0, 0.5), (-1.0, 1.0))),
    ]
    yield Case("FusedConv", {"x": image, "w": _f(4, 4, 3, 3), "b": _f(4)}, fused, domain=_MICROSOFT)
    turned: list[dict[str, Any]] = [
        *({}, {"pads": (1, 1, 1, 1)}, {"pads": (0, 1, 1, 0)}, {"strides": (2, 2)}, {"dilations": (2, 2)}),
        {"strides": (2, 2), "output_padding": (1, 1)},
    ]
    for groups in (1, 2):
        variants = [{**each, "group": groups} for each in turned]
        yield Case("ConvTranspose", {"x": image, "w": _f(4, 4 // groups, 3, 3)}, variants)
    kernel: dict[str, Any] = {"kernel_shape": (3, 3)}
    pools: list[dict[str, Any]] = [
        *({"kernel_shape": shape} for shape in ((2, 2), (3, 3), (2, 3), (3, 2))),
        *({**kernel, "pads": pads} for pads in ((1, 1, 1, 1), (2, 0, 0, 2), (0, 2, 2, 0))),
        *({**kernel, "strides": (2, 2), "ceil_mode": ceil} for ceil in (0, 1)),
    ]
    counted = [{**each, "count_include_pad": 1} for each in pools if "pads" in each]
    yield Case("MaxPool", {"x": image}, [*pools, {"kernel_shape": (2, 2), "dilations": (2, 2)}])
    yield Case("AveragePool", {"x": image}, [*pools, *counted])
    modes = _combined(
        mode=("nearest",),
        coordinate_transformation_mode=("asymmetric", "half_pixel", "align_corners"),
        nearest_mode=("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"),
    )
    modes += _combined(
        mode=("linear", "cubic"), coordinate_transformation_mode=("asymmetric", "half_pixel", "align_corners")
    )
    scales = [{"r": np.zeros(0, np.float32), "s": np.array([1, 1, by, by], np.float32)} for by in (1.5, 2.0)]
    yield Case("Resize", {"x": _f(1, 2, 4, 4)}, modes, scales)
    heads: list[dict[str, Any]] = [
        {"num_heads": 2},
        {"num_heads": 4},
        {"num_heads": 2, "scale": 0.1},
        {"num_heads": 2, "unidirectional": 1},
    ]
    tokens = {name: _f(1, 4, 8) + place for place, name in enumerate("qkv")}
    yield Case("MultiHeadAttention", tokens, heads, domain=_MICROSOFT)
    turning = {"x": _f(1, 2, 4, 8), "p": _i64(1), "c": _f(8, 4), "s": _f(8, 4) + 1}
    rotations: list[dict[str, Any]] = [{}, {"interleaved": 1}, {"scale": 2.0}]
    yield Case("RotaryEmbedding", turning, rotations, domain=_MICROSOFT)


def _model(case: Case, attributes: Mapping[str, Any], constants: Mapping[str, Any]) -> onnx.ModelProto:
    outputs = [f"out{place}" for place in range(case.outputs)]
    node = helper.make_node(case.op, [*case.inputs, *constants], outputs, domain=case.domain, name="n", **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in case.inputs.items()
    ]
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph([node], "g", inputs, results, held)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _session(model: onnx.ModelProto, device: Any) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if device is not None:
        options.add_provider_for_devices([device], {})
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return ort.InferenceSession(model.SerializeToString(), options)


def _is_handled(model: onnx.ModelProto) -> bool:
    """Return whether a limit of the provider refuses the node or a lowering avoids it."""
    from rlx_ort.converters.from_onnx import from_onnx
    from rlx_ort.converters.to_onnx.exporter import export_model
    from rlx_ort.providers.claims import kernel_set

    provider = provider_of(_WEBGPU)
    assert provider is not None  # it is available
    graph = from_onnx(onnx.shape_inference.infer_shapes(model))
    made = export_model(graph, None, kernel_set(provider, graph))
    changed = [node.op_type for node in made.nodes] != [node.op_type for node in export_model(graph).nodes]
    return changed or bool(limited_nodes(made.nodes, provider.limits, made.constants))


def main() -> int:
    """Run all operators, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help="operators; all by default")
    wanted = parser.parse_args().operators
    require_available(_WEBGPU)
    import onnxruntime as ort

    device = next(each for each in ort.get_ep_devices() if each.ep_name == "WebGpuExecutionProvider")
    alive: list[Any] = []
    unhandled = 0
    for case in _cases():
        if wanted and case.op not in wanted:
            continue
        wrong: list[str] = []
        refused = count = 0
        for attributes, constants in case.variants():
            model = _model(case, attributes, constants)
            count += 1
            try:
                session = _session(model, device)
                found = session.run(None, case.inputs)
            except Exception:  # the exceptions of ONNX Runtime have no common base
                refused += 1
                continue
            alive.append(session)
            expected = _session(model, None).run(None, case.inputs)
            if not all(
                a.shape == b.shape and np.allclose(a, b, rtol=2e-3, atol=2e-3, equal_nan=True)
                for a, b in zip(found, expected, strict=True)
            ):
                handled = _is_handled(model)
                unhandled += not handled
                wrong.append(f"  {'avoided' if handled else 'WRONG'}: {dict(attributes)} {dict(constants)}")
        print(f"{case.op}: {count - refused - len(wrong)} right, {refused} not taken", *wrong, sep="\n", flush=True)
    return 1 if unhandled else 0


if __name__ == "__main__":
    sys.exit(main())
