"""How a conversion is verified: source and result run on the same inputs, one after the other.

bf16 is emulated on a CPU without kernels for it: nodes compute in f32, and every result is rounded to bf16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from rlx_ort.calibration.features import RANDOM_OPS
from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.onnx_types import tensor_type
from rlx_ort.converters.protos import copied, graphs_of, infer_proto, nodes_of
from rlx_ort.converters.to_onnx.model import UniqueNames
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError, EngineError, ParityError, as_cause
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.compile_options import CompileOptions, OptimizationLevel, PlacementRule
from rlx_ort.parity.compare import Comparison, compare_to, reference_run
from rlx_ort.parity.metrics import Tolerance, dtypes_of
from rlx_ort.parity.opening import OrtFormatFile, as_model, open_model
from rlx_ort.providers.engine.process import ending

_LEAN_ABOVE_BYTES = 256 << 20
"""Models with more bytes of weights than this are run without optimisation, because folded and packed weights would be
in memory beside those of the file."""
# Operators that ONNX Runtime 1.31 runs on bf16 on the CPU, or whose bodies are rewritten instead.
_RUN_AS_THEY_ARE = {"Cast", "Constant", "If", "Loop", "Scan"}
# Attributes that name an element type by its number.
_TYPE_ATTRIBUTES = {"dtype", "output_dtype", "softmax_precision", "stash_type"}


class ConversionCheck:
    """The verification of one conversion: runs the source, and holds its answer, not the source, meanwhile.

    `emulated` is how one side was emulated, empty if both ran as they are. Raises as `reference_run`, and
    `ConversionError` where the engine refuses the source.
    """

    def __init__(
        self,
        source: ModelBundle,
        tolerance: Tolerance,
        device: Device | None,
        inputs: Mapping[str, Any] | None,
        dims: Mapping[str, int],
    ) -> None:
        self._tolerance, self._optimized = tolerance, device is not None
        self._device = device or Device.CPU
        self._drawn = sorted(RANDOM_OPS & {node.op_type for node in nodes_of(source.proto)})
        self._lean = sum(data.nbytes for data in source.weights.values()) > _LEAN_ABOVE_BYTES
        self.emulated = ""
        model, how = self._runnable(source, on_cpu=True)
        with _refusing("the source itself does not run here; verify=False (--no-verify) converts it without comparing"):
            self._reference = reference_run(model, inputs=inputs, dims=dims, options=how)

    def run_result(self, path: Path) -> Comparison:
        """Run the written file on its device and return the differences; raise `ParityError` beyond the tolerance."""
        device = self._device
        model, how = self._runnable(as_model(path), on_cpu=device == Device.CPU, optimized=self._optimized)
        with _refusing(f"the result does not run on {device.display}, and nothing was written"):
            comparison = compare_to(self._reference, model, device, tolerance=self._tolerance, options=how)
        if not comparison.ok:
            raise ParityError(self._verdict(comparison), comparison)
        return comparison

    def run_freed(self, path: Path, name: str, places: Sequence[tuple[str, int]]) -> None:
        """Run the written file on twice the size of a dim that was opened.

        Where the dim is the first of every input, the inputs come twice, and so must the outputs.

        Raises:
            ConversionError: the graph does not take the size, or gives other results for it.
        """
        reference = self._reference
        inputs = dict(reference.inputs)
        for value, axis in places:
            inputs[value] = np.concatenate([inputs[value]] * 2, axis)
        device = self._device
        model, how = self._runnable(as_model(path), on_cpu=device == Device.CPU)
        refused = f"dim {name!r} cannot be opened: the graph depends on its size"
        try:
            if {(value, 0) for value in inputs} == set(places):
                twice = [
                    (key, np.concatenate([array] * 2) if array.ndim else array) for key, array in reference.outputs
                ]
                wanted = replace(reference, inputs=inputs, outputs=tuple(twice))
                comparison = compare_to(wanted, model, device, tolerance=self._tolerance, options=how)
                if not comparison.ok:
                    raise ConversionError(f"{refused}: rows have different results in a batch of twice the size")
            else:
                with open_model(model, device, how) as opened:
                    opened.run(inputs)
        except EngineError as err:
            raise ConversionError(f"{refused}, and the result does not run on twice that size: {err}") from err

    def _verdict(self, comparison: Comparison) -> str:
        """Return why the conversion is refused."""
        lines = [f"the result differs from the source by more than {comparison.tolerance}; nothing was written:"]
        lines += [f"  {output.name}: {output.found}{'' if output.ok else ' <-'}" for output in comparison.outputs]
        if self._drawn:
            operators = ", ".join(self._drawn)
            lines.append(f"  the model draws random numbers ({operators}), so no two runs agree; do not verify it")
        else:
            lines.append(
                "  allow more with a tolerance, keep nodes as they are, or write it unverified and bisect the two"
            )
        return "\n".join(lines)

    def _runnable(
        self, model: ModelBundle | OrtFormatFile, *, on_cpu: bool, optimized: bool = False
    ) -> tuple[ModelBundle | OrtFormatFile, CompileOptions]:
        """Return a model as it can run here, and how to open it: as users do, unless that takes too much memory."""
        plain = optimized or self._lean  # an optimised model is not optimised again
        if on_cpu and isinstance(model, ModelBundle) and "bf16" in dtypes_of(model):
            # Optimising could take out the casts, and with them the rounding.
            model, plain = with_f32_kernels(model), True
            self.emulated = "bf16 was computed in f32 and each result rounded: the CPU has no kernels for it"
        level = OptimizationLevel.OFF if plain else OptimizationLevel.ALL
        how = CompileOptions(placement=PlacementRule.ASSISTED, optimization=level, low_memory=self._lean)
        return model, how


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise a `ConversionError` for a model that the engine refuses, with which of the two it is, and the reason."""
    try:
        yield
    except EngineError as err:
        if type(err) is not EngineError or ending():  # stopped, not refused
            raise
        raise ConversionError(f"{what}: {err}") from as_cause(err)


def with_f32_kernels(model: ModelBundle) -> ModelBundle:
    """Return the model with casts around every node that reads or makes bf16, over the same weights.

    Each node computes in f32 and its results are rounded to bf16, as in kernels that accumulate in f32. Nodes keep
    their names, values their names and types. Functions are not rewritten. Open the model with optimisation off, which
    would fold the casts of weights and remove pairs of casts that round.
    """
    proto = copied(model.proto)
    types = infer_proto(proto)
    graphs = list(graphs_of(proto, functions=False))
    for graph in graphs:
        types |= {tensor.name: tensor_type(tensor) for tensor in graph.initializer}
    names = UniqueNames(name for node in nodes_of(proto) for name in (*node.input, *node.output))
    for graph in reversed(graphs):  # bodies first: their owners are copied
        nodes = [made for node in graph.node for made in _in_f32(node, types, names)]
        del graph.node[:]
        graph.node.extend(nodes)
    return model.with_proto(proto)


def _in_f32(node: onnx.NodeProto, types: Mapping[str, ValueType], names: UniqueNames) -> Iterator[onnx.NodeProto]:
    """Yield a node with the casts that it needs before and after it."""
    made = copied(node)
    if node.op_type in _RUN_AS_THEY_ARE:
        yield made
        return
    f32, bf16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16
    for index, name in enumerate(node.input):
        if _is_bf16(types.get(name)):
            made.input[index] = names.unique(f"{name}_f32")
            yield onnx.helper.make_node("Cast", [name], [made.input[index]], to=f32)
    behind = []
    for index, name in enumerate(node.output):
        if _is_bf16(types.get(name)):
            made.output[index] = names.unique(f"{name}_f32")
            behind.append(onnx.helper.make_node("Cast", [made.output[index]], [name], to=bf16))
    if behind:
        for attribute in made.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i == bf16:
                attribute.i = f32
            elif attribute.HasField("t") and attribute.t.data_type == bf16:
                array = onnx.numpy_helper.to_array(attribute.t).astype("float32")
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(array, attribute.t.name))
    yield made
    yield from behind


def _is_bf16(kind: ValueType | None) -> bool:
    return isinstance(kind, TensorType) and kind.dtype is DType.BF16
